"""The best clocks for given runs: the linear program over durations, its units bound together.

All units of a run have one clock, so a run has one mixture of clocks, and the durations of its
forwards and backwards follow from it.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import bmat, csr_matrix

from envpipe_megatron.core.arrays import FloatArray, IntArray
from envpipe_megatron.core.conditions import Conditions
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.core.timeline import LongestPath
from envpipe_megatron.policies.clock_changes.clock_runs import ClockTable
from envpipe_megatron.policies.optimal.choices import lower_hull, unbeaten
from envpipe_megatron.policies.optimal.linear_program import LinearProgramError

#: Of an iteration's time, beyond what is noticed and above what HiGHS loses along a path.
_ROUNDING = 1e-6


def solve_shared_clocks(
    schedule: Schedule,
    table: ClockTable,
    index: IntArray,
    conditions: Conditions,
    waiting_power_w: float,
    deadline_s: float,
) -> tuple[FloatArray, FloatArray]:
    """Minimise energy over the clocks of given runs.

    Late clocks count if they cost time, which is when a run begins at a higher clock than the run
    before it; how much higher is taken from the given clocks. See `_dependencies`.

    Returns the best durations, between profiled times, and what a second more of each unit costs,
    J/s; both [num_stages, units_per_stage]. Raises LinearProgramError if HiGHS gave up.

    Args:
        index: [num_stages, units_per_stage] indices of clocks: where they change, a run begins.
        waiting_power_w: power of all GPUs of the pipeline together.
        deadline_s: exceeded, by as much as needed, if even the fastest clocks cannot meet it.
    """
    num_stages, width = index.shape
    num_units = schedule.num_units
    begins = np.ones(index.shape, dtype=bool)
    begins[:, 1:] = index[:, 1:] != index[:, :-1]
    run = begins.ravel().cumsum() - 1
    hulls = _hulls(schedule, table, np.flatnonzero(begins))
    steps = np.array([len(hull) - 1 for hull, _ in hulls])
    num_steps = int(steps.sum())
    # Seconds and joules of any size become numbers around 1, for which tolerances are made.
    time_unit_s = float(table.time_s.min(axis=2).mean())
    cost_unit_j = float(np.ptp(table.cost_j, axis=2).max()) or 1.0

    # [unit, step of its run]: how much longer a unit takes after each step down the run's hull.
    node = np.repeat(np.arange(num_units), steps[run])
    first_step = (np.cumsum(steps) - steps)[run]
    first_row = np.cumsum(steps[run]) - steps[run]
    step = np.arange(len(node)) + (first_step - first_row)[node]
    units = np.arange(num_units)
    times = table.time_s[units % width, units // width]
    higher, lower = (
        np.concatenate([hull[ends] for hull, _ in hulls]) for ends in (slice(-1), slice(1, None))
    )
    longer_s = times[node, lower[step]] - times[node, higher[step]]
    longer = csr_matrix((longer_s / time_unit_s, (node, step)), (num_units, num_steps))
    fastest = times[units, np.array([hull[0] for hull, _ in hulls])[run]]

    path = LongestPath(schedule, fastest.tolist(), conditions.latency_s)
    # By how much of their delay late clocks lengthen a unit; a stage's first is never late.
    change_s = conditions.change_time_s
    new, old = index.ravel(), np.roll(index, 1, axis=1).ravel()
    k = np.maximum(0.0, 1.0 - times[units, new] / times[units, old])
    k[::width] = 0.0
    target, least_s, sources = _dependencies(schedule, np.array(path.hop_s), k, change_s)
    least_s = least_s + fastest[target]
    waits = csr_matrix((np.ones(len(target)), (np.arange(len(target)), target)))
    last = np.arange(1, num_stages + 1) * width - 1
    ends = csr_matrix((np.ones(num_stages), (np.arange(num_stages), last)), (num_stages, num_units))
    for unit in path.order:
        start_s = path.start_s(unit)
        late_s = max(0.0, path.end_s[unit - 1] + change_s - start_s)
        path.end_s[unit] = start_s + path.duration_s[unit] + k[unit] * late_s
    fastest_iteration_s = float((np.array(path.end_s)[last] + conditions.tail_by_stage_s).max())
    latest = max(deadline_s, fastest_iteration_s) / time_unit_s
    # Columns: ends of units, steps of runs, the iteration.
    program = {
        "c": np.concatenate(
            [
                np.zeros(num_units),
                np.concatenate([np.diff(cost_j) for _, cost_j in hulls]) / cost_unit_j,
                [waiting_power_w * time_unit_s / cost_unit_j],
            ]
        ),
        "A_ub": bmat(
            [
                [sources - waits, waits @ longer, None],
                [ends, None, -np.ones((num_stages, 1))],
            ],
            format="csr",
        ),
        "b_ub": np.concatenate([-least_s, -conditions.tail_by_stage_s]) / time_unit_s,
    }
    bounds = [(0, None)] * num_units + [(0, 1)] * num_steps
    # Where only the fastest clocks are in time, HiGHS may see no solution for rounding.
    for longer_by in (0.0, _ROUNDING):
        solved = linprog(**program, bounds=[*bounds, (0, latest * (1 + longer_by))], method="highs")
        if solved.status == 0:
            break
    else:
        raise LinearProgramError(f"The clocks of runs were not found: {solved.message}")
    duration_s = fastest + longer @ solved.x[num_units : num_units + num_steps] * time_unit_s
    price_w = np.zeros(num_units)
    np.add.at(price_w, target, -solved.ineqlin.marginals[: len(target)])
    price_w *= cost_unit_j / time_unit_s
    return duration_s.reshape(index.shape), price_w.reshape(index.shape)


def _dependencies(
    schedule: Schedule, hop_s: FloatArray, k: FloatArray, change_time_s: float
) -> tuple[IntArray, FloatArray, csr_matrix]:
    """What each unit waits for, late clocks among it: rows of

        end of target >= weighted ends of its sources + least_s + duration of target

    as targets [rows], least_s [rows] and weights [rows, num_units].

    A unit that starts d before its clock f comes, while the clock g before it is still set, ends at
    `start + d + (1 - d/t_g) t_f`; its clock comes `change_time_s` after the end of the unit before.
    Where the clock is raised, k = 1 - t_f/t_g > 0, that is the later of `start + t_f` and
    `(1-k) start + k (end before + change_time_s) + t_f`, and so linear in what the start waits for.
    A lowered clock that is late saves time, which is left out.
    """
    num_units = schedule.num_units
    nodes = np.arange(num_units)
    inside = nodes % schedule.units_per_stage > 0
    cross = schedule.cross_dependency.astype(np.int64)
    late_s, one = k * change_time_s, np.ones(num_units)
    same, fed = nodes[inside], nodes[cross >= 0]
    both, free = fed[late_s[fed] > 0], nodes[~inside & (cross < 0)]
    rest = 1.0 - k
    blocks = [  # targets, least_s, sources with their weights
        (same, late_s[same], [(same - 1, one[same])]),
        (fed, hop_s[fed], [(cross[fed], one[fed])]),
        (both, late_s[both] + rest[both] * hop_s[both],
         [(both - 1, k[both]), (cross[both], rest[both])]),
        (free, np.zeros(len(free)), []),
    ]  # fmt: skip
    first_row = np.cumsum([0, *(len(targets) for targets, _, _ in blocks)])
    entries = [
        (first + np.arange(len(targets)), node, weight)
        for first, (targets, _, sources) in zip(first_row, blocks, strict=False)
        for node, weight in sources
    ]
    row, node, weight = (np.concatenate(values) for values in zip(*entries, strict=True))
    return (
        np.concatenate([targets for targets, _, _ in blocks]),
        np.concatenate([least_s for _, least_s, _ in blocks]),
        csr_matrix((weight, (row, node)), (int(first_row[-1]), num_units)),
    )


def _hulls(
    schedule: Schedule, table: ClockTable, begin: IntArray
) -> list[tuple[IntArray, FloatArray]]:
    """For each run, the clocks on the lower hull of its cost over its time, and its cost at them.

    Runs with as many units of each key have the same hull.
    """
    width = schedule.units_per_stage
    keys: list[int] = table.key.T.ravel().tolist()
    end = np.append(begin[1:], schedule.num_units)
    known: dict[frozenset[tuple[int, int]], tuple[IntArray, FloatArray]] = {}
    hulls = []
    for node, stop in zip(begin.tolist(), end.tolist(), strict=True):
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
