"""The best division of a model into stages that may differ in size: Aceso's space, exactly.

Enter at `divide`. Searched are the cuts, between any pieces; tensor and data parallel sizes of each
stage; the samples of a microbatch; and what is computed again (`recomputation`). The cost is
Aceso's: (m - 1) max t + sum t for m microbatches and stages of times t, each stage within memory
(`costs`). It leaves out all-reduces, the optimizer and waits of 1F1B (Aceso, EuroSys'24).

Stages are the edges of a graph (`graph`). They get a lower bound on their time first; edges
that no path can use that beats the best division known are dropped; the rest is solved exactly
where the best path needs it. A first division comes from coarse cuts. The result is exact in the
space to a part of 1e-9.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations

import numpy as np

from envpipe_megatron.core.arrays import FloatArray, IntArray
from envpipe_megatron.search.configuration import Configuration, Job, StageLayout
from envpipe_megatron.search.layer_profile import LayerProfile, Sizes
from envpipe_megatron.search.stages.costs import StageCosts
from envpipe_megatron.search.stages.edges import Stage, stage_edges
from envpipe_megatron.search.stages.graph import TOLERANCE, StageGraph
from envpipe_megatron.search.stages.options import StageOption, Switched
from envpipe_megatron.search.stages.recomputation import Recomputed

#: Cuts of the coarsest division, and how many times finer the next one is.
_COARSE_CUTS, _FINER = 48, 4
#: Stages are no smaller than makes so many of the job, which leaves jobs up to 64 GPUs all sizes.
_MOST_STAGES = 64


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
    stage_s: tuple[float, ...]


def divide(
    profile: LayerProfile,
    job: Job,
    batches: Sequence[int],
    *,
    cuts: Sequence[int] | None = None,
    same_size: bool = False,
    switch_s: SwitchTimes | None = None,
) -> Division | None:
    """The division with the least cost; None if none fits.

    Args:
        batches: samples of a microbatch over all data parallel ranks of a stage, to choose from.
        cuts: where stages may begin, as piece numbers; everywhere by default.
        same_size: whether all stages have the same sizes.
        switch_s: if given, a stage that recomputes nothing can change its sizes once.
    """
    search = _Search(profile, job)
    allowed = np.array(sorted({0, *(cuts or range(len(profile.pieces))), len(profile.pieces)}))
    levels = list(_coarse_to_fine(allowed, np.array(profile.block_edges)))
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
            times_s = switch_s(one.sizes, other.sizes)
            behind = Switched(other.sizes, other.data_parallel, other.costs, times_s)
            yield replace(one, switched=behind)


def _coarse_to_fine(cuts: IntArray, edges: IntArray) -> Iterator[IntArray]:
    """Some of the cuts between blocks, then more, then all cuts."""
    between = np.intersect1d(cuts, edges)
    step = 1
    while len(between) > step * _COARSE_CUTS:
        step *= _FINER
    while step > 1:
        yield np.union1d(between[::step], cuts[-1:])
        step //= _FINER
    if len(between) < len(cuts):
        yield between
    yield cuts


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
        return [
            StageOption(sizes, batch // sizes.microbatch_size, self._costs_at(sizes))
            for sizes in sorted(self._profile.measures)
            if batch % sizes.microbatch_size == 0
            and sizes.gpus <= self._job.gpus_per_node
            and sizes.gpus * batch // sizes.microbatch_size <= self._job.num_gpus
            and sizes.gpus * batch // sizes.microbatch_size * _MOST_STAGES >= self._job.num_gpus
        ]

    def improve(self, cuts: IntArray, batch: int, options: Sequence[StageOption]) -> None:
        """Find a division with these options that is better than the best, if there is one."""
        num_microbatches = self._job.global_batch // batch
        edges = stage_edges(self._job, cuts, options, self._best_s / num_microbatches)
        if edges is None:
            return
        graph = StageGraph(
            edges.tail,
            edges.head,
            edges.level,
            edges.outside_s + edges.again_s,
            edges.starts,
            num_microbatches - 1,
        )
        # Numbers of the edges that are left, and which of them have their true time.
        left, exact = np.arange(len(edges.tail)), edges.over_bytes <= 0
        kept = graph.time_s < graph.most_s(self._best_s * (1 - TOLERANCE))
        graph, left, exact = graph.kept(kept), left[kept], exact[kept]
        for number, option in enumerate(options):
            here = np.flatnonzero((edges.option[left] == number) & ~exact)
            if len(here):
                edge = left[here]
                again_s = option.costs.recompute_bound_s(
                    edges.first[edge], edges.end[edge], edges.over_bytes[edge], edges.level[edge]
                )
                graph.time_s[here] = edges.outside_s[edge] + again_s
        while True:
            most_s = graph.most_s(self._best_s * (1 - TOLERANCE))
            kept = graph.time_s < most_s
            graph, left, exact, most_s = graph.kept(kept), left[kept], exact[kept], most_s[kept]
            path = graph.best_path()
            if path is None or path.cost_s >= self._best_s * (1 - TOLERANCE):
                return
            on_path = np.array(path.edges)
            for edge in on_path[~exact[on_path]]:
                stage = edges.stage(left[edge])
                again = self._recompute(stage, options, most_s[edge] - stage.outside_s)
                graph.time_s[edge] = np.inf if again is None else stage.outside_s + again.time_s
            exact[on_path] = True
            self._offer([edges.stage(edge) for edge in left[on_path]], batch, options)

    @property
    def _best_s(self) -> float:
        return np.inf if self.best is None else self.best.time_s

    def _costs_at(self, sizes: Sizes) -> StageCosts:
        if sizes not in self._costs:
            memory_bytes = self._job.memory_bytes or np.inf
            self._costs[sizes] = StageCosts(self._profile, sizes, memory_bytes)
        return self._costs[sizes]

    def _recompute(
        self, stage: Stage, options: Sequence[StageOption], below_s: float
    ) -> Recomputed | None:
        """What the stage recomputes; None if that takes as much as some s, or cannot fit."""
        option = options[stage.option]
        if option.switched is not None:
            return Recomputed(0.0, (None,) * (stage.end - stage.first))
        key = (option.sizes, stage.first, stage.end, stage.level)
        if key not in self._solved and below_s > self._at_least_s.get(key, 0.0):
            again = option.costs.recompute(stage.first, stage.end, stage.level, below_s)
            if again is None:
                self._at_least_s[key] = below_s
            else:
                self._solved[key] = again
        return self._solved.get(key)

    def _offer(self, stages: Sequence[Stage], batch: int, options: Sequence[StageOption]) -> None:
        """Take a division for the best if it is."""
        agains = [self._recompute(stage, options, np.inf) for stage in stages]
        found = [again for again in agains if again is not None]
        if len(found) < len(stages):
            return
        stage_s = [
            stage.outside_s + again.time_s for stage, again in zip(stages, found, strict=True)
        ]
        num_microbatches = self._job.global_batch // batch
        time_s = (num_microbatches - 1) * max(stage_s) + sum(stage_s)
        self._found_s[batch] = min(self.promise_s(batch), time_s)
        if time_s < self._best_s:
            chosen = [options[stage.option] for stage in stages]
            layouts = [
                StageLayout(
                    ((stage.first, stage.end),), option.sizes, option.data_parallel, again.ways
                )
                for stage, option, again in zip(stages, chosen, found, strict=True)
            ]
            switches = [
                None
                if (behind := option.switched) is None
                else Switch(stage.switch, behind.sizes, behind.data_parallel)
                for stage, option in zip(stages, chosen, strict=True)
            ]
            configuration = Configuration(tuple(layouts), num_microbatches)
            self.best = Division(configuration, tuple(switches), time_s, tuple(stage_s))
