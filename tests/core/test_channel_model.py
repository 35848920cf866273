"""Orders on channels of every capacity: searched exhaustively when small, by property beyond."""

import random
from collections import deque
from functools import cache
from itertools import pairwise, product

import pytest
from channel_search import explore_all, stopping_points
from hypothesis import given, settings
from hypothesis import strategies as st
from on_request import asked_for, examples, on_request

from envpipe_megatron.core.channel_model import (
    StuckStage,
    check_message_order,
    completes,
    find_stall,
    hardware_capacity,
    max_falling_step,
    most_under_way,
    slots_of,
)
from envpipe_megatron.core.kinds import WHOLE, Kind, Unit, parse_unit
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.core.timeline import Timeline
from envpipe_megatron.errors import EnvPipeError

CAPACITIES = (None, 0, 1, 2)
#: Of orders that are all tried.
MOST_MICROBATCHES = 8 if asked_for("CORE") else 7


def most_extra(num_stages: int, num_microbatches: int) -> list[int]:
    return [max(0, num_microbatches - (num_stages - stage)) for stage in range(num_stages)]


def extra_vectors(num_stages: int, num_microbatches: int) -> list[tuple[int, ...]]:
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


def envpipe_orders(num_stages: int, num_microbatches: int) -> list[Schedule]:
    return [
        builders.envpipe(num_stages, num_microbatches, extra)
        for extra in extra_vectors(num_stages, num_microbatches)
    ]


def other_orders(num_stages: int, num_microbatches: int, max_chunks: int = 3) -> list[Schedule]:
    """GPipe, 1F1B, forward-only, and with chunks where the job allows it."""
    orders = [
        builders.gpipe(num_stages, num_microbatches),
        builders.one_f_one_b(num_stages, num_microbatches),
    ]
    for chunks in range(1, max_chunks + 1):
        orders.append(builders.forward_only(num_stages, num_microbatches, chunks))
        if chunks > 1 and num_microbatches % num_stages == 0:
            orders.append(builders.interleaved(num_stages, num_microbatches, chunks))
    return orders


def where(schedule: Schedule) -> str:
    return f"{schedule.name} p={schedule.num_stages} M={schedule.num_microbatches} " + str(
        schedule.extra_forwards
    )


def schedule_of(num_microbatches: int, *stages: str) -> Schedule:
    orders = tuple(tuple(parse_unit(text) for text in stage.split()) for stage in stages)
    return Schedule("by hand", num_microbatches, 1, orders)


# Every order of the builders, small.


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_asynchronous_sends_carry_every_small_order(num_stages: int) -> None:
    for num_microbatches in range(1, MOST_MICROBATCHES + 1):
        orders = envpipe_orders(num_stages, num_microbatches)
        orders += other_orders(num_stages, num_microbatches, max_chunks=4)
        for schedule in orders:
            check_message_order(schedule)
            assert completes(schedule, None), where(schedule)


@pytest.mark.parametrize(
    ("num_stages", "num_microbatches"),
    [
        *((p, m) for p, most in ((1, 4), (2, 4), (3, 2), (4, 2)) for m in range(1, most + 1)),
        *(
            pytest.param(*size, marks=on_request("CORE"))
            for size in ((2, 5), (2, 6), (2, 7), (2, 8), (3, 3), (3, 4), (3, 5), (4, 3))
        ),
    ],
)
def test_all_interleavings_end_where_the_one_simulation_ends(
    num_stages: int, num_microbatches: int
) -> None:
    """All orders of the builders of these sizes."""
    orders = envpipe_orders(num_stages, num_microbatches)
    orders += other_orders(num_stages, num_microbatches, max_chunks=2)
    for schedule in orders:
        for capacity in CAPACITIES:
            assert_one_stopping_point(schedule, capacity)


def assert_one_stopping_point(schedule: Schedule, capacity: int | None) -> None:
    points = stopping_points(schedule, capacity)
    assert len(points) == 1, f"{where(schedule)} capacity {capacity} is not confluent: {points}"
    stuck = find_stall(schedule, capacity)
    finished = dict.fromkeys(range(schedule.num_stages), schedule.units_per_stage)
    for at in stuck:
        finished[at.stage] = schedule.labels()[at.stage].index(at.unit)
    assert points == {tuple(finished.values())}, f"{where(schedule)} capacity {capacity}"
    assert explore_all(schedule, capacity) == (not stuck)


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_an_order_stalls_exactly_where_extra_forwards_fall_too_fast(num_stages: int) -> None:
    for num_microbatches in range(1, MOST_MICROBATCHES + 1):
        for schedule in envpipe_orders(num_stages, num_microbatches):
            fall = max(before - after for before, after in pairwise(schedule.extra_forwards))
            for capacity in (1, 2, 3):
                step = max_falling_step(capacity)
                assert step is not None
                assert completes(schedule, capacity) == (fall <= step), (where(schedule), capacity)


# Every order of the builders, up to 8 stages and 24 microbatches.


