"""Random orders of split backwards come to megatron-core's own losses and gradients, bit by bit."""

from __future__ import annotations

import itertools
import random

import pytest
from jobs import Job
from memory_folder import memory_folder
from on_request import asked_for
from rehearsed import differences, random_order

from envpipe_megatron.core.kinds import SPLIT, Kind, unit
from envpipe_megatron.core.schedule import Schedule

pytestmark = pytest.mark.xdist_group("pipeline")

PLAIN, OVERLAP = (), ("overlap_grad_reduce",)
ALL = ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather")
JOBS = {
    "tied": Job(4, 6, tied=True, reducer=OVERLAP, dropout=0.1),
    "two chunks": Job(2, 4, chunks=2, reducer=ALL, fused=True, deallocate=False),
    "sequence parallel": Job(2, 5, tensor=2, half="bf16", fused=True, reducer=OVERLAP),
}
ORDERS = 334 if asked_for("PIPELINE") else 4


@pytest.mark.parametrize("name", JOBS)
def test_random_orders_with_delays(pool, name):
    job = JOBS[name]
    rng = random.Random(name)
    orders = [random_order(rng, job.stages, job.microbatches, job.chunks) for _ in range(ORDERS)]
    assert not any(order.out_of_turn for order in orders)
    with memory_folder() as folder:
        for found in pool.run(differences, job, orders, folder, True):
            assert found in ([], None)


def test_random_orders_differ_and_mix_whole_backwards_with_split_ones():
    rng = random.Random(0)
    orders = [random_order(rng, 3, 5, 2) for _ in range(50)]
    assert len({order.stages for order in orders}) == 50
    assert any(order.combined.any() for order in orders)
    assert any(not order.combined.any() for order in orders)
    assert len({order.peak_in_flight for order in orders}) > 20


@pytest.mark.parametrize("kind", [Kind.FORWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT])
def test_units_out_of_turn_come_to_other_bits(pool, kind):
    """So those orders are refused, and what these tests compare shows other sums."""
    units = [[unit(kind, m) for m in range(5)] for kind in SPLIT]
    row = units[SPLIT.index(kind)]
    row[2], row[4] = row[4], row[2]
    order = Schedule("turned", 5, 1, (tuple(itertools.chain(*units)),) * 2)
    assert order.out_of_turn
    with memory_folder() as folder:
        found = pool.run(differences, Job(2, 5, reducer=()), [order], folder)
    assert any(found)
