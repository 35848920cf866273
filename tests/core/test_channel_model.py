"""Orders on channels of every capacity: searched exhaustively when small, by property beyond."""

import random
from functools import cache
from itertools import pairwise, product

import pytest
from channel_search import explore_all, stopping_points
from hypothesis import given, settings
from hypothesis import strategies as st

from envpipe_megatron.core import builders
from envpipe_megatron.core.channel_model import (
    StuckStage,
    check_message_order,
    completes,
    find_stall,
    hardware_capacity,
    max_falling_step,
)
from envpipe_megatron.core.schedule import Kind, Schedule, Unit, parse_unit
from envpipe_megatron.errors import EnvPipeError

CAPACITIES = (None, 0, 1, 2)


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
    for num_microbatches in range(1, 9):
        orders = envpipe_orders(num_stages, num_microbatches)
        orders += other_orders(num_stages, num_microbatches, max_chunks=4)
        for schedule in orders:
            check_message_order(schedule)
            assert completes(schedule, None), where(schedule)


@pytest.mark.parametrize(
    ("num_stages", "num_microbatches"),
    [(p, m) for p, most in ((1, 4), (2, 8), (3, 5), (4, 3)) for m in range(1, most + 1)],
)
def test_all_interleavings_end_where_the_one_simulation_ends(
    num_stages: int, num_microbatches: int
) -> None:
    """All orders of the builders with p = 2, M <= 8; p = 3, M <= 5; p = 4, M <= 3."""
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
    for num_microbatches in range(1, 9):
        for schedule in envpipe_orders(num_stages, num_microbatches):
            fall = max(before - after for before, after in pairwise(schedule.extra_forwards))
            for capacity in (1, 2, 3):
                step = max_falling_step(capacity)
                assert step is not None
                assert completes(schedule, capacity) == (fall <= step), (where(schedule), capacity)


# Every order of the builders, up to 8 stages and 24 microbatches.


@pytest.mark.parametrize("num_stages", range(2, 9))
def test_orders_without_extra_forwards_complete(num_stages: int) -> None:
    for num_microbatches in range(1, 25):
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


@settings(deadline=None, max_examples=150)
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


@settings(deadline=None, max_examples=40)
@given(st.integers(2, 3), st.integers(1, 4), st.randoms(use_true_random=False))
def test_all_interleavings_of_random_orders_end_alike(
    num_stages: int, num_microbatches: int, rng: random.Random
) -> None:
    schedule = random_order(num_stages, num_microbatches, rng, in_order=True)
    for capacity in CAPACITIES:
        assert_one_stopping_point(schedule, capacity)


@settings(deadline=None, max_examples=60)
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
        for kind in Kind
    )
    if same:
        assert completes(schedule, None)
    else:
        with pytest.raises(EnvPipeError, match="other way round"):
            completes(schedule, None)


# What does not work, and how it is told.


def test_1f1b_with_blocking_sends_stalls_at_the_last_two_stages() -> None:
    stuck = find_stall(builders.one_f_one_b(2, 2), 0)
    assert stuck == [StuckStage(0, "F1", True, 1), StuckStage(1, "B0", True, 0)]
    assert str(stuck[0]) == "stage 0 sends the output of F1 to stage 1"
    assert not explore_all(builders.one_f_one_b(2, 2), 0)


def test_stall_on_a_channel_of_capacity_one_names_every_stuck_stage() -> None:
    schedule = builders.envpipe(3, 5, [2, 0, 0])  # 4, 1 and 0 warm-up forwards
    stuck = find_stall(schedule, 1)
    assert stuck == [
        StuckStage(0, "F4", True, 1), StuckStage(1, "B1", True, 0), StuckStage(2, "F3", False, 1)
    ]  # fmt: skip
    assert str(stuck[2]) == "stage 2 awaits F3's input from stage 1"
    assert completes(schedule, 2)


def test_messages_taken_in_another_order_than_sent_are_refused() -> None:
    # Executable with named messages.
    schedule = schedule_of(3, "F0 F1 F2 B0 B1 B2", "F2 F1 F0 B0 B1 B2")
    for call in (check_message_order, lambda s: completes(s, None)):
        with pytest.raises(EnvPipeError, match="F0 on stage 0 before F1 on stage 0") as error:
            call(schedule)
        assert "F1 on stage 1 comes before F0 on stage 1" in str(error.value)


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
