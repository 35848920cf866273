"""Shares of a GPU's time and energy add up to what was metered."""

import pytest
import run_made

from envpipe_megatron.core.conditions import Conditions
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.plan import Plan
from envpipe_megatron.policies.frequencies import POLICIES
from envpipe_megatron.report.facts import gpu_shares


def plan(conditions):
    profile = run_made.profile(3, [(1500, 1.0, 14.0), (900, 1.6, 11.0)])
    schedule = builders.one_f_one_b(3, 4)
    frequency = POLICIES["envelope"](schedule, profile)
    return Plan("envelope", schedule, frequency, profile, conditions)


@pytest.mark.parametrize(
    "conditions",
    [
        Conditions((80.0, 81.0, 82.0)),
        Conditions((0.0,) * 3, wait_power_w=({900: 60.0, 1500: 90.0},) * 3),
    ],
)
def test_a_job_that_runs_as_planned_has_the_plans_shares(conditions):
    planned = plan(conditions)
    for stage in range(3):
        busy_s = planned.timeline.duration_s[stage].sum()
        tail_s = planned.cost.iteration_time_s - planned.timeline.end_s[stage, -1]
        metered = {
            "energy_j": 10 * planned.energy_by_stage_j[stage],
            "duration_s": 10 * planned.cost.iteration_time_s,
            "compute_s": 10 * busy_s,
            "blocking_s": 10 * (planned.cost.iteration_time_s - busy_s - tail_s),
            "iterations": 10,
        }
        shares = gpu_shares(planned, stage, metered)
        assert shares.compute_s == pytest.approx(10 * busy_s)
        assert shares.idle_s == pytest.approx(10 * tail_s, abs=1e-9)
        assert shares.compute_j == pytest.approx(10 * planned.evaluation.unit_energy_j[stage].sum())
        whole_j = shares.compute_j + shares.blocking_j + shares.idle_j
        assert whole_j == pytest.approx(metered["energy_j"])
        # Waiting for the slowest stage draws what waiting in a receive does.
        waited_s = shares.blocking_s + shares.idle_s
        waited_j = shares.blocking_j + shares.idle_j
        assert shares.blocking_j * waited_s == pytest.approx(waited_j * shares.blocking_s)
