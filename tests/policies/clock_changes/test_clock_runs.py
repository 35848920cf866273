"""Runs of units at one clock: against every assignment, and what a dwell time measures."""

import itertools
import math
import random

import numpy as np
import pytest
from core_cases import PROFILE, WAIT_CURVES, random_orders, uniform_profile
from hypothesis import given, settings
from hypothesis import strategies as st
from on_request import examples
from planning_cases import random_profile

from envpipe_megatron.core.conditions import Conditions
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.plan import Plan
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.policies.clock_changes.clock_runs import (
    LateClocks,
    RunFinder,
    make_clock_table,
    shortest_dwell_s,
)

SCHEDULE = builders.one_f_one_b(2, 2)


class TestShortestDwell:
    # At 1200 MHz stage 0 runs F0 0-1, F1 1-2, B0 4-6, B1 7-9, stage 1 F0 1-2 B0 -4 F1 -5 B1 -7.

    def dwell_s(self, first, second=(1200,) * 4, park=None, **conditions):
        plan = Plan(
            "mine",
            SCHEDULE,
            np.array([first, second]),
            PROFILE,
            Conditions((40.0, 50.0), wait_power_w=WAIT_CURVES, **conditions),
            park_mhz=park,
        )
        return shortest_dwell_s(plan)

    def test_one_clock_is_kept_for_ever(self):
        assert self.dwell_s([1200] * 4, [900] * 4) == math.inf

    def test_a_run_lasts_from_request_to_request_with_the_waits_in_it(self):
        # 900 MHz is asked for when F1 ends at 2 and lasts until B0 ends at 7: B1 ends at 9.
        assert self.dwell_s([1200, 1200, 900, 1200]) == 4.0  # 7 to 9, and 0 to 2 of the next
        # F1 takes 1.5 s from 1 on; after it 1200 MHz is kept until 1 of the next iteration.
        assert self.dwell_s([1200, 900, 1200, 1200]) == 1.5

    def test_the_last_run_continues_in_the_next_iteration(self):
        # B1 and F0 are at 900 MHz: from 6 on, through the end at 10, until 1.5.
        assert self.dwell_s([900, 1200, 1200, 900]) == pytest.approx(5.0)

    def test_parking_asks_for_a_clock_twice(self):
        park = np.zeros((2, 4), dtype=np.int64)
        park[0, 2] = 300
        # From 2 to a quarter second before B0 starts at 4.
        assert self.dwell_s([1200] * 4, park=park, change_time_s=0.25) == pytest.approx(1.75)
        # Parking at the clock before is one request, late in the wait: 1200 MHz is kept from the
        # end of the iteration until then, and not just until F1 ends at 2.
        clocks = [1200, 1200, 900, 900]
        assert self.dwell_s(clocks, change_time_s=0.25) == pytest.approx(2.0)
        park[0, 2] = 1200
        assert self.dwell_s(clocks, park=park, change_time_s=0.25) == pytest.approx(3.75)


def random_case(rng):
    """A table of a small job, and costs, permissions and lateness without any order in them."""
    profile = random_profile(rng, rng.randint(1, 2), 3)
    stages, microbatches = profile.num_stages, rng.randint(1, 2)
    orders = random_orders(rng, stages, microbatches)
    schedule = Schedule("random", microbatches, 1, orders)
    power_w = np.array([rng.choice([0.0, 60.0])] * stages)
    conditions = Conditions(tuple(power_w), gpus_per_stage=(rng.choice([1, 4]),) * stages)
    table = make_clock_table(schedule, profile, conditions, power_w)
    numbers = np.random.default_rng(rng.getrandbits(32))
    cost_j = numbers.normal(0, 10, table.time_s.shape)
    allowed = table.profiled & (numbers.random(table.time_s.shape) < 0.9)
    late = None
    if rng.random() < 0.5:
        late_s = numbers.random(table.time_s.shape[:2]) * table.time_s.mean()
        late = LateClocks(late_s, numbers.normal(0, 10, table.time_s.shape))
    change_j = numbers.random(stages) * rng.choice([0.0, 3.0, 30.0])
    dwell_s = rng.choice([0.0, 0.0, rng.uniform(0, 1.5) * float(table.time_s.sum(axis=0).mean())])
    wait_s = numbers.random((stages, len(table.time_s))) * rng.choice([0.0, table.time_s.mean()])
    return table, cost_j, allowed, late, change_j, dwell_s, wait_s


def cost_of(stage, clocks, table, cost_j, late, change_j):
    total = 0.0
    for position, clock in enumerate(clocks):
        old = clocks[position - 1]
        total += cost_j[position, stage, clock]
        if old == clock:
            continue
        total += change_j[stage]
        if late is not None:
            share = late.late_s[position, stage] / table.time_s[position, stage, old]
            there = late.cost_j[position, stage]
            total += min(1.0, share) * (there[old] - there[clock])
    return total


def runs_last(stage, clocks, table, dwell_s, wait_s):
    """Around the iteration, whose units are turned until a run begins with the first."""
    if len(set(clocks)) == 1:
        return True
    begin = next(i for i, clock in enumerate(clocks) if clock != clocks[i - 1])
    turned = [i % len(clocks) for i in range(begin, begin + len(clocks))]
    runs = itertools.groupby(turned, key=lambda i: clocks[i])
    return all(
        sum(table.time_s[i, stage, clock] + wait_s[stage, i] for i in run) >= dwell_s
        for clock, run in runs
    )


@settings(max_examples=examples(300), deadline=None, derandomize=True)
@given(st.integers(0, 2**32))
def test_the_cheapest_of_all_assignments_is_found(seed):
    table, cost_j, allowed, late, change_j, dwell_s, wait_s = random_case(random.Random(seed))
    found = RunFinder(table, change_j, dwell_s, wait_s).find(cost_j, allowed, late)
    length, stages, width = cost_j.shape
    for stage in range(stages):
        possible = [
            clocks
            for clocks in itertools.product(range(width), repeat=length)
            if all(allowed[i, stage, c] for i, c in enumerate(clocks))
            and runs_last(stage, clocks, table, dwell_s, wait_s)
        ]
        if not possible:
            assert found is None
            return
        if found is None:
            continue  # another stage has none
        assert tuple(found[stage].tolist()) in possible
        costs = (table, cost_j, late, change_j)
        value_j = cost_of(stage, found[stage].tolist(), *costs)
        least_j = min(cost_of(stage, clocks, *costs) for clocks in possible)
        # The first clock is chosen before the change back to it is known, which may be too many.
        more_j = change_j[stage] + 1e-9
        if late is not None:
            more_j += 2 * np.ptp(late.cost_j[:, stage], axis=1).max()
        assert least_j - 1e-9 <= value_j <= least_j + more_j
    if found is None:
        pytest.fail("every stage has runs")


def test_the_change_back_to_the_first_clock_counts():
    profile = uniform_profile(1, {1000: (1.0, 10.0), 800: (1.2, 8.0)})
    schedule = builders.one_f_one_b(1, 2)
    table = make_clock_table(schedule, profile, Conditions((0.0,)), np.zeros(1))
    cost_j = np.array([[0.0, 5.0], [0.5, 0.0], [0.5, 0.0], [0.5, 0.0]])[:, None]
    # At a joule a change, one change and back cost more than three times half a joule.
    for change_j, clocks in ((0.0, [0, 1, 1, 1]), (0.7, [0, 1, 1, 1]), (1.0, [0, 0, 0, 0])):
        index = RunFinder(table, np.array([change_j]), 0.0).find(cost_j, table.profiled)
        assert index.tolist() == [clocks]
