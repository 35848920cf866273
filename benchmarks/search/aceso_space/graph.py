"""A graph of which every path from a start to the end is a way to divide a model into stages.

A node is a cut with the stages and GPUs behind it, an edge is a stage. A path costs the sum of its
edges' times and some times the largest. Levels count the stages from an edge to the end, so sums
and maxima over paths are found in one pass over levels.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise

import numpy as np

from envpipe_megatron.core.arrays import BoolArray, FloatArray, IntArray

#: A path that is better by less than this part is not looked for.
TOLERANCE = 1e-9


@dataclass(frozen=True)
class Path:
    """Edges from the first stage to the last, and what they cost, in s."""

    edges: tuple[int, ...]
    cost_s: float


class StageGraph:
    """Stages as edges.

    Args:
        tail, head: [num_edges] the nodes that an edge leaves and reaches. Tails rise, and heads are
            below tails: nodes are numbered from the end of the pipeline, which is node 0.
        level: [num_edges] stages from the edge on, itself too.
        time_s: [num_edges]; a caller may change it.
        starts: nodes at which a path may begin.
        weight: how often the largest time counts besides the sum: m - 1 for m microbatches.
    """

    def __init__(
        self,
        tail: IntArray,
        head: IntArray,
        level: IntArray,
        time_s: FloatArray,
        starts: IntArray,
        weight: float,
    ) -> None:
        self.time_s = time_s
        self._tail, self._head, self._level = tail, head, level
        self._starts, self._weight = starts, weight
        self._behind = _Pass(level, tail, head)
        self._before = _Pass(-level, head, tail)
        self._num_nodes = int(max(tail.max(initial=0), starts.max(initial=0))) + 1

    def kept(self, kept: BoolArray) -> StageGraph:
        """The graph of some of the edges."""
        edges = (self._tail[kept], self._head[kept], self._level[kept], self.time_s[kept])
        return StageGraph(*edges, self._starts, self._weight)

    def most_s(self, cost_s: float) -> FloatArray:
        """[num_edges] the time that an edge may take at most on a path that costs no more."""
        at_end, at_starts = np.zeros(1, dtype=np.int64), self._starts
        others_s, largest_s = (
            combine(
                self._values(combine, self._behind, at_end, self.time_s)[self._head],
                self._values(combine, self._before, at_starts, self.time_s)[self._tail],
            )
            for combine in (np.add, np.maximum)
        )
        connected = np.isfinite(others_s)
        most_s = np.full(len(others_s), -np.inf)
        left_s = cost_s - others_s[connected]
        # Where another is the largest, and where the edge itself is.
        most_s[connected] = np.minimum(
            left_s - self._weight * largest_s[connected], left_s / (self._weight + 1)
        )
        return most_s

    def best_path(self) -> Path | None:
        """The path that costs least, to a part of `TOLERANCE`; None if there is none.

        Paths of which the largest time lies in an interval cost no less than its lower end and the
        least sum of paths below its upper end. The interval that promises most is solved for that
        sum, which yields a path, and divided, until none promises less than the best path costs.
        """
        at_end = np.zeros(1, dtype=np.int64)
        largest_s = self._values(np.maximum, self._behind, at_end, self.time_s)
        best, intervals = None, [(0.0, float(largest_s[self._starts].min(initial=np.inf)), np.inf)]
        while intervals:
            promise_s, low_s, high_s = heappop(intervals)
            if best is not None and promise_s >= best.cost_s * (1 - TOLERANCE):
                break
            times_s = np.where(self.time_s <= high_s, self.time_s, np.inf)
            sums_s = self._values(np.add, self._behind, at_end, times_s)
            sum_s = float(sums_s[self._starts].min(initial=np.inf))
            if sum_s == np.inf:
                continue
            edges = self._walk(times_s, sums_s)
            longest_s = float(self.time_s[edges].max())
            if best is None or self._weight * longest_s + sum_s < best.cost_s:
                best = Path(tuple(edges), self._weight * longest_s + sum_s)
            high_s = float(np.nextafter(longest_s, 0.0))
            middle_s = (low_s + high_s) / 2
            for below_s, above_s in ((low_s, middle_s), (middle_s, high_s)):
                if below_s <= above_s:
                    heappush(intervals, (self._weight * below_s + sum_s, below_s, above_s))
        return best

    def _values(
        self, combine: np.ufunc, passed: _Pass, zeros: IntArray, time_s: FloatArray
    ) -> FloatArray:
        """[num_nodes] the least sum or maximum of paths between each node and those at zero."""
        values = np.full(self._num_nodes, np.inf)
        values[zeros] = 0.0
        times_s = time_s[passed.order]
        for begin, end, segments, targets in passed.levels:
            reached = combine(times_s[begin:end], values[passed.source[begin:end]])
            found = np.minimum.reduceat(reached, segments)
            values[targets] = np.minimum(values[targets], found)
        return values

    def _walk(self, time_s: FloatArray, sums_s: FloatArray) -> list[int]:
        node, edges = int(self._starts[np.argmin(sums_s[self._starts])]), []
        while node:
            begin, end = np.searchsorted(self._tail, [node, node + 1])
            reached = time_s[begin:end] + sums_s[self._head[begin:end]]
            edges.append(int(begin + np.argmin(reached)))
            node = int(self._head[edges[-1]])
        return edges


class _Pass:
    """Edges in the order in which a pass over levels reads them, by target and level."""

    def __init__(self, rank: IntArray, target: IntArray, source: IntArray) -> None:
        self.order = np.lexsort((target, rank))
        self.source = source[self.order]
        rank, target = rank[self.order], target[self.order]
        changes = np.flatnonzero(np.diff(target, prepend=-1))
        self.levels = []
        for begin, end in _runs(rank):
            segments = changes[(changes >= begin) & (changes < end)]
            segments = np.union1d(segments, [begin])
            self.levels.append((begin, end, segments - begin, target[segments]))


def _runs(values: IntArray) -> list[tuple[int, int]]:
    """Begin and end of each run of equal values."""
    inner = (np.flatnonzero(np.diff(values)) + 1).tolist()
    return list(pairwise([0, *inner, len(values)])) if len(values) else []
