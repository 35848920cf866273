"""The cut of a model into stages that takes the least time, by dynamic programming.

A stage is a run of pieces. Its time, memory and least recomputation depend on the run and on the
stage's place alone, so the best cut is a path: with `t` a stage's time for a microbatch, 1F1B of M
microbatches takes `(M - 1) max t + sum t` at least, and as much where stages are even (Narayanan et
al., SC'21, section 2.1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import ArrayLike

from envpipe_megatron.core.arrays import BoolArray, FloatArray, IntArray
from envpipe_megatron.search.configuration import Job
from envpipe_megatron.search.layer_profile import LayerProfile, Measure, Sizes
from envpipe_megatron.search.megatron.work import workspace_bytes

#: A cut must be better by more than rounding.
_BETTER = 1 - 1e-12
#: With more pieces a coarse cut is found first, which says how long a stage can be at most.
_COARSE_NODES = 96

#: The name of a recomputation, and of how many of the first pieces that know it.
Recomputed = tuple[str | None, int]


@dataclass(frozen=True)
class Shape:
    """A configuration but for its cut and recomputation: all stages have the same sizes."""

    sizes: Sizes
    num_stages: int
    data_parallel: int
    num_chunks: int
    num_microbatches: int


@dataclass(frozen=True)
class Way:
    """What recomputing does: running sums [n + 1] over pieces; `working_bytes` [n] of each."""

    again_s: FloatArray
    saved_bytes: FloatArray
    working_bytes: FloatArray

    @cached_property
    def known(self) -> FloatArray:
        """[n + 1] how many pieces so far can be recomputed."""
        return running(np.diff(self.again_s) > 0)


class Pieces:
    """Running sums over a model's pieces at some sizes, [n + 1], and what single ones need, [n].

    `ways` are those of recomputation; the sums are without.
    """

    def __init__(self, profile: LayerProfile, sizes: Sizes) -> None:
        self.profile = profile
        measures = profile.at(sizes)
        by_piece = [measures[piece] for piece in profile.pieces]
        self.time_s = running([m.forward_s[0] + m.backward_s[0] for m in by_piece])
        self.kept_bytes = running([m.activation_bytes for m in by_piece])
        self.parameters = running([m.parameters for m in by_piece])
        self.input_bytes = np.array([0.0, *(m.input_bytes for m in by_piece[1:])])
        self.forward_bytes = np.array([m.forward_workspace_bytes for m in by_piece])
        self.backward_bytes = np.array([m.backward_workspace_bytes for m in by_piece])
        names = dict.fromkeys(way.name for m in by_piece for way in m.recomputation)
        self.ways = {name: _way(by_piece, name) for name in names}

    @property
    def num_pieces(self) -> int:
        """Pieces of the model, n."""
        return len(self.time_s) - 1


class Runs:
    """Runs of pieces from some nodes to others: arrays are [nodes, width].

    Column k of a node's row is the run from there to the k-th node behind it; `inside` says whether
    there is one.

    Args:
        nodes: pieces at which stages may begin, from 0, and the number of pieces.
        width: of how many nodes a stage consists at most.
    """

    def __init__(self, pieces: Pieces, nodes: IntArray, width: int) -> None:
        self.pieces, self.nodes = pieces, nodes
        index = np.arange(len(nodes))[:, None] + np.arange(1, width + 1)
        self.inside: BoolArray = index < len(nodes)
        self.first, self.end = nodes[:, None], nodes[np.minimum(index, len(nodes) - 1)]

    def sums(self, running_sums: FloatArray) -> FloatArray:
        """What each run has of a value."""
        sums: FloatArray = running_sums[self.end] - running_sums[self.first]
        return sums

    def largest(self, values: FloatArray) -> FloatArray:
        """The largest of a value in each run."""
        if not values.any():
            return np.zeros(self.end.shape)
        by_node = np.maximum.reduceat(values, self.nodes[:-1])
        width = self.end.shape[1]
        windows = sliding_window_view(np.pad(by_node, (0, width)), width)
        largest: FloatArray = np.maximum.accumulate(windows, axis=1)
        return largest

    @cached_property
    def time_s(self) -> FloatArray:
        """Forward and backward, with nothing recomputed."""
        return self.sums(self.pieces.time_s)

    @cached_property
    def held_bytes(self) -> FloatArray:
        """For each microbatch in flight, with nothing recomputed."""
        inputs = np.append(self.pieces.input_bytes, 0.0)[self.first]
        return self.sums(self.pieces.kept_bytes) + inputs

    @cached_property
    def parameters(self) -> FloatArray:
        """That one GPU holds."""
        return self.sums(self.pieces.parameters)

    def beside_bytes(self, way: Way | None) -> FloatArray:
        """Workspace at the peak, with a layer that is recomputed in it."""
        pieces = self.pieces
        return workspace_bytes(
            pieces.profile,
            self.largest(pieces.forward_bytes),
            self.largest(pieces.backward_bytes),
            0.0 if way is None else self.largest(way.working_bytes),
            self.parameters,
        )

    @cached_property
    def _beside(self) -> dict[str | None, FloatArray]:
        beside: dict[str | None, FloatArray] = {None: self.beside_bytes(None)}
        for name, way in self.pieces.ways.items():
            beside[name] = self.beside_bytes(way)
        return beside

    def excess_bytes(
        self, name: str | None, limit_bytes: float | None, in_flight: int, each_bytes: float
    ) -> FloatArray:
        """By how much each run exceeds its memory, before anything is saved by recomputing."""
        if limit_bytes is None:
            return np.full(self.end.shape, -math.inf)
        held = self.parameters * each_bytes + in_flight * self.held_bytes
        return held + self._beside[name] - limit_bytes

    def recomputed_until(
        self, way: Way, excess_bytes: FloatArray, in_flight: int, layers: int | None
    ) -> IntArray:
        """The piece up to which each run recomputes; behind its end if it cannot fit.

        As little as memory allows, or the first `layers` that can be recomputed.
        """
        saved = way.saved_bytes
        if layers is None:
            wanted = saved[self.first] + np.maximum(excess_bytes, 0.0) / in_flight
            return np.searchsorted(saved, wanted * _BETTER, side="left")
        until = np.searchsorted(way.known, way.known[self.first] + layers, side="left")
        until = np.maximum(np.minimum(until, self.end), self.first)  # n + 1: not so many
        left = excess_bytes - in_flight * (saved[until] - saved[self.first])
        return np.where(left <= 0, until, self.pieces.num_pieces + 1)


@dataclass(frozen=True)
class BestCut:
    """Time (s) by the formula, infinite if nothing fits; the cut, and what each stage recomputes.

    `cut` lists the first piece of each stage, and the number of pieces.
    """

    time_s: float = math.inf
    cut: tuple[int, ...] = ()
    recomputed: tuple[Recomputed, ...] = ()


def best_cut(
    pieces: Pieces,
    shape: Shape,
    job: Job,
    each_bytes: float,
    within_s: float = math.inf,
    everywhere: Recomputed | None = None,
) -> BestCut:
    """The cut of a shape without virtual stages that takes the least time; exact.

    Args:
        each_bytes: held for each parameter.
        within_s: a cut that takes longer need not be found.
        everywhere: what each stage recomputes; by default each as little as its memory allows, in
            the way that takes it the least time.

    Many pieces are cut coarsely first: a better cut has no stage longer than what is left of the
    coarse one's time when all else takes the least.
    """
    count = pieces.num_pieces
    if count < shape.num_stages:
        return BestCut()
    given = shape, job, each_bytes, everywhere
    if count > _COARSE_NODES:
        step = -(-count // _COARSE_NODES)
        coarse = np.unique([*range(0, count, step), 1, count - 1, count])
        within_s = min(within_s, _best(Runs(pieces, coarse, len(coarse) - 1), *given).time_s)
    width, times = count, shape.num_microbatches - 1
    if math.isfinite(within_s) and times:
        longest_s = (within_s - pieces.time_s[-1]) / times * (2 - _BETTER)
        ends = np.searchsorted(pieces.time_s, pieces.time_s + longest_s, side="right") - 1
        width = int((ends - np.arange(count + 1)).max())
    return _best(Runs(pieces, np.arange(count + 1), width), *given) if width > 0 else BestCut()


def least_path(weight: Sequence[FloatArray], *, largest: bool) -> tuple[float, IntArray]:
    """The path whose largest run, or whose sum of runs, is least.

    Args:
        weight: for each stage, [nodes, width] as in `Runs`, infinite where there is no run.

    Returns that value, infinite if there is no path, and [num_stages + 1] the nodes.
    """
    nodes, width = weight[0].shape
    combine = np.maximum if largest else np.add
    best = np.full(nodes, np.inf)
    best[-1] = -np.inf if largest else 0.0
    choices = []
    for of_stage in reversed(weight):
        behind = sliding_window_view(np.pad(best[1:], (0, width), constant_values=np.inf), width)
        through = combine(of_stage, behind)
        choices.append(through.argmin(axis=1))
        best = through[np.arange(nodes), choices[-1]]
    path = [0]
    for choice in reversed(choices):
        path.append(min(nodes - 1, path[-1] + 1 + int(choice[path[-1]])))
    return float(best[0]), np.array(path)


def least_time(weight: Sequence[FloatArray], num_microbatches: int) -> tuple[float, IntArray]:
    """The path with the least `(M - 1) max + sum` of its runs; exact.

    The least largest run bounds the first term, the least sum the second; so only caps on runs
    within a narrow window can lead to less, and each solution's largest run is the next cap.
    """
    times = num_microbatches - 1
    bottleneck, path = least_path(weight, largest=True)
    if not math.isfinite(bottleneck):
        return math.inf, path
    value, path = _capped(weight, bottleneck * (2 - _BETTER), times)
    least_sum, _ = least_path(weight, largest=False)
    cap = (value - least_sum) / times if times else math.inf
    while cap >= bottleneck:
        candidate_value, candidate = _capped(weight, cap, times)
        largest = float(_along(weight, candidate).max())
        if times * (bottleneck - largest) + candidate_value >= value * _BETTER:
            break
        if candidate_value < value * _BETTER:
            value, path = candidate_value, candidate
        cap = largest * _BETTER
    return value, path


def running(values: ArrayLike) -> FloatArray:
    """[n + 1] running sums that begin with nothing."""
    return np.concatenate([[0.0], np.cumsum(values)])


def _best(
    runs: Runs, shape: Shape, job: Job, each_bytes: float, everywhere: Recomputed | None
) -> BestCut:
    weight, chosen = [], []
    for stage in range(shape.num_stages):
        in_flight = min(shape.num_microbatches, shape.num_stages - stage)
        least_s = np.full(runs.end.shape, np.inf)
        if everywhere is None or everywhere[0] is None:
            excess = runs.excess_bytes(None, job.memory_bytes, in_flight, each_bytes)
            least_s = np.where(runs.inside & (excess <= 0), runs.time_s, np.inf)
        ways = []
        for name, way in runs.pieces.ways.items():
            if everywhere is not None and everywhere[0] != name:
                continue
            excess = runs.excess_bytes(name, job.memory_bytes, in_flight, each_bytes)
            layers = None if everywhere is None else everywhere[1]
            until = runs.recomputed_until(way, excess, in_flight, layers)
            fits = runs.inside & (until <= runs.end)
            again_s = way.again_s[np.where(fits, until, runs.first)] - way.again_s[runs.first]
            way_s = np.where(fits, runs.time_s + again_s, np.inf)
            ways.append((name, until, way_s))
            least_s = np.minimum(least_s, way_s)
        weight.append(least_s)
        chosen.append(ways)
    time_s, path = least_time(weight, shape.num_microbatches)
    if not math.isfinite(time_s):
        return BestCut()
    recomputed = []
    for of_stage, ways, a, b in zip(weight, chosen, path, path[1:], strict=False):
        run = a, b - a - 1
        least: Recomputed = (None, 0)
        for name, until, way_s in ways:
            if way_s[run] == of_stage[run] and way_s[run] > runs.time_s[run]:
                least = name, int(until[run] - runs.nodes[a])
        recomputed.append(least)
    return BestCut(time_s, tuple(runs.nodes[path].tolist()), tuple(recomputed))


def _capped(weight: Sequence[FloatArray], cap: float, times: int) -> tuple[float, IntArray]:
    capped = [np.where(of_stage <= cap, of_stage, np.inf) for of_stage in weight]
    total, path = least_path(capped, largest=False)
    return times * float(_along(weight, path).max()) + total, path


def _along(weight: Sequence[FloatArray], path: IntArray) -> FloatArray:
    return np.array(
        [w[a, b - a - 1] for w, a, b in zip(weight, path, path[1:], strict=False)], dtype=float
    )


def _way(by_piece: Sequence[Measure], name: str) -> Way:
    ways = [next((w for w in m.recomputation if w.name == name), None) for m in by_piece]
    saved = [
        max(0.0, m.activation_bytes - w.activation_bytes) if w else 0.0
        for m, w in zip(by_piece, ways, strict=True)
    ]
    return Way(
        running([w.time_s[0] if w else 0.0 for w in ways]),
        running(saved),
        np.array([w.working_bytes if w else 0.0 for w in ways]),
    )
