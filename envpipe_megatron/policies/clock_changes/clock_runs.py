"""Runs of units at one clock: how long a plan stays at each, and the cheapest runs of a stage.

Where a change of clock costs energy or time, or a clock must be kept for a while, the best clock of
a unit depends on those around it. Along the order of one stage that is a shortest path: a dynamic
programme over positions and clocks finds the cheapest runs exactly, for all stages at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from envpipe_megatron.core.arrays import BoolArray, FloatArray, IntArray
from envpipe_megatron.core.conditions import Conditions
from envpipe_megatron.core.evaluation import clock_requests
from envpipe_megatron.core.plan import Plan
from envpipe_megatron.core.profile import Profile, at_any_clock
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.policies.optimal.linear_program import make_choices

#: Positions of an iteration that a run is made to begin at, to find those that pass its end.
_MOST_BEGINS = 8
#: A clock that is not allowed costs as much as this many units at the dearest clock.
_REFUSED = 1e6


def shortest_dwell_s(plan: Plan) -> float:
    """Return the shortest time between two requests for a clock on one stage, around the iteration.

    A unit's clock is requested when the unit before it has ended, a parked unit's one change before
    it starts. Infinite if no stage changes its clock.
    """
    timeline, iteration_s = plan.timeline, plan.cost.iteration_time_s
    before_s = timeline.start_s - timeline.wait_s
    raise_s = timeline.start_s - plan.conditions.change_time_s
    asked_mhz = clock_requests(plan.frequency_mhz, plan.park_mhz)
    # The second request for a unit is none where nothing parks.
    asked_s = np.stack([before_s, raise_s], axis=2).reshape(asked_mhz.shape)
    changes = asked_mhz != np.roll(asked_mhz, 1, axis=1)
    shortest_s = math.inf
    for of_stage_s, changed in zip(asked_s, changes, strict=True):
        if changed.any():
            times_s = of_stage_s[changed]
            gaps_s = np.diff(times_s, append=times_s[0] + iteration_s)
            shortest_s = min(shortest_s, float(gaps_s.min()))
    return shortest_s


@dataclass(frozen=True)
class ClockTable:
    """Time and cost of each unit at each clock of its stage, by position in the order.

    Args:
        frequency_mhz: [num_stages, n] the clocks of each stage, the highest first; stages with
            fewer clocks repeat their last.
        time_s: [units_per_stage, num_stages, n]; where a clock was not profiled for the unit, on
            the line between those that were.
        cost_j: the same shape, planning cost (see `linear_program`) of all GPUs of the stage.
        profiled: the same shape, whether the unit may run at that clock.
        key: [units_per_stage, num_stages]; units of the same key have the same rows.
    """

    frequency_mhz: IntArray
    time_s: FloatArray
    cost_j: FloatArray
    profiled: BoolArray
    key: NDArray[np.int32]

    def frequencies(self, index: IntArray) -> IntArray:
        """Return [num_stages, units_per_stage] clocks in MHz of their indices."""
        return np.take_along_axis(self.frequency_mhz, index, axis=1)

    def index_of(self, frequency_mhz: IntArray) -> IntArray:
        """Return the indices of clocks in MHz; undoes `frequencies`."""
        same = frequency_mhz[:, :, None] == self.frequency_mhz[:, None, :]
        index: IntArray = same.argmax(axis=2)
        return index


def make_clock_table(
    schedule: Schedule, profile: Profile, conditions: Conditions, waiting_power_w: FloatArray
) -> ClockTable:
    """Make the table of a schedule, without clocks that are worth nothing to their stage.

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


class LateClocks(NamedTuple):
    """Cost of units that start before their clock has come; see `evaluation.evaluate`.

    Args:
        late_s: [units_per_stage, num_stages] how long after the unit's start a clock comes that is
            requested for it.
        cost_j: [units_per_stage, num_stages, clocks] cost of each unit, its time priced: a late
            unit is taken to cost the mixture of both clocks.
    """

    late_s: FloatArray
    cost_j: FloatArray


