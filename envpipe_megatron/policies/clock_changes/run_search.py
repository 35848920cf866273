"""Plans with fewer changes of clock: for changes that cost, and clocks that must be kept a while.

From a plan that ignores changes: the cheapest runs of units at one clock (`clock_runs`), the best
division of time over those runs (`divide_time`), and again the cheapest runs within it; time that
is left over is spent run by run. The evaluator decides: a plan is taken only if its own iteration
time meets the deadline.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import bmat, csr_matrix

from envpipe_megatron.core.arrays import FloatArray, IntArray
from envpipe_megatron.core.longest_path import latency_by_node
from envpipe_megatron.core.plan import Plan, max_frequencies
from envpipe_megatron.core.timeline import RELATIVE_TOLERANCE
from envpipe_megatron.policies.clock_changes.clock_runs import (
    ClockTable,
    LateClocks,
    RunFinder,
    make_clock_table,
    shortest_dwell_s,
)
from envpipe_megatron.policies.optimal.certificate import price_flow
from envpipe_megatron.policies.optimal.choices import lower_hull, unbeaten
from envpipe_megatron.policies.optimal.linear_program import Relaxed

#: How strongly a first choice of runs holds units to their relaxed durations: the cost, in units'
#: mean energies, of a duration that is off by 100 %. Prices of time alone leave ties between
#: neighbouring clocks, which all break the same way. Without a dwell time the second does for all.
_PULLS = (10.0, 30.0, 100.0)
#: These runs are chosen as if a change cost this many times its energy, plus this share of a unit's
#: energy: with fewer runs, dividing time saves more than it seems beforehand.
_CHANGE_FACTOR, _CHANGE_OF_UNIT = 4.0, 0.02
#: Halvings in the search for the share of the slowing for which late clocks leave time.
_SHARE_STEPS = 6
#: Divisions of time, each for an earlier deadline, as long as late clocks exceed the deadline.
_ROUNDS = 4
#: Above this many units time is not divided again: the linear program takes too long.
_MAX_PROGRAM_UNITS = 6_000
#: Runs are found for a dwell time so much longer, too: the waits in them are shorter in the end.
_LONGER = (1.25, 1.0)
#: How much dearer a second beyond the deadline is than all that a second can save.
_LATE_FACTOR = 10.0
#: Longest paths of a late plan that are shortened before it is given up.
_PATHS = 20
#: Slower clocks that a run is tried at, where time is left over.
_SLOWER_CLOCKS = 2
#: Units of all plans that spending time may evaluate, and the fewest plans.
_EVALUATED_UNITS, _FEWEST_EVALUATIONS = 40_000, 10


def fewer_changes(
    plan: Plan,
    relaxed: Relaxed,
    waiting_power_w: FloatArray,
    deadline_s: float,
    min_dwell_s: float = 0.0,
) -> Plan | None:
    """The cheapest plan found that meets a deadline and a dwell time, changes of clock included.

    All units at their highest clocks, and one clock per stage, are tried too. None if none fits.

    Args:
        plan: has the order and conditions; it need not meet deadline or dwell time.
        relaxed: the linear program's solution that it was rounded from.
        waiting_power_w: [num_stages] by which that program priced waiting.
        deadline_s: for the evaluated iteration, late clocks included.
        min_dwell_s: as `clock_runs.shortest_dwell_s` counts.
    """
    return _RunSearch(plan, relaxed, waiting_power_w, deadline_s, min_dwell_s).search()


class _RunSearch:
    def __init__(
        self,
        plan: Plan,
        relaxed: Relaxed,
        waiting_power_w: FloatArray,
        deadline_s: float,
        min_dwell_s: float,
    ) -> None:
        conditions = plan.conditions
        self._start, self._relaxed = plan, relaxed
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
        # Of the waits that a run has for its dwell time, slower units leave less.
        self._waiting = (self._highest, plan) if min_dwell_s else (plan,)
        self._finders = self._finders_for(self._change_j)
        self._evaluations = max(_FEWEST_EVALUATIONS, _EVALUATED_UNITS // plan.schedule.num_units)
        self._price_w = price_flow(plan.schedule, relaxed.prices)[0].reshape(
            plan.frequency_mhz.shape
        )

    def search(self) -> Plan | None:
        start = self._start
        found = [*(self._runs_in_time(1.0, f) for f in self._finders), *self._runs_near_relaxed()]
        runs = [self._plan(index) for index in found if index is not None]
        tried = [self._highest, start, *runs, *self._steady(), *self._slowed_in_part()]
        if runs and start.schedule.num_units <= _MAX_PROGRAM_UNITS:
            divided = [self._divided(plan) for plan in runs]
            tried += [*divided, self._divided(min(divided, key=self._rank))]
        if not self._min_dwell_s:
            tried += map(self._in_time, tuple(tried))
        best = min(filter(self._meets, tried), key=lambda plan: plan.cost.energy_j, default=None)
        return best and self._spent(best)

    def _steady(self) -> Iterator[Plan]:
        """One clock per stage for the whole iteration: the fastest that all its units have."""
        finder = RunFinder(self._table, self._change_j, np.inf)
        index = finder.find(self._table.time_s, self._table.profiled)
        if index is not None:
            yield self._plan(index)

    def _slowed_in_part(self) -> Iterator[Plan]:
        """Runs that slow units down by the largest share of the start's slowing that is in time.

        With thousands of microbatches late clocks are on too many paths to divide time over.
        """
        least, most = 0.0, 1.0
        for _ in range(_SHARE_STEPS):
            share = (least + most) / 2
            index = self._runs_in_time(share, self._finders[-1])
            plan = None if index is None else self._plan(index)
            if plan is not None and self._meets(plan):
                least = share
                yield plan
            else:
                most = share

    def _runs_in_time(self, share: float, finder: RunFinder) -> IntArray | None:
        """The cheapest runs that slow no unit down by more than a share of what the start does."""
        plan = self._start
        duration_s, _ = plan.profile.lookup(plan.schedule, plan.frequency_mhz)
        fastest_s = self._table.time_s.min(axis=2).T
        longest_s = fastest_s + share * (duration_s - fastest_s)
        return self._within(plan, longest_s, self._price_w, finder)

    def _runs_near_relaxed(self) -> Iterator[IntArray | None]:
        """Runs whose units are as close to the relaxed durations as changes let them be."""
        relaxed_s = self._relaxed.duration_s.reshape(self._price_w.shape).T[:, :, None]
        off = (self._table.time_s - relaxed_s) / relaxed_s
        cost_j, late = self._costs(self._start, self._price_w)
        priced_j = cost_j + self._price_w.T[:, :, None] * self._table.time_s
        unit_j = float(np.abs(self._table.cost_j).mean())
        change_j = _CHANGE_FACTOR * self._change_j + _CHANGE_OF_UNIT * unit_j
        for finder in self._finders_for(change_j):
            for pull in _PULLS if self._min_dwell_s else _PULLS[1:2]:
                yield finder.find(priced_j + pull * unit_j * off**2, self._table.profiled, late)

    def _finders_for(self, change_j: FloatArray) -> list[RunFinder]:
        """Of runs that last the dwell time with the waits of one plan each, the start the last."""
        return [
            RunFinder(self._table, change_j, share * self._run_s, plan.timeline.wait_s)
            for share in (_LONGER if self._min_dwell_s else (1.0,))
            for plan in self._waiting
        ]

    def _within(
        self, plan: Plan, duration_s: FloatArray, price_w: FloatArray, finder: RunFinder
    ) -> IntArray | None:
        """The cheapest runs in which no unit takes longer than given."""
        times = self._table.time_s
        short = times <= duration_s.T[:, :, None] * (1 + RELATIVE_TOLERANCE)
        cost_j, late = self._costs(plan, price_w)
        return finder.find(cost_j, self._table.profiled & short, late)

    def _costs(self, plan: Plan, price_w: FloatArray) -> tuple[FloatArray, LateClocks | None]:
        """Costs of units at each clock, with the waits before them as they are in a plan."""
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
        """Make units on the longest paths faster until late clocks keep the deadline.

        A unit goes to its next faster clock; or a clock that comes late is set a unit earlier.
        """
        table, width = self._table, plan.schedule.units_per_stage
        for _ in range(min(_PATHS, self._evaluations)):
            missing_s = plan.cost.iteration_time_s - self._deadline_s
            if missing_s <= RELATIVE_TOLERANCE * self._deadline_s:
                break
            index = table.index_of(plan.frequency_mhz)
            planned_s, _energy_j = plan.profile.lookup(plan.schedule, plan.frequency_mhz)
            late_s = plan.timeline.duration_s - planned_s
            path = set(plan.timeline.critical_path())
            options: list[tuple[float, float, int, int, int]] = []  # J/s, s, stage, position, clock
            for stage, position in (divmod(node, width) for node in path):
                now = int(index[stage, position])
                time_s, cost_j = table.time_s[position, stage], table.cost_j[position, stage]
                faster = table.profiled[position, stage] & (
                    time_s < time_s[now] * (1 - RELATIVE_TOLERANCE)
                )
                if faster.any():
                    clock = int(np.where(faster, time_s, 0.0).argmax())
                    gained_s = float(time_s[now] - time_s[clock])
                    rate_w = float(cost_j[clock] - cost_j[now]) / gained_s
                    options.append((rate_w, gained_s, stage, position, clock))
                before = position - 1
                if late_s[stage, position] > 0 and table.profiled[before, stage, now]:
                    time_s, cost_j = table.time_s[before, stage], table.cost_j[before, stage]
                    old, gained_s = index[stage, before], float(late_s[stage, position])
                    if stage * width + before in path:
                        gained_s += max(0.0, float(time_s[old] - time_s[now]))
                    rate_w = float(cost_j[now] - cost_j[old]) / gained_s
                    options.append((rate_w, gained_s, stage, before, now))
            if not options:
                break
            changed = index.copy()
            for _rate, gained_s, stage, position, clock in sorted(options):
                if missing_s > 0 and changed[stage, position] == index[stage, position]:
                    changed[stage, position] = clock
                    missing_s -= gained_s
            plan = self._plan(changed)
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
            moves = sorted(self._moves(plan, index), reverse=True)
            first, count = 0, 1
            while first < len(moves) and left > 0:
                changed_index = index.copy()
                for _, stage, begin, end, clock in moves[first : first + count]:
                    units = changed_index[stage, begin:end]
                    if (units == units[0]).all():  # no move before it has split the run
                        units[:] = clock
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

    def _moves(self, plan: Plan, index: IntArray) -> Iterator[tuple[float, int, int, int, int]]:
        """J saved for each second, stage, begin, end and new clock of moves worth evaluating.

        A run goes to a slower clock or that of a neighbour, or gives units at one of its ends to
        that neighbour: as many as the slack of each has time for all of.
        """
        slack_s = plan.timeline.slack_s + (self._deadline_s - plan.cost.iteration_time_s)
        table = self._table
        for stage, row in enumerate(index):
            bounds = [0, *(np.flatnonzero(np.diff(row)) + 1).tolist(), len(row)]
            for begin, end in pairwise(bounds):
                now, sides = row[begin], (row[begin - 1], row[end % len(row)])
                more_s = table.time_s[begin:end, stage] - table.time_s[begin:end, stage, now, None]
                slower = np.flatnonzero(more_s.sum(axis=0) > 0)
                slower = slower[more_s.sum(axis=0)[slower].argsort()][:_SLOWER_CLOCKS]
                for clock in {*sides, *slower.tolist()} - {now}:
                    fewer = sum(now != side for side in sides) - sum(
                        clock != side for side in sides
                    )
                    for turn, side in zip((slice(None), slice(None, None, -1)), sides, strict=True):
                        saved_j = np.cumsum(
                            (
                                table.cost_j[begin:end, stage, now]
                                - table.cost_j[begin:end, stage, clock]
                            )[turn]
                        )
                        saved_j[-1] += fewer * self._change_j[stage] * (end - begin < len(row))
                        extra_s = np.cumsum(more_s[turn, clock])
                        fits = extra_s <= np.minimum.accumulate(slack_s[stage, begin:end][turn])
                        fits &= np.logical_and.accumulate(
                            table.profiled[begin:end, stage, clock][turn]
                        )
                        fits &= saved_j > 0
                        if clock != side:
                            fits[:-1] = False
                        if not fits.any():
                            continue
                        count = int(np.flatnonzero(fits)[-1]) + 1
                        rate = saved_j[count - 1] / max(extra_s[count - 1], 1e-9)
                        first = begin if turn.step is None else end - count
                        yield float(rate), stage, first, first + count, int(clock)

    def _rank(self, plan: Plan) -> tuple[bool, float]:
        return not self._meets(plan), plan.cost.energy_j

    def _plan(self, index: IntArray) -> Plan:
        return replace(self._start, frequency_mhz=self._table.frequencies(index))

    def _meets(self, plan: Plan) -> bool:
        if plan.cost.iteration_time_s > self._deadline_s * (1 + RELATIVE_TOLERANCE):
            return False
        least_s = self._min_dwell_s * (1 - RELATIVE_TOLERANCE)
        return least_s == 0.0 or shortest_dwell_s(plan) >= least_s


def divide_time(
    plan: Plan, table: ClockTable, index: IntArray, waiting_power_w: float, deadline_s: float
) -> tuple[FloatArray, FloatArray] | None:
    """Minimise energy over the clocks of given runs: the linear program, its units bound together.

    All units of a run have one clock, so a run has one mixture of clocks, and the durations of its
    forwards and backwards follow from it.

    A unit that starts d before its clock f comes, while the clock g before it is still set, ends at
    `start + d + (1 - d/t_g) t_f`; its clock comes `change_time_s` after the end of the unit before.
    Where the clock is raised, k = 1 - t_f/t_g > 0, that is the later of `start + t_f` and
    `(1-k) start + k (end before + change_time_s) + t_f`, and so linear in what the start waits for;
    k is taken from the given clocks. A lowered clock that is late saves time, which is left out.

    Returns the best durations, between profiled times, and what a second more of each unit costs,
    J/s; both [num_stages, units_per_stage]. None if HiGHS gave up.

    Args:
        plan: has the order and the conditions.
        index: [num_stages, units_per_stage] indices of clocks: where they change, a run begins.
        waiting_power_w: power of all GPUs of the pipeline together.
        deadline_s: exceeded, by as little as can be, if even the fastest clocks cannot meet it.
    """
    schedule, conditions = plan.schedule, plan.conditions
    num_stages, width = index.shape
    units = np.arange(schedule.num_units)
    begins = np.ones(index.shape, dtype=bool)
    begins[:, 1:] = index[:, 1:] != index[:, :-1]
    run = begins.ravel().cumsum() - 1
    hulls = _hulls(table, np.flatnonzero(begins), units.size)
    steps = np.array([len(hull) - 1 for hull, _ in hulls])
    # Seconds and joules of any size become numbers around 1, for which tolerances are made.
    time_unit_s = float(table.time_s.min(axis=2).mean())
    cost_unit_j = float(np.ptp(table.cost_j, axis=2).max()) or 1.0

    # [unit, step of its run]: how much longer a unit takes after each step down the run's hull.
    node = np.repeat(units, steps[run])
    first_step = (np.cumsum(steps) - steps)[run]
    step = np.arange(len(node)) + (first_step - (np.cumsum(steps[run]) - steps[run]))[node]
    times = table.time_s[units % width, units // width]
    higher, lower = (
        np.concatenate([hull[ends] for hull, _ in hulls]) for ends in (slice(-1), slice(1, None))
    )
    longer = _sparse(
        (times[node, lower[step]] - times[node, higher[step]]) / time_unit_s,
        (node, step),
        (units.size, int(steps.sum())),
    )
    fastest_s = times[units, np.array([hull[0] for hull, _ in hulls])[run]]
    new, old = index.ravel(), np.roll(index, 1, axis=1).ravel()
    k = np.maximum(0.0, 1.0 - times[units, new] / times[units, old])
    k[::width] = 0.0  # a stage's first is never late

    # Rows: a unit on the one before it, on what feeds it, late on both, on nothing; ends of stages.
    cross = schedule.cross_dependency.astype(np.int64)
    hop_s = np.array(latency_by_node(schedule, conditions.latency_s))
    late_s = k * conditions.change_time_s
    after, fed, first = units[units % width > 0], units[cross >= 0], units[::width]
    both = fed[late_s[fed] > 0]
    target = np.concatenate([after, fed, both, first])
    least_s = [late_s[after], hop_s[fed], (late_s + (1 - k) * hop_s)[both], 0.0 * first]
    row = np.arange(len(target))
    in_both = row[len(after) + len(fed) :][: len(both)]
    waits = _sparse(np.ones(len(row)), (row, target), (len(row), units.size))
    sources = _sparse(
        np.concatenate([np.ones(len(after) + len(fed)), k[both], 1 - k[both]]),
        (
            np.concatenate([row[: len(after) + len(fed)], in_both, in_both]),
            np.concatenate([after - 1, cross[fed], both - 1, cross[both]]),
        ),
        waits.shape,
    )
    stages = np.arange(num_stages)
    last = _sparse(
        np.ones(num_stages), (stages, width * (stages + 1) - 1), (num_stages, units.size)
    )
    # Columns: ends of units, steps of runs, the iteration, and by how much it is late, at a price
    # above that of any time.
    step_j = np.concatenate([np.diff(cost_j) for _, cost_j in hulls]) / cost_unit_j
    wait_cost = waiting_power_w * time_unit_s / cost_unit_j
    steepest = float((-step_j / np.maximum(longer.sum(axis=0).A1, 1e-9)).max(initial=0.0))
    late_cost = _LATE_FACTOR * (wait_cost + num_stages * steepest) + 1.0
    one = np.ones((num_stages, 1))
    solved = linprog(
        np.concatenate([np.zeros(units.size), step_j, [wait_cost, late_cost]]),
        bmat([[sources - waits, waits @ longer, None, None], [last, None, -one, -one]], "csr"),
        np.concatenate([-np.concatenate(least_s) - fastest_s[target], -conditions.tail_by_stage_s])
        / time_unit_s,
        bounds=[(0, None)] * units.size
        + [(0, 1)] * len(step_j)
        + [(0, deadline_s / time_unit_s), (0, None)],
        method="highs",
    )
    if solved.status != 0:
        return None
    duration_s = fastest_s + longer @ solved.x[units.size : -2] * time_unit_s
    price_w = np.zeros(units.size)
    np.add.at(price_w, target, -solved.ineqlin.marginals[: len(target)])
    price_w *= cost_unit_j / time_unit_s
    return duration_s.reshape(index.shape), price_w.reshape(index.shape)


def _sparse(
    values: FloatArray, at: tuple[IntArray, IntArray], shape: tuple[int, int]
) -> csr_matrix:
    return csr_matrix((values, at), shape)


def _hulls(table: ClockTable, begin: IntArray, num_units: int) -> list[tuple[IntArray, FloatArray]]:
    """For each run, the clocks on the lower hull of its cost over its time, and its cost at them.

    Runs with as many units of each key have the same hull.
    """
    width = len(table.key)
    keys: list[int] = table.key.T.ravel().tolist()
    known: dict[frozenset[tuple[int, int]], tuple[IntArray, FloatArray]] = {}
    hulls = []
    for node, stop in pairwise([*begin.tolist(), num_units]):
        stage, position = divmod(node, width)
        counts = frozenset(Counter(keys[node:stop]).items())
        if counts not in known:
            at = slice(position, position + stop - node)
            clocks = np.flatnonzero(table.profiled[at, stage].all(axis=0))
            time_s = table.time_s[at, stage].sum(axis=0)[clocks].tolist()
            cost_j = table.cost_j[at, stage].sum(axis=0)[clocks].tolist()
            kept = unbeaten(zip(time_s, cost_j, clocks.tolist(), strict=True))
            _, hull_j, hull = zip(*(kept[index] for index in lower_hull(kept)), strict=True)
            known[counts] = np.array(hull, dtype=np.int64), np.array(hull_j)
        hulls.append(known[counts])
    return hulls
