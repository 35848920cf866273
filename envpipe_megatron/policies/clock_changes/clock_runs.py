"""Runs of units at one clock: how long a plan stays at each, and the clocks that runs may have."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from envpipe_megatron.core.arrays import BoolArray, FloatArray, IntArray
from envpipe_megatron.core.conditions import Conditions
from envpipe_megatron.core.plan import Plan
from envpipe_megatron.core.profile import Profile, at_any_clock
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.core.timeline import RELATIVE_TOLERANCE
from envpipe_megatron.policies.optimal.choices import make_choices


def shortest_dwell_s(plan: Plan) -> float:
    """The shortest time between two requests for a clock on one stage, around the iteration.

    A unit's clock is requested when the unit before it has ended, a parked unit's one change before
    it starts. Infinite if no stage changes its clock.
    """
    timeline, iteration_s = plan.timeline, plan.cost.iteration_time_s
    before_s = timeline.start_s - timeline.wait_s
    raise_s = timeline.start_s - plan.conditions.change_time_s
    shortest_s = math.inf
    for stage, clocks in enumerate(plan.frequency_mhz.tolist()):
        requests = []
        running = clocks[-1]
        for position, clock in enumerate(clocks):
            asked = [(before_s[stage, position], clock)]
            if plan.park_mhz is not None and plan.park_mhz[stage, position]:
                asked = [
                    (before_s[stage, position], int(plan.park_mhz[stage, position])),
                    (raise_s[stage, position], clock),
                ]
            for at_s, wanted in asked:
                if wanted != running:
                    requests.append(at_s)
                running = wanted
        if requests:
            gaps_s = np.diff([*requests, requests[0] + iteration_s])
            shortest_s = min(shortest_s, float(gaps_s.min()))
    return shortest_s


@dataclass(frozen=True)
class ClockTable:
    """What each unit takes at each clock of its stage, by position in the order.

    Args:
        frequency_mhz: [num_stages, n] the clocks of each stage, the highest first; stages with
            fewer clocks repeat their last.
        time_s: [units_per_stage, num_stages, n]; where a clock was not profiled for the unit, on
            the line between those that were.
        cost_j: the same shape, planning cost (see `choices`) of all GPUs of the stage.
        profiled: the same shape, whether the unit may run at that clock.
        key: [units_per_stage, num_stages]; units of the same key have the same rows.
    """

    frequency_mhz: IntArray
    time_s: FloatArray
    cost_j: FloatArray
    profiled: BoolArray
    key: NDArray[np.int32]

    def frequencies(self, index: IntArray) -> IntArray:
        """[num_stages, units_per_stage] clocks in MHz from their indices."""
        return np.take_along_axis(self.frequency_mhz, index, axis=1)

    def index_of(self, frequency_mhz: IntArray) -> IntArray:
        """The inverse of `frequencies`."""
        same = frequency_mhz[:, :, None] == self.frequency_mhz[:, None, :]
        index: IntArray = same.argmax(axis=2)
        return index


def make_clock_table(
    schedule: Schedule, profile: Profile, conditions: Conditions, waiting_power_w: FloatArray
) -> ClockTable:
    """The table of a schedule, without clocks below all that are worth anything to their stage.

    `waiting_power_w`, [num_stages], is what waiting is priced by.
    """
    gpus = conditions.gpus_by_stage
    choices = make_choices(profile, waiting_power_w, gpus)
    per_stage = len(choices.units) // schedule.num_stages
    clocks: list[list[int]] = []
    for stage in range(schedule.num_stages):
        units = choices.units[per_stage * stage : per_stage * (stage + 1)]
        lowest = min(int(unit.frequency_mhz.min()) for unit in units)
        known = profile.clocks_mhz(stage)
        clocks.append(sorted((f for f in known if f >= lowest), reverse=True))
    width = max(map(len, clocks))
    shape = (len(choices.units), width)
    frequency = np.array([row + row[-1:] * (width - len(row)) for row in clocks], dtype=np.int64)
    time_s, cost_j, profiled = np.empty(shape), np.empty(shape), np.empty(shape, dtype=bool)
    for key, curve in enumerate(profile.curves):
        stage, known_mhz = key // per_stage, curve[0]
        time_s[key], energy_j = at_any_clock(curve, frequency[stage])
        cost_j[key] = gpus[stage] * (energy_j - waiting_power_w[stage] * time_s[key])
        profiled[key] = np.isin(frequency[stage], known_mhz)
        profiled[key, len(clocks[stage]) :] = False  # the last clock, repeated
    key_of = profile.keys(schedule).T
    return ClockTable(frequency, time_s[key_of], cost_j[key_of], profiled[key_of], key_of)


def runs_of(index: IntArray) -> IntArray:
    """[num_stages, units_per_stage] the runs of one clock around the iteration of each stage.

    They are numbered from 0 on over all stages.
    """
    begins = index != np.roll(index, 1, axis=1)
    begins[~begins.any(axis=1), 0] = True
    ended = begins.sum(axis=1).cumsum() - begins.sum(axis=1)
    within = (begins.cumsum(axis=1) - 1) % begins.sum(axis=1)[:, None]
    return np.asarray(ended[:, None] + within)


def alike_runs(slowed: FloatArray, lasts_s: FloatArray, least_s: float, first: int) -> IntArray:
    """[num_stages, units_per_stage] runs, as `runs_of` has them, of units that are slowed alike.

    Args:
        slowed: [num_stages, units_per_stage] how many times as long as at its highest clock each
            unit may take. All of a run are slowed as the fastest of them, by which least is lost.
        lasts_s: [num_stages, units_per_stage] what each unit adds to the length of its run.
        least_s: how long runs are at least, but for one that is all of the iteration.
        first: the position at which each stage begins a run.
    """
    begins = np.zeros(slowed.shape, dtype=np.int64)
    begins[:, 0] = 1
    for stage, turned in enumerate(np.roll([slowed, lasts_s], -first, axis=2).swapaxes(0, 1)):
        begins[stage, _cut(*turned, least_s)] = 1
    runs = begins.ravel().cumsum().reshape(begins.shape) - 1
    return np.roll(runs, first, axis=1)


def _cut(slowed: FloatArray, lasts_s: FloatArray, least_s: float) -> list[int]:
    """Where the runs of a stage begin, but for the first: a dynamic programme over their ends."""
    until_s, sums = (np.concatenate([[0.0], values.cumsum()]) for values in (lasts_s, slowed))
    least = np.full(len(until_s), np.inf)
    least[0] = 0.0
    before = np.zeros(len(until_s), dtype=np.int64)
    # Longer runs could be cut.
    longest_s = 1.01 * (2 * least_s + lasts_s.max())
    from_on = np.searchsorted(until_s, until_s - longest_s)
    until = np.searchsorted(until_s, until_s - least_s * (1 + RELATIVE_TOLERANCE), side="right")
    for end in range(1, len(until_s)):
        begin = np.arange(from_on[end], min(until[end], end))
        if begin.size:
            fastest = np.minimum.accumulate(slowed[from_on[end] : end][::-1])[::-1][: begin.size]
            lost = least[begin] + sums[end] - sums[begin] - (end - begin) * fastest
            best = int(lost.argmin())
            least[end], before[end] = lost[best], begin[best]
    cuts = [int(before[-1])]
    while cuts[-1]:
        cuts.append(int(before[cuts[-1]]))
    return cuts[:-1]


def best_clocks(runs: IntArray, cost_j: FloatArray, allowed: BoolArray) -> IntArray | None:
    """[num_stages, units_per_stage] the index of the clock at which each run costs least.

    None if a run has none that all its units are allowed.

    Args:
        runs: as `runs_of` has them.
        cost_j: [units_per_stage, num_stages, clocks], and so is `allowed`.
    """
    total_j = np.zeros((runs.max() + 1, cost_j.shape[2]))
    np.add.at(total_j, runs.T, np.where(allowed, cost_j, np.inf))
    if not np.isfinite(total_j.min(axis=1)).all():
        return None
    return np.asarray(total_j.argmin(axis=1)[runs])
