"""The frequencies worth giving to the units of a stage, and the power at which stages wait.

The planning cost of a unit is its energy less what its GPUs would have used by waiting as long:
then iteration energy = sum of costs + waiting power of the whole pipeline x iteration time, and
only the iteration time, not each wait, has to be known (the identity behind Perseus' cost model;
Chung et al., SOSP'24, section 4.1).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from envpipe_megatron.core.arrays import FloatArray, IntArray
from envpipe_megatron.core.conditions import Conditions
from envpipe_megatron.core.plan import Plan
from envpipe_megatron.core.profile import Profile
from envpipe_megatron.core.profile_rows import ProfileRow
from envpipe_megatron.core.timeline import RELATIVE_TOLERANCE

Choice = tuple[float, float, int]  #: time in s, cost in J, and whose they are


@dataclass(frozen=True)
class UnitChoices:
    """The frequencies of one part and kind that no other beats in both time and planning cost.

    Args:
        frequency_mhz: [n], the fastest first.
        time_s: [n], rising.
        cost_j: [n], falling; of all GPUs of the stage.
        hull: [h] indices of the choices on the lower convex hull of cost over time; the fastest and
            the cheapest choice are on it.
    """

    frequency_mhz: IntArray
    time_s: FloatArray
    cost_j: FloatArray
    hull: IntArray


@dataclass(frozen=True)
class Choices:
    """All choices of a pipeline under one waiting power.

    Args:
        units: the choices of each kind, for each part of the profile, as `Profile.keys` has them.
        waiting_power_w: power of all the pipeline's GPUs, the price of waiting.
        by_stage_w: [num_stages] the power of one waiting GPU of each.
    """

    units: tuple[UnitChoices, ...]
    profile: Profile
    waiting_power_w: float
    by_stage_w: FloatArray


def make_choices(profile: Profile, waiting_power_w: FloatArray, gpus_by_stage: IntArray) -> Choices:
    """Return the choices of each part and kind.

    `waiting_power_w`, [num_stages], is of one GPU; `gpus_by_stage`, [num_stages], follow one plan.
    """
    units = tuple(
        _unit_choices(rows, float(waiting_power_w[stage]), int(gpus))
        for stage, gpus in enumerate(gpus_by_stage)
        for part in profile.parts(stage)
        for rows in part.values()
    )
    all_w = float(np.dot(waiting_power_w, gpus_by_stage))
    return Choices(units, profile, all_w, waiting_power_w)


def _unit_choices(rows: Sequence[ProfileRow], waiting_power_w: float, gpus: int) -> UnitChoices:
    kept = unbeaten(
        (row.time_s, gpus * (row.energy_j - waiting_power_w * row.time_s), row.frequency_mhz)
        for row in rows
    )
    times, costs, frequencies = zip(*kept, strict=True)
    return UnitChoices(
        np.array(frequencies, dtype=np.int64),
        np.array(times),
        np.array(costs),
        np.array(lower_hull(kept), dtype=np.int64),
    )


def unbeaten(choices: Iterable[Choice]) -> list[Choice]:
    """Leave out what another beats in both time and cost, by rising time and falling cost.

    Times that only rounding tells apart are the same: joules over such a difference are prices of
    1e14 W, in which a bound loses its digits.
    """
    kept: list[Choice] = []
    for choice in sorted(choices):
        if kept and choice[1] >= kept[-1][1]:
            continue
        if kept and choice[0] <= kept[-1][0] * (1 + RELATIVE_TOLERANCE):
            kept.pop()
        kept.append(choice)
    return kept


def lower_hull(kept: Sequence[Choice]) -> list[int]:
    """Return indices of the unbeaten choices on the lower convex hull of cost over time."""
    hull: list[int] = []
    for index, (time_s, cost_j, _) in enumerate(kept):
        while len(hull) >= 2:
            (t0, c0, _), (t1, c1, _) = kept[hull[-2]], kept[hull[-1]]
            if (c1 - c0) * (time_s - t0) < (cost_j - c0) * (t1 - t0):
                break
            hull.pop()
        hull.append(index)
    return hull


def mean_waiting_power_w(plan: Plan) -> FloatArray:
    """Return [num_stages] the mean power of a waiting GPU; without a wait, the blocking power."""
    conditions, result = plan.conditions, plan.evaluation
    by_gpu_j = result.energy_by_stage_j / conditions.gpus_by_stage
    changes_j = conditions.change_energy_j * result.clock_changes
    waiting_j = by_gpu_j - result.unit_energy_j.sum(axis=1) - changes_j
    waiting_s = plan.cost.iteration_time_s - result.timeline.duration_s.sum(axis=1)
    long = waiting_s > RELATIVE_TOLERANCE * plan.cost.iteration_time_s
    return np.where(long, waiting_j / np.where(long, waiting_s, 1.0), conditions.blocking_power_w)


def waiting_floor_w(profile: Profile, conditions: Conditions) -> FloatArray:
    """Return [num_stages] the least power of a waiting GPU at the clocks that its stage has."""
    if conditions.wait_power_w is None:
        return np.array(conditions.blocking_power_w)
    least_w = []
    for stage in range(profile.num_stages):
        clocks = sorted(profile.clocks_mhz(stage))
        power_w = conditions.waiting_power_w(np.tile(clocks, (profile.num_stages, 1)))
        least_w.append(float(power_w[stage].min()))
    return np.array(least_w)