@pytest.mark.parametrize("num_stages", range(2, 9))
def test_orders_without_extra_forwards_complete(num_stages: int) -> None:
    for num_microbatches in range(24, 0, -1 if asked_for("CORE") else -3):
        for schedule in other_orders(num_stages, num_microbatches, max_chunks=2):
            for capacity in (None, 1, 2):
                assert completes(schedule, capacity), (where(schedule), capacity)


# Beyond the builders.


@cache
def forward(microbatch: int) -> Unit:
    return Unit(Kind.FORWARD, microbatch)


@cache
def backward(microbatch: int) -> Unit:
    return Unit(Kind.BACKWARD, microbatch)


def random_order(
    num_stages: int, num_microbatches: int, rng: random.Random, *, in_order: bool
) -> Schedule:
    """List scheduling: any stage runs any ready unit, so the result is executable by construction.

    `in_order`: a message is taken only if it is the oldest of its channel, as channels need it.
    """
    activations: list[list[int]] = [[] for _ in range(num_stages)]  # arrived, oldest first
    activations[0] = rng.sample(range(num_microbatches), num_microbatches)
    gradients: list[list[int]] = [[] for _ in range(num_stages)]
    orders: list[list[Unit]] = [[] for _ in range(num_stages)]
    bias = [rng.random() for _ in range(num_stages)]  # how soon a stage turns to a backward

    def pick(messages: list[int]) -> int:
        return messages.pop(0 if in_order else rng.randrange(len(messages)))

    while ready := [s for s in range(num_stages) if activations[s] or gradients[s]]:
        stage = rng.choice(ready)
        if gradients[stage] and (not activations[stage] or rng.random() < bias[stage]):
            done = pick(gradients[stage])
            orders[stage].append(backward(done))
            if stage > 0:
                gradients[stage - 1].append(done)
        else:
            done = pick(activations[stage])
            orders[stage].append(forward(done))
            if stage < num_stages - 1:
                activations[stage + 1].append(done)
            else:  # its gradients start from its own forwards, in any order
                gradients[stage].insert(rng.randint(0, len(gradients[stage])), done)
    return Schedule("random", num_microbatches, 1, tuple(tuple(order) for order in orders))


@settings(deadline=None, max_examples=examples(150))
@given(st.integers(1, 8), st.integers(1, 24), st.randoms(use_true_random=False))
def test_asynchronous_sends_carry_every_random_order(
    num_stages: int, num_microbatches: int, rng: random.Random
) -> None:
    schedule = random_order(num_stages, num_microbatches, rng, in_order=True)
    assert completes(schedule, None)
    # A capacity no channel can fill is the same as none, and a larger one never hurts.
    assert completes(schedule, num_microbatches)
    verdicts = [completes(schedule, capacity) for capacity in range(num_microbatches + 1)]
    assert verdicts == sorted(verdicts)


@settings(deadline=None, max_examples=examples(40))
@given(st.integers(2, 3), st.integers(1, 4), st.randoms(use_true_random=False))
def test_all_interleavings_of_random_orders_end_alike(
    num_stages: int, num_microbatches: int, rng: random.Random
) -> None:
    schedule = random_order(num_stages, num_microbatches, rng, in_order=True)
    for capacity in CAPACITIES:
        assert_one_stopping_point(schedule, capacity)


@settings(deadline=None, max_examples=examples(60))
@given(st.integers(2, 6), st.integers(1, 12), st.randoms(use_true_random=False))
def test_message_order_is_checked_against_a_plain_comparison(
    num_stages: int, num_microbatches: int, rng: random.Random
) -> None:
    schedule = random_order(num_stages, num_microbatches, rng, in_order=False)

    def listed(stage: int, kind: Kind) -> list[Unit]:
        return [unit for unit in schedule.stages[stage] if unit.kind is kind]

    same = all(
        listed(stage, kind) == listed(stage + 1, kind)
        for stage in range(num_stages - 1)
        for kind in WHOLE
    )
    if same:
        assert completes(schedule, None)
    else:
        with pytest.raises(EnvPipeError, match="other way round"):
            completes(schedule, None)


# Slots for one-sided transfers.


