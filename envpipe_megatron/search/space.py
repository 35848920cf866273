"""Megatron's space: whole layers, and one tensor, context, data and expert size for all stages.

Everything that Megatron runs is a shape (sizes, stages, virtual stages, recomputation) and a cut.
For each shape the best cut is found: exactly without virtual stages, by `cuts`. With virtual
stages, of whose slots stage s has every p-th from s on, even slots come from the same graph; then
single pieces move between slots as long as that shortens an estimate, which need not end at the
best cut. Shapes come with a bound, so that those that cannot be among the best are passed over.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
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
    Shape,
    StageLayout,
    parameter_bytes,
    recomputed_at_most,
)
from envpipe_megatron.search.cuts import ShapeCuts
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
        held, shared = self.pieces(shape), self.space.distributed_optimizer
        return parameter_bytes(self.profile, shape, held, distributed_optimizer=shared)

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
        slots: Sequence[int] | IntArray,
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
        self, shape: Shape, slots: Sequence[int] | IntArray, stage: int, recomputed: Recomputed
    ) -> StageLayout:
        starts = range(stage, len(slots) - 1, shape.num_stages)
        chunks = tuple((int(slots[slot]), int(slots[slot + 1])) for slot in starts)
        least = recomputed_at_most(self.pieces(shape), chunks, recomputed)
        return StageLayout(chunks, shape.sizes, shape.data_parallel, least)

    def _plain(self, shape: Shape, within_s: float) -> Candidate | None:
        best, best_s, count = None, math.inf, self.pieces(shape).num_pieces
        for everywhere in self._everywhere(shape):
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

    def alike(self, candidate: Candidate) -> Recomputed | None:
        """Return what all stages recompute in a candidate; None where each does as it must."""
        if not self.space.same_recomputation:
            return None
        stages = candidate.configuration.stages
        name, count = max((stage.recomputed for stage in stages), key=lambda each: each[1])
        return name, count if name == FULL else len(self.profile.pieces)

    def _everywhere(self, shape: Shape) -> Iterator[Recomputed | None]:
        """List what all stages can recompute by Megatron's own flags; None: each its own.

        `full` of some pieces, or `selective` of all.
        """
        if not self.space.same_recomputation:
            yield None
            return
        for name, way in self.pieces(shape).ways.items():
            layers = int(way.known[-1])
            yield from ((name, count) for count in range(1 if name == FULL else layers, layers + 1))

    def _in_chunks(self, shape: Shape) -> Candidate | None:
        """Return even slots that recompute as little as fits; None if nothing does."""
        pieces, cuts = self.pieces(shape), []
        slots = _even_slots(pieces, shape)
        for name in pieces.ways:
            fewest = self._fewest(shape, slots, name)
            if self.space.same_recomputation:
                fewest[:] = fewest.max() if name == FULL else pieces.num_pieces
            cuts.append(self.candidate(shape, slots, [(name, count) for count in fewest]))
        if not self.space.same_recomputation:
            fits = [cut.peak_bytes <= self.job.limit_bytes for cut in cuts]
            times_s = np.where(fits, [_times_s(cut).sum(axis=0) for cut in cuts], np.inf)
            layouts, least = [cut.configuration.stages for cut in cuts], times_s.argmin(axis=0)
            best = [layouts[at][stage].recomputed for stage, at in enumerate(least)]
            cuts = [self.candidate(shape, slots, best)]
        fitting = [
            replace(cut, bound_s=_forced_s(cut))
            for cut in cuts
            if (cut.peak_bytes <= self.job.limit_bytes).all()
        ]
        return min(fitting, key=lambda cut: cut.bound_s, default=None)

    def _fewest(self, shape: Shape, slots: IntArray, name: str | None) -> IntArray:
        """Return [num_stages] how few pieces of each chunk must be recomputed; all if too few."""
        most = int(min(np.diff(slots).max(), self.pieces(shape).ways[name].known[-1]))
        fewest, enough = np.zeros(shape.num_stages, int), np.full(shape.num_stages, most)
        while (fewest < enough).any():
            tried = (fewest + enough) // 2
            cut = self.candidate(shape, slots, [(name, count) for count in tried])
            fits = cut.peak_bytes <= self.job.limit_bytes
            fewest, enough = np.where(fits, fewest, tried + 1), np.where(fits, tried, enough)
        return fewest

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


def _even_slots(pieces: Pieces, shape: Shape) -> IntArray:
    """Return [slots + 1] the first piece of each slot, and their number.

    A microbatch of each stage takes as long as the longest stage at least, and where stages run the
    same chunk at the same time, as long as the longest slots of all chunks. From even slots on
    single pieces move as long as the sum of both falls.
    """
    chunks, stages = shape.num_chunks, shape.num_stages
    slots = chunks * stages
    # Slots that are filled one after another exceed their share by less than a piece.
    longest_s = pieces.time_s[-1] / slots + np.diff(pieces.time_s).max()
    runs = runs_within(pieces, np.arange(pieces.num_pieces + 1), slots, longest_s / BETTER)
    weights = [np.where(each.inside, each.time_s**2, np.inf) for each in runs]
    _, cut = least_path(runs, weights, largest=False)
    behind = (np.arange(slots + 1) > np.arange(slots)[:, None]).astype(int)

    def estimate_s(slot_s: FloatArray) -> FloatArray:
        both_s: FloatArray = slot_s.sum(axis=-2).max(axis=-1) + slot_s.max(axis=-1).sum(axis=-1)
        return both_s

    while True:
        slot_s = np.diff(pieces.time_s[cut]).reshape(chunks, stages)
        longest = np.arange(chunks) * stages + slot_s.argmax(axis=1)
        moved = (cut + behind - behind[longest, None]).reshape(-1, slots + 1)
        moved = moved[(np.diff(moved) > 0).all(axis=1)]
        moved_s = estimate_s(np.diff(pieces.time_s[moved]).reshape(-1, chunks, stages))
        if moved_s.min() >= estimate_s(slot_s) * BETTER:
            return cut
        cut = moved[moved_s.argmin()]


def _times_s(cut: Candidate) -> FloatArray:
    """Return [num_chunks, num_stages] of a microbatch forward and backward."""
    return np.array([(work.forward_s + work.backward_s)[:, 0] for work in cut.measured_works]).T


def _forced_s(cut: Candidate) -> float:
    """Return the least time (s) that a stage forces.

    All its microbatches, and the way of the first one there and of the last one back through the
    slots before it.
    """
    times_s = _times_s(cut)
    ahead_s = np.cumsum(times_s[0]) - times_s[0]
    return float((cut.configuration.num_microbatches * times_s.sum(axis=0) + ahead_s).max())
