"""The best division of a model into stages that may differ in size: Aceso's space, exactly.

Enter at `divide`. Searched are the cuts, between any pieces; tensor and data parallel sizes of each
stage; the samples of a microbatch; and what is computed again (`recomputation`). The cost is
Aceso's: (m - 1) max t + sum t for m microbatches and stages of times t, each stage within memory
(`costs`). It leaves out all-reduces, the optimizer and waits of 1F1B (Aceso, EuroSys'24). There are
sixteen stages at most, each with a sixteenth of the GPUs or more. Where times of changing sizes are
given, a stage can also run its last pieces at other sizes, on as many GPUs, if it recomputes
nothing.

Stages are the edges of a graph (`graph`). They get a lower bound on their time first; edges that no
path can use that beats the best division known are dropped; the rest is solved exactly where the
best path needs it. A first division comes from coarse cuts. The result is exact in the space to a
part of 1e-9.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations

import numpy as np

from benchmarks.search.aceso_space.costs import StageCosts
from benchmarks.search.aceso_space.edges import Stage, stage_edges
from benchmarks.search.aceso_space.graph import TOLERANCE, StageGraph
from benchmarks.search.aceso_space.options import StageOption, Switched
from benchmarks.search.aceso_space.recomputation import Recomputed
from envpipe_megatron.core.arrays import FloatArray, IntArray
from envpipe_megatron.search.configuration import Configuration, Job, StageLayout
from envpipe_megatron.search.layer_profile import LayerProfile, Sizes

#: Cuts of the coarsest division, and how many times finer the next one is.
_COARSE_CUTS, _FINER = 48, 4
#: Stages that a job is divided into at most, as in Aceso, and so no stage is a smaller part of it.
_MOST_STAGES = 16

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
        job, options = self._job, []
        for sizes in sorted(self._profile.measures):
            data_parallel, rest = divmod(batch, sizes.microbatch_size)
            num_gpus = sizes.gpus * data_parallel
            fits = job.num_gpus / _MOST_STAGES <= num_gpus <= job.num_gpus
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
        edges = stage_edges(self._job, cuts, options, limit_s)
        if edges is None:
            return
        graph = StageGraph(
            edges.tail,
            edges.head,
            edges.level,
            edges.outside_s + edges.again_s,
            edges.starts,
            weight,
        )
        # Numbers of the edges that are left, and which of them have their true time.
        left, exact = np.arange(len(edges.tail)), edges.over_bytes <= 0
        kept = graph.time_s < graph.most_s(self._least_gain_s)
        graph, left, exact = graph.kept(kept), left[kept], exact[kept]
        inexact = np.flatnonzero(~exact)
        graph.time_s[inexact] = edges.bounds_s(left[inexact], options)
        while True:
            most_s = graph.most_s(self._least_gain_s)
            kept = graph.time_s < most_s
            graph, left, exact, most_s = graph.kept(kept), left[kept], exact[kept], most_s[kept]
            path = graph.best_path()
            if path is None or path.cost_s >= self._least_gain_s:
                return
            on_path = np.array(path.edges)
            stages = [edges.stage(edge) for edge in left[on_path]]
            agains = []
            for edge, stage in zip(on_path, stages, strict=True):
                again = self._recompute(stage, options, most_s[edge] - stage.outside_s)
                if again is None:
                    graph.time_s[edge] = np.inf
                else:
                    graph.time_s[edge] = stage.outside_s + again.time_s
                    agains.append(again)
            exact[on_path] = True
            if len(agains) == len(stages):
                self._offer(batch, stages, [options[stage.option] for stage in stages], agains)

    @property
    def _best_s(self) -> float:
        return np.inf if self.best is None else self.best.time_s

    @property
    def _least_gain_s(self) -> float:
        """Below which a division is better than the best."""
        return self._best_s * (1 - TOLERANCE)

    def _costs_at(self, sizes: Sizes) -> StageCosts:
        if sizes not in self._costs:
            memory_bytes = self._job.memory_bytes
            limit_bytes = np.inf if memory_bytes is None else memory_bytes
            self._costs[sizes] = StageCosts(self._profile, sizes, limit_bytes)
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

    def _offer(
        self,
        batch: int,
        stages: Sequence[Stage],
        options: Sequence[StageOption],
        agains: Sequence[Recomputed],
    ) -> None:
        """Take a division, with the option and the recomputation of each stage, if it is best."""
        num_microbatches = self._job.global_batch // batch
        stage_s = [s.outside_s + again.time_s for s, again in zip(stages, agains, strict=True)]
        time_s = (num_microbatches - 1) * max(stage_s) + sum(stage_s)
        self._found_s[batch] = min(self.promise_s(batch), time_s)
        if time_s >= self._best_s:
            return
        layouts = tuple(
            StageLayout(((stage.first, stage.end),), option.sizes, option.data_parallel, again.ways)
            for stage, option, again in zip(stages, options, agains, strict=True)
        )
        switches = tuple(
            None if other is None else Switch(stage.switch, other.sizes, other.data_parallel)
            for stage, other in zip(stages, (each.switched for each in options), strict=True)
        )
        self.best = Division(Configuration(layouts, num_microbatches), switches, time_s)