def under_way(schedule: Schedule, done: tuple[int, ...]) -> int:
    """Of the channel that holds most, the messages not taken after so many units of each stage."""
    width = schedule.units_per_stage
    count: dict[tuple[int, int, bool], int] = {}
    for stage, units in enumerate(done):
        for place in range(stage * width, stage * width + units):
            kind = bool(schedule.is_backward.flat[place])
            taker, sender = schedule.cross_successor[place], schedule.cross_dependency[place]
            if taker >= 0:
                channel = (stage, int(taker) // width, kind)
                count[channel] = count.get(channel, 0) + 1
            if sender >= 0:
                channel = (int(sender) // width, stage, kind)
                count[channel] = count.get(channel, 0) - 1
    return max(count.values(), default=0)


def most_in_any_interleaving(schedule: Schedule) -> int:
    """By looking at every state that the stages can be in together."""
    width, start = schedule.units_per_stage, (0,) * schedule.num_stages
    seen, left, most = {start}, deque([start]), 0
    while left:
        done = left.popleft()
        most = max(most, under_way(schedule, done))
        for stage, units in enumerate(done):
            sender = -1 if units == width else int(schedule.cross_dependency[stage * width + units])
            if units < width and (sender < 0 or sender % width < done[sender // width]):
                after = (*done[:stage], units + 1, *done[stage + 1 :])
                if after not in seen:
                    seen.add(after)
                    left.append(after)
    return most


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(2, 3), (2, 5), (3, 4), (4, 3)])
def test_as_many_messages_are_under_way_as_is_said_and_no_more(
    num_stages: int, num_microbatches: int
) -> None:
    rng = random.Random(num_microbatches)
    orders = envpipe_orders(num_stages, num_microbatches)
    orders += other_orders(num_stages, num_microbatches, max_chunks=2)
    orders += [random_order(num_stages, 3, rng, in_order=True) for _ in range(25)]
    for schedule in orders:
        most = most_in_any_interleaving(schedule)
        if schedule.num_chunks == 1:
            assert most_under_way(schedule) == most, where(schedule)
        else:
            assert most_under_way(schedule) >= most, where(schedule)


@settings(deadline=None, max_examples=examples(40))
@given(st.integers(2, 3), st.integers(1, 4), st.randoms(use_true_random=False))
def test_with_its_slots_an_order_finishes_in_all_interleavings(
    num_stages: int, num_microbatches: int, rng: random.Random
) -> None:
    schedule = random_order(num_stages, num_microbatches, rng, in_order=True)
    needed, most = slots_of(schedule, 1), most_under_way(schedule)
    assert needed == next(k for k in range(1, 99) if completes(schedule, k))
    slots = [slots_of(schedule, limit) for limit in range(1, 9)]
    assert slots == sorted(slots)
    assert all(needed <= own <= max(needed, limit) for limit, own in enumerate(slots, 1))
    assert slots[-1] <= max(needed, most)
    for count in {needed, slots[-1]}:
        assert explore_all(schedule, count)


def test_in_the_planned_timeline_no_sender_waits_for_a_slot() -> None:
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


# What does not work, and how it is told.


def test_1f1b_with_blocking_sends_stalls_at_the_last_two_stages() -> None:
    stuck = find_stall(builders.one_f_one_b(2, 2), 0)
    assert stuck == [StuckStage(0, "F1", True, 1, 1), StuckStage(1, "B0", True, 0, 5)]
    assert str(stuck[0]) == "stage 0 sends the output of F1 to stage 1"
    assert not explore_all(builders.one_f_one_b(2, 2), 0)


def test_stall_on_a_channel_of_capacity_one_names_every_stuck_stage() -> None:
    schedule = builders.envpipe(3, 5, [2, 0, 0])  # 4, 1 and 0 warm-up forwards
    stuck = find_stall(schedule, 1)
    assert stuck == [
        StuckStage(0, "F4", True, 1, 4),
        StuckStage(1, "B1", True, 0, 14),
        StuckStage(2, "F3", False, 1, 26),
    ]
    assert str(stuck[2]) == "stage 2 awaits F3's input from stage 1"
    assert completes(schedule, 2)


def test_messages_taken_in_another_order_than_sent_are_refused() -> None:
    # Executable with named messages.
    schedule = schedule_of(3, "F0 F1 F2 B0 B1 B2", "F2 F1 F0 B0 B1 B2")
    for call in (check_message_order, lambda s: completes(s, None)):
        with pytest.raises(EnvPipeError, match="F0 on stage 0 before F1 on stage 0") as error:
            call(schedule)
        assert "F1 on stage 1 comes before F0 on stage 1" in str(error.value)
        assert "stage 0   [F0] [F1]   F2   B0" in str(error.value)


def test_one_stage_with_chunks_uses_no_channel() -> None:
    assert completes(builders.interleaved(1, 3, 2), 0)
    order = "F0.0 F1.0 F1.1 F0.1 B0.1 B1.1 B0.0 B1.0"  # chunks pass tensors on in any order
    alone = Schedule("by hand", 2, 2, (tuple(parse_unit(text) for text in order.split()),))
    assert completes(alone, 0)


@pytest.mark.parametrize(
    ("queues", "capacity"),
    [(None, None), ("1", 1), ("7", 1), ("8", None), ("32", None), ("", None), ("many", None)],
)
def test_fewer_hardware_queues_than_usual_make_a_channel_of_one(
    queues: str | None, capacity: int | None
) -> None:
    environment = {} if queues is None else {"CUDA_DEVICE_MAX_CONNECTIONS": queues}
    assert hardware_capacity(environment) == capacity


def test_negative_capacity_is_refused() -> None:
    with pytest.raises(EnvPipeError, match="got -1"):
        completes(builders.gpipe(2, 2), -1)
