"""From relaxed durations to choices: each move keeps the deadline, and none is left undone."""

from dataclasses import replace

import numpy as np
import pytest
from core_cases import B, F, profile_of
from hypothesis import given, settings
from hypothesis import strategies as st
from on_request import examples
from program_cases import Case

from envpipe_megatron.core.conditions import Conditions
from envpipe_megatron.core.orders import builders
from envpipe_megatron.policies.optimal.linear_program import DurationProgram, make_choices
from envpipe_megatron.policies.optimal.rounding import Rounding, hull_floor, round_durations

SEEDS = st.integers(0, 2**32)
CARRIES = [Rounding.carry, Rounding.carry_back]


def assert_in_time(case, chosen):
    assert case.chosen_s(chosen) <= case.deadline_s * (1 + 1e-9)


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
    program = DurationProgram(builders.one_f_one_b(1, 1), choices, Conditions((0.0,)))
    return Rounding(program, deadline_s, list(chosen))


def test_slack_goes_where_a_second_saves_most():
    # One second is left over; F would save 4 J in it and B 6.
    forward = {1200: (1.0, 10.0), 1000: (2.0, 6.0)}
    backward = {1200: (1.0, 10.0), 1000: (2.0, 4.0)}
    rounding = one_of_each(forward, backward, 3.0, [0, 0])
    rounding.spend_slack()
    assert rounding.chosen == [0, 1]
    # Of three seconds all are spent, one after another.
    backward[800] = (3.0, 1.0)
    rounding = one_of_each(forward, backward, 5.0, [0, 0])
    rounding.spend_slack()
    assert rounding.chosen == [1, 2]


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


@settings(max_examples=examples(25), deadline=None, derandomize=True)
@given(SEEDS)
def test_choices_are_in_time_and_no_worse_than_any_way_alone(seed):
    case = Case(seed)
    relaxed = replace(case.program().solve(case.deadline_s), end_s=case.deadline_s, cost_j=-np.inf)
    duration_s = relaxed.duration_s
    chosen = round_durations(case.program(), relaxed, 0.0)
    assert_in_time(case, chosen)
    floored = case.rounding(hull_floor(case.program(), duration_s))
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


@pytest.mark.parametrize("choose", [*CARRIES, hull_floor])
@settings(max_examples=examples(25), deadline=None, derandomize=True)
@given(seed=SEEDS)
def test_durations_that_exist_are_kept(choose, seed):
    """Hull points within the deadline are taken as they are, by what a solver leaves of them."""
    case = Case(seed)
    wanted = [int(case.rng.choice(unit.hull)) for unit in case.units]
    duration_s = np.array([unit.time_s[at] for unit, at in zip(case.units, wanted, strict=True)])
    case.deadline_s = case.chosen_s(wanted)
    if choose is hull_floor:
        assert hull_floor(case.program(), duration_s * (1 - 1e-9)) == wanted
        return
    rounding = case.rounding(case.fastest)
    choose(rounding, duration_s)
    assert rounding.chosen == wanted
