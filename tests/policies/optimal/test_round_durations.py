"""Rounding as a whole: carried, carried back or floored, whichever is best, with bounded work."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_linear_program import INTERIOR_POINT, SIMPLEX, SOLVERS, Case

from envpipe_megatron.policies.optimal import rounding as rounding_module
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
@settings(max_examples=80, deadline=None, derandomize=True)
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
@settings(max_examples=80, deadline=None, derandomize=True)
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
        slower = unit.time_s[unit.hull][unit.time_s[unit.hull] >= duration_s * (1 - 1e-4)]
        if slower.size:
            assert unit.time_s[at] <= slower[0]


@pytest.mark.parametrize("carry", CARRIES)
@settings(max_examples=80, deadline=None, derandomize=True)
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


@pytest.mark.parametrize("carry", CARRIES)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=SEEDS)
def test_after_carrying_ends_are_those_of_a_fresh_start(carry, seed):
    case = Case(seed)
    relaxed = case.program(SIMPLEX).solve(case.deadline_s)
    rounding = rounding_of(case, [0] * case.schedule.num_units)
    carry(rounding, relaxed.duration_s)
    fresh = rounding_of(case, rounding.chosen)
    assert rounding._path.end_s == fresh._path.end_s
    assert rounding._path.latest_end_s == fresh._path.latest_end_s


def test_work_is_limited():
    """No work, no change; a little work, a little better; more work, no worse."""
    case = Case(4, max_microbatches=6, factors=(1.15,))
    fastest = [0] * case.schedule.num_units
    costs = []
    for max_work in (0, 20, 200, 10**6):
        rounding = rounding_of(case, fastest)
        rounding.spend_slack(max_work)
        assert iteration_s(case, rounding.chosen) <= case.deadline_s * (1 + 1e-9)
        costs.append(rounding.cost_j)
    assert rounding_of(case, fastest).cost_j == costs[0]
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] < costs[1] < costs[0]
    chosen = rounding.chosen.copy()
    rounding.move_pairs(-np.inf, max_work=0)
    assert rounding.chosen == chosen


def test_a_plan_that_is_good_enough_is_left_alone():
    case = Case(11, factors=(1.1,))
    duration_s = case.program(SIMPLEX).solve(case.deadline_s).duration_s
    plain = rounded(case, duration_s, enough_j=np.inf)
    assert cost_j(case, plain) >= cost_j(case, rounded(case, duration_s))
    assert iteration_s(case, plain) <= case.deadline_s * (1 + 1e-9)


def test_small_jobs_try_every_way_to_begin_and_large_ones_only_where_they_must(monkeypatch):
    better = 0
    for seed in range(25):
        case = Case(seed, factors=(1.1,))
        duration_s = case.program(SIMPLEX).solve(case.deadline_s).duration_s
        units = case.schedule.num_units
        ways = []
        for begin in (*CARRIES, None):
            way = rounding_of(case, hull_floor(case.schedule, case.choices, duration_s))
            if begin:
                begin(way, duration_s)
            way.repair()
            way.spend_slack(np.inf if not ways else 30 * units)
            ways.append(way)
        best = min(ways, key=lambda way: way.cost_j)
        monkeypatch.setattr(rounding_module, "_SMALL_UNITS", units)
        assert rounded(case, duration_s, enough_j=np.inf) == best.chosen
        monkeypatch.setattr(rounding_module, "_SMALL_UNITS", units - 1)
        assert rounded(case, duration_s, enough_j=np.inf) == ways[0].chosen
        assert rounded(case, duration_s, enough_j=ways[0].cost_j) == ways[0].chosen
        # Not good enough: the others are tried, and the best is improved.
        chosen = rounded(case, duration_s, enough_j=-np.inf)
        monkeypatch.setattr(rounding_module, "_SMALL_UNITS", units)
        assert chosen == rounded(case, duration_s, enough_j=-np.inf)
        best.move_pairs(-np.inf)
        assert chosen == best.chosen
        better += best is not ways[0]
    assert better >= 2
