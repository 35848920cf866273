"""Orders of repeated building blocks: in a V, with the least memory there is."""

from dataclasses import replace

import numpy as np
import pytest

from envpipe_megatron.core.kinds import SPLIT
from envpipe_megatron.core.orders.blocks import block_turns, squeezed_blocks
from envpipe_megatron.core.orders.greedy import shortest
from envpipe_megatron.core.orders.job import OrderJob, fill
from envpipe_megatron.core.schedule import Placement


def level_job(stages: int, microbatches: int, limit: int) -> OrderJob:
    unit_s = np.ones((stages, 2, microbatches))
    return OrderJob(dict.fromkeys(SPLIT, unit_s), placement=Placement.V, limits=[limit] * stages)


def test_a_block_of_two_stages_by_hand():
    # Forwards go there and back at once, gradients too: F F F F I I I I in eight slots.
    turns = next(block_turns(level_job(2, 1, 3)))
    assert turns == [
        [(0, 0, 0), (0, 1, 0), (1, 1, 0), (1, 0, 0)],
        [(0, 2, 0), (0, 3, 0), (1, 3, 0), (1, 2, 0)],
    ]


@pytest.mark.parametrize(("stages", "least"), [(4, 4), (16, 12)])
def test_with_a_third_of_1f1bs_memory_stages_stay_busy(stages, least):
    """Each further microbatch costs its six units and no wait: V-Min (NeurIPS'24, section 4)."""
    few, many = (level_job(stages, m, least) for m in (stages, 2 * stages))
    short_s, long_s = (
        min(fill(job, turns, job.floor_s).time_s for turns in block_turns(job))
        for job in (few, many)
    )
    assert long_s - short_s == 6 * stages
    schedule = shortest(many)
    assert max(schedule.peak_in_flight) <= least


def test_no_block_is_given_where_none_has_room():
    assert list(block_turns(level_job(8, 8, 5))) == []
    assert list(block_turns(level_job(8, 8, 6)))


@pytest.mark.parametrize(("stages", "most", "wait"), [(8, 10, 17), (16, 18, 41)])
def test_squeezed_blocks_have_the_bubble_of_v_half(stages, most, wait):
    """Half of 1F1B's memory: as NeurIPS'24's own order, shorter than blocks as they stand."""
    job = replace(level_job(stages, 4 * stages, most), tail_s=range(stages)[::-1])
    plain, squeezed = (
        [fill(job, turns, job.floor_s) for turns in made(job)]
        for made in (block_turns, squeezed_blocks)
    )
    best = min(squeezed, key=lambda filled: filled.time_s)
    assert best.time_s == 6 * 4 * stages + wait + stages - 1
    assert best.time_s < min(filled.time_s for filled in plain)
    for filled in squeezed:
        assert max(filled.peak_held) <= most
        assert all(len(order) == 3 * job.num_per_kind for order in filled.orders)
