"""Time for given runs: the best division of it, and what is late made faster, what is left spent.

What a move saves and whether there is time for it is an estimate, good enough to choose what to
evaluate: late clocks are left out, and other stages stay as they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import bmat, csr_matrix

from envpipe_megatron.core.arrays import FloatArray, IntArray
from envpipe_megatron.core.plan import Plan
from envpipe_megatron.core.timeline import RELATIVE_TOLERANCE, latency_by_node
from envpipe_megatron.policies.clock_changes.clock_runs import ClockTable
from envpipe_megatron.policies.optimal.linear_program import lower_hull, unbeaten

#: How much dearer a second beyond the deadline is than all that a second can save.
_LATE_FACTOR = 10.0
#: Slower clocks that a run is tried at, where time is left over.
_SLOWER_CLOCKS = 2


def faster_path(plan: Plan, table: ClockTable, deadline_s: float) -> IntArray | None:
    """Make up for an overrun on the path that sets the iteration time, at the least cost.

    A unit goes to its next faster clock; or a clock that comes late is set a unit earlier. Returns
    new indices of clocks, None if nothing on the path can be faster.
    """
    width, index = plan.schedule.units_per_stage, table.index_of(plan.frequency_mhz)
    planned_s, _ = plan.profile.lookup(plan.schedule, plan.frequency_mhz)
    late_s = plan.timeline.duration_s - planned_s
    path = set(plan.timeline.critical_path())
    options: list[tuple[float, float, int, int, int]] = []  # J/s, s, stage, position, clock
    for stage, position in (divmod(node, width) for node in path):
        now, before = int(index[stage, position]), position - 1
        time_s, cost_j = table.time_s[position, stage], table.cost_j[position, stage]
        faster = table.profiled[position, stage] & (time_s < time_s[now] * (1 - RELATIVE_TOLERANCE))
        if faster.any():
            clock = int(np.where(faster, time_s, 0.0).argmax())
            gained_s = float(time_s[now] - time_s[clock])
            rate_w = float(cost_j[clock] - cost_j[now]) / gained_s
            options.append((rate_w, gained_s, stage, position, clock))
        if late_s[stage, position] > 0 and table.profiled[before, stage, now]:
            time_s, cost_j = table.time_s[before, stage], table.cost_j[before, stage]
            old, gained_s = index[stage, before], float(late_s[stage, position])
            if stage * width + before in path:
                gained_s += max(0.0, float(time_s[old] - time_s[now]))
            rate_w = float(cost_j[now] - cost_j[old]) / gained_s
            options.append((rate_w, gained_s, stage, before, now))
    changed = index.copy()
    missing_s = plan.cost.iteration_time_s - deadline_s
    for _, gained_s, stage, position, clock in sorted(options):
        if missing_s > 0 and changed[stage, position] == index[stage, position]:
            changed[stage, position] = clock
            missing_s -= gained_s
    return changed if options else None


class Move(NamedTuple):
    """Another clock, an index, for the units from `begin` to before `end` of a stage.

    `rate_w` is an estimate of what it saves for each second that the units take longer together,
    above all others where they take none.
    """

    rate_w: float
    stage: int
    begin: int
    end: int
    clock: int


def saving_moves(
    plan: Plan, table: ClockTable, change_j: FloatArray, deadline_s: float
) -> list[Move]:
    """Return moves worth evaluating, the best first.

    A run goes to a slower clock or to that of a neighbour, or gives units at one of its ends to
    that neighbour: the most whose extra time, all together, is within the slack of each.
    """
    slack_s = plan.timeline.slack_s + (deadline_s - plan.cost.iteration_time_s)
    moves: list[Move] = []
    for stage, row in enumerate(table.index_of(plan.frequency_mhz)):
        bounds = [0, *(np.flatnonzero(np.diff(row)) + 1).tolist(), len(row)]
        for begin, end in pairwise(bounds):
            moves += _moves_of_run(
                table, row, stage, begin, end, float(change_j[stage]), slack_s[stage, begin:end]
            )
    return sorted(moves, reverse=True)


def _moves_of_run(
    table: ClockTable,
    row: IntArray,
    stage: int,
    begin: int,
    end: int,
    change_j: float,
    slack_s: FloatArray,
) -> Iterator[Move]:
    """Yield the moves of one run of a stage, whose clocks are in `row`."""
    now, sides = int(row[begin]), (int(row[begin - 1]), int(row[end % len(row)]))
    profiled = table.profiled[begin:end, stage]
    more_j, more_s = (
        values[begin:end, stage] - values[begin:end, stage, now, None]
        for values in (table.cost_j, table.time_s)
    )
    all_s = more_s.sum(axis=0)
    slower = np.flatnonzero(all_s > 0)
    slower = slower[all_s[slower].argsort()][:_SLOWER_CLOCKS]
    for clock in {*sides, *slower.tolist()} - {now}:
        fewer = sum(side != now for side in sides) - sum(side != clock for side in sides)
        for from_front, side in zip((1, -1), sides, strict=True):
            order = slice(None, None, from_front)
            saved_j = -np.cumsum(more_j[order, clock])
            saved_j[-1] += change_j * fewer * (end - begin < len(row))
            extra_s = np.cumsum(more_s[order, clock])
            fits = (saved_j > 0) & (extra_s <= np.minimum.accumulate(slack_s[order]))
            fits &= np.logical_and.accumulate(profiled[order, clock])
            fits[:-1] &= clock == side
            if fits.any():
                count = int(np.flatnonzero(fits)[-1]) + 1
                rate_w = float(saved_j[count - 1] / max(extra_s[count - 1], 1e-9))
                first = begin if from_front > 0 else end - count
                yield Move(rate_w, stage, first, first + count, clock)


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
    longer = csr_matrix(
        ((times[node, lower[step]] - times[node, higher[step]]) / time_unit_s, (node, step)),
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
    waits = csr_matrix((np.ones(len(row)), (row, target)), (len(row), units.size))
    sources = csr_matrix(
        (
            np.concatenate([np.ones(len(after) + len(fed)), k[both], 1 - k[both]]),
            (
                np.concatenate([row[: len(after) + len(fed)], in_both, in_both]),
                np.concatenate([after - 1, cross[fed], both - 1, cross[both]]),
            ),
        ),
        waits.shape,
    )
    stages = np.arange(num_stages)
    last = csr_matrix(
        (np.ones(num_stages), (stages, width * (stages + 1) - 1)), (num_stages, units.size)
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


def _hulls(table: ClockTable, begin: IntArray, num_units: int) -> list[tuple[IntArray, FloatArray]]:
    """Return for each run the clocks on its lower hull of cost over time, and its cost at them.

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
