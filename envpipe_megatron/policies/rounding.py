"""From durations between profiled times to frequencies that exist, and closer to the bound.

Each unit starts at the slowest hull point that is not slower than its relaxed duration, give or
take the solver's tolerance; an over-run that this leaves is repaired by the cheapest steps. Then
time that is left over is spent where a second saves most, and pairs of moves follow: one unit a
step faster, and the time it frees spent elsewhere, if that saves more than it costs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray

from envpipe_megatron.policies.choices import Choices
from envpipe_megatron.policies.linear_program import node_keys
from envpipe_megatron.schedule import Schedule
from envpipe_megatron.timeline import RELATIVE_TOLERANCE, latency_by_node

FloatArray = NDArray[np.float64]

#: Relaxed durations within this fraction of a unit below a profiled time count as that time.
_SOLVER_TOLERANCE = 1e-6


def hull_floor(schedule: Schedule, choices: Choices, duration_s: FloatArray) -> list[int]:
    """[num_units] for each node the slowest hull choice that takes no longer than given."""
    key = node_keys(schedule)
    chosen = np.empty(schedule.num_units, dtype=np.int64)
    for index, unit in enumerate(choices.units):
        nodes = key == index
        hull_s = unit.time_s[unit.hull]
        reached_s = duration_s[nodes] * (1 + _SOLVER_TOLERANCE)
        at = np.searchsorted(hull_s, reached_s, side="right") - 1
        chosen[nodes] = unit.hull[np.maximum(at, 0)]
    return [int(index) for index in chosen]


class Rounding:
    """A choice for each unit, with the earliest and the latest end that the deadline allows.

    Args:
        schedule: the order of units.
        choices: what each unit can run at.
        latency_s: p2p latency, as `Timeline` takes it.
        tail_s: [num_stages] the time after each stage's last unit.
        deadline_s: the iteration takes no longer.
        chosen: [num_units] index of each node's choice.
    """

    def __init__(
        self,
        schedule: Schedule,
        choices: Choices,
        latency_s: float | tuple[float, ...],
        tail_s: FloatArray,
        deadline_s: float,
        chosen: Sequence[int],
    ) -> None:
        self._width = schedule.units_per_stage
        self._cross: list[int] = schedule.cross_dependency.tolist()
        self._successor: list[int] = schedule.cross_successor.tolist()
        self._order = schedule.topological_order
        self._rank = [0] * schedule.num_units
        for rank, node in enumerate(self._order):
            self._rank[node] = rank
        self._latency: list[float] = latency_by_node(schedule, latency_s)
        self._last_end: list[float] = (deadline_s - tail_s).tolist()
        key = node_keys(schedule).tolist()
        time_s: list[list[float]] = [unit.time_s.tolist() for unit in choices.units]
        cost_j: list[list[float]] = [unit.cost_j.tolist() for unit in choices.units]
        self._time: list[list[float]] = [time_s[k] for k in key]
        self._cost: list[list[float]] = [cost_j[k] for k in key]
        self.chosen = list(chosen)
        self._duration: list[float] = [
            times[i] for times, i in zip(self._time, self.chosen, strict=True)
        ]
        # Far below what a sum of durations loses by rounding on its way to the deadline.
        self._tolerance_s = 1e-3 * RELATIVE_TOLERANCE * deadline_s
        self._earliest_end = [0.0] * schedule.num_units
        self._latest_end = [0.0] * schedule.num_units
        for node in self._order:
            self._earliest_end[node] = self._find_earliest_end(node)
        for node in reversed(self._order):
            self._latest_end[node] = self._find_latest_end(node)

    @property
    def cost_j(self) -> float:
        """Planning cost of all units."""
        return sum(costs[i] for costs, i in zip(self._cost, self.chosen, strict=True))

    @property
    def end_s(self) -> list[float]:
        """[num_units] the earliest end of each node."""
        return self._earliest_end

    def repair(self) -> None:
        """Make units faster until the deadline holds, the cheapest step on a late path first.

        The fastest choices must meet the deadline.
        """
        while late := [
            node
            for node, index in enumerate(self.chosen)
            if index and self._latest_end[node] - self._earliest_end[node] < -self._tolerance_s
        ]:
            step_j = {node: self._step_cost_j(node) for node in late}
            cheapest = min(late, key=step_j.__getitem__)
            self._choose(cheapest, self.chosen[cheapest] - 1)

    def spend_slack(self) -> None:
        """Slow units down while any time is left, the largest saving a second first."""
        self._spend(range(len(self.chosen)))

    def move_pairs(self, enough_j: float, max_passes: int = 3, max_steps: int = 3) -> None:
        """Make units up to `max_steps` choices faster where the time it frees saves more elsewhere.

        Args:
            enough_j: stop when the cost is at most this.
            max_passes: passes over all units; one without success is the last.
            max_steps: choices that a unit may become faster by at once.
        """
        cost_j = self.cost_j
        for _ in range(max_passes):
            before_j = cost_j
            for node in range(len(self.chosen)):
                if cost_j <= enough_j:
                    return
                cost_j -= self._try_pairs(node, max_steps)
            if cost_j >= before_j:
                return

    def _try_pairs(self, node: int, max_steps: int) -> float:
        """Planning cost saved by the first move from this node that saves any."""
        now = self.chosen[node]
        costs = self._cost[node]
        for faster in range(now - 1, max(-1, now - 1 - max_steps), -1):
            lost_j = costs[faster] - costs[now]
            moved = self._choose(node, faster)
            moved.discard(node)
            undo = self._spend(moved)
            saved_j = sum(
                self._cost[other][old] - self._cost[other][new] for other, old, new in undo
            )
            # Sums of the same costs in another order differ by rounding alone.
            if saved_j > lost_j + 1e-9 * abs(costs[0]):
                return saved_j - lost_j
            for other, old, _ in reversed(undo):
                self._choose(other, old)
            self._choose(node, now)
        return 0.0

    def _step_cost_j(self, node: int) -> float:
        costs, index = self._cost[node], self.chosen[node]
        return costs[index - 1] - costs[index]

    def _spend(self, nodes: Iterable[int]) -> list[tuple[int, int, int]]:
        """Spend slack on some nodes; returns (node, choice before, choice after) in order."""
        heap = [(-best[0], node) for node in nodes if (best := self._best_slower(node))]
        heapify(heap)
        done = []
        while heap:
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
        """The slower choice that fits and saves most a second, with that saving in J/s."""
        times, costs, now = self._time[node], self._cost[node], self.chosen[node]
        slack = self._latest_end[node] - self._earliest_end[node]
        slowest = bisect_right(times, times[now] + slack + self._tolerance_s) - 1
        best = None
        for index in range(now + 1, slowest + 1):
            rate = (costs[now] - costs[index]) / (times[index] - times[now])
            if best is None or rate > best[0]:
                best = (rate, index)
        return best

    def _choose(self, node: int, index: int) -> set[int]:
        """Change a node's choice; returns the nodes whose earliest or latest end moved."""
        self.chosen[node] = index
        self._duration[node] = self._time[node][index]
        rank, order, width = self._rank, self._order, self._width
        moved: set[int] = set()
        pending = [rank[node]]
        last = -1
        while pending:
            at = heappop(pending)
            if at == last:
                continue
            last, here = at, order[at]
            end = self._find_earliest_end(here)
            if end == self._earliest_end[here]:
                continue
            self._earliest_end[here] = end
            moved.add(here)
            if (here + 1) % width:
                heappush(pending, rank[here + 1])
            if self._successor[here] >= 0:
                heappush(pending, rank[self._successor[here]])
        # Upwards: ranks negated, so that the heap yields the last node first.
        pending = []
        self._push_sources(node, pending)
        last = 1
        while pending:
            at = heappop(pending)
            if at == last:
                continue
            last, here = at, order[-at]
            end = self._find_latest_end(here)
            if end == self._latest_end[here]:
                continue
            self._latest_end[here] = end
            moved.add(here)
            self._push_sources(here, pending)
        return moved

    def _push_sources(self, node: int, pending: list[int]) -> None:
        if node % self._width:
            heappush(pending, -self._rank[node - 1])
        if self._cross[node] >= 0:
            heappush(pending, -self._rank[self._cross[node]])

    def _find_earliest_end(self, node: int) -> float:
        start = self._earliest_end[node - 1] if node % self._width else 0.0
        source = self._cross[node]
        if source >= 0:
            arrival = self._earliest_end[source] + self._latency[node]
            start = max(start, arrival)
        return start + self._duration[node]

    def _find_latest_end(self, node: int) -> float:
        if (node + 1) % self._width:
            latest = self._latest_end[node + 1] - self._duration[node + 1]
        else:
            latest = self._last_end[node // self._width]
        receiver = self._successor[node]
        if receiver >= 0:
            limit = self._latest_end[receiver] - self._duration[receiver] - self._latency[receiver]
            latest = min(latest, limit)
        return latest
