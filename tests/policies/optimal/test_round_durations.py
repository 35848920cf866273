"""Rounding as a whole: carried, carried back or floored, whichever is best, with bounded work."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_linear_program import INTERIOR_POINT, SOLVERS, Case

from envpipe_megatron.policies.optimal.choices import node_keys
from envpipe_megatron.policies.optimal.rounding import Rounding, hull_floor, round_durations

SEEDS = st.integers(0, 2**32)
CARRIES = [Rounding.carry, Rounding.carry_back]


def rounding_of(case, chosen):
    return Rounding(
        case.schedule,
        case.choices,
        case.conditions.latency_s,
        case.tail_s,
        case.deadline_s,
        chosen,
    )


def units_of(case):
    return [case.choices.units[key] for key in node_keys(case.schedule)]


def iteration_s(case, chosen):
    return case.iteration_s(
        [unit.time_s[at] for unit, at in zip(units_of(case), chosen, strict=True)]
    )


def cost_j(case, chosen):
    return sum(float(unit.cost_j[at]) for unit, at in zip(units_of(case), chosen, strict=True))


def rounded(case, duration_s, enough_j=-np.inf):
    return round_durations(
        case.schedule,
        case.choices,
        case.conditions.latency_s,
        case.tail_s,
        case.deadline_s,
        duration_s,
        enough_j,
    )


@SOLVERS
@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=SEEDS)
def test_choices_are_in_time_and_no_worse_than_any_way_alone(max_simplex_units, seed):
    case = Case(seed)
    duration_s = case.program(max_simplex_units).solve(case.deadline_s).duration_s
    chosen = rounded(case, duration_s)
    assert iteration_s(case, chosen) <= case.deadline_s * (1 + 1e-9)
    floored = rounding_of(case, hull_floor(case.schedule, case.choices, duration_s))
    floored.repair()
    floored.spend_slack()
    ways = [floored]
    for carry in CARRIES:
        carried = rounding_of(case, [0] * case.schedule.num_units)
        carry(carried, duration_s)
        carried.repair()
        carried.spend_slack()
        ways.append(carried)
    best_j = min(way.cost_j for way in ways)
    assert cost_j(case, chosen) <= best_j + 1e-9 * abs(best_j)


@pytest.mark.parametrize("carry", CARRIES)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=SEEDS)
def test_carrying_takes_one_of_the_two_neighbours_or_a_faster_one_and_is_in_time(carry, seed):
    case = Case(seed)
    relaxed = case.program(INTERIOR_POINT).solve(case.deadline_s)
    rounding = rounding_of(case, [0] * case.schedule.num_units)
    carry(rounding, relaxed.duration_s)
    assert iteration_s(case, rounding.chosen) <= case.deadline_s * (1 + 1e-6)
    for unit, at, duration_s in zip(
        units_of(case), rounding.chosen, relaxed.duration_s, strict=True
    ):
        assert at in unit.hull
        slower = unit.time_s[unit.hull][unit.time_s[unit.hull] >= duration_s * (1 - 1e-6)]
        if slower.size:
            assert unit.time_s[at] <= slower[0]


@pytest.mark.parametrize("carry", CARRIES)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=SEEDS)
def test_carrying_keeps_durations_that_exist(carry, seed):
    """Hull points within the deadline are taken as they are."""
    case = Case(seed)
    rng = random.Random(seed)
    wanted = [int(rng.choice(unit.hull)) for unit in units_of(case)]
    duration_s = np.array(
        [unit.time_s[at] for unit, at in zip(units_of(case), wanted, strict=True)]
    )
    case.deadline_s = iteration_s(case, wanted)
    rounding = rounding_of(case, [0] * len(wanted))
    carry(rounding, duration_s)
    assert rounding.chosen == wanted
