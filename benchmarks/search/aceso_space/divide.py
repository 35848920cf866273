"""The best division of a model into stages that may differ in size: Aceso's space, exactly.

Enter at `divide`. Searched are the cuts, between any pieces; tensor and data parallel sizes of each
stage; the samples of a microbatch; and what is computed again (`recomputation`). The cost is
Aceso's: (m - 1) max t + sum t for m microbatches and stages of times t, each stage within memory
(`stages`). It leaves out all-reduces, the optimizer and waits of 1F1B (Aceso, EuroSys'24), and all
GPUs are of one node. There are sixteen stages at most, each with a sixteenth of the GPUs or more.
Where times of changing sizes are given, a stage can also run its last pieces at other sizes, on as
many GPUs, if it recomputes nothing.

Stages are the edges of a graph. They get a lower bound on their time first; edges that no path can
use that beats the best division known are dropped; the rest is solved exactly where the best path
needs it. A first division comes from coarse cuts. The result is exact in the space to a part of
1e-9.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import pairwise, permutations

import numpy as np

from benchmarks.search.aceso_space.plans import PieceStage
from benchmarks.search.aceso_space.recomputation import Recomputed
from benchmarks.search.aceso_space.stages import Edges, StageCosts, StageOption, stage_edges
from envpipe_megatron.core.arrays import BoolArray, FloatArray, IntArray
from envpipe_megatron.search.configuration import Configuration, Job
from envpipe_megatron.search.layer_profile import LayerProfile, Sizes

#: Cuts of the coarsest division, and how many times finer the next one is.
_COARSE_CUTS, _FINER = 48, 4
#: Stages that a job is divided into at most, as in Aceso, and so no stage is a smaller part of it.
_MOST_STAGES = 16
#: A path that is better by less than this part is not looked for.
_TOLERANCE = 1e-9

#: Seconds of changing from sizes to others before each piece, [num_pieces]; infinite if impossible.
SwitchTimes = Callable[[Sizes, Sizes], FloatArray]


@dataclass(frozen=True)
class Switch:
    """Where a stage changes its sizes: its first piece at the new ones."""

    piece: int
    sizes: Sizes
    data_parallel: int


@dataclass(frozen=True)
class Division:
    """A division and what it takes, by Aceso's formula; times in s.

    `switches` are of the stages; a layout has the sizes before its switch.
    """

    configuration: Configuration
    switches: tuple[Switch | None, ...]
    time_s: float


def divide(
    profile: LayerProfile,
    job: Job,
    batches: Sequence[int],
    *,
    same_size: bool = False,
    switch_s: SwitchTimes | None = None,
) -> Division | None:
    """Find the division with the least cost; None if none fits.

    Args:
        batches: samples of a microbatch over all data parallel ranks of a stage, to choose from.
        same_size: whether all stages have the same sizes.
        switch_s: if given, a stage that recomputes nothing can change its sizes once.
    """
    search = _Search(profile, job)
    levels = list(_coarse_to_fine(len(profile.pieces), np.array(profile.block_edges)))
    # A first bound comes from stages of one size, which are few.
    steps = [(levels[0], True), *((level, same_size) for level in levels)]
    for level, one_size in steps:
        for batch in sorted(batches, key=search.promise_s):
            options = search.options(batch)
            if one_size:
                for option in options:
                    search.improve(level, batch, [option])
            else:
                switching = list(_switching(options, switch_s)) if switch_s else []
                search.improve(level, batch, options + switching)
    return search.best


def _switching(options: Sequence[StageOption], switch_s: SwitchTimes) -> Iterator[StageOption]:
    for one, other in permutations(options, 2):
        if one.num_gpus == other.num_gpus:
            yield replace(one, behind=other, switch_s=switch_s(one.sizes, other.sizes))


def _coarse_to_fine(num_pieces: int, edges: IntArray) -> Iterator[IntArray]:
    """Some of the cuts between blocks, then more, then all cuts."""
    step = 1
    while len(edges) > step * _COARSE_CUTS:
        step *= _FINER
    while step > 1:
        yield np.union1d(edges[::step], [num_pieces])
        step //= _FINER
    if len(edges) <= num_pieces:
        yield edges
    yield np.arange(num_pieces + 1)


#: Of a stage: its sizes, its first piece, the one behind its last, microbatches in flight.
_Key = tuple[Sizes, int, int, int]


class _Search:
    """The best division so far, and what is known of stages."""

    def __init__(self, profile: LayerProfile, job: Job) -> None:
        self.best: Division | None = None
        self._profile, self._job = profile, job
        self._costs: dict[Sizes, StageCosts] = {}
        self._solved: dict[_Key, Recomputed] = {}
        self._at_least_s: dict[_Key, float] = {}
        self._found_s: dict[int, float] = {}

    def promise_s(self, batch: int) -> float:
        """What the best division so far with this batch takes."""
        return self._found_s.get(batch, np.inf)

    def options(self, batch: int) -> list[StageOption]:
        """Sizes that the profile has, for a batch that data parallel ranks share."""
        job, options = self._job, []
        for sizes in sorted(self._profile.measures):
            data_parallel, rest = divmod(batch, sizes.microbatch_size)
            fits = job.num_gpus / _MOST_STAGES <= sizes.gpus * data_parallel <= job.num_gpus
            if not rest and fits and sizes.gpus <= job.gpus_per_node:
                options.append(StageOption(sizes, data_parallel, self._costs_at(sizes)))
        return options

    def improve(self, cuts: IntArray, batch: int, options: Sequence[StageOption]) -> None:
        """Find a division with these options that is better than the best, if there is one."""
        num_microbatches = self._job.global_batch // batch
        if not options or not num_microbatches:
            return
        # The sum of all stages is at least that of all pieces, each in the sizes it runs best at.
        least_sum_s = np.minimum.reduce([option.costs.piece_s for option in options]).sum()
        weight = num_microbatches - 1
        limit_s = self._best_s / num_microbatches
        if weight:
            limit_s = min(limit_s, (self._best_s - float(least_sum_s)) / weight)
        found = stage_edges(self._job.num_gpus, cuts, options, limit_s)
        if found is None:
            return
        edges, starts = found
        graph = _StageGraph(edges, edges.outside_s + edges.again_s, starts, weight)
        while True:
            most_s = graph.most_s(self._least_gain_s)
            kept = graph.time_s < most_s
            graph, most_s = graph.kept(kept), most_s[kept]
            path, cost_s = graph.best_path()
            if cost_s >= self._least_gain_s:
                return
            edges, agains = graph.edges, []
            for edge in path:
                outside_s = float(edges.outside_s[edge])
                again = self._recompute(edges, edge, options, most_s[edge] - outside_s)
                graph.time_s[edge] = np.inf if again is None else outside_s + again.time_s
                if again is not None:
                    agains.append(again)
            if len(agains) == len(path):
                self._offer(num_microbatches, batch, edges.at(path), options, agains)

    @property
    def _best_s(self) -> float:
        return np.inf if self.best is None else self.best.time_s

    @property
    def _least_gain_s(self) -> float:
        """Below which a division is better than the best."""
        return self._best_s * (1 - _TOLERANCE)

    def _costs_at(self, sizes: Sizes) -> StageCosts:
        if sizes not in self._costs:
            memory_bytes = self._job.memory_bytes
            limit_bytes = np.inf if memory_bytes is None else memory_bytes
            self._costs[sizes] = StageCosts(self._profile, sizes, limit_bytes)
        return self._costs[sizes]

    def _recompute(
        self, edges: Edges, edge: int, options: Sequence[StageOption], below_s: float
    ) -> Recomputed | None:
        """What a stage recomputes; None if that takes as much as some s, or cannot fit."""
        option = options[edges.option[edge]]
        first, end, level = (int(a[edge]) for a in (edges.first, edges.end, edges.level))
        if option.behind is not None:
            return Recomputed(0.0, (None,) * (end - first))
        key = (option.sizes, first, end, level)
        if key not in self._solved and below_s > self._at_least_s.get(key, 0.0):
            again = option.costs.recompute(first, end, level, below_s)
            if again is None:
                self._at_least_s[key] = below_s
            else:
                self._solved[key] = again
        return self._solved.get(key)

    def _offer(
        self,
        num_microbatches: int,
        batch: int,
        stages: Edges,
        options: Sequence[StageOption],
        agains: Sequence[Recomputed],
    ) -> None:
        """Take a division, with the recomputation of each stage, if it is best."""
        stage_s = stages.outside_s + [again.time_s for again in agains]
        time_s = float((num_microbatches - 1) * stage_s.max() + stage_s.sum())
        self._found_s[batch] = min(self.promise_s(batch), time_s)
        if time_s >= self._best_s:
            return
        layouts, switches = [], list[Switch | None]()
        for number, again in enumerate(agains):
            option = options[stages.option[number]]
            chunks = ((int(stages.first[number]), int(stages.end[number])),)
            sizes, data_parallel = option.sizes, option.data_parallel
            layouts.append(PieceStage(chunks, sizes, data_parallel, ways=again.ways))
            behind, piece = option.behind, int(stages.switch[number])
            switches.append(behind and Switch(piece, behind.sizes, behind.data_parallel))
        configuration = Configuration(tuple(layouts), num_microbatches)
        self.best = Division(configuration, tuple(switches), time_s)


class _StageGraph:
    """Stages as edges: every path from a start to the end is a way to divide a model.

    A node is a cut with the stages and GPUs behind it. A path costs the sum of its edges' times and
    some times the largest. Levels count the stages from an edge to the end, so sums and maxima over
    paths are found in one pass over levels.

    Args:
        edges: sorted by tail. Heads are below tails: nodes are numbered from the end of the
            pipeline, which is node 0.
        time_s: [num_edges]; a caller may change it.
        starts: nodes at which a path may begin.
        weight: how often the largest time counts besides the sum: m - 1 for m microbatches.
    """

    def __init__(self, edges: Edges, time_s: FloatArray, starts: IntArray, weight: float) -> None:
        self.edges, self.time_s = edges, time_s
        self._starts, self._weight = starts, weight
        self._behind = _Pass(edges.level, edges.tail, edges.head)
        self._before = _Pass(-edges.level, edges.head, edges.tail)
        self._num_nodes = int(max(edges.tail.max(initial=0), starts.max(initial=0))) + 1

    def kept(self, kept: BoolArray) -> _StageGraph:
        """The graph of some of the edges."""
        return _StageGraph(self.edges.at(kept), self.time_s[kept], self._starts, self._weight)

    def most_s(self, cost_s: float) -> FloatArray:
        """[num_edges] the time that an edge may take at most on a path that costs no more."""
        others_s, largest_s = (
            combine(
                self._values(combine, self._behind, _AT_END, self.time_s)[self.edges.head],
                self._values(combine, self._before, self._starts, self.time_s)[self.edges.tail],
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

    def best_path(self) -> tuple[IntArray, float]:
        """The edges of the path that costs least, to a part of `_TOLERANCE`, and its cost, in s.

        Paths of which the largest time lies in an interval cost no less than its lower end and the
        least sum of paths below its upper end. The interval that promises most is solved for that
        sum, which yields a path, and divided, until none promises less than the best path costs.
        """
        largest_s = self._values(np.maximum, self._behind, _AT_END, self.time_s)
        best, best_s = np.empty(0, dtype=np.int64), np.inf
        intervals = [(0.0, float(largest_s[self._starts].min(initial=np.inf)), np.inf)]
        while intervals:
            promise_s, low_s, high_s = heappop(intervals)
            if promise_s >= best_s * (1 - _TOLERANCE):
                break
            times_s = np.where(self.time_s <= high_s, self.time_s, np.inf)
            sums_s = self._values(np.add, self._behind, _AT_END, times_s)
            sum_s = float(sums_s[self._starts].min(initial=np.inf))
            if sum_s == np.inf:
                continue
            path = self._walk(times_s, sums_s)
            longest_s = float(self.time_s[path].max())
            if self._weight * longest_s + sum_s < best_s:
                best, best_s = path, self._weight * longest_s + sum_s
            high_s = float(np.nextafter(longest_s, 0.0))
            middle_s = (low_s + high_s) / 2
            for below_s, above_s in ((low_s, middle_s), (middle_s, high_s)):
                if below_s <= above_s:
                    heappush(intervals, (self._weight * below_s + sum_s, below_s, above_s))
        return best, best_s

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

    def _walk(self, time_s: FloatArray, sums_s: FloatArray) -> IntArray:
        node, path = int(self._starts[np.argmin(sums_s[self._starts])]), []
        while node:
            begin, end = np.searchsorted(self.edges.tail, [node, node + 1])
            reached = time_s[begin:end] + sums_s[self.edges.head[begin:end]]
            path.append(int(begin + np.argmin(reached)))
            node = int(self.edges.head[path[-1]])
        return np.array(path)


_AT_END = np.zeros(1, dtype=np.int64)


class _Pass:
    """Edges in the order in which a pass over levels reads them, by target and level."""

    def __init__(self, rank: IntArray, target: IntArray, source: IntArray) -> None:
        self.order = np.lexsort((target, rank))
        self.source = source[self.order]
        rank, target = rank[self.order], target[self.order]
        changes = np.flatnonzero(np.diff(target, prepend=-1))
        self.levels = []
        inner = (np.flatnonzero(np.diff(rank)) + 1).tolist()
        for begin, end in pairwise([0, *inner, len(rank)] if len(rank) else []):
            segments = changes[(changes >= begin) & (changes < end)]
            segments = np.union1d(segments, [begin])
            self.levels.append((begin, end, segments - begin, target[segments]))
