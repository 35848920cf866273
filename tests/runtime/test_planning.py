"""Plans made online: from all that was measured of the job."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from envpipe_megatron.conditions import known_conditions
from envpipe_megatron.policies.linear_program import LinearProgramError
from envpipe_megatron.policies.planner import PlannerError, PlanRequest, make_plan
from envpipe_megatron.profile import read_profile
from envpipe_megatron.runtime import planning
from envpipe_megatron.runtime.going_on import GoesOnError
from envpipe_megatron.runtime.planning import adopt_plan, make_online
from envpipe_megatron.sidecar import Sidecar

PUBLISHED = Path(__file__).parents[3] / "shared/data/perseus_sosp24/emulation/stage_profile"


def test_late_clocks_make_no_online_plan_slow():
    """GPT-3 175B in 1F1B: a plan that knows nothing of changes of clock is 1.35 % too slow."""
    path = PUBLISHED / "gpt3-175b_a100_sxm.csv"
    if not path.exists():
        pytest.skip(f"the published profiles are not in {PUBLISHED}")
    profile = read_profile(path)
    measured = Sidecar(wait_power_w=({1410: 83.64},) * 8, frequency_change_s=0.05)
    profile = replace(profile, sidecar=measured)
    request = PlanRequest(24, "1f1b", "optimal", blocking_power_w=83.64)
    blind = replace(make_plan(profile, request).plan, conditions=known_conditions(profile))
    assert blind.cost.slowdown_percent(blind.baseline.cost) > 1
    job = SimpleNamespace(
        config=SimpleNamespace(request=PlanRequest(1, "1f1b", "optimal")),
        num_microbatches=24,
        channel=SimpleNamespace(capacity=None),
        state=SimpleNamespace(memory=None),
    )
    plan, _ = make_online(job, profile)
    assert plan.conditions.change_time_s == 0.05
    assert plan.cost.slowdown_percent(plan.baseline.cost) < 1e-6
    assert plan.cost.saving_percent(plan.baseline.cost) > 12


@pytest.mark.parametrize(
    ("failure", "ends_as"), [(LinearProgramError, GoesOnError), (PlannerError, PlannerError)]
)
def test_of_a_profile_that_the_user_named_a_solver_that_fails_ends_no_training(
    monkeypatch, failure, ends_as
):
    def fails(job, profile):
        raise failure("of a test")

    monkeypatch.setattr(planning, "make_online", fails)
    collectives = SimpleNamespace(is_planner=True, from_planner=lambda value: value)
    collectives.agreed = lambda make: make()
    job = SimpleNamespace(
        config=SimpleNamespace(profile_file=Path("named.csv"), plan_file=None),
        keeps_profile=False,
        keeps_plan=False,
        collectives=collectives,
    )
    with pytest.raises(ends_as, match="of a test"):
        adopt_plan(job, None, [])
