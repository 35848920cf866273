"""From relaxed durations to choices: each move keeps the deadline, and none is left undone."""

import random

import numpy as np
import pytest
from core_cases import B, F, profile_of, random_orders
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_cases import random_job

from envpipe_megatron.core import builders
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.core.timeline import Timeline
from envpipe_megatron.policies.optimal.choices import make_choices, node_keys
from envpipe_megatron.policies.optimal.rounding import Rounding, hull_floor

SEEDS = st.integers(0, 2**32)


class Case:
    """A random order of a random job, and a deadline between its fastest and slowest iteration."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        job = random_job(self.rng, stages=(1, 2, 3), max_frequencies=5)
        stages, microbatches = job.num_stages, job.num_microbatches
        orders = random_orders(self.rng, stages, microbatches)
        self.schedule = self.rng.choice(
            [
                Schedule("random", microbatches, 1, orders),
                builders.one_f_one_b(stages, microbatches),
            ]
        )
        self.conditions = job.conditions
        self.choices = make_choices(
            job.profile, np.array(job.conditions.blocking_power_w), job.conditions.gpus_by_stage
        )
        self.units = [self.choices.units[key] for key in node_keys(self.schedule)]
        self.fastest = [0] * len(self.units)
        self.slowest = [len(unit.time_s) - 1 for unit in self.units]
        early, late = self.iteration_s(self.fastest), self.iteration_s(self.slowest)
        self.deadline_s = early + self.rng.choice([0.0, self.rng.random(), 1.0]) * (late - early)

    def any_choices(self):
        return [self.rng.randint(0, slowest) for slowest in self.slowest]

    def rounding(self, chosen):
        return Rounding(
            self.schedule,
            self.choices,
            self.conditions.latency_s,
            self.conditions.tail_by_stage_s,
            self.deadline_s,
            chosen,
        )

    def timeline(self, chosen):
        duration_s = [unit.time_s[at] for unit, at in zip(self.units, chosen, strict=True)]
        shape = self.schedule.is_backward.shape
        return Timeline(
            self.schedule, np.array(duration_s).reshape(shape), self.conditions.latency_s
        )

    def iteration_s(self, chosen):
        return float(np.max(self.timeline(chosen).end_s[:, -1] + self.conditions.tail_by_stage_s))

    def cost_j(self, chosen):
        return sum(unit.cost_j[at] for unit, at in zip(self.units, chosen, strict=True))

    def assert_in_time(self, chosen):
        assert self.iteration_s(chosen) <= self.deadline_s * (1 + 1e-9)


@settings(max_examples=40, deadline=None, derandomize=True)
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


@settings(max_examples=40, deadline=None, derandomize=True)
@given(SEEDS)
def test_repair_brings_choices_that_are_too_slow_within_the_deadline(seed):
    case = Case(seed)
    for start in (case.slowest, case.any_choices()):
        rounding = case.rounding(start)
        late = case.iteration_s(start) > case.deadline_s * (1 + 1e-9)
        rounding.repair()
        case.assert_in_time(rounding.chosen)
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


@settings(max_examples=40, deadline=None, derandomize=True)
@given(SEEDS)
def test_spending_slack_leaves_no_unit_that_could_be_slower(seed):
    case = Case(seed)
    rounding = case.rounding(case.fastest)
    rounding.spend_slack()
    case.assert_in_time(rounding.chosen)
    for node, (unit, at) in enumerate(zip(case.units, rounding.chosen, strict=True)):
        if at + 1 < len(unit.time_s):
            slower = [*rounding.chosen]
            slower[node] = at + 1
            assert case.iteration_s(slower) > case.deadline_s * (1 + 1e-13)


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


@settings(max_examples=40, deadline=None, derandomize=True)
@given(SEEDS)
def test_pairs_of_moves_never_cost_nor_break_the_deadline(seed):
    case = Case(seed)
    rounding = case.rounding(case.any_choices())
    rounding.repair()
    for spend_first in (False, True):
        if spend_first:
            rounding.spend_slack()
        before_j = case.cost_j(rounding.chosen)
        rounding.move_pairs(enough_j=-np.inf, max_passes=case.rng.randint(1, 3))
        after_j = case.cost_j(rounding.chosen)
        assert after_j <= before_j + 1e-12 * abs(before_j)
        assert rounding.cost_j == pytest.approx(after_j, rel=1e-12)
        case.assert_in_time(rounding.chosen)
