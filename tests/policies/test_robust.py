"""Plans that keep their time although the times of units vary."""

from dataclasses import replace

import numpy as np
import pytest
from combined_cases import combined_profile
from core_cases import uniform_profile
from on_request import on_request

from envpipe_megatron.core.conditions import Conditions, Spread
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.plan import Plan
from envpipe_megatron.core.profile_rows import SplitBackward
from envpipe_megatron.core.uncertainty import expected
from envpipe_megatron.policies import robust
from envpipe_megatron.policies.objectives.objective import Goal, Objective
from envpipe_megatron.policies.optimal.linear_program import LinearProgramError
from envpipe_megatron.policies.planner import make_plan
from envpipe_megatron.policies.request import PlannerError, PlanRequest

#: By clock: time (s) and energy (J) of a forward.
CURVE = {
    mhz: (0.03 + 98 / mhz, (0.03 + 98 / mhz) * (160 + 240 * (mhz / 1400) ** 2))
    for mhz in range(800, 1401, 50)
}
PROFILE = uniform_profile(4, CURVE, slowness=[0.95, 1.0, 0.9, 1.05])
POWER = Conditions((60.0,) * 4)


def request(spread=None, schedule="1f1b", conditions=POWER, **options):
    conditions = replace(conditions, spread=spread)
    return PlanRequest(8, schedule, "optimal", conditions=conditions, **options)


def on_other_draws(plan):
    return expected(plan, 10_000, 12345)


@pytest.mark.parametrize(
    ("schedule", "spread", "factor"),
    [
        pytest.param("auto", 0.01, 1.0, marks=on_request("CORE")),
        ("1f1b", 0.05, 1.0),
        ("auto", 0.05, 1.01),
    ],
)
def test_the_mean_keeps_the_deadline_on_other_draws(schedule, spread, factor):
    asked = request(Spread(spread, 0.02), schedule, deadline_factor=factor)
    unaware = make_plan(PROFILE, replace(asked, conditions=POWER)).plan
    loses = on_other_draws(replace(unaware, conditions=asked.conditions))
    assert loses.slowdown.percent > 100 * (factor - 1) + 0.1
    planned = make_plan(PROFILE, asked)
    kept = on_other_draws(planned.plan)
    assert kept.slowdown.percent <= 100 * (factor - 1) + 0.02 + 4 * kept.slowdown.error
    assert kept.saving.percent > 2
    assert "this one takes" in planned.notes[-1]


def test_time_that_is_left_in_the_mean_is_used():
    """Where baselines lose more by varying times than plans, these have more time."""
    even = uniform_profile(4, CURVE)
    asked = request(Spread(0.08), "auto")
    plan = make_plan(even, asked).plan
    kept = on_other_draws(plan)
    assert kept.slowdown.percent == pytest.approx(0, abs=0.05)
    assert plan.cost.slowdown_percent(plan.baseline.cost) > 0.1
    at_means = make_plan(even, replace(asked, conditions=POWER)).plan
    before = on_other_draws(replace(at_means, conditions=asked.conditions))
    assert kept.saving.percent > before.saving.percent


@pytest.mark.parametrize("schedule", ["1f1b", "auto"])
def test_without_spread_plans_are_the_same_to_the_last_bit(schedule):
    plain, zero = (make_plan(PROFILE, request(s, schedule)) for s in (None, Spread(0.0)))
    assert zero.plan.to_json() == plain.plan.to_json()
    assert zero.notes == plain.notes


def test_weights_are_what_the_mean_grows_by():
    plan = make_plan(PROFILE, request(schedule="envpipe")).plan
    tails = replace(plan.conditions, spread=Spread(0.1, 0.05), tail_time_s=(0.0, 0.1, 0.2, 0.3))
    plan = replace(plan, conditions=replace(tails, latency_s=0.01))
    factors, path, time_s = robust._drawn(plan, 0)
    weight = robust._weights(plan, factors, path, time_s)
    step_s = 1e-7
    for node in range(0, plan.schedule.num_units, 5):
        path.duration_s[node] = path.duration_s[node] + step_s * factors[node]
        path.find_ends(np.maximum)
        grown_s = robust.iteration_times_s(plan, path).mean() - time_s.mean()
        path.duration_s[node] = path.duration_s[node] - step_s * factors[node]
        assert weight[node] == pytest.approx(grown_s / step_s, abs=1e-4)


def test_what_no_clocks_can_keep_is_refused():
    plan = make_plan(PROFILE, request()).plan
    plan = replace(plan, conditions=replace(POWER, spread=Spread(0.05)))
    with pytest.raises(LinearProgramError, match="in the mean, with times that vary"):
        robust.keep_mean_time(plan, 0.98)


def test_kinds_that_run_as_one_or_in_two_parts():
    chunked = combined_profile()
    order = builders.interleaved(2, 4, 2, combined=True)
    conditions = Conditions((60.0, 60.0), spread=Spread(0.05))
    plan = make_plan(
        chunked, PlanRequest(4, policy="optimal", order=order, conditions=conditions)
    ).plan
    assert on_other_draws(plan).slowdown.percent < 0.03
    split = make_plan(PROFILE, request(Spread(0.05), "auto", split=SplitBackward(0.4))).plan
    assert on_other_draws(split).slowdown.percent < 0.03


def test_late_and_parked_clocks():
    curve = {1400: 60.0, 800: 40.0}
    around = replace(POWER, wait_power_w=(curve,) * 4, change_time_s=0.002, change_energy_j=0.1)
    plan = make_plan(PROFILE, request(Spread(0.03), conditions=around, park=True)).plan
    assert plan.park_mhz is not None
    assert plan.park_mhz.any()
    kept = on_other_draws(plan)
    assert kept.slowdown.percent < 0.03
    assert kept.saving.percent > 2


@pytest.mark.parametrize("option", [{"objective": Objective(goal=Goal.EDP)}, {"min_dwell_s": 0.1}])
def test_what_does_not_go_with_a_spread(option):
    with pytest.raises(PlannerError, match="A spread of times goes with no"):
        make_plan(PROFILE, request(Spread(0.03), **option))


def test_rules_are_only_drawn():
    asked = replace(request(Spread(0.03)), policy="uniform")
    plan = make_plan(PROFILE, asked).plan
    assert isinstance(plan, Plan)
    plain = make_plan(PROFILE, replace(asked, conditions=POWER)).plan
    assert (plan.frequency_mhz == plain.frequency_mhz).all()
    assert on_other_draws(plan).slowdown.percent > 5
