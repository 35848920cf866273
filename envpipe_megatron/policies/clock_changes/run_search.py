"""Plans with fewer changes of clock: for changes that cost, and clocks that must be kept a while.

From a plan that ignores changes: the cheapest runs of units at one clock (`clock_runs`), the best
division of time over those runs (`run_times`), and again the cheapest runs within it. What is late
is made faster, and time that is left is spent run by run. The evaluator decides: a plan is taken
only if its own iteration time meets the deadline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import numpy as np

from envpipe_megatron.core.arrays import FloatArray, IntArray
from envpipe_megatron.core.plan import Plan, max_frequencies
from envpipe_megatron.core.timeline import RELATIVE_TOLERANCE
from envpipe_megatron.policies.clock_changes.clock_runs import (
    LateClocks,
    RunFinder,
    make_clock_table,
    shortest_dwell_s,
)
from envpipe_megatron.policies.clock_changes.run_times import (
    divide_time,
    faster_path,
    saving_moves,
)
from envpipe_megatron.policies.optimal.linear_program import LinearProgramError, Relaxed

#: How strongly a first choice of runs holds units to their relaxed durations: the cost, in units'
#: mean energies, of a duration that is off by 100 %. With prices of time only, ties remain between
#: neighbouring clocks, which all break the same way.
_PULLS = (10.0, 30.0, 100.0)
#: These runs are chosen as if a change cost this many times its energy, plus this share of a unit's
#: energy: with fewer runs, dividing time saves more than it seems beforehand.
_CHANGE_FACTOR, _CHANGE_OF_UNIT = 4.0, 0.02
#: Halvings in the search for the share of the slowing for which late clocks leave time.
_SHARE_STEPS = 10
#: Divisions of time, each for an earlier deadline, as long as late clocks exceed the deadline.
_ROUNDS = 4
#: An earlier deadline is earlier by this many times of what late clocks took more.
_SAFELY = 1.1
#: Above this many units time is not divided again: the linear program takes too long.
_MAX_PROGRAM_UNITS = 6_000
#: Runs are found for a dwell time so much longer, too: the waits in them are shorter in the end.
_LONGER = (1.25, 1.0)
#: Longest paths of a late plan that are shortened before it is given up.
_PATHS = 20
#: The best plans with a dwell time in which the time that is left is spent, or, where all are late,
#: that are made faster.
_SPENT = 4
#: Units of all plans that spending time may evaluate, and the fewest plans.
_EVALUATED_UNITS, _FEWEST_EVALUATIONS = 40_000, 20


class RunSearch:
    """Searches the cheapest plan that meets a deadline and a dwell time, with changes of clock.

    All units at their highest clocks, and one clock per stage, are tried too.

    Args:
        plan: has the order and conditions; it need not meet deadline or dwell time.
        relaxed: the linear program's solution that it was rounded from.
        waiting_power_w: [num_stages] the price of waiting in that program.
        by_energy: whether plans of least energy are wanted; else units of least planning cost, with
            waiting at that price, and the iteration's time costs nothing.
        deadline_s: for the evaluated iteration, late clocks included.
        min_dwell_s: as `clock_runs.shortest_dwell_s` counts.
        plan_for: makes such a plan for another deadline; LinearProgramError: there is none.
    """

    def __init__(
        self,
        plan: Plan,
        relaxed: Relaxed,
        waiting_power_w: FloatArray,
        deadline_s: float,
        min_dwell_s: float,
        plan_for: Callable[[float], Plan],
        *,
        by_energy: bool = True,
    ) -> None:
        conditions = plan.conditions
        self._plan_for = plan_for
        self._start, self._relaxed = plan, relaxed
        self._power_w, self._by_energy = waiting_power_w, by_energy
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
        self._finders = self._finders_for(self._change_j)
        self._evaluations = max(_FEWEST_EVALUATIONS, _EVALUATED_UNITS // plan.schedule.num_units)
        self._price_w = relaxed.price_w.reshape(plan.frequency_mhz.shape)

    def search(self) -> Plan | None:
        """Return the cheapest plan found; None if none fits."""
        slowed = list(self._slowed(1.0))
        begun = _distinct(self._near_relaxed()) if self._min_dwell_s else slowed
        runs = _distinct([*slowed, *begun])
        if begun and self._start.schedule.num_units <= _MAX_PROGRAM_UNITS:
            divided = [self._divided(plan) for plan in begun]
            runs += [*divided, self._divided(min(divided, key=self._rank))]
        if not self._min_dwell_s:
            runs += map(self._in_time, (self._start, *runs))
            for others in (self._earlier, self._slowed_in_part):
                if not any(map(self._meets, runs)):
                    runs += others()
        elif not any(map(self._meets, runs)):
            nearest = sorted(runs, key=lambda plan: plan.cost.iteration_time_s)[:_SPENT]
            runs += map(self._in_time, nearest)
        in_time = filter(self._meets, (self._highest, self._start, *self._steady(), *runs))
        best = sorted(_distinct(in_time), key=self._cost_j)
        spent = map(self._spent, best[: _SPENT if self._min_dwell_s else 1])
        return min(spent, key=self._cost_j, default=None)

    def _steady(self) -> Iterator[Plan]:
        """Yield one clock per stage for the whole iteration: the fastest that all units have."""
        finder = RunFinder(self._table, self._change_j, np.inf)
        index = finder.find(self._table.time_s, self._table.profiled)
        if index is not None:
            yield self._plan(index)

    def _earlier(self) -> Iterator[Plan]:
        """Yield plans for earlier deadlines, by what late clocks of the plan before exceed it."""
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

    def _slowed_in_part(self) -> Iterator[Plan]:
        """Yield runs that slow units by the largest share of the start's slowing that is in time.

        Where no order of clocks is faster than the deadline, as for 1F1B at its own time.
        """
        least, most = 0.0, 1.0
        for _ in range(_SHARE_STEPS):
            share = (least + most) / 2
            for plan in self._slowed(share):
                yield plan
                if self._meets(plan):
                    least = share
            most = share if least < share else most

    def _slowed(self, share: float) -> Iterator[Plan]:
        """Yield the cheapest runs that slow no unit by more than a share of the start's slowing."""
        plan = self._start
        duration_s, _ = plan.profile.lookup(plan.schedule, plan.frequency_mhz)
        fastest_s = self._table.time_s.min(axis=2).T
        longest_s = fastest_s + share * (duration_s - fastest_s)
        for finder in self._finders:
            index = self._within(plan, longest_s, self._price_w, finder)
            if index is not None:
                yield self._plan(index)

    def _near_relaxed(self) -> Iterator[Plan]:
        """Yield runs whose units are as near to the relaxed durations as the dwell time lets."""
        relaxed_s = self._relaxed.duration_s.reshape(self._price_w.shape).T[:, :, None]
        off = (self._table.time_s - relaxed_s) / relaxed_s
        cost_j, late = self._costs(self._start, self._price_w)
        priced_j = cost_j + self._price_w.T[:, :, None] * self._table.time_s
        unit_j = float(np.abs(self._table.cost_j).mean())
        change_j = _CHANGE_FACTOR * self._change_j + _CHANGE_OF_UNIT * unit_j
        for finder in self._finders_for(change_j):
            for pull in _PULLS:
                pulled_j = priced_j + pull * unit_j * off**2
                index = finder.find(pulled_j, self._table.profiled, late)
                if index is not None:
                    yield self._plan(index)

    def _finders_for(self, change_j: FloatArray) -> list[RunFinder]:
        """Return finders of runs that last the dwell time with one plan's waits, the start's last.

        Of the waits that a run has for its dwell time, slower units leave less.
        """
        return [
            RunFinder(self._table, change_j, longer * self._run_s, plan.timeline.wait_s)
            for longer in (_LONGER if self._min_dwell_s else (1.0,))
            for plan in ((self._highest, self._start) if self._min_dwell_s else (self._start,))
        ]

    def _within(
        self, plan: Plan, duration_s: FloatArray, price_w: FloatArray, finder: RunFinder
    ) -> IntArray | None:
        """Return the cheapest runs in which no unit takes longer than given."""
        times = self._table.time_s
        short = times <= duration_s.T[:, :, None] * (1 + RELATIVE_TOLERANCE)
        cost_j, late = self._costs(plan, price_w)
        return finder.find(cost_j, self._table.profiled & short, late)

    def _costs(self, plan: Plan, price_w: FloatArray) -> tuple[FloatArray, LateClocks | None]:
        """Return costs of units at each clock, with the waits before them as they are in a plan."""
        conditions, wait_s = plan.conditions, plan.timeline.wait_s
        cost_j = self._table.cost_j
        if conditions.wait_power_w is not None:
            above_w = conditions.waiting_power_w(self._table.frequency_mhz)
            above_w -= self._power_w[:, None]
            cost_j = cost_j + wait_s.T[:, :, None] * (self._gpus[:, None] * above_w)
        if not conditions.change_time_s:
            return cost_j, None
        late_s = np.maximum(0.0, conditions.change_time_s - wait_s).T
        late_s[0] = 0.0
        return cost_j, LateClocks(late_s, cost_j + price_w.T[:, :, None] * self._table.time_s)

    def _divided(self, plan: Plan) -> Plan:
        """Time divided anew over the runs of a plan, for an earlier deadline while it is late."""
        target_s, power_w = self._deadline_s, float(self._power_w @ self._gpus)
        for _ in range(_ROUNDS):
            index = self._table.index_of(plan.frequency_mhz)
            divided = divide_time(plan, self._table, index, power_w, target_s)
            within = divided and self._within(plan, *divided, self._finders[-1])
            if within is None:
                break
            plan = self._plan(within)
            if self._meets(plan):
                break
            target_s -= max(0.0, plan.cost.iteration_time_s - self._deadline_s)
        return plan

    def _in_time(self, plan: Plan) -> Plan:
        """Make units on the longest paths faster until late clocks keep the deadline."""
        for _ in range(_PATHS):
            if plan.cost.iteration_time_s <= self._deadline_s * (1 + RELATIVE_TOLERANCE):
                break
            faster = faster_path(plan, self._table, self._deadline_s)
            if faster is None:
                break
            plan = self._plan(faster)
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
                if self._cost_j(changed) < self._cost_j(plan) and self._meets(changed):
                    plan, index = changed, changed_index
                    first, count = first + count, 2 * count
                elif count > 1:
                    count = max(1, count // 4)
                else:
                    first += 1
        return plan

    def _rank(self, plan: Plan) -> tuple[bool, float]:
        return not self._meets(plan), self._cost_j(plan)

    def _cost_j(self, plan: Plan) -> float:
        """Return what is to be least."""
        if self._by_energy:
            return plan.cost.energy_j
        result = plan.evaluation
        priced_j = result.unit_energy_j - self._power_w[:, None] * result.timeline.duration_s
        return float(self._gpus @ priced_j.sum(axis=1) + self._change_j @ result.clock_changes)

    def _plan(self, index: IntArray) -> Plan:
        return replace(self._start, frequency_mhz=self._table.frequencies(index))

    def _meets(self, plan: Plan) -> bool:
        if plan.cost.iteration_time_s > self._deadline_s * (1 + RELATIVE_TOLERANCE):
            return False
        least_s = self._min_dwell_s * (1 - RELATIVE_TOLERANCE)
        return least_s == 0.0 or shortest_dwell_s(plan) >= least_s


def _distinct(plans: Iterable[Plan]) -> list[Plan]:
    """Return plans of one order without those whose clocks another has."""
    return list({plan.frequency_mhz.tobytes(): plan for plan in plans}.values())
