"""What the planner says of a job where a figure contradicts the paper, from its own profile."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from envpipe_megatron.core import builders
from envpipe_megatron.core.profile import Profile, read_profile
from envpipe_megatron.policies.planner import PlanRequest, make_plan

#: Stages whose longest pair of units is this much longer than the shortest differ.
_UNEQUAL = 1.1


def why_few_save_less(profile_file: Path, counts: Sequence[int]) -> str:
    """Why fewer microbatches save less: for each number of them, what stays at full clock.

    Args:
        profile_file: of the job.
        counts: numbers of microbatches of an iteration.
    """
    profile = read_profile(profile_file)
    on_envelope = _listed([_envelope_percent(profile.num_stages, count) for count in counts], 0)
    best = _listed([_best_saving_percent(profile, count) for count in counts], 1)
    slack = "; stages that differ have slack in every microbatch" if _stages_differ(profile) else ""
    return (
        f"With M = {_listed(counts, 0)} the outer envelope, which stays at full clock, holds "
        f"{on_envelope} % of the units{slack}. From the same profile, the planner's best order and "
        f"clocks save {best} %."
    )


def _listed(numbers: Sequence[float], decimals: int) -> str:
    return ", ".join(f"{number:.{decimals}f}" for number in numbers)


def _envelope_percent(num_stages: int, num_microbatches: int) -> float:
    schedule = builders.one_f_one_b(num_stages, num_microbatches)
    return 100 * len(schedule.outer_envelope) / schedule.num_units


def _best_saving_percent(profile: Profile, num_microbatches: int) -> float:
    """At the time of 1F1B at full clock."""
    curves = profile.sidecar.wait_power_w or ({0: 0.0},) * profile.num_stages
    powers = tuple(curve[max(curve)] for curve in curves)
    request = PlanRequest(num_microbatches, "auto", "optimal", blocking_power_w=powers)
    plan = make_plan(profile, request).plan
    return plan.cost.saving_percent(plan.baseline.cost)


def _stages_differ(profile: Profile) -> bool:
    pairs_s = [
        sum(max(rows, key=lambda row: row.frequency_mhz).time_s for rows in kinds.values())
        for kinds in profile.rows
    ]
    return max(pairs_s) > _UNEQUAL * min(pairs_s)
