"""From durations between profiled times to frequencies that exist.

Three ways to begin. Carried: in the order of time, each unit takes the next slower hull point as
soon as what earlier units have left over allows it. Carried back: the same from the last unit to
the first. Floored: each takes the next faster one, and all that is left over is spent afterwards,
where a second saves most; an over-run by the solver's tolerance is repaired by the cheapest steps.
The best is then improved by pairs of moves: one unit a step faster, and the time it frees spent
elsewhere, if that saves more. On 120 drawn jobs plans cost up to 0.3 % more without the pairs, and
up to 0.1 % more without the second way.

A change of one unit moves the ends of many; how many may move in all is limited, so that time grows
with the number of units only.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush

import numpy as np

from envpipe_megatron.core.arrays import FloatArray
from envpipe_megatron.core.timeline import RELATIVE_TOLERANCE, LongestPath
from envpipe_megatron.policies.optimal.linear_program import DurationProgram, Relaxed

#: Relaxed durations within this fraction of a unit below a profiled time count as that time.
_SOLVER_TOLERANCE = 1e-6
#: A plan that costs no more than this fraction above its bound needs no other way to begin; with
#: more units than this number, one that is good enough.
_NEAR_GAP, _SMALL_UNITS = 1e-4, 20_000
#: Ends of units that may move for each unit, while slack that flooring has left is spent.
_SPENDING_WORK = 30
#: Ends of units that may move in all, while pairs of moves are tried: about a quarter of a second.
_PAIRS_WORK = 100_000
#: Passes of moves over all units, and choices that one move makes a unit faster by.
_MOST_PASSES, _MOST_STEPS = 3, 3


def round_durations(program: DurationProgram, relaxed: Relaxed, good_gap: float) -> list[int]:
    """Return [num_units] a choice for each node, near to relaxed durations and no later than these.

    The fastest choices must be in time. A plan within `good_gap` of what the relaxed durations cost
    is not improved.
    """
    duration_s, relaxed_j = relaxed.duration_s, relaxed.cost_j
    floor, num_units = hull_floor(program, duration_s), program.schedule.num_units

    def begun() -> Rounding:
        return Rounding(program, relaxed.end_s, floor)

    rounding = begun()
    rounding.carry(duration_s)
    rounding.repair()
    rounding.spend_slack()
    waiting_j = program.choices.waiting_power_w * relaxed.end_s
    enough_j = (1 + good_gap) * relaxed_j - waiting_j
    gap = _NEAR_GAP if num_units <= _SMALL_UNITS else good_gap
    if rounding.cost_j > (1 + gap) * relaxed_j - waiting_j:
        carried_back, floored = begun(), begun()
        carried_back.carry_back(duration_s)
        for other in (carried_back, floored):
            other.repair()
            other.spend_slack(_SPENDING_WORK * num_units)
        rounding = min(rounding, carried_back, floored, key=lambda rounded: rounded.cost_j)
    rounding.move_pairs(enough_j, max_work=_PAIRS_WORK)
    return rounding.chosen


def hull_floor(program: DurationProgram, duration_s: FloatArray) -> list[int]:
    """Return [num_units] for each node the slowest hull choice that takes no longer than given."""
    chosen = np.empty(len(program.key), dtype=np.int64)
    for index, unit in enumerate(program.choices.units):
        nodes = program.key == index
        hull_s = unit.time_s[unit.hull]
        reached_s = duration_s[nodes] * (1 + _SOLVER_TOLERANCE)
        at = np.searchsorted(hull_s, reached_s, side="right") - 1
        chosen[nodes] = unit.hull[np.maximum(at, 0)]
    return [int(index) for index in chosen]


class Rounding:
    """A choice for each unit, with the earliest and the latest end that the deadline allows.

    `chosen`, [num_units], is the index of each node's choice.
    """

    def __init__(self, program: DurationProgram, deadline_s: float, chosen: Sequence[int]) -> None:
        conditions, units, key = program.conditions, program.choices.units, program.key.tolist()
        self._deadline_s = deadline_s
        hull: list[list[int]] = [unit.hull.tolist() for unit in units]
        self._hull: list[list[int]] = [hull[k] for k in key]
        time_s: list[list[float]] = [unit.time_s.tolist() for unit in units]
        cost_j: list[list[float]] = [unit.cost_j.tolist() for unit in units]
        self._time: list[list[float]] = [time_s[k] for k in key]
        self._cost: list[list[float]] = [cost_j[k] for k in key]
        self.chosen = list(chosen)
        duration_s = [times[i] for times, i in zip(self._time, self.chosen, strict=True)]
        # Far below what a sum of durations loses by rounding on its way to the deadline.
        self._tolerance_s = 1e-3 * RELATIVE_TOLERANCE * deadline_s
        self._work = 0
        self._path = LongestPath(
            program.schedule, duration_s, conditions.latency_s, conditions.tail_by_stage_s
        )
        self._path.find_ends()
        self._path.find_latest_ends(self._deadline_s)

    @property
    def cost_j(self) -> float:
        """Planning cost of all units."""
        return sum(costs[i] for costs, i in zip(self._cost, self.chosen, strict=True))

    def carry(self, duration_s: FloatArray) -> None:
        """Choose again, following relaxed durations: a unit that ends early enough is rounded up.

        Each unit may end when it would if all units after it took their relaxed durations
        ([num_units], which meet the deadline).
        """
        relaxed_s: list[float] = duration_s.tolist()
        path = self._path
        path.duration_s = relaxed_s.copy()
        path.find_latest_ends(self._deadline_s)
        for node in path.order:
            start = path.start_s(node)
            self._take_nearest(node, relaxed_s[node], path.latest_end_s[node] - start)
            path.end_s[node] = start + path.duration_s[node]
        path.find_latest_ends(self._deadline_s)

    def carry_back(self, duration_s: FloatArray) -> None:
        """Choose again as `carry` does, from the last unit to the first.

        Each unit may start when it would if all units before it took their relaxed durations.
        """
        relaxed_s: list[float] = duration_s.tolist()
        path = self._path
        path.duration_s = relaxed_s.copy()
        path.find_ends()
        start = [end - relaxed for end, relaxed in zip(path.end_s, relaxed_s, strict=True)]
        for node in reversed(path.order):
            end = path.find_latest_end(node)
            self._take_nearest(node, relaxed_s[node], end - start[node])
            path.latest_end_s[node] = end
        path.find_ends()

    def _take_nearest(self, node: int, relaxed_s: float, allowed_s: float) -> None:
        """Take the first hull choice not faster than relaxed, or the slowest that is allowed."""
        times, hull = self._time[node], self._hull[node]
        at = 0
        while (
            at + 1 < len(hull)
            and times[hull[at + 1]] <= allowed_s + self._tolerance_s
            and times[hull[at]] < relaxed_s * (1 - _SOLVER_TOLERANCE)
        ):
            at += 1
        self.chosen[node] = hull[at]
        self._path.duration_s[node] = times[hull[at]]

    def repair(self) -> None:
        """Make units faster until the deadline holds, the cheapest step on a late path first.

        The fastest choices must meet the deadline.
        """
        while late := [
            node
            for node, index in enumerate(self.chosen)
            if index and self._slack_s(node) < -self._tolerance_s
        ]:
            step_j = {node: self._step_cost_j(node) for node in late}
            cheapest = min(late, key=step_j.__getitem__)
            self._choose(cheapest, self.chosen[cheapest] - 1)

    def spend_slack(self, max_work: float = math.inf) -> None:
        """Slow units down while time is left, the largest saving a second first.

        At most `max_work` ends of units move before no more are slowed down.
        """
        self._spend(range(len(self.chosen)), self._work + max_work)

    def move_pairs(self, enough_j: float, max_work: float = math.inf) -> None:
        """Make units a few choices faster if the time that frees saves more elsewhere.

        Units that lose least for a second come first. Ends when the cost is at most `enough_j`,
        when `max_work` ends of units have moved, or after a pass over all units without success.
        """
        cost_j = self.cost_j
        most_work = self._work + max_work
        for _ in range(_MOST_PASSES):
            before_j = cost_j
            can_move = [node for node, index in enumerate(self.chosen) if index]
            for node in sorted(can_move, key=self._step_rate_w):
                if cost_j <= enough_j or self._work >= most_work:
                    return
                cost_j -= self._try_pairs(node)
            if cost_j >= before_j:
                return

    def _try_pairs(self, node: int) -> float:
        """Make the first move from this node that saves cost; return the saving, or 0."""
        now = self.chosen[node]
        costs = self._cost[node]
        for faster in range(now - 1, max(-1, now - 1 - _MOST_STEPS), -1):
            lost_j = costs[faster] - costs[now]
            moved = self._choose(node, faster)
            moved.discard(node)
            undo = self._spend(moved)
            saved_j = sum(
                self._cost[other][old] - self._cost[other][new] for other, old, new in undo
            )
            # Sums of the same costs in another order differ only by rounding.
            if saved_j > lost_j + 1e-9 * abs(costs[0]):
                return saved_j - lost_j
            for other, old, _ in reversed(undo):
                self._choose(other, old)
            self._choose(node, now)
        return 0.0

    def _slack_s(self, node: int) -> float:
        return self._path.latest_end_s[node] - self._path.end_s[node]

    def _step_cost_j(self, node: int) -> float:
        costs, index = self._cost[node], self.chosen[node]
        return costs[index - 1] - costs[index]

    def _step_rate_w(self, node: int) -> float:
        times, index = self._time[node], self.chosen[node]
        return self._step_cost_j(node) / (times[index] - times[index - 1])

    def _spend(
        self, nodes: Iterable[int], most_work: float = math.inf
    ) -> list[tuple[int, int, int]]:
        """Spend slack on some nodes; returns (node, choice before, choice after) in order."""
        heap = [(-best[0], node) for node in nodes if (best := self._best_slower(node))]
        heapify(heap)
        done = []
        while heap and self._work < most_work:
            rate, node = heappop(heap)
            best = self._best_slower(node)
            if best is None:
                continue
            if -best[0] > rate:  # slack has been spent since: it saves less now
                heappush(heap, (-best[0], node))
                continue
            done.append((node, self.chosen[node], best[1]))
            self._choose(node, best[1])
            best = self._best_slower(node)
            if best:
                heappush(heap, (-best[0], node))
        return done

    def _best_slower(self, node: int) -> tuple[float, int] | None:
        """Return the slower choice that fits and saves most a second, with that saving in J/s."""
        times, costs, now = self._time[node], self._cost[node], self.chosen[node]
        slowest = bisect_right(times, times[now] + self._slack_s(node) + self._tolerance_s) - 1
        best = None
        for index in range(now + 1, slowest + 1):
            rate = (costs[now] - costs[index]) / (times[index] - times[now])
            if best is None or rate > best[0]:
                best = (rate, index)
        return best

    def _choose(self, node: int, index: int) -> set[int]:
        """Change a node's choice; returns the nodes whose earliest or latest end moved."""
        self.chosen[node] = index
        moved = self._path.change(node, self._time[node][index])
        self._work += len(moved)
        return moved
