"""ZB-H1, ZB-H2, ZB-V, building blocks, breadth-first: by hand, by papers' formulas, for any job."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from on_request import on_request

from envpipe_megatron.core.kinds import SPLIT, Kind, ScheduleError
from envpipe_megatron.core.orders.builders import (
    breadth_first,
    envpipe,
    framework_order,
    half_split,
    interleaved,
    one_f_one_b,
    split_late,
    zero_bubble,
    zero_bubble_v,
)
from envpipe_megatron.core.orders.greedy import shortest
from envpipe_megatron.core.orders.job import OrderJob, fill
from envpipe_megatron.core.orders.turns import block_turns, squeezed_blocks
from envpipe_megatron.core.schedule import Placement
from envpipe_megatron.core.timeline import Timeline


def longest_stage_s(schedule, forward_s=1.0, input_s=1.0, weights_s=1.0):
    """From a stage's first unit to its last, as the papers count; the longest."""
    seconds = {
        Kind.FORWARD: forward_s,
        Kind.INPUT_GRADIENT: input_s,
        Kind.WEIGHT_GRADIENT: weights_s,
    }
    timeline = Timeline(schedule, [[seconds[u.kind] for u in order] for order in schedule.stages])
    return float((timeline.end_s[:, -1] - timeline.start_s[:, 0]).max())


@pytest.mark.parametrize(
    ("built", "stages"),
    [
        (
            zero_bubble(4, 6),
            [
                "F0 F1 F2 F3 I0 W0 F4 I1 W1 F5 I2 W2 I3 W3 I4 W4 I5 W5",
                "F0 F1 F2 I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 I4 W3 I5 W4 W5",
                "F0 F1 I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 I5 W3 W4 W5",
                "F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 W3 W4 W5",
            ],
        ),
        (
            zero_bubble(3, 6, 5),
            [
                "F0 F1 F2 F3 F4 I0 W0 F5 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5",
                "F0 F1 F2 I0 F3 I1 F4 I2 W0 F5 I3 W1 I4 W2 I5 W3 W4 W5",
                "F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 F5 I5 W1 W2 W3 W4 W5",
            ],
        ),
        (
            half_split(one_f_one_b(2, 4)),
            ["F0 F1 I0+ W0 F2 I1 W1 F3 I2+ W2 I3 W3", "F0 I0+ W0 F1 I1 W1 F2 I2+ W2 F3 I3 W3"],
        ),
        (
            split_late(one_f_one_b(2, 5)),
            [
                "F0 F1 I0 F2 I1 W0 F3 W1 I2+ W2 F4 I3 I4 W3 W4",
                "F0 I0 F1 I1 W0 F2 W1 I2+ W2 F3 I3 F4 I4 W3 W4",
            ],
        ),
        (split_late(one_f_one_b(1, 1)), ["F0 I0 W0"]),
        (breadth_first(2, 2, 2), ["F0.0 F1.0 F0.1 F1.1 B0.1 B1.1 B0.0 B1.0"] * 2),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_orders_by_hand(built, stages):
    assert [" ".join(order) for order in built.labels()] == stages


@pytest.mark.parametrize(("microbatches", "chunks"), [(2, 1), (3, 1), (2, 2), (4, 3), (8, 2)])
def test_each_chunk_of_each_stage_has_whole_backwards_and_parts(microbatches, chunks):
    own = framework_order(2, microbatches, chunks)
    split = half_split(own)
    for order in split.stages:
        for chunk in range(chunks):
            first = [u for u in order if (u.kind, u.chunk) == (Kind.INPUT_GRADIENT, chunk)]
            num_whole = sum(u.combined for u in first)
            assert 0 <= 2 * num_whole - len(first) <= 1
            assert 0 < num_whole < len(first)
    assert split.peak_in_flight == own.peak_in_flight


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (4, 12), (8, 20)])
def test_bubbles_are_those_of_the_paper(stages, microbatches):
    forward_s, input_s, weights_s = times_s = 1.0, 1.1, 0.9
    work_s = microbatches * sum(times_s)
    h1, h2 = zero_bubble(stages, microbatches), zero_bubble(stages, microbatches, 2 * stages - 1)
    assert longest_stage_s(h1, *times_s) - work_s == pytest.approx(
        (stages - 1) * (forward_s + input_s - weights_s)
    )
    assert longest_stage_s(h2, *times_s) - work_s == pytest.approx(
        (stages - 1) * (forward_s + input_s - 2 * weights_s)
    )
    assert h1.peak_in_flight == (stages,) * stages
    assert h2.peak_in_flight == (2 * stages - 1,) * stages


def test_memory_between_h1_and_h2_is_used():
    bubbles = []
    for most in (4, 5, 6, 7):
        schedule = zero_bubble(4, 12, most)
        assert max(schedule.peak_in_flight) == most
        bubbles.append(longest_stage_s(schedule) - 36)
    assert bubbles == [3, 2, 1, 0]


def test_zb_v_has_no_bubble_with_the_memory_of_1f1b():
    for stages, microbatches in ((2, 4), (4, 8), (4, 12), (8, 20)):
        schedule = zero_bubble_v(stages, microbatches)
        assert max(schedule.peak_in_flight) == 2 * stages
        assert longest_stage_s(schedule) == 6 * microbatches
        timeline = Timeline(schedule, np.ones((stages, schedule.units_per_stage)))
        assert timeline.iteration_time_s == 6 * microbatches + stages - 1


@on_request("CORE")
def test_any_number_of_microbatches_and_any_memory_gives_an_order():
    for stages, microbatches in itertools.product((1, 2, 3, 5), (1, 2, 3, 5, 7)):
        for most in range(stages, 2 * stages + 1):
            assert max(zero_bubble(stages, microbatches, most).peak_in_flight) <= most
        for most in (2, stages + 1, 2 * stages):
            schedule = zero_bubble_v(stages, microbatches, most)
            assert max(schedule.peak_in_flight) <= most
        schedule = breadth_first(stages, microbatches, 3)
        assert schedule.peak_in_flight == (3 * microbatches,) * stages


def test_less_memory_than_1f1bs_first_stage_is_refused():
    with pytest.raises(ScheduleError, match=r"as many microbatches as there are stages.*3"):
        zero_bubble(4, 8, 3)
    with pytest.raises(ScheduleError, match="less than one microbatch"):
        zero_bubble_v(4, 8, 1)
    # More than there are is asked of nobody.
    assert zero_bubble(4, 2, 2).stages == zero_bubble(4, 2).stages
    with pytest.raises(ScheduleError, match="Allow 2 in flight"):
        zero_bubble(4, 2, 1)


def level_job(stages, microbatches, limit):
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


@pytest.mark.parametrize(
    "own", [one_f_one_b(4, 8), envpipe(3, 7, [2, 1, 0]), interleaved(2, 6, 3)], ids=lambda o: o.name
)
def test_late_second_parts_come_in_turn_for_one_microbatch_more(own):
    late = split_late(own)
    assert late.out_of_turn is None
    peaks = zip(late.peak_in_flight, own.peak_in_flight, strict=True)
    assert all(most <= own_most + 1 for most, own_most in peaks)
    assert late.combined.sum(axis=1).tolist() == [1] * own.num_stages
    for units, before in zip(late.stages, own.stages, strict=True):
        sends = [u for u in units if u.kind is not Kind.WEIGHT_GRADIENT]
        assert [(u.microbatch, u.chunk, u.kind is Kind.FORWARD) for u in sends] == [
            (u.microbatch, u.chunk, u.kind is Kind.FORWARD) for u in before
        ]
