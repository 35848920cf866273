"""What the planner says of a job where a figure contradicts the paper, from its own profile."""

from __future__ import annotations

from pathlib import Path

from envpipe_megatron import builders
from envpipe_megatron.policies.planner import PlanRequest, make_plan
from envpipe_megatron.profile import read_profile


def best_saving_percent(profile_file: Path, num_microbatches: int) -> float:
    """What the best plan of any extra forwards saves at the time of 1F1B at full clock."""
    profile = read_profile(profile_file)
    curves = profile.sidecar.wait_power_w or ({0: 0.0},) * profile.num_stages
    request = PlanRequest(
        num_microbatches,
        "auto",
        "optimal",
        blocking_power_w=tuple(curve[max(curve)] for curve in curves),
    )
    plan = make_plan(profile, request).plan
    return plan.cost.saving_percent(plan.baseline.cost)


def envelope_percent(num_stages: int, num_microbatches: int) -> float:
    """Units on the outer envelope, which stays at full clock, of all."""
    schedule = builders.one_f_one_b(num_stages, num_microbatches)
    return 100 * len(schedule.outer_envelope) / schedule.num_units
