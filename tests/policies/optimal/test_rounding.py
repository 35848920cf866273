"""From relaxed durations to choices: each move keeps the deadline, and none is left undone."""

import numpy as np
import pytest
from core_cases import B, F, profile_of
from hypothesis import given, settings
from hypothesis import strategies as st
from on_request import examples
from program_cases import Case

from envpipe_megatron.core.orders import builders
from envpipe_megatron.policies.optimal.choices import make_choices
from envpipe_megatron.policies.optimal.rounding import Rounding, hull_floor, round_durations

SEEDS = st.integers(0, 2**32)
CARRIES = [Rounding.carry, Rounding.carry_back]


def assert_in_time(case, chosen):
    assert case.chosen_s(chosen) <= case.deadline_s * (1 + 1e-9)


@settings(max_examples=examples(40), deadline=None, derandomize=True)
@given(SEEDS)
def test_a_floor_is_the_slowest_hull_choice_within_the_duration(seed):
    case = Case(seed)
    duration_s = np.array(
        [
            case.rng.choice(
                [case.rng.choice(unit.time_s), case.rng.uniform(unit.time_s[0], unit.time_s[-1])]
            )
            for unit in case.units
        ]
    )
    exactly = hull_floor(case.schedule, case.choices, duration_s)
    # What a solver leaves of a profiled time is that time still.
    assert hull_floor(case.schedule, case.choices, duration_s * (1 - 1e-9)) == exactly
    for unit, at, given_s in zip(case.units, exactly, duration_s, strict=True):
        assert at in unit.hull
        assert unit.time_s[at] <= given_s * (1 + 1e-6)
        slower = unit.hull[unit.hull > at]
        assert not slower.size or unit.time_s[slower[0]] > given_s


@settings(max_examples=examples(40), deadline=None, derandomize=True)
@given(SEEDS)
def test_repair_brings_choices_that_are_too_slow_within_the_deadline(seed):
    case = Case(seed)
    for start in (case.slowest, case.any_choices()):
        rounding = case.rounding(start)
        late = case.chosen_s(start) > case.deadline_s * (1 + 1e-9)
        rounding.repair()
        assert_in_time(case, rounding.chosen)
        assert all(after <= before for after, before in zip(rounding.chosen, start, strict=True))
        assert late == (rounding.chosen != start)  # who is in time is left alone


def test_repair_takes_the_cheapest_step_on_a_late_path():
    # F may become a second faster for 5 J, B for 3: one of the two is enough.
    rounding = one_of_each(
        {1200: (1.0, 15.0), 1000: (2.0, 10.0)}, {1200: (1.0, 13.0), 1000: (2.0, 10.0)}, 3.0, [1, 1]
    )
    rounding.repair()
    assert rounding.chosen == [1, 0]
    assert rounding.cost_j == 23.0


def one_of_each(forward, backward, deadline_s, chosen):
    """A forward, then a backward, on a single stage."""
    profile = profile_of({(0, F): forward, (0, B): backward})
    choices = make_choices(profile, np.zeros(1), np.ones(1, dtype=np.int64))
    return Rounding(builders.one_f_one_b(1, 1), choices, 0.0, np.zeros(1), deadline_s, list(chosen))


@settings(max_examples=examples(40), deadline=None, derandomize=True)
@given(SEEDS)
def test_spending_slack_leaves_no_unit_that_could_be_slower(seed):
    case = Case(seed)
    rounding = case.rounding(case.fastest)
    rounding.spend_slack()
    assert_in_time(case, rounding.chosen)
    for node, (unit, at) in enumerate(zip(case.units, rounding.chosen, strict=True)):
        if at + 1 < len(unit.time_s):
            slower = [*rounding.chosen]
            slower[node] = at + 1
            assert case.chosen_s(slower) > case.deadline_s * (1 + 1e-13)


def test_slack_goes_where_a_second_saves_most():
    # One second is left over; F would save 4 J in it and B 6.
    forward = {1200: (1.0, 10.0), 1000: (2.0, 6.0)}
    backward = {1200: (1.0, 10.0), 1000: (2.0, 4.0)}
    rounding = one_of_each(forward, backward, 3.0, [0, 0])
    rounding.spend_slack()
    assert rounding.chosen == [0, 1]


