"""Runs of units at one clock: how they are cut, their clocks, and what a dwell time measures."""

import itertools
import math

import numpy as np
import pytest
from core_cases import PROFILE, WAIT_CURVES, B, F, profile_of
from hypothesis import given, settings
from hypothesis import strategies as st
from on_request import examples

from envpipe_megatron.core.conditions import Conditions
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.plan import Plan
from envpipe_megatron.policies.clock_changes.clock_runs import (
    alike_runs,
    best_clocks,
    make_clock_table,
    runs_of,
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


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(st.integers(0, 2**32))
def test_alike_runs_are_long_enough_and_lose_least_around_the_iteration(seed):
    """Against all ways to cut."""
    numbers = np.random.default_rng(seed)
    width = int(numbers.integers(1, 8))
    lasts_s, slowed = numbers.random((2, 2, width)) + np.array([[[0.1]], [[1.0]]])
    least_s = numbers.choice([0.0, 0.7, 1.5, 100.0])
    first = int(numbers.integers(0, width))
    runs = alike_runs(slowed, lasts_s, least_s, first)
    assert np.unique(runs).tolist() == list(range(runs.max() + 1))
    for own, times_s, ratios in zip(*np.roll([runs, lasts_s, slowed], -first, axis=2), strict=True):

        def lost(cuts, times_s=times_s, ratios=ratios):
            parts = [np.split(each, cuts) for each in (times_s, ratios)]
            if cuts and min(part.sum() for part in parts[0]) < least_s:
                return np.inf
            return sum((part - part.min()).sum() for part in parts[1])

        assert set(np.diff(own).tolist()) <= {0, 1}
        every = itertools.chain.from_iterable(
            itertools.combinations(range(1, width), count) for count in range(width)
        )
        found = lost(tuple((np.flatnonzero(np.diff(own)) + 1).tolist()))
        assert found == pytest.approx(min(map(lost, every)))


def test_runs_of_one_clock_go_on_in_the_next_iteration():
    index = np.array([[1, 0, 0, 2, 1], [3, 3, 3, 3, 3], [0, 0, 1, 1, 1]])
    assert runs_of(index).tolist() == [[2, 0, 0, 1, 2], [3] * 5, [4, 4, 5, 5, 5]]


@settings(max_examples=examples(100), deadline=None, derandomize=True)
@given(st.integers(0, 2**32))
def test_the_cheapest_clock_of_each_run_is_found(seed):
    numbers = np.random.default_rng(seed)
    stages, width, clocks = numbers.integers(1, 4), numbers.integers(1, 8), 3
    runs = runs_of(numbers.integers(0, 2, (stages, width)))
    cost_j = numbers.normal(0, 10, (width, stages, clocks))
    allowed = numbers.random(cost_j.shape) < 0.8
    best = best_clocks(runs, cost_j, allowed)
    for run in range(runs.max() + 1):
        stage, position = np.nonzero(runs == run)
        possible = allowed[position, stage].all(axis=0)
        if not possible.any():
            assert best is None
            return
        if best is not None:
            (clock,) = set(best[stage, position].tolist())
            costs_j = cost_j[position, stage].sum(axis=0)
            assert possible[clock]
            assert costs_j[clock] == pytest.approx(costs_j[possible].min())
    assert best is not None


class TestClockTable:
    profile = profile_of(
        {
            (0, F): {1200: (1.0, 10.0), 1000: (1.2, 8.0), 600: (3.0, 30.0)},
            (0, B): {1200: (2.0, 24.0), 900: (3.0, 15.0)},
            (1, F): {1400: (1.0, 11.0)},
            (1, B): {1400: (2.0, 25.0), 700: (4.0, 15.5)},
        }
    )
    conditions = Conditions((2.0, 3.0), gpus_per_stage=(1, 8))

    @pytest.fixture
    def table(self):
        powers_w = np.array([2.0, 3.0])
        return make_clock_table(builders.one_f_one_b(2, 1), self.profile, self.conditions, powers_w)

    def test_holds_the_clocks_of_a_stage_that_are_worth_anything(self, table):
        # 600 MHz is slower and dearer than 1000; stage 1 repeats its last clock.
        assert table.frequency_mhz.tolist() == [[1200, 1000, 900], [1400, 700, 700]]
        assert table.profiled[:, 0].tolist() == [[True, True, False], [True, False, True]]
        assert table.profiled[:, 1].tolist() == [[True, False, False], [True, True, False]]

    def test_times_between_profiled_clocks_are_on_the_line(self, table):
        assert table.time_s[:, 0, 1] == pytest.approx([1.2, 2 + 2 / 3])

    def test_costs_count_all_gpus_and_what_waiting_would_have_cost(self, table):
        assert table.cost_j[:, 1, 0] == pytest.approx([8 * (11 - 3), 8 * (25 - 6)])
