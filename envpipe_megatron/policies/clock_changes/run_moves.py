"""Small changes to the runs of a plan: those that promise to save energy, and those that save time.

What a move saves and whether there is time for it is an estimate, good enough to choose what to
evaluate: late clocks are left out, and other stages stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from envpipe_megatron.core.arrays import FloatArray, IntArray
from envpipe_megatron.core.plan import Plan
from envpipe_megatron.core.timeline import RELATIVE_TOLERANCE
from envpipe_megatron.policies.clock_changes.clock_runs import ClockTable

#: Slower clocks that a run is tried at.
_SLOWER_CLOCKS = 4


@dataclass(frozen=True)
class Move:
    """Another clock for the units from `begin` to before `end` of a stage.

    `clock` is an index, `saved_j` an estimate, and `extra_s` how much longer the units take
    together.
    """

    stage: int
    begin: int
    end: int
    clock: int
    saved_j: float
    extra_s: float

    @property
    def rank(self) -> tuple[bool, float]:
        """Moves that take no time first, then those that save most for it; higher is better."""
        free = self.extra_s <= 0
        return free, self.saved_j if free else self.saved_j / self.extra_s


def saving_moves(
    plan: Plan, table: ClockTable, index: IntArray, change_j: FloatArray, deadline_s: float
) -> list[Move]:
    """Moves worth evaluating, the best first.

    A run goes to a slower clock or to that of a neighbour, or gives the units at one of its ends to
    that neighbour: as many as there is time for, halved until they fit. `index`, [num_stages,
    units_per_stage], has the plan's clocks as indices of the table.
    """
    slack_s = plan.timeline.slack_s + (deadline_s - plan.cost.iteration_time_s)
    wait_s = plan.timeline.wait_s
    moves: list[Move] = []
    for stage, row in enumerate(index):
        bounds = [0, *(np.flatnonzero(np.diff(row)) + 1).tolist(), len(row)]
        for begin, end in pairwise(bounds):
            moves.extend(
                _moves_of_run(
                    table, row, stage, (begin, end), float(change_j[stage]),
                    wait_s[stage, begin:end].tolist(), slack_s[stage, begin:end].tolist(),
                )
            )  # fmt: skip
    return sorted(moves, key=lambda move: move.rank, reverse=True)


def _moves_of_run(
    table: ClockTable,
    row: IntArray,
    stage: int,
    bounds: tuple[int, int],
    change_j: float,
    wait_s: list[float],
    slack_s: list[float],
) -> Iterator[Move]:
    """The moves of one run of a stage, whose clocks are in `row`; waits and slack of its units."""
    begin, end = bounds
    now, length = int(row[begin]), end - begin
    sides = int(row[begin - 1]), int(row[end % len(row)])
    profiled = table.profiled[begin:end, stage]
    more_j, more_s = (
        values[begin:end, stage] - values[begin:end, stage, now, None]
        for values in (table.cost_j, table.time_s)
    )

    def move(first: int, last: int, clock: int, fewer_changes: int = 0) -> Move | None:
        saved_j = change_j * fewer_changes - float(more_j[first:last, clock].sum())
        if saved_j <= 0 or not profiled[first:last, clock].all():
            return None
        longer_s = more_s[first:last, clock].tolist()
        late_s = 0.0  # waits between the units take it up
        for at, longer in enumerate(longer_s, first):
            late_s = (max(0.0, late_s - wait_s[at]) if at > first else 0.0) + longer
            if late_s > slack_s[at]:
                return None
        return Move(stage, begin + first, begin + last, clock, saved_j, float(sum(longer_s)))

    slower = np.flatnonzero((more_j.sum(axis=0) < 0) & (more_s.sum(axis=0) > 0) & profiled.all(0))
    slower = slower[np.argsort(more_s.sum(axis=0)[slower])][:_SLOWER_CLOCKS]
    for clock in dict.fromkeys((*sides, *slower.tolist())):
        fewer = sum(side != now for side in sides) - sum(side != clock for side in sides)
        if found := move(0, length, clock, fewer if length < len(row) else 0):
            yield found
    for clock, at_front in zip(sides, (True, False), strict=True):
        count = length - 1
        while count:
            first, last = (0, count) if at_front else (length - count, length)
            if found := move(first, last, clock):
                yield found
                break
            count //= 2


def faster_path(
    plan: Plan, table: ClockTable, index: IntArray, deadline_s: float
) -> IntArray | None:
    """Make up for an overrun on the path that sets the iteration time, at the least cost.

    A unit goes to its next faster clock; or a clock that comes late is set a unit earlier. Returns
    new indices of clocks, None if nothing on the path can be faster.
    """
    width = plan.schedule.units_per_stage
    planned_s, _ = plan.profile.lookup(plan.schedule, plan.frequency_mhz)
    late_s = plan.timeline.duration_s - planned_s
    path = plan.timeline.critical_path()
    on_path = set(path)
    options: list[tuple[float, float, int, int, int]] = []  # J/s, s, stage, position, clock
    for node in path:
        stage, position = divmod(node, width)
        now = int(index[stage, position])
        time_s, cost_j = table.time_s[position, stage], table.cost_j[position, stage]
        faster = table.profiled[position, stage] & (time_s < time_s[now] * (1 - RELATIVE_TOLERANCE))
        if faster.any():
            clock = int(max(np.flatnonzero(faster), key=time_s.__getitem__))
            gained_s = float(time_s[now] - time_s[clock])
            more_j = float(cost_j[clock] - cost_j[now])
            options.append((more_j / gained_s, gained_s, stage, position, clock))
        before = position - 1
        if late_s[stage, position] > 0 and table.profiled[before, stage, now]:
            time_s, cost_j = table.time_s[before, stage], table.cost_j[before, stage]
            old = int(index[stage, before])
            gained_s = float(late_s[stage, position])
            if node - 1 in on_path:
                gained_s += max(0.0, float(time_s[old] - time_s[now]))
            more_j = float(cost_j[now] - cost_j[old])
            options.append((more_j / gained_s, gained_s, stage, before, now))
    changed = index.copy()
    missing_s = plan.cost.iteration_time_s - deadline_s
    for _, gained_s, stage, position, clock in sorted(options):
        if changed[stage, position] == index[stage, position]:
            changed[stage, position] = clock
            missing_s -= gained_s
        if missing_s <= 0:
            break
    return changed if options else None
