"""Units that take messages in another order than they are sent come to megatron-core's own bits."""

from __future__ import annotations

import random

import pytest
from jobs import Job
from on_request import each_of
from random_orders import random_order
from test_bit_equality import by_plan, ours, stock, trained_alike
from test_split_backward import searched

from envpipe_megatron.core.channel_model import most_kept
from envpipe_megatron.core.kinds import WHOLE

pytestmark = pytest.mark.xdist_group("pipeline")
__all__ = ["ours", "stock"]


@pytest.mark.parametrize(
    ("stages", "microbatches", "chunks", "split", "seed"),
    each_of(
        (
            (*size, split, seed)
            for size in ((2, 8, 2), (2, 6, 3), (4, 8, 2), (4, 8, 1))
            for split in (False, True)
            for seed in range(2 * split, 4)
        ),
        [(2, 8, 2, False, 0), (2, 8, 2, True, 2)],
    ),
)
def test_random_orders(stock, ours, tmp_path, stages, microbatches, chunks, split, seed):
    rng = random.Random(seed)
    schedule = random_order(rng, stages, microbatches, chunks, split=split, in_turn=True)
    kept = [most_kept(schedule, stage, kind) for stage in range(stages) for kind in WHOLE]
    assert max(kept) > 0 or chunks == 1
    job = Job(stages, microbatches, chunks=chunks)
    trained_alike(stock, ours, job, by_plan(tmp_path, schedule), schedule)


def test_a_searched_order_of_messages_out_of_order(stock, ours, tmp_path):
    schedule = searched(4, 12, 2)
    assert max(most_kept(schedule, stage, kind) for stage in range(4) for kind in WHOLE) > 0
    job = Job(4, 12, chunks=2)
    trained_alike(stock, ours, job, by_plan(tmp_path, schedule), schedule)
