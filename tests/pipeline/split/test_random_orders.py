"""Random orders of split backwards come to megatron-core's own losses and gradients, bit by bit."""

import itertools
import random
from collections.abc import Sequence

import pytest
from jobs import ALL, OVERLAP, Job
from memory_folder import memory_folder
from on_request import asked_for, on_request
from random_orders import random_order
from rehearsed import differences
from test_split_features import JOBS as FEATURES

from envpipe_megatron.core.kinds import SPLIT, WHOLE, Kind, unit
from envpipe_megatron.core.schedule import Schedule

pytestmark = pytest.mark.xdist_group("pipeline")

JOBS = {
    "tied": Job(4, 6, tied=True, reducer=OVERLAP, dropout=0.1),
    "two chunks": Job(2, 4, chunks=2, reducer=ALL, fused=True, deallocate=False),
    "sequence parallel": Job(2, 5, tensor=2, half="bf16", fused=True, reducer=OVERLAP),
}


def assert_equal_in_random_orders(pool, name: str, job: Job, count: int) -> None:
    rng = random.Random(name)
    size = job.stages, job.microbatches, job.chunks
    orders = [random_order(rng, *size, split=True, in_turn=True) for _ in range(count)]
    assert not any(order.out_of_turn for order in orders)
    with memory_folder() as folder:
        for some in range(0, count, 20):  # a pool waits two minutes for an answer
            for found in pool.run(differences, job, orders[some : some + 20], folder, True):
                assert found in ([], None)


@pytest.mark.parametrize("name", JOBS)
def test_random_orders_with_delays(pool, name):
    count = 334 if asked_for("PIPELINE") else 4
    assert_equal_in_random_orders(pool, name, JOBS[name], count)


@on_request("PIPELINE")
@pytest.mark.parametrize("name", FEATURES)
def test_features_in_random_orders(pool, name):
    assert_equal_in_random_orders(pool, name, FEATURES[name], 4)


def turned(kinds: Sequence[Kind], kind: Kind) -> Schedule:
    """Five of each kind, those of one in descending order."""
    units = [[unit(each, m) for m in range(5)] for each in kinds]
    units[kinds.index(kind)].reverse()
    order = Schedule("turned", 5, 1, (tuple(itertools.chain(*units)),) * 2)
    assert order.out_of_turn
    return order


@pytest.mark.parametrize(
    ("kinds", "kind"), [*zip([SPLIT] * 3, SPLIT, strict=True), (WHOLE, Kind.BACKWARD)]
)
def test_units_out_of_turn_come_to_other_bits(pool, kinds, kind):
    """So those orders are refused, and what these tests compare shows other sums."""
    with memory_folder() as folder:
        by_rank = pool.run(differences, Job(2, 5, reducer=OVERLAP), [turned(kinds, kind)], folder)
    assert any(by_rank)
    if kind is not Kind.FORWARD:
        # Whichever microbatch comes last: replicas would drift apart silently otherwise.
        for one, other in zip(by_rank[::2], by_rank[1::2], strict=True):
            assert one == other
