"""At what power the stages of a plan wait."""

from __future__ import annotations

import numpy as np

from envpipe_megatron.core.arrays import FloatArray
from envpipe_megatron.core.conditions import Conditions
from envpipe_megatron.core.plan import Plan
from envpipe_megatron.core.profile import Profile
from envpipe_megatron.core.timeline import RELATIVE_TOLERANCE


def mean_waiting_power_w(plan: Plan) -> FloatArray:
    """[num_stages] mean power of one waiting GPU; the blocking power if a stage hardly waits."""
    conditions, result = plan.conditions, plan.evaluation
    by_gpu_j = result.energy_by_stage_j / conditions.gpus_by_stage
    changes_j = conditions.change_energy_j * result.clock_changes
    waiting_j = by_gpu_j - result.unit_energy_j.sum(axis=1) - changes_j
    waiting_s = plan.cost.iteration_time_s - result.timeline.duration_s.sum(axis=1)
    long = waiting_s > RELATIVE_TOLERANCE * plan.cost.iteration_time_s
    return np.where(long, waiting_j / np.where(long, waiting_s, 1.0), conditions.blocking_power_w)


def waiting_floor_w(profile: Profile, conditions: Conditions, parking: bool = False) -> FloatArray:
    """[num_stages] the least power at which one GPU of a stage can wait.

    At a clock that the profile has, or with parking at any other.
    """
    if conditions.wait_power_w is None:
        return np.array(conditions.blocking_power_w)
    if parking:
        return np.array([min(curve.values()) for curve in conditions.wait_power_w])
    least_w = []
    for stage in range(profile.num_stages):
        clocks = sorted(profile.clocks_mhz(stage))
        power_w = conditions.waiting_power_w(np.tile(clocks, (profile.num_stages, 1)))
        least_w.append(float(power_w[stage].min()))
    return np.array(least_w)
