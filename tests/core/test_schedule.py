"""A schedule accepts exactly the orders that can run, and says which unit is wrong."""

import random
import re

import pytest
from core_cases import (
    B,
    F,
    I,
    W,
    parse_stages,
    random_orders,
    random_schedule,
    run_naively,
    units_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from on_request import examples

from envpipe_megatron.core.kinds import ScheduleError, parse_unit
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.orders.builders import check_size, split_in_place, zero_bubble
from envpipe_megatron.core.schedule import Placement, Schedule
from envpipe_megatron.errors import plain


@st.composite
def jobs_with_orders(draw):
    """Orders that run, orders with two units exchanged, and shuffled ones."""
    num_stages, num_microbatches = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    num_chunks = draw(st.integers(1, 2))
    rng = random.Random(draw(st.integers(0, 2**32)))
    orders = [list(o) for o in random_orders(rng, num_stages, num_microbatches, num_chunks)]
    for _ in range(draw(st.integers(0, 3))):
        order = rng.choice(orders)
        i, j = rng.randrange(len(order)), rng.randrange(len(order))
        order[i], order[j] = order[j], order[i]
    if draw(st.integers(0, 3)) == 0:
        rng.shuffle(rng.choice(orders))
    return num_microbatches, num_chunks, tuple(tuple(order) for order in orders)


@settings(max_examples=examples(400), deadline=None)
@given(jobs_with_orders())
def test_accepts_exactly_what_a_naive_run_finishes(job):
    num_microbatches, num_chunks, orders = job
    stopped = run_naively(orders, num_chunks)
    stuck = [
        f"{orders[stage][position].label(num_chunks)} on stage {stage}"
        for stage, position in enumerate(stopped)
        if position < len(orders[stage])
    ]
    if not stuck:
        schedule = Schedule("x", num_microbatches, num_chunks, orders)
        assert sorted(schedule.topological_order) == list(range(schedule.num_units))
        return
    with pytest.raises(ScheduleError) as caught:
        Schedule("x", num_microbatches, num_chunks, orders)
    early = re.search(r"Stage (\d+) runs (\S+) before (\S+)\.", str(caught.value))
    if early:
        order = orders[int(early[1])]
        assert order.index(parse_unit(early[2])) < order.index(parse_unit(early[3]))
    else:
        assert all(f"{name} waits for" in str(caught.value) for name in stuck)


GOOD = ("F0 F1 B0 B1", "F0 B0 F1 B1")


@pytest.mark.parametrize(
    ("orders", "told"),
    [
        (("F0 F1 B0 B1", "F0 B0 F0 B1"), "Stage 1 lists a unit twice (got 'F0')"),
        (("F0 F1 B0", "F0 B0 F1 B1"), "Stage 0 lacks a unit (got 'B1')"),
        (("F0 F2 B0 B1", "F0 B0 F1 B1"), "Stage 0 lists a unit that the job does not have"),
        (("F0 B1 F1 B0", "F0 B0 F1 B1"), "Stage 0 runs B1 before F1"),
        (
            ("F0 B0 F1 B1", "F1 B1 F0 B0"),
            "Schedule 'x' would deadlock: B0 on stage 0 waits for B0 on stage 1; F1 on stage 1 "
            "waits for F1 on stage 0. Each",
        ),
        (("", "F0 B0 F1 B1"), "Stage 0 lacks a unit (got 'F0')"),
    ],
)
def test_errors_name_stage_and_unit(orders, told):
    with pytest.raises(ScheduleError, match=re.escape(told)):
        Schedule("x", 2, 1, parse_stages(*orders))


TWICE = """
position     0    1    2    3
stage 0     F0   F1   B0   B1
stage 1   [F0]   B0 [F0]   B1"""
IN_CIRCLES = """
position     0    1    2    3
stage 0     F0 [B0]   F1   B1
stage 1   [F1]   B1   F0   B0"""
COMBINED = """
position      0     1     2     3
stage 0   [F0+]    B0    F1    B1
stage 1      F0    B0    F1    B1"""


@pytest.mark.parametrize("grid", [TWICE, IN_CIRCLES, COMBINED])
def test_a_schedule_that_cannot_run_is_shown_with_the_place_marked(grid):
    rows = (re.sub(r"[][]", "", row).split()[2:] for row in grid.splitlines()[2:])
    orders = tuple(tuple(map(parse_unit, row)) for row in rows)
    with pytest.raises(ScheduleError, match=re.escape(grid) + "$"):
        Schedule("x", 2, 1, orders)


def test_of_a_large_schedule_what_is_near_the_place_is_shown():
    orders = [list(order) for order in builders.one_f_one_b(40, 300).stages]
    orders[20][140], orders[20][300] = orders[20][300], orders[20][140]
    with pytest.raises(ScheduleError, match="Stage 20 runs") as caught:
        Schedule("x", 300, 1, tuple(map(tuple, orders)))
    _, header, *rows = str(caught.value).splitlines()
    assert header.split() == ["position", *map(str, range(137, 148))]
    assert [row.split()[1] for row in rows] == list(map(str, range(15, 31)))
    (marked,) = (row for row in rows if "[" in row)
    assert marked.split()[:2] == ["stage", "20"]
    assert marked.split()[5].startswith("[B")
    assert max(map(len, rows)) < 100


def test_a_pipeline_may_have_four_million_units():
    check_size(2, 1_000_000, 1)
    check_size(2, 250_000, 4)
    with pytest.raises(ScheduleError, match=r"2 stages x 1000001 microbatches are 4,000,004 units"):
        check_size(2, 1_000_001, 1)
    told = (
        "2 stages x 4 chunks x 1000000 microbatches are 16,000,000 units, and at most 4,000,000 "
        "are planned: these would take 12 GB and 5.33 minutes or more."
    )
    with pytest.raises(ScheduleError, match=re.escape(told)):
        check_size(2, 1_000_000, 4)


@pytest.mark.parametrize(
    ("microbatches", "chunks", "stages"), [(0, 1, GOOD), (2, 0, GOOD), (2, 1, ()), (0, 1, ("", ""))]
)
def test_empty_jobs_are_refused(microbatches, chunks, stages):
    with pytest.raises(ScheduleError, match="at least one stage, one microbatch and one chunk"):
        Schedule("x", microbatches, chunks, parse_stages(*stages))


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(0, 2**32))
def test_memory_and_warmup_are_those_of_a_walk_through_the_order(seed):
    schedule = random_schedule(random.Random(seed))
    for stage, order in enumerate(schedule.stages):
        held, peak, first = 0, 0, None
        for position, u in enumerate(order):
            held += {F: 1, B: -1, I: 0, W: -1}[u.kind]
            peak = max(peak, held)
            if u.kind is not F and first is None:
                first = position
        assert held == 0
        assert schedule.peak_in_flight[stage] == peak
        usual = min(schedule.num_stages - stage, schedule.num_microbatches)
        assert schedule.extra_forwards[stage] == max(0, first - usual)


