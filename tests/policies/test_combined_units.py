"""Plans of combined units: against every assignment of clocks, and by every policy."""

import numpy as np
import pytest
from combined_cases import CLOCKS_MHZ, combined_profile
from planning_cases import try_everything

from envpipe_megatron.core.conditions import Conditions
from envpipe_megatron.core.orders import builders
from envpipe_megatron.policies.optimal.optimizer import Optimizer, all_maximum_s
from envpipe_megatron.policies.planner import make_plan
from envpipe_megatron.policies.request import PlanRequest

NAME = "interleaved-combined"
POWER_W = (40.0, 55.0)


@pytest.mark.parametrize("seed", range(6))
def test_optimal_plans_stand_between_the_optimum_and_a_few_percent_above(seed):
    profile = combined_profile(seed, clocks_mhz=CLOCKS_MHZ[:2])
    schedule = builders.interleaved(2, 2, 2, combined=True)
    assert schedule.combined.sum() == 1
    conditions = Conditions(POWER_W, (0.1 * seed,))
    everything = try_everything(schedule, profile, conditions)
    iteration_s, energy_j = everything.iteration_time_s, everything.energy_j
    deadline_s = (1 + 0.05 * (seed % 3)) * all_maximum_s(schedule, profile, conditions)
    assert iteration_s.min() == pytest.approx(Optimizer(schedule, profile, conditions).fastest_s)
    plan = Optimizer(schedule, profile, conditions).plan(deadline_s)
    least_j = energy_j[iteration_s <= deadline_s * (1 + 1e-9)].min()
    assert plan.energy_lower_bound_j <= least_j * (1 + 1e-8)
    assert least_j * (1 - 1e-8) <= plan.cost.energy_j <= 1.02 * least_j
    assert plan.cost.iteration_time_s <= deadline_s * (1 + 1e-9)


@pytest.mark.parametrize(
    ("policy", "reconfigure"),
    [
        ("baseline", "default"),
        ("uniform", "default"),
        ("envelope", "default"),
        ("envelope", "balanced"),
        ("envelope", "greedy"),
        ("optimal", "default"),
    ],
)
def test_every_policy_gives_a_pair_one_clock(policy, reconfigure):
    profile = combined_profile(1)
    request = PlanRequest(8, NAME, policy, reconfigure, POWER_W, num_chunks=2)
    plan = make_plan(profile, request).plan
    schedule = plan.schedule
    assert schedule == builders.interleaved(2, 8, 2, combined=True)
    at = np.argwhere(schedule.combined)
    assert len(at) > 10
    for stage, position in at:
        forward_mhz, backward_mhz = plan.frequency_mhz[stage, position : position + 2]
        assert forward_mhz == backward_mhz
    if policy == "optimal":
        assert plan.cost.energy_j < plan.baseline.cost.energy_j
        assert plan.gap_percent < 3  # of three clocks; neighbours hold each other's pairs in step


def test_changes_of_clock_and_dwell_are_planned_around_pairs():
    profile = combined_profile(2)
    curves = tuple({clock: 30.0 + clock / 40 for clock in CLOCKS_MHZ} for _ in range(2))
    conditions = Conditions(
        POWER_W, (0.01,), (0.1, 0.2), None, curves, change_time_s=0.02, change_energy_j=0.5
    )
    request = PlanRequest(
        8, NAME, "optimal", num_chunks=2, conditions=conditions, min_dwell_s=1.0,
        deadline_factor=1.05,
    )  # fmt: skip
    plan = make_plan(profile, request).plan
    assert plan.cost.energy_j < 0.99 * plan.baseline.cost.energy_j
    assert plan.cost.iteration_time_s <= 1.05 * plan.baseline.cost.iteration_time_s * (1 + 1e-9)


def test_thousands_of_units_are_planned_too():
    """By the interior-point method, in which the forwards of pairs have no choice."""
    profile = combined_profile(3, stages=4, clocks_mhz=range(1410, 600, -60))
    request = PlanRequest(160, NAME, "optimal", blocking_power_w=50.0, num_chunks=2)
    plan = make_plan(profile, request).plan
    assert plan.schedule.num_units > 2000
    assert plan.cost.energy_j < plan.baseline.cost.energy_j
    assert plan.gap_percent < 1.5
