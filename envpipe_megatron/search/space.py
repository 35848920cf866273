"""Megatron's space: whole layers, and one tensor, context, data and expert size for all stages.

Everything that Megatron runs is a shape (sizes, stages, virtual stages, recomputation) and a cut.
For each shape the best cut is found: exactly without virtual stages, by `cuts`. With virtual
stages, of whose slots stage s has every p-th from s on, the evenest slots come from the same graph;
then single pieces move between slots as long as that shortens the estimate, which need not end at
the best cut. Shapes come with a bound, so that those that cannot be among the best are passed over.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from envpipe_megatron.core.arrays import FloatArray, IntArray
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.search.candidates import Candidate
from envpipe_megatron.search.configuration import (
    Configuration,
    Job,
    Recomputed,
    StageLayout,
    parameter_bytes,
    stage_peak_bytes,
    stage_work,
)
from envpipe_megatron.search.cuts import Shape, ShapeCuts
from envpipe_megatron.search.layer_profile import EMBEDDING, FULL, LOSS, LayerProfile, Pieces
from envpipe_megatron.search.runs import BETTER, least_path, runs_within

#: A larger batch is a mistake, and its microbatches would fill the memory.
_MOST_SAMPLES = 10**9
#: With more pieces a coarse cut is found first: no stage of a better one takes longer for all
#: microbatches.
_COARSE_NODES = 96


@dataclass(frozen=True)
class Space:
    """Limits of the search.

    Args:
        max_chunks: virtual stages of a stage at most; 1 for none.
        distributed_optimizer: whether data parallel ranks share the optimizer's state.
        same_recomputation: all stages recompute alike, as Megatron does by itself: no layer, each
            a part (`selective`), or equally many `full`; else each as its own memory asks for.
    """

    max_chunks: int = 1
    distributed_optimizer: bool = True
    same_recomputation: bool = False


class MegatronSpace:
    """All configurations of a job that Megatron can run, by shape.

    EnvPipeError: a profile whose layers are in parts.
    """

    def __init__(self, profile: LayerProfile, job: Job, space: Space) -> None:
        if any(len(block.pieces) > 1 for block in profile.blocks):
            raise EnvPipeError(
                "The layer profile lists parts of layers, and Megatron's stages have whole ones",
                remedy="Fold each block into one piece first.",
            )
        self.profile, self.job, self.space = profile, job, space

    @cached_property
    def shapes(self) -> tuple[Shape, ...]:
        """Every shape, the one with the lowest bound first.

        EnvPipeError: a profile that does not begin with the embedding and end with the loss; a
        batch that is too large, or that no shape divides.
        """
        ends = self.profile.pieces[0], self.profile.pieces[-1]
        if ends != (EMBEDDING, LOSS) or {*ends} & {*self.profile.pieces[1:-1]}:
            raise EnvPipeError(
                f"A model of Megatron's begins with one '{EMBEDDING}' and ends with one '{LOSS}', "
                "and the pieces of the layer profile do not",
                value=self.profile.pieces,
                remedy="Give these two pieces blocks of their own, and measures.",
            )
        if self.job.global_batch > _MOST_SAMPLES:
            raise EnvPipeError(
                f"The batch has more than {_MOST_SAMPLES:,} samples",
                value=self.job.global_batch,
                remedy="Correct --global-batch.",
            )
        found = tuple(self._shapes())
        if not found:
            raise EnvPipeError(
                f"No sizes in the layer profile fit {self.job.num_gpus} GPUs and a batch of "
                f"{self.job.global_batch}",
                value=sorted(self.profile.measures),
                remedy="The GPUs must be tensor x context x data parallel x stages, the batch a "
                "multiple of data parallel x microbatch size, and data x context parallel one of "
                "expert parallel.",
            )
        return tuple(sorted(found, key=self.bound_s))

    def bound_s(self, shape: Shape) -> float:
        """Return a time that no cut of a shape takes less than, however memory is.

        With stages that take ever less, so that the time that each forces is the same: M times its
        own and once that of all before it.
        """
        all_s = float(self.pieces(shape).time_s[-1])
        if shape.num_chunks > 1:
            return shape.num_microbatches * all_s / shape.num_stages
        return all_s / (1 - (1 - 1 / shape.num_microbatches) ** shape.num_stages)

    def pieces(self, shape: Shape) -> Pieces:
        """Return what pieces take at a shape's sizes."""
        return self.profile.sums(shape.sizes)

    def static_bytes(self, shape: Shape) -> FloatArray:
        """Return [n + 1] running sums of what a GPU holds for pieces' parameters."""
        pieces = self.pieces(shape)
        return parameter_bytes(
            self.profile,
            shape.sizes,
            shape.data_parallel,
            pieces.parameters,
            pieces.expert_parameters,
            distributed_optimizer=self.space.distributed_optimizer,
        )

    def cuts(
        self,
        shape: Shape,
        everywhere: Recomputed | None = None,
        within_s: float = math.inf,
        nodes: IntArray | None = None,
    ) -> ShapeCuts:
        """Return all cuts of a shape without virtual stages; arguments as `ShapeCuts` has them."""
        given = self.pieces(shape), shape, self.job, self.static_bytes(shape)
        return ShapeCuts(*given, everywhere, within_s, nodes)

    def best_cut(self, shape: Shape, within_s: float = math.inf) -> Candidate | None:
        """Return the best cut of a shape; None if nothing fits, or all take longer than that."""
        return self._plain(shape, within_s) if shape.num_chunks == 1 else self._in_chunks(shape)

    def candidate(
        self,
        shape: Shape,
        slots: Sequence[int],
        recomputed: Sequence[Recomputed],
        bound_s: float = 0.0,
    ) -> Candidate:
        """Return a shape with its cut.

        Args:
            slots: the first piece of each slot, and the number of pieces; slot i is of stage i mod
                p.
            recomputed: by each stage, of the pieces of each of its chunks that know it.
            bound_s: as `Candidate` has it.
        """
        stages = tuple(
            self._layout(shape, slots, stage, each) for stage, each in enumerate(recomputed)
        )
        shared = self.space.distributed_optimizer
        configuration = Configuration(stages, shape.num_microbatches, shared)
        return Candidate(configuration, self.profile, self.job, bound_s)

    def _layout(
        self, shape: Shape, slots: Sequence[int], stage: int, recomputed: Recomputed
    ) -> StageLayout:
        starts = range(stage, len(slots) - 1, shape.num_stages)
        chunks = tuple((int(slots[slot]), int(slots[slot + 1])) for slot in starts)
        name, count = recomputed
        if name is not None:
            known = self.pieces(shape).ways[name].known
            count = min(count, int(max(known[end] - known[first] for first, end in chunks)))
        return StageLayout(
            chunks, shape.sizes, shape.data_parallel, (name, count) if count else (None, 0)
        )

    def _plain(self, shape: Shape, within_s: float) -> Candidate | None:
        best, best_s, count = None, math.inf, self.pieces(shape).num_pieces
        if count < shape.num_stages:
            return None
        for everywhere in self._everywhere(shape):
            if everywhere is not None and self._bound_with(shape, everywhere) > best_s:
                continue
            least_s = min(within_s, best_s)
            if count > _COARSE_NODES:
                step = -(-count // _COARSE_NODES)
                nodes = np.unique([*range(0, count, step), 1, count - 1, count])
                coarse = self.cuts(shape, everywhere, nodes=nodes)
                least_s = min(least_s, coarse.fastest()[0])
            cuts = self.cuts(shape, everywhere, least_s)
            bound_s, path = cuts.fastest()
            if bound_s < best_s:
                best_s, best = bound_s, self.candidate(shape, path, cuts.recomputed(path), bound_s)
        return best

    def _everywhere(self, shape: Shape) -> Iterator[Recomputed | None]:
        """List what all stages can recompute in Megatron's own ways; None: each its own."""
        if not self.space.same_recomputation:
            yield None
            return
        yield None, 0
        for name, way in self.pieces(shape).ways.items():
            layers = int(way.known[-1])
            yield from ((name, count) for count in range(1 if name == FULL else layers, layers + 1))

    def _bound_with(self, shape: Shape, everywhere: Recomputed) -> float:
        """Return a bound on the time of cuts whose stages recompute this many pieces, or all."""
        name, count = everywhere
        if name is None:
            return 0.0
        pieces = self.pieces(shape)
        way = pieces.ways[name]
        again_s = np.diff(way.again_s)[way.can_be]
        all_s = pieces.time_s[-1] + min(count * shape.num_stages, len(again_s)) * again_s.min()
        return float(shape.num_microbatches * all_s / shape.num_stages)

    def _in_chunks(self, shape: Shape) -> Candidate | None:
        slots = _spread(self.pieces(shape), shape)
        if slots is None:
            return None
        most, stages = int(np.diff(slots).max()), range(shape.num_stages)
        ways = self.pieces(shape).ways if self.job.memory_bytes is not None else ()
        fewest = {
            name: [self._fewest(shape, slots, stage, name, most) for stage in stages]
            for name in ways
        }
        if self.space.same_recomputation:
            options = [(name, max(n) if name == FULL else most) for name, n in fewest.items()]
            tried = [[option for _ in stages] for option in [(None, 0), *options]]
        else:
            by_stage = [[(None, 0), *((name, n[s]) for name, n in fewest.items())] for s in stages]
            chosen = [self._least_of_stage(shape, slots, s, by_stage[s]) for s in stages]
            known = [each for each in chosen if each is not None]
            tried = [known] if len(known) == len(chosen) else []
        cuts = (self._cut_in_chunks(shape, slots, each) for each in tried)
        fitting = [cut for cut in cuts if cut is not None]
        return min(fitting, key=lambda cut: cut.bound_s, default=None)

    def _cut_in_chunks(
        self, shape: Shape, slots: IntArray, recomputed: Sequence[Recomputed]
    ) -> Candidate | None:
        found = self.candidate(shape, slots.tolist(), recomputed)
        if (found.peak_bytes > self._limit_bytes).any():
            return None
        works = found.measured_works
        times_s = np.array([work.time_s for work in works])
        first_s = np.array([work.forward_s[0, 0] + work.backward_s[0, 0] for work in works])
        ahead_s = np.cumsum(first_s) - first_s
        return replace(found, bound_s=float((shape.num_microbatches * times_s + ahead_s).max()))

    def _least_of_stage(
        self, shape: Shape, slots: IntArray, stage: int, options: Iterable[Recomputed]
    ) -> Recomputed | None:
        """Return which option takes a stage the least time of what fits; None if nothing does."""
        found = [(*self._time_and_peak(shape, slots, stage, each), each) for each in options]
        fitting = [(time_s, each) for time_s, peak, each in found if peak <= self._limit_bytes]
        return min(fitting, key=lambda each: each[0])[1] if fitting else None

    def _fewest(self, shape: Shape, slots: IntArray, stage: int, name: str, most: int) -> int:
        """Return the fewest pieces of each chunk that a stage must recompute; all: too few."""

        def fits(count: int) -> bool:
            _, peak = self._time_and_peak(shape, slots, stage, (name, count))
            return peak <= self._limit_bytes

        return bisect_left(range(most), True, key=fits)

    def _time_and_peak(
        self, shape: Shape, slots: IntArray, stage: int, option: Recomputed
    ) -> tuple[float, float]:
        """Return the time (s) of a microbatch and peak (bytes) of a stage that recomputes so."""
        layout = self._layout(shape, slots.tolist(), stage, option)
        work = stage_work(self.profile, layout)
        found = Configuration(  # of the other stages, how many there are is all that counts
            (layout,) * shape.num_stages, shape.num_microbatches, self.space.distributed_optimizer
        )
        return work.time_s, stage_peak_bytes(self.profile, found, stage, work)

    @property
    def _limit_bytes(self) -> float:
        return math.inf if self.job.memory_bytes is None else self.job.memory_bytes

    def _shapes(self) -> Iterator[Shape]:
        job, pieces = self.job, len(self.profile.pieces)
        for sizes in self.profile.measures:
            groups, left = divmod(job.num_gpus, sizes.gpus)
            if left:
                continue
            for stages in range(1, min(groups, pieces) + 1):
                replicas, left = divmod(groups, stages)
                samples = replicas * sizes.microbatch_size
                if left or job.global_batch % samples:
                    continue
                if (replicas * sizes.context_parallel) % sizes.expert_parallel:
                    continue
                plain = Shape(sizes, stages, replicas, 1, job.global_batch // samples)
                yield from self._with_chunks(plain)

    def _with_chunks(self, shape: Shape) -> Iterator[Shape]:
        yield shape
        if shape.num_stages == 1 or shape.num_microbatches % shape.num_stages:
            return  # Megatron wants whole groups of microbatches
        for chunks in range(2, self.space.max_chunks + 1):
            if shape.num_stages * chunks <= len(self.profile.pieces):
                yield replace(shape, num_chunks=chunks)


def shape_of(configuration: Configuration) -> Shape:
    """Return the shape that a configuration is a cut of."""
    first = configuration.stages[0]
    return Shape(
        first.sizes,
        len(configuration.stages),
        first.data_parallel,
        configuration.num_chunks,
        configuration.num_microbatches,
    )


def _spread(pieces: Pieces, shape: Shape) -> IntArray | None:
    """Return [slots + 1] the first piece of each slot, and their number; None: too few pieces."""
    slots = shape.num_stages * shape.num_chunks
    if pieces.num_pieces < slots:
        return None
    # Slots that are filled one after another exceed their share by less than a piece.
    longest_s = pieces.time_s[-1] / slots + np.diff(pieces.time_s).max()
    runs = runs_within(pieces, np.arange(pieces.num_pieces + 1), slots, longest_s / BETTER)
    weights = [np.where(each.inside, each.time_s, np.inf) for each in runs]
    _, cut = least_path(runs, weights, largest=True)
    return _with_moves(pieces, shape, cut)


def _with_moves(pieces: Pieces, shape: Shape, cut: IntArray) -> IntArray:
    """Return the cut after the best moves out of the stage that forces the most."""
    value = float(_chunks_forced_s(pieces, shape, cut[None]).max())
    while True:
        worst = int(_chunks_forced_s(pieces, shape, cut[None])[0].argmax())
        moved = np.array(list(_moves(cut, range(worst, len(cut) - 1, shape.num_stages))))
        if not len(moved):
            return cut
        values = _chunks_forced_s(pieces, shape, moved).max(axis=1)
        best = int(values.argmin())
        if values[best] >= value * BETTER:
            return cut
        cut, value = moved[best], float(values[best])


def _moves(cut: IntArray, slots: Iterable[int]) -> Iterator[IntArray]:
    """Yield cuts in which one of some slots has one piece less, and another slot one more."""
    for slot in slots:
        if cut[slot + 1] - cut[slot] == 1:
            continue
        for other in range(len(cut) - 1):
            moved = cut.copy()
            if other < slot:
                moved[other + 1 : slot + 1] += 1
            elif other > slot:
                moved[slot + 1 : other + 1] -= 1
            else:
                continue
            yield moved


def _chunks_forced_s(pieces: Pieces, shape: Shape, cuts: IntArray) -> FloatArray:
    """Return [num_cuts, num_stages] the least time (s) that each stage forces.

    All its microbatches, and the way of the first one there and of the last one back through the
    slots before it.
    """
    slot_s = np.diff(pieces.time_s[cuts], axis=1)
    by_chunk = slot_s.reshape(len(cuts), shape.num_chunks, shape.num_stages)
    ahead_s = np.cumsum(by_chunk[:, 0], axis=1) - by_chunk[:, 0]
    forced_s: FloatArray = shape.num_microbatches * by_chunk.sum(axis=1) + ahead_s
    return forced_s