@pytest.mark.parametrize("u", units_of(3, 2))
def test_units_are_read_as_they_are_written(u):
    assert parse_unit(u.label(2)) == u
    if u.chunk == 0:
        assert parse_unit(u.label()) == u


@pytest.mark.parametrize(
    "text",
    ["", "F", "F-1", "f0", "X0", "F0.", "F 0", "F0.1.2", " F0", "F0\n", None, 3, ["F0"], "F1.5e3"],
)
def test_unreadable_units_are_refused_with_their_text(text):
    with pytest.raises(ScheduleError, match=re.escape(f"(got {plain(text)})")):
        parse_unit(text)


def test_units_apart_are_whole_iterations():
    """Of several units a stage the order would be free of what they send each other."""
    assert builders.whole_iteration(3).placement is Placement.APART
    for microbatches, orders in ((1, ("F0 B0", "F0 B0")), (2, ("F0 F1", "F0 F1"))):
        with pytest.raises(ScheduleError, match=r"know nothing of each other .got 'placement"):
            Schedule("x", microbatches, 1, parse_stages(*orders), Placement.APART)


#: Units of two stages; which of them come out of turn.
OUT_OF_TURN = [
    (("F0 F1 B0 B1", "F0 F1 B0 B1"), None),
    (("F0 F1 F2 B0 B2 B1", "F0 B0 F1 B1 F2 B2"), "stage 0 runs B2 before B1"),
    (("F1 F0 B0 B1", "F0 F1 B0 B1"), "stage 0 runs F1 before F0"),
    (("F0 F1 I0 I1 W0 W1", "F0 F1 I0 I1 W1 W0"), "stage 1 runs W1 before W0"),
    (("F0 F1 I0 I1+ W1 W0", "F0 F1 I0 W0 I1+ W1"), "stage 0 runs W1 before W0"),
    (("F0.0 F1.0 F0.1 F1.1", "F0.0 F0.1 F1.0 F1.1"), None),
    (("F0.0 F1.0 F1.1 F0.1", "F0.0 F1.0 F0.1 F1.1"), "stage 0 runs F1.1 before F0.1"),
]


@pytest.mark.parametrize(("stages", "found"), OUT_OF_TURN)
def test_units_that_do_not_come_in_the_order_of_their_microbatches_are_named(stages, found):
    orders = tuple(tuple(map(parse_unit, order.split())) for order in stages)
    units = [each for order in orders for each in order]
    counts = 1 + max(u.microbatch for u in units), 1 + max(u.chunk for u in units)
    assert Schedule("given", *counts, orders).out_of_turn == found


def test_orders_of_builders_come_in_the_order_of_microbatches():
    built = [
        builders.one_f_one_b(4, 8),
        builders.gpipe(4, 8),
        builders.interleaved(2, 8, 3),
        builders.envpipe(4, 8, [3, 2, 1, 0]),
        zero_bubble(4, 8),
        zero_bubble(4, 8, 7),
        split_in_place(builders.one_f_one_b(4, 8), 3),
        split_in_place(builders.interleaved(2, 8, 2), 5),
    ]
    assert [order.name for order in built if order.out_of_turn] == []
