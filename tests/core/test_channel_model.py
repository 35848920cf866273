"""Orders on channels of every capacity: searched exhaustively when small, by property beyond."""

import random
from itertools import pairwise, product

import pytest
from channel_search import out_of_turn, stopping_points
from hypothesis import given, settings
from hypothesis import strategies as st
from on_request import asked_for, examples
from random_orders import all_orders, random_order

from envpipe_megatron.core.channel_model import (
    StuckStage,
    completes,
    find_stall,
    hardware_capacity,
    inputs_of,
    slots_of,
)
from envpipe_megatron.core.kinds import parse_unit
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.core.timeline import Timeline
from envpipe_megatron.errors import EnvPipeError

CAPACITIES = (None, 0, 1, 2)


def most_extra(num_stages, num_microbatches):
    return [max(0, num_microbatches - (num_stages - stage)) for stage in range(num_stages)]


def extra_vectors(num_stages, num_microbatches):
    """Every vector of extra forwards that has an order at all.

    A stage cannot take more warm-up forwards than the stage before sends ahead of its first
    backward, so the counts rise by at most one; the builder refuses the others.
    """
    most = most_extra(num_stages, num_microbatches)
    return [
        extra
        for extra in product(*(range(count + 1) for count in most))
        if all(after - before <= 1 for before, after in pairwise(extra))
    ]


def envpipe_orders(num_stages, num_microbatches):
    return [
        builders.envpipe(num_stages, num_microbatches, extra)
        for extra in extra_vectors(num_stages, num_microbatches)
    ]


def other_orders(num_stages, num_microbatches, max_chunks=3):
    """GPipe, 1F1B, breadth-first, and interleaved where the job allows it."""
    orders = [
        builders.gpipe(num_stages, num_microbatches),
        builders.one_f_one_b(num_stages, num_microbatches),
    ]
    for chunks in range(1, max_chunks + 1):
        orders.append(builders.breadth_first(num_stages, num_microbatches, chunks))
        if chunks > 1 and num_microbatches % num_stages == 0:
            orders.append(builders.interleaved(num_stages, num_microbatches, chunks))
    return orders


def where(schedule):
    return f"{schedule.name} p={schedule.num_stages} M={schedule.num_microbatches} " + str(
        schedule.extra_forwards
    )


def schedule_of(num_microbatches, *stages):
    orders = tuple(tuple(parse_unit(text) for text in stage.split()) for stage in stages)
    return Schedule("by hand", num_microbatches, 1, orders)


#: Stages, microbatches, chunks, whether backwards are split, and every how many-th of all orders is
#: tried where they are not asked for.
ALL_SMALL = [
    (2, 2, 1, False, 1),
    (3, 2, 1, False, 2),
    (2, 2, 1, True, 4),
    (3, 2, 1, True, 307),
    (2, 3, 1, False, 211),
    (2, 2, 2, False, 151),
]


@pytest.mark.parametrize("size", ALL_SMALL, ids=str)
def test_every_small_order_ends_as_the_model_says(size):
    """Also those that take messages in another order than they are sent, as most do."""
    *job, split, every = size
    tried = early = 0
    for schedule in all_orders(*job, split=split, every=1 if asked_for("CORE") else every):
        for capacity in CAPACITIES:
            assert_one_stopping_point(schedule, capacity)
        assert completes(schedule, None)
        tried, early = tried + 1, early + out_of_turn(schedule)
    assert tried / 10 < early < tried


def assert_one_stopping_point(schedule, capacity):
    points = stopping_points(schedule, capacity)
    assert len(points) == 1, f"{where(schedule)} capacity {capacity} is not confluent: {points}"
    stuck = find_stall(schedule, capacity)
    finished = dict.fromkeys(range(schedule.num_stages), schedule.units_per_stage)
    for at in stuck:
        finished[at.stage] = schedule.labels()[at.stage].index(at.unit)
    assert points == {tuple(finished.values())}, f"{where(schedule)} capacity {capacity}"


def any_order(rng, most_stages, most_microbatches):
    """With one or two chunks, of whole or split backwards."""
    chunks, split = rng.randint(1, 2), rng.random() < 0.5
    stages, microbatches = rng.randint(2, most_stages), rng.randint(1, most_microbatches)
    return random_order(rng, stages, microbatches, chunks, split=split)


@settings(deadline=None, max_examples=examples(150))
@given(st.randoms(use_true_random=False))
def test_asynchronous_sends_carry_every_random_order(rng):
    schedule = any_order(rng, 8, 24)
    assert completes(schedule, None)
    # A capacity no channel can fill is the same as none, and a larger one never hurts.
    most = schedule.num_microbatches * schedule.num_chunks
    assert completes(schedule, most)
    verdicts = [completes(schedule, capacity) for capacity in range(min(most, 9))]
    assert verdicts == sorted(verdicts)


@settings(deadline=None, max_examples=examples(40))
@given(st.randoms(use_true_random=False))
def test_all_interleavings_of_random_orders_end_alike(rng):
    schedule = any_order(rng, 3, 3)
    for capacity in CAPACITIES:
        assert_one_stopping_point(schedule, capacity)


