"""Parking: what it saves by hand, when it is left alone, and what it never breaks."""

import random
from dataclasses import replace

import numpy as np
import pytest
from core_cases import PROFILE, WAIT_CURVES, B, F, profile_of, random_orders
from hypothesis import given, settings
from hypothesis import strategies as st
from on_request import examples
from planning_cases import random_job

from envpipe_megatron.core.conditions import Conditions
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.plan import Plan
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.policies.clock_changes.clock_runs import shortest_dwell_s
from envpipe_megatron.policies.optimal.optimizer import mean_waiting_power_w, waiting_floor_w
from envpipe_megatron.tuning import parking

#: At 1200 MHz stage 0 runs F0 0-1, F1 1-2, B0 4-6, B1 7-9, stage 1 F0 1-2 B0 -4 F1 -5 B1 -7.
SCHEDULE = builders.one_f_one_b(2, 2)


def plan_of(clocks=(1200, 1200, 1200, 1200), profile=PROFILE, **conditions):
    conditions.setdefault("wait_power_w", WAIT_CURVES)
    return Plan(
        "mine",
        SCHEDULE,
        np.array([clocks, [1200] * 4]),
        profile,
        Conditions((40.0, 50.0), **conditions),
    )


def park(plan, min_dwell_s=0.0):
    """Parked at the clocks of least waiting power."""
    lowest = [min(curve, key=curve.__getitem__) for curve in plan.conditions.wait_power_w]
    return parking.park(plan, min_dwell_s, np.array(lowest), 0.0)


class TestPark:
    def test_saves_the_lower_power_in_the_wait_less_two_changes(self):
        plan = plan_of(change_time_s=0.25)
        parked = park(plan)
        # Stage 0 waits 2 s before B0 and one before B1; stage 1 waits a second and two, as one.
        assert parked.park_mhz.tolist() == [[0, 0, 300, 300], [600, 0, 0, 0]]
        saved_j = (60 - 10) * (2 - 0.5 + 1 - 0.5) + (50 - 20) * (3 - 0.5)
        assert plan.cost.energy_j - parked.cost.energy_j == pytest.approx(saved_j)
        assert parked.cost.iteration_time_s == plan.cost.iteration_time_s

    @pytest.mark.parametrize(
        ("change_s", "parked"),
        [(0.4, 3), (0.5, 2), (0.9, 2), (1.0, 1), (1.4, 1), (1.5, 0), (9.0, 0)],
    )
    def test_is_left_alone_where_two_changes_do_not_fit(self, change_s, parked):
        plan = park(plan_of(change_time_s=change_s))
        assert np.count_nonzero(plan.park_mhz if parked else 0) == parked
        assert (plan.park_mhz is None) == (parked == 0)

    @pytest.mark.parametrize(
        ("change_j", "parked"), [(24.9, 3), (25.1, 2), (44.9, 2), (45.1, 1), (49.9, 1), (50.1, 0)]
    )
    def test_is_left_alone_where_its_changes_take_more_than_it_saves(self, change_j, parked):
        # Two more changes each, for 100 J, 50 J and 90 J: at no time of a change.
        plan = park(plan_of(change_energy_j=change_j))
        assert np.count_nonzero(plan.park_mhz if parked else 0) == parked

    def test_a_raised_clock_can_wait_until_it_is_needed(self):
        # F1 at 900 MHz runs 1-2.5; B0 waits 1.5 s for 1200. Parking at 300 would save 50 W, but
        # take a change more; staying at 900 saves 30 W and takes none.
        plan = plan_of((1200, 900, 1200, 1200), change_energy_j=40.0)
        parked = park(plan)
        assert parked.park_mhz[0].tolist() == [0, 0, 900, 0]
        assert plan.cost.energy_j - parked.cost.energy_j == pytest.approx(30 * 1.5 + 10.0)
        assert parked.evaluation.clock_changes.tolist() == [2, 2]

    def test_a_bound_that_parking_can_go_below_is_left_out(self):
        plan = replace(plan_of(), energy_lower_bound_j=1.0)
        assert park(plan).energy_lower_bound_j is None
        assert park(replace(plan, park_mhz=None), 100.0).energy_lower_bound_j == 1.0

    def test_keeps_a_dwell_time(self):
        # Parked runs last 2 s, 1 s and 3 s less one change. B0 lasts 2 s and has one change before
        # it, so with both waits of stage 0 parked the shortest run is that of B1's wait, 0.75 s.
        plan = plan_of(change_time_s=0.25)
        assert shortest_dwell_s(park(plan)) == pytest.approx(0.75)
        parked = park(plan, min_dwell_s=1.0)
        assert parked.park_mhz.tolist() == [[0, 0, 300, 0], [600, 0, 0, 0]]
        assert shortest_dwell_s(parked) >= 1.0
        assert park(plan, min_dwell_s=100.0).park_mhz is None