def test_a_pair_of_moves_finds_what_greedy_spending_misses():
    # F's half second saves 8 J/s and is spent first; the half that is left is too short for B,
    # whose whole second saves 7.
    forward = {1200: (1.0, 10.0), 1000: (1.5, 6.0)}
    backward = {1200: (1.0, 10.0), 1000: (2.0, 3.0)}
    rounding = one_of_each(forward, backward, 3.0, [0, 0])
    rounding.spend_slack()
    assert rounding.chosen == [1, 0]
    assert rounding.cost_j == 16.0
    rounding.move_pairs(enough_j=16.0)  # good enough already
    assert rounding.chosen == [1, 0]
    rounding.move_pairs(enough_j=0.0)
    assert rounding.chosen == [0, 1]
    assert rounding.cost_j == 13.0


@settings(max_examples=examples(40), deadline=None, derandomize=True)
@given(SEEDS)
def test_pairs_of_moves_never_cost_nor_break_the_deadline(seed):
    case = Case(seed)
    rounding = case.rounding(case.any_choices())
    rounding.repair()
    for spend_first in (False, True):
        if spend_first:
            rounding.spend_slack()
        before_j = case.chosen_j(rounding.chosen)
        rounding.move_pairs(enough_j=-np.inf)
        after_j = case.chosen_j(rounding.chosen)
        assert after_j <= before_j + 1e-12 * abs(before_j)
        assert rounding.cost_j == pytest.approx(after_j, rel=1e-12)
        assert_in_time(case, rounding.chosen)


@settings(max_examples=examples(25), deadline=None, derandomize=True)
@given(SEEDS)
def test_choices_are_in_time_and_no_worse_than_any_way_alone(seed):
    case = Case(seed)
    duration_s = case.program().solve(case.deadline_s).duration_s
    where = case.schedule, case.choices, case.conditions.latency_s, case.tail_s
    chosen = round_durations(*where, case.deadline_s, duration_s, -np.inf, 0.0)
    assert_in_time(case, chosen)
    floored = case.rounding(hull_floor(case.schedule, case.choices, duration_s))
    floored.repair()
    floored.spend_slack()
    ways = [floored]
    for carry in CARRIES:
        carried = case.rounding(case.fastest)
        carry(carried, duration_s)
        carried.repair()
        carried.spend_slack()
        ways.append(carried)
    best_j = min(way.cost_j for way in ways)
    assert case.chosen_j(chosen) <= best_j + 1e-9 * abs(best_j)


@pytest.mark.parametrize("carry", CARRIES)
@settings(max_examples=examples(25), deadline=None, derandomize=True)
@given(seed=SEEDS)
def test_carrying_takes_one_of_the_two_neighbours_or_a_faster_one_and_is_in_time(carry, seed):
    case = Case(seed)
    relaxed = case.program().solve(case.deadline_s)
    rounding = case.rounding(case.fastest)
    carry(rounding, relaxed.duration_s)
    assert case.chosen_s(rounding.chosen) <= case.deadline_s * (1 + 1e-6)
    for unit, at, duration_s in zip(case.units, rounding.chosen, relaxed.duration_s, strict=True):
        assert at in unit.hull
        slower = unit.time_s[unit.hull][unit.time_s[unit.hull] >= duration_s * (1 - 1e-6)]
        if slower.size:
            assert unit.time_s[at] <= slower[0]


@pytest.mark.parametrize("carry", CARRIES)
@settings(max_examples=examples(25), deadline=None, derandomize=True)
@given(seed=SEEDS)
def test_carrying_keeps_durations_that_exist(carry, seed):
    """Hull points within the deadline are taken as they are."""
    case = Case(seed)
    wanted = [int(case.rng.choice(unit.hull)) for unit in case.units]
    duration_s = np.array([unit.time_s[at] for unit, at in zip(case.units, wanted, strict=True)])
    case.deadline_s = case.chosen_s(wanted)
    rounding = case.rounding(case.fastest)
    carry(rounding, duration_s)
    assert rounding.chosen == wanted