@settings(deadline=None, max_examples=examples(40))
@given(st.randoms(use_true_random=False))
def test_with_its_slots_an_order_finishes_in_all_interleavings(rng):
    schedule = any_order(rng, 3, 3)
    needed = slots_of(schedule, 1)
    assert needed == next(k for k in range(1, 99) if completes(schedule, k))
    slots = [slots_of(schedule, limit) for limit in range(1, 9)]
    assert slots == sorted(slots)
    assert all(needed <= own <= max(needed, limit) for limit, own in enumerate(slots, 1))
    for count in {needed, slots[-1]}:
        assert_one_stopping_point(schedule, count)
        assert completes(schedule, count)


def test_in_the_planned_timeline_no_sender_waits_for_a_slot():
    rng = random.Random(0)
    for _ in range(150):
        num_stages = rng.randint(2, 8)
        num_microbatches = rng.randint(num_stages, 24)
        extra: list[int] = []
        for most in most_extra(num_stages, num_microbatches):
            extra.append(rng.randint(0, min(most, extra[-1] + 1) if extra else most))
        schedule = builders.envpipe(num_stages, num_microbatches, extra)
        slots, width = slots_of(schedule, schedule.num_units), schedule.units_per_stage
        backward_s = rng.uniform(1, 2.5)
        timeline = Timeline(schedule, 1 + (backward_s - 1) * schedule.is_backward)
        start_s, end_s = timeline.start_s.ravel(), timeline.end_s.ravel()
        for stage, kind in product(range(num_stages), (False, True)):
            sends = (schedule.is_backward[stage] == kind) & (
                schedule.cross_successor.reshape(-1, width)[stage] >= 0
            )
            senders = stage * width + sends.nonzero()[0]
            freed_s = start_s[schedule.cross_successor[senders[:-slots]]]
            assert (freed_s <= end_s[senders[slots:]] + 1e-9).all(), where(schedule)


def test_1f1b_with_blocking_sends_stalls_at_the_last_two_stages():
    stuck = find_stall(builders.one_f_one_b(2, 2), 0)
    assert stuck == [StuckStage(0, "F1", True, 1, 1), StuckStage(1, "B0", True, 0, 5)]
    assert str(stuck[0]) == "stage 0 sends the output of F1 to stage 1"


def test_stall_on_a_channel_of_capacity_one_names_every_stuck_stage():
    schedule = builders.envpipe(3, 5, [2, 0, 0])  # 4, 1 and 0 warm-up forwards
    stuck = find_stall(schedule, 1)
    assert stuck == [
        StuckStage(0, "F4", True, 1, 4),
        StuckStage(1, "B1", True, 0, 14),
        StuckStage(2, "F3", False, 1, 26),
    ]
    assert str(stuck[2]) == "stage 2 awaits F3's input from stage 1"
    assert completes(schedule, 2)


def test_what_is_sent_before_a_message_is_received_before_it():
    schedule = schedule_of(3, "F0 F1 F2 B0 B1 B2", "F2 F1 F0 B0 B1 B2")
    assert out_of_turn(schedule)
    assert [str(unit) for unit in inputs_of(schedule, 1)] == ["F0", "F1", "F2"]
    assert completes(schedule, 0)  # the second stage stands there from the start
    later = schedule_of(3, "F0 F1 F2 B1 B0 B2", "F1 B1 F0 B0 F2 B2")
    assert [str(at) for at in find_stall(later, 0)] == [
        "stage 0 sends the output of F2 to stage 1",
        "stage 1 sends the output of B1 to stage 0",
    ]
    assert completes(later, 1)


def test_combined_forwards_are_refused():
    for early, late in (
        ("F0 F1 F2 B0 B1 B2", "F0 F1 B0 F2+ B1 B2"),
        ("F0 F1 F2 I0 W0 I1 W1 I2 W2", "F0 F1 I0 W0 F2+ I1+ W1 I2 W2"),
    ):
        with pytest.raises(EnvPipeError, match="combined forwards"):
            completes(schedule_of(3, early, late), None)
    whole = "F0 F1 F2 I0+ W0 I1+ W1 I2 W2"
    assert completes(schedule_of(3, whole, whole), None)


def test_one_stage_with_chunks_uses_no_channel():
    assert completes(builders.interleaved(1, 3, 2), 0)
    order = "F0.0 F1.0 F1.1 F0.1 B0.1 B1.1 B0.0 B1.0"  # chunks pass tensors on in any order
    alone = Schedule("by hand", 2, 2, (tuple(parse_unit(text) for text in order.split()),))
    assert completes(alone, 0)


@pytest.mark.parametrize(
    ("queues", "capacity"),
    [(None, None), ("1", 1), ("7", 1), ("8", None), ("32", None), ("", None), ("²", None)],
)
def test_fewer_hardware_queues_than_usual_make_a_channel_of_one(queues, capacity):
    environment = {} if queues is None else {"CUDA_DEVICE_MAX_CONNECTIONS": queues}
    assert hardware_capacity(environment) == capacity


def test_negative_capacity_is_refused():
    with pytest.raises(EnvPipeError, match="got -1"):
        completes(builders.gpipe(2, 2), -1)
