"""Where the time and energy of a GPU went: units, waits in receives, and the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from envpipe_megatron.core.plan import Plan
from envpipe_megatron.policies.optimal.choices import mean_waiting_power_w


@dataclass(frozen=True)
class GpuShares:
    """Time and energy of one GPU over metered iterations: units, waits in receives, and the rest.

    The rest is what the meter says beyond the other two: optimizer, data, the wait for the slowest
    stage. Where a profile prices units too high it is below 0, by as much as the profile is off.
    """

    compute_s: float
    blocking_s: float
    idle_s: float
    compute_j: float
    blocking_j: float
    idle_j: float


def gpu_shares(plan: Plan, stage: int, metered: Mapping[str, float]) -> GpuShares:
    """The shares of one GPU that ran a plan.

    Only the whole energy is measured: that of units is the plan's by its profile, and that of waits
    the waiting power of the plan's clocks times the measured waits. `metered` has `energy_j`,
    `duration_s`, `compute_s`, `blocking_s` and the number of `iterations`.
    """
    compute_j = metered["iterations"] * float(plan.evaluation.unit_energy_j[stage].sum())
    blocking_j = metered["blocking_s"] * float(mean_waiting_power_w(plan)[stage])
    return GpuShares(
        compute_s=metered["compute_s"],
        blocking_s=metered["blocking_s"],
        idle_s=metered["duration_s"] - metered["compute_s"] - metered["blocking_s"],
        compute_j=compute_j,
        blocking_j=blocking_j,
        idle_j=metered["energy_j"] - compute_j - blocking_j,
    )