class RunFinder:
    """Finds the cheapest runs of all stages for any costs of their units.

    Every run lasts at least the dwell time, by its units and the waits before them; the last run of
    an iteration goes on in the first of the next if their clocks are the same. A single run that is
    the whole iteration may be short.

    Args:
        change_j: [num_stages] the energy of one change on all GPUs of the stage.
        wait_s: [num_stages, units_per_stage] the waits that count; by default none.
    """

    def __init__(
        self,
        table: ClockTable,
        change_j: FloatArray,
        min_dwell_s: float,
        wait_s: FloatArray | None = None,
    ) -> None:
        length, stages, clocks = table.time_s.shape
        # [i]: how many units a run that begins at i has at least.
        least = np.ones(table.time_s.shape, dtype=np.int64)
        self._begins = [0]
        if min_dwell_s > 0:
            self._begins = list(range(0, length, math.ceil(length / _MOST_BEGINS)))
            lasts_s = table.time_s if wait_s is None else table.time_s + wait_s.T[:, :, None]
            until = np.zeros((2 * length + 1, stages, clocks))
            np.cumsum(np.concatenate([lasts_s, lasts_s]), axis=0, out=until[1:])
            wanted = until[:length] + min_dwell_s
            for stage, clock in np.ndindex(stages, clocks):
                found = np.searchsorted(until[:, stage, clock], wanted[:, stage, clock])
                least[:, stage, clock] = found - np.arange(length)
        # By the position that a run begins at, the first at which it may end.
        self._reach = self._turned(least) + np.arange(length)[:, None, None]
        self._time_s = self._turned(table.time_s)
        self._change_j = np.tile(change_j, len(self._begins))

    def find(
        self, cost_j: FloatArray, allowed: BoolArray, late: LateClocks | None = None
    ) -> IntArray | None:
        """Return the runs of least cost, [num_stages, units_per_stage] indices of clocks.

        None if a stage has none. Costs and allowed clocks are [units_per_stage, num_stages,
        clocks].
        """
        stages = cost_j.shape[1]
        refused_j = _REFUSED * (1.0 + float(np.abs(cost_j).max()))
        unit_j = self._turned(np.where(allowed, cost_j, refused_j))
        if late is not None:
            late = LateClocks(*map(self._turned, late))
        index, value_j = self._walk(unit_j, late, None)
        value_j += self._close_j(index[:, 0], late)[np.arange(len(index)), index[:, -1]]
        # The first clock costs a change after the last unit: once more, knowing it.
        closed, closed_j = self._walk(unit_j, late, index[:, 0])
        index[closed_j < value_j] = closed[closed_j < value_j]
        value_j = np.minimum(value_j, closed_j).reshape(-1, stages)
        if not (value_j.min(axis=0) < refused_j / 2).all():
            return None
        best = value_j.argmin(axis=0)
        turned = index.reshape(-1, stages, index.shape[1])
        return np.array([np.roll(turned[n, s], self._begins[n]) for s, n in enumerate(best)])

    def _turned(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return values by position and stage, once for each position that a run is to begin at.

        Positions are counted from there, and the copies are further stages.
        """
        turns = [np.roll(values, -begin, axis=0) for begin in self._begins]
        return np.concatenate(turns, axis=1)

    def _close_j(self, first: IntArray, late: LateClocks | None) -> FloatArray:
        """Return [num_stages, clocks] the cost of a change from each clock to the first unit's."""
        others = np.arange(self._time_s.shape[2]) != first[:, None]
        close_j: FloatArray = self._change_j[:, None] * others
        if late is not None:
            share = np.minimum(1.0, late.late_s[0][:, None] / self._time_s[0])
            there_j = np.take_along_axis(late.cost_j[0], first[:, None], axis=1)
            close_j = close_j + share * (late.cost_j[0] - there_j)
        return close_j

    def _walk(
        self, unit_j: FloatArray, late: LateClocks | None, first: IntArray | None
    ) -> tuple[IntArray, FloatArray]:
        """Find runs and their cost; with `first`, that clock begins, and is closed to."""
        length, stages, clocks = unit_j.shape
        total_j = np.zeros((length + 1, stages, clocks))
        np.cumsum(unit_j, axis=0, out=total_j[1:])
        at_stage, at_clock = np.indices((stages, clocks))
        # By the position at which a run may end first: the cheapest beginning of such a run.
        pending_j = np.full((length + 1, stages, clocks), np.inf)
        begun = np.zeros((length + 1, stages, clocks), dtype=np.int32)
        grown = np.zeros((length + 1, stages, clocks), dtype=bool)
        before = np.zeros((length, stages, clocks), dtype=np.int32)
        is_first = np.ones((stages, clocks), dtype=bool)
        if first is not None:
            is_first = np.arange(clocks) == first[:, None]
        best_j = np.full((stages, clocks), np.inf)
        for position in range(length):
            begin_j = np.where(is_first, 0.0, np.inf)
            if position:
                begin_j, before[position] = self._begin(best_j, position, late)
            end = np.minimum(self._reach[position], length)
            run_j = begin_j + total_j[end, at_stage, at_clock] - total_j[position]
            better = self._reach[position] <= length
            better &= run_j < pending_j[end, at_stage, at_clock]
            at = (end[better], at_stage[better], at_clock[better])
            pending_j[at] = run_j[better]
            begun[at] = position
            longer_j = best_j + unit_j[position]
            grown[position + 1] = longer_j < pending_j[position + 1]
            best_j = np.minimum(longer_j, pending_j[position + 1])
        last_j = best_j if first is None else best_j + self._close_j(first, late)
        whole_j = np.where(is_first, total_j[-1], np.inf)
        index = np.zeros((stages, length), dtype=np.int64)
        value_j = np.minimum(last_j.min(axis=1), whole_j.min(axis=1))
        for stage in range(stages):
            if whole_j[stage].min() <= last_j[stage].min():
                index[stage] = whole_j[stage].argmin()
                continue
            clock, position = int(last_j[stage].argmin()), length
            while position > 0:
                end = position
                while grown[position, stage, clock]:
                    position -= 1
                position = int(begun[position, stage, clock])
                index[stage, position:end] = clock
                clock = int(before[position, stage, clock])
        return index, value_j

    def _begin(
        self, best_j: FloatArray, position: int, late: LateClocks | None
    ) -> tuple[FloatArray, IntArray]:
        """[num_stages, clocks] least cost of beginning a run here, and the clock before it."""
        clocks = best_j.shape[1]
        if late is None or not late.late_s[position].any():
            before = best_j.argmin(axis=1)[:, None].repeat(clocks, axis=1)
            begin_j = np.take_along_axis(best_j, before, axis=1)
        else:
            time_s, cost_j = self._time_s[position], late.cost_j[position]
            share = np.minimum(1.0, late.late_s[position][:, None] / time_s)
            from_j = (best_j + share * cost_j)[:, :, None] - share[:, :, None] * cost_j[:, None]
            before = from_j.argmin(axis=1)
            begin_j = np.take_along_axis(from_j, before[:, None], axis=1)[:, 0]
        return begin_j + self._change_j[:, None], before
