"""Plans with fewer changes of clock: for changes that cost, and clocks that must be kept a while.

From a plan that ignores changes: its units are put together to runs of one clock, in a few ways
(`clock_runs`), and the time is divided over those runs (`run_times`). What is late is made faster,
and time that is left is spent run by run. The evaluator decides: a plan is taken only if its own
iteration time meets the deadline.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product

import numpy as np

from envpipe_megatron.core.arrays import FloatArray, IntArray
from envpipe_megatron.core.plan import Plan, max_frequencies
from envpipe_megatron.core.timeline import RELATIVE_TOLERANCE
from envpipe_megatron.policies.clock_changes.clock_runs import (
    alike_runs,
    best_clocks,
    make_clock_table,
    runs_of,
    shortest_dwell_s,
)
from envpipe_megatron.policies.clock_changes.run_times import (
    divide_time,
    saving_moves,
)
from envpipe_megatron.policies.optimal.linear_program import LinearProgramError

#: Runs for a dwell time are so much longer, for the waits in them are shorter in the end, and begin
#: at so many positions. With half of these 0.3 points less are saved.
_LONGER, _OFFSETS = (1.0, 1.25), 6
#: Where changes cost energy, runs are of so many mean units.
_UNITS = (2, 4, 8)
#: Divisions of time, each for an earlier deadline, as long as late clocks exceed the deadline.
_ROUNDS = 4
#: An earlier deadline is earlier by this many times of what late clocks took more.
_SAFELY = 1.1
#: Above this many units time is not divided again: the linear program takes too long.
_MAX_PROGRAM_UNITS = 6_000
#: So many times late clocks are set a unit earlier before a plan is given up.
_SHIFTS = 20
#: The best plans with a dwell time in which the time that is left is spent, or, where all are late,
#: whose late clocks are set earlier.
_SPENT = 8
#: Units of all plans that spending time may evaluate, and the fewest plans.
_EVALUATED_UNITS, _FEWEST_EVALUATIONS = 40_000, 20


def fewer_changes(
    plan: Plan,
    waiting_power_w: FloatArray,
    deadline_s: float,
    min_dwell_s: float = 0.0,
    *,
    plan_for: Callable[[float], Plan],
) -> Plan | None:
    """The cheapest plan found that meets a deadline and a dwell time, changes of clock included.

    All units at their highest clocks, and one clock per stage, are tried too. None if none fits.

    Args:
        plan: has the order and conditions; it need not meet deadline or dwell time.
        waiting_power_w: [num_stages] by which the plan's linear program priced waiting.
        deadline_s: for the evaluated iteration, late clocks included.
        min_dwell_s: as `clock_runs.shortest_dwell_s` counts.
        plan_for: makes such a plan for another deadline; LinearProgramError: there is none.
    """
    return _RunSearch(plan, waiting_power_w, deadline_s, min_dwell_s, plan_for).search()


class _RunSearch:
    def __init__(
        self,
        plan: Plan,
        waiting_power_w: FloatArray,
        deadline_s: float,
        min_dwell_s: float,
        plan_for: Callable[[float], Plan],
    ) -> None:
        conditions = plan.conditions
        self._plan_for = plan_for
        self._start = plan
        self._start_s, _ = plan.profile.lookup(plan.schedule, plan.frequency_mhz)
        self._power_w = waiting_power_w
        self._deadline_s, self._min_dwell_s = deadline_s, min_dwell_s
        self._table = make_clock_table(plan.schedule, plan.profile, conditions, waiting_power_w)
        # A late first unit is faster than planned if the old clock was higher.
        times = self._table.time_s
        faster = float((times.max(axis=2) / times.min(axis=2)).max()) - 1.0
        self._run_s = min_dwell_s + (conditions.change_time_s * faster if min_dwell_s else 0.0)
        self._gpus = conditions.gpus_by_stage.astype(np.float64)
        self._change_j = self._gpus * conditions.change_energy_j
        highest = max_frequencies(plan.schedule, plan.profile)
        self._highest = replace(plan, frequency_mhz=highest)
        self._evaluations = max(_FEWEST_EVALUATIONS, _EVALUATED_UNITS // plan.schedule.num_units)

    def search(self) -> Plan | None:
        runs: list[Plan] = []
        divides = self._start.schedule.num_units <= _MAX_PROGRAM_UNITS
        for of in self._possible_runs():
            made = self._within(self._start, of, self._start_s), divides and self._divided(of)
            runs += filter(None, made)
        for plan in sorted(filter(self._meets, runs), key=_energy_j)[:divides]:
            again = self._divided(runs_of(self._table.index_of(plan.frequency_mhz)), plan)
            runs += filter(None, (again,))
        if not self._min_dwell_s:
            runs += map(self._in_time, (self._start, *runs))
            if not any(map(self._meets, runs)):
                runs += self._earlier()
        elif not any(map(self._meets, runs)):
            nearest = sorted(runs, key=lambda plan: plan.cost.iteration_time_s)[:_SPENT]
            runs += map(self._in_time, nearest)
        in_time = filter(self._meets, (self._highest, self._start, *self._steady(), *runs))
        best = sorted(in_time, key=_energy_j)
        spent = map(self._spent, best[: _SPENT if self._min_dwell_s else 1])
        return min(spent, key=_energy_j, default=None)

    def _possible_runs(self) -> Iterator[IntArray]:
        """Runs of the dwell time, with the waits of two plans; or those of the start, or of units.

        Of the waits that a run has for its dwell time, slower units leave less.
        """
        slowed = self._start_s / self._table.time_s.min(axis=2).T
        if not self._min_dwell_s:
            yield runs_of(self._table.index_of(self._start.frequency_mhz))
            for units in _UNITS if self._change_j.any() else ():
                least_s = units * float(self._start_s.mean())
                yield alike_runs(slowed, self._start_s, least_s, 0)
            return
        for plan, longer in product((self._highest, self._start), _LONGER):
            lasts_s = plan.timeline.duration_s + plan.timeline.wait_s
            least_s = longer * self._run_s
            units = min(math.ceil(least_s / float(lasts_s.mean())), lasts_s.shape[1])
            for first in range(0, units, math.ceil(units / _OFFSETS)):
                yield alike_runs(slowed, lasts_s, least_s, first)

    def _steady(self) -> Iterator[Plan]:
        """One clock per stage for the whole iteration: the fastest that all its units have."""
        runs = np.indices(self._start.frequency_mhz.shape)[0]
        index = best_clocks(runs, self._table.time_s, self._table.profiled)
        if index is not None:
            yield self._plan(index)

    def _earlier(self) -> Iterator[Plan]:
        """Plans for earlier deadlines, by as much as late clocks of the plan before exceed it."""
        plan, target_s = self._start, self._deadline_s
        for _ in range(_ROUNDS):
            target_s -= _SAFELY * max(0.0, plan.cost.iteration_time_s - self._deadline_s)
            try:
                plan = self._plan_for(target_s)
            except LinearProgramError:  # no clocks are as fast
                break
            yield plan
            if self._meets(plan):
                break

    def _within(self, plan: Plan, runs: IntArray, duration_s: FloatArray) -> Plan | None:
        """The cheapest clocks of runs in which no unit takes longer than given.

        The waits before units are as in a plan.
        """
        conditions, cost_j = plan.conditions, self._table.cost_j
        if conditions.wait_power_w is not None:
            above_w = conditions.waiting_power_w(self._table.frequency_mhz)
            above_w -= self._power_w[:, None]
            wait_s = plan.timeline.wait_s.T[:, :, None]
            cost_j = cost_j + wait_s * (self._gpus[:, None] * above_w)
        short = self._table.time_s <= duration_s.T[:, :, None] * (1 + RELATIVE_TOLERANCE)
        index = best_clocks(runs, cost_j, self._table.profiled & short)
        return None if index is None else self._plan(index)

    def _divided(self, runs: IntArray, plan: Plan | None = None) -> Plan | None:
        """Time divided over runs, for an earlier deadline while it is late."""
        target_s, power_w = self._deadline_s, float(self._power_w @ self._gpus)
        for _ in range(_ROUNDS):
            near = plan or self._start
            duration_s = divide_time(near, self._table, runs, power_w, target_s)
            if duration_s is None:
                break
            divided = self._within(near, runs, duration_s)
            if divided is None:
                break
            plan = divided
            late_s = plan.cost.iteration_time_s - self._deadline_s
            if late_s <= RELATIVE_TOLERANCE * self._deadline_s:
                break
            target_s -= late_s
        return plan

    def _in_time(self, plan: Plan) -> Plan:
        """Set late clocks that no slack makes up for a unit earlier, until the deadline is kept."""
        for _ in range(_SHIFTS):
            missing_s = plan.cost.iteration_time_s - self._deadline_s
            if missing_s <= RELATIVE_TOLERANCE * self._deadline_s:
                break
            planned_s, _ = plan.profile.lookup(plan.schedule, plan.frequency_mhz)
            late = (plan.timeline.duration_s > planned_s) & (plan.timeline.slack_s < missing_s)
            index = self._table.index_of(plan.frequency_mhz)
            for stage, position in np.argwhere(late).tolist():
                if self._table.profiled[position - 1, stage, index[stage, position]]:
                    index[stage, position - 1] = index[stage, position]
            earlier = self._plan(index)
            if np.array_equal(earlier.frequency_mhz, plan.frequency_mhz):
                break
            plan = earlier
        return plan

    def _spent(self, plan: Plan) -> Plan:
        """Give runs, or their ends, another clock while that saves energy and there is time.

        Moves are tried several at once, more after a success and fewer after a failure.
        """
        left = self._evaluations
        before = None
        while plan is not before and left > 0:
            before = plan
            index = self._table.index_of(plan.frequency_mhz)
            moves = saving_moves(plan, self._table, self._change_j, self._deadline_s)
            first, count = 0, 1
            while first < len(moves) and left > 0:
                changed_index = index.copy()
                for move in moves[first : first + count]:
                    units = changed_index[move.stage, move.begin : move.end]
                    if (units == units[0]).all():  # no move before it has split the run
                        units[:] = move.clock
                changed = self._plan(changed_index)
                left -= 1
                if changed.cost.energy_j < plan.cost.energy_j and self._meets(changed):
                    plan, index = changed, changed_index
                    first, count = first + count, 2 * count
                elif count > 1:
                    count = max(1, count // 4)
                else:
                    first += 1
        return plan

    def _plan(self, index: IntArray) -> Plan:
        return replace(self._start, frequency_mhz=self._table.frequencies(index))

    def _meets(self, plan: Plan) -> bool:
        if plan.cost.iteration_time_s > self._deadline_s * (1 + RELATIVE_TOLERANCE):
            return False
        least_s = self._min_dwell_s * (1 - RELATIVE_TOLERANCE)
        return least_s == 0.0 or shortest_dwell_s(plan) >= least_s


def _energy_j(plan: Plan) -> float:
    return plan.cost.energy_j
