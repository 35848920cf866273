"""Small changes to the runs of a plan that promise to save energy.

A run goes to a slower clock or to that of a neighbour, or gives units at one of its ends to a
slower neighbour. What a move saves and whether there is time for it is an estimate, good enough to
choose what to evaluate: late clocks are left out, and other stages stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from envpipe_megatron.core.plan import Plan
from envpipe_megatron.core.timeline import RELATIVE_TOLERANCE
from envpipe_megatron.policies.clock_changes.clock_runs import ClockTable

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

#: Slower clocks that a run is tried at.
_STEPS = 4


@dataclass(frozen=True)
class Move:
    """Another clock for some neighbouring units of a stage.

    Args:
        stage: whose units.
        begin: the first position.
        end: one behind the last.
        clock: index of the clock.
        saved_j: what it seems to save.
        extra_s: how much longer the units take together.
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

    Args:
        plan: that is to be improved.
        table: what its units take.
        index: [num_stages, units_per_stage] its clocks, as indices.
        change_j: [num_stages] energy of one change on all GPUs of the stage.
        deadline_s: of the iteration.
    """
    slack_s = plan.timeline.slack_s + (deadline_s - plan.cost.iteration_time_s)
    wait_s = plan.timeline.wait_s
    moves: list[Move] = []
    for stage, row in enumerate(index):
        bounds = [0, *(np.flatnonzero(np.diff(row)) + 1).tolist(), len(row)]
        for begin, end in pairwise(bounds):
            now = int(row[begin])
            units = slice(begin, end)
            cost_j, time_s = table.cost_j[units, stage], table.time_s[units, stage]
            run = _Run(
                stage,
                begin,
                now,
                sides=(int(row[begin - 1]), int(row[end % len(row)])),
                is_alone=end - begin == len(row),
                profiled=table.profiled[units, stage],
                more_j=cost_j - cost_j[:, now, None],
                more_s=time_s - time_s[:, now, None],
                wait_s=wait_s[stage, units],
                slack_s=slack_s[stage, units],
            )
            moves.extend(run.to_other_clock(float(change_j[stage])))
            moves.extend(run.to_neighbour())
    return sorted(moves, key=lambda move: move.rank, reverse=True)


def hurry(
    plan: Plan,
    table: ClockTable,
    index: IntArray,
    deadline_s: float,
    price_w: FloatArray | None = None,
) -> IntArray | None:
    """Make up for an overrun on the path that sets the iteration time, at the least cost.

    A unit goes to its next faster clock; or a clock that comes late is set a unit earlier.

    Args:
        plan: that takes longer than the deadline.
        table: what its units take.
        index: [num_stages, units_per_stage] its clocks, as indices.
        deadline_s: of the iteration.
        price_w: [num_stages, units_per_stage] what a second of each unit is worth. With it units
            of the highest price are taken in place of the cheapest: those that most paths share.

    Returns:
        The new indices, None if nothing on the path can be faster.
    """
    width = plan.schedule.units_per_stage
    planned_s, _ = plan.profile.lookup(plan.frequency_mhz, plan.schedule.is_backward)
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
    options.sort()
    if price_w is not None:
        options.sort(key=lambda option: -price_w[option[2], option[3]])
    hurried = index.copy()
    missing_s = plan.cost.iteration_time_s - deadline_s
    for _, gained_s, stage, position, clock in options:
        if hurried[stage, position] == index[stage, position]:
            hurried[stage, position] = clock
            missing_s -= gained_s
        if missing_s <= 0:
            break
    return hurried if options else None


@dataclass(frozen=True)
class _Run:
    """A run, its neighbours' clocks, and what its units would take more at each clock."""

    stage: int
    begin: int
    now: int
    sides: tuple[int, int]
    is_alone: bool
    profiled: NDArray[np.bool_]
    more_j: FloatArray
    more_s: FloatArray
    wait_s: FloatArray
    slack_s: FloatArray

    def to_other_clock(self, change_j: float) -> Iterator[Move]:
        """The whole run at another clock."""
        possible: NDArray[np.bool_] = np.logical_and.reduce(self.profiled)
        more_j, more_s = self.more_j.sum(axis=0), self.more_s.sum(axis=0)
        slower = np.flatnonzero(possible & (more_j < 0) & (more_s > 0))
        steps = slower[np.argsort(more_s[slower])][:_STEPS].tolist()
        for clock in dict.fromkeys((*self.sides, *steps)):
            saved_j = -float(more_j[clock])
            if not self.is_alone:
                fewer = sum(s != self.now for s in self.sides) - sum(s != clock for s in self.sides)
                saved_j += change_j * fewer
            if possible[clock] and saved_j > 0 and self._fits(0, len(self.wait_s), clock):
                yield self._move(0, len(self.wait_s), clock, saved_j)

    def to_neighbour(self) -> Iterator[Move]:
        """The longest first and last part of the run that has time for a slower neighbour."""
        length = len(self.wait_s)
        counts = [length - 1]
        while counts[-1] > 1:
            counts.append(counts[-1] // 2)
        for clock, at_front in zip(self.sides, (True, False), strict=True):
            for count in counts:
                first, last = (0, count) if at_front else (length - count, length)
                part = slice(first, last)
                saved_j = -float(self.more_j[part, clock].sum())
                if (
                    self.profiled[part, clock].all()
                    and saved_j > 0
                    and self._fits(first, last, clock)
                ):
                    yield self._move(first, last, clock, saved_j)
                    break

    def _move(self, first: int, last: int, clock: int, saved_j: float) -> Move:
        extra_s = float(self.more_s[first:last, clock].sum())
        return Move(self.stage, self.begin + first, self.begin + last, clock, saved_j, extra_s)

    def _fits(self, first: int, last: int, clock: int) -> bool:
        """Whether units may be as late as that makes them; waits between them take it up."""
        late_s = 0.0
        for at in range(first, last):
            if at > first:
                late_s = max(0.0, late_s - float(self.wait_s[at]))
            late_s += float(self.more_s[at, clock])
            if late_s > self.slack_s[at]:
                return False
        return True