class TestWaiting:
    def test_mean_power_is_that_of_the_clocks_that_are_waited_at(self):
        # B0 waits 2 s at 900 MHz; it ends at 7, so B1, at 1200, does not wait.
        plan = plan_of((1200, 1200, 900, 1200), change_energy_j=3.0, gpus_per_stage=(2, 4))
        assert mean_waiting_power_w(plan) == pytest.approx([30.0, 50.0])
        assert mean_waiting_power_w(park(plan)) == pytest.approx([10.0, 20.0])

    def test_mean_power_of_a_stage_that_never_waits_is_the_blocking_power(self):
        profile = profile_of({(0, F): {1200: (1.0, 10.0)}, (0, B): {1200: (2.0, 24.0)}})
        conditions = Conditions((40.0,), wait_power_w=({1200: 60.0},))
        plan = Plan("mine", builders.one_f_one_b(1, 2), np.full((1, 4), 1200), profile, conditions)
        assert mean_waiting_power_w(plan).tolist() == [40.0]

    def test_floor(self):
        conditions = plan_of().conditions
        assert waiting_floor_w(PROFILE, conditions).tolist() == [30.0, 35.0]
        plain = replace(conditions, wait_power_w=None)
        assert waiting_floor_w(PROFILE, plain).tolist() == [40.0, 50.0]


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(st.integers(0, 2**32))
def test_parking_never_costs_energy_and_never_moves_a_unit(seed):
    rng = random.Random(seed)
    job = random_job(rng)
    profile, stages = job.profile, job.num_stages
    orders = random_orders(rng, stages, job.num_microbatches)
    schedule = Schedule("random", job.num_microbatches, 1, orders)
    unit_s = profile.rows[0][F][0].time_s
    conditions = replace(
        job.conditions,
        wait_power_w=tuple(
            {f: rng.uniform(10, 100) for f in rng.sample(range(200, 2000, 15), rng.randint(1, 4))}
            for _ in range(stages)
        ),
        change_time_s=rng.choice([0.0, rng.uniform(0, 1.5) * unit_s]),
        change_energy_j=rng.choice([0.0, rng.uniform(0, 20) * unit_s]),
    )
    frequency = np.array(
        [
            [rng.choice(profile.rows[stage][unit.kind]).frequency_mhz for unit in order]
            for stage, order in enumerate(schedule.stages)
        ]
    )
    plan = Plan("mine", schedule, frequency, profile, conditions)
    parked = park(plan)
    assert parked.cost.energy_j <= plan.cost.energy_j
    assert parked.timeline.start_s.tolist() == plan.timeline.start_s.tolist()
    assert parked.cost.iteration_time_s == plan.cost.iteration_time_s
    dwell_s = (
        rng.uniform(0, 1) * shortest_dwell_s(plan)
        if (frequency != frequency[:, :1]).any()
        else unit_s
    )
    assert shortest_dwell_s(park(plan, dwell_s)) >= dwell_s * (1 - 1e-9)
