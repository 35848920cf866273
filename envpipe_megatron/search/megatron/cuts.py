"""The cut of a model into stages that takes the least time, by dynamic programming.

A stage is a run of pieces. Its time, memory and least recomputation depend on the run and on the
stage's place alone, and so does the iteration time that it forces: the cut whose stages force the
least is a path through runs. 1F1B takes that time or a little more, which the simulator says.
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
from envpipe_megatron.search.megatron.work import working, workspace_bytes

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
    """What recomputing does: running sums [n + 1] over pieces; others [n] of each.

    `can_be` says which pieces can be recomputed.
    """

    can_be: BoolArray
    again_s: FloatArray
    saved_bytes: FloatArray
    working_bytes: FloatArray

    @cached_property
    def known(self) -> FloatArray:
        """[n + 1] how many pieces so far can be recomputed."""
        return running(self.can_be)

    @cached_property
    def levels(self) -> list[tuple[float, IntArray]]:
        """What a piece may hold while it is recomputed, from the least; and for each of the pieces.

        [n + 1] the next piece that holds more; behind all pieces if none does.
        """
        count = len(self.working_bytes)
        found = []
        for level in np.unique(self.working_bytes[self.can_be]):
            more = np.append(np.flatnonzero(self.working_bytes > level), count + 1)
            found.append((float(level), more[np.searchsorted(more, np.arange(count + 1))]))
        return found


class Pieces:
    """Running sums over a model's pieces at some sizes, [n + 1], and what single ones need, [n].

    `ways` are those of recomputation; the sums are without.
    """

    def __init__(self, profile: LayerProfile, sizes: Sizes) -> None:
        self.profile = profile
        measures = profile.at(sizes)
        by_piece = [measures[piece] for piece in profile.pieces]
        self.forward_s = running([m.forward_s[0] for m in by_piece])
        self.time_s = running([m.both_s[0] for m in by_piece])
        self.kept_bytes = running([m.activation_bytes for m in by_piece])
        self.parameters = running([m.parameters for m in by_piece])
        self.expert_parameters = running([m.expert_parameters for m in by_piece])
        self.input_bytes = np.array([0.0, *(m.input_bytes for m in by_piece[1:])])
        freed = [m.output_bytes if profile.frees_outputs else 0.0 for m in by_piece[:-1]]
        #: [n + 1] freed by a stage that ends before a piece.
        self.freed_bytes = np.array([0.0, *freed, 0.0])
        self.forward_bytes = np.array([m.forward_workspace_bytes for m in by_piece])
        self.backward_bytes = np.array([m.backward_workspace_bytes for m in by_piece])
        names = dict.fromkeys(way.name for m in by_piece for way in m.recomputation)
        self.ways = {name: _way(profile, by_piece, name) for name in names}

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
        kept = self.sums(self.pieces.kept_bytes)
        held: FloatArray = kept + inputs - self.pieces.freed_bytes[self.end]
        return held

    @cached_property
    def parameters(self) -> FloatArray:
        """That one GPU holds."""
        return self.sums(self.pieces.parameters)

    @cached_property
    def _workspaces(self) -> tuple[FloatArray, FloatArray]:
        return self.largest(self.pieces.forward_bytes), self.largest(self.pieces.backward_bytes)

    def excess_bytes(
        self,
        limit_bytes: float,
        in_flight: int,
        of_parameters_bytes: FloatArray,
        working_bytes: float = 0.0,
    ) -> FloatArray:
        """By how much each run exceeds its memory, before anything is saved by recomputing.

        `of_parameters_bytes`, [nodes, width], are held for each run's parameters.
        """
        beside = workspace_bytes(
            self.pieces.profile, *self._workspaces, working_bytes, self.parameters
        )
        return of_parameters_bytes + in_flight * self.held_bytes + beside - limit_bytes

    def recomputed_until(
        self,
        way: Way,
        limit_bytes: float,
        in_flight: int,
        of_parameters_bytes: FloatArray,
        layers: int | None,
    ) -> IntArray:
        """The piece up to which each run recomputes; behind all of them if it cannot fit.

        As little as memory allows, or the first `layers` that can be recomputed.
        """
        never = self.pieces.num_pieces + 1
        best = np.full(self.end.shape, never)
        saved = way.saved_bytes
        for working_bytes, blocked in way.levels:
            excess = self.excess_bytes(limit_bytes, in_flight, of_parameters_bytes, working_bytes)
            if layers is None:
                wanted = saved[self.first] + np.maximum(excess, 0.0) / in_flight
                until = np.searchsorted(saved, wanted * _BETTER, side="left")
            else:
                until = np.searchsorted(way.known, way.known[self.first] + layers, side="left")
                until = np.maximum(np.minimum(until, self.end), self.first)
                left = excess - in_flight * (saved[until] - saved[self.first])
                until = np.where(left <= 0, until, never)
            best = np.minimum(best, np.where(until <= blocked[self.first], until, never))
        return best


@dataclass(frozen=True)
class BestCut:
    """The iteration time that a cut forces, infinite if none fits; what each stage recomputes.

    `cut` lists the first piece of each stage, and the number of pieces.
    """

    bound_s: float = math.inf
    cut: tuple[int, ...] = ()
    recomputed: tuple[Recomputed, ...] = ()


def best_cut(
    pieces: Pieces,
    shape: Shape,
    job: Job,
    static_bytes: FloatArray,
    within_s: float = math.inf,
    everywhere: Recomputed | None = None,
) -> BestCut:
    """The cut of a shape without virtual stages that forces the least time; exact.

    Of equal ones that with the evenest stages.

    Args:
        static_bytes: [n + 1] running sums of what is held for parameters.
        within_s: a cut that takes longer need not be found.
        everywhere: what each stage recomputes; by default each as little as its memory allows, in
            the way that takes it the least time.

    Many pieces are cut coarsely first: no stage of a better cut takes longer for all microbatches.
    """
    count = pieces.num_pieces
    if count < shape.num_stages:
        return BestCut()
    given = shape, job, static_bytes, everywhere
    if count > _COARSE_NODES:
        step = -(-count // _COARSE_NODES)
        coarse = np.unique([*range(0, count, step), 1, count - 1, count])
        within_s = min(within_s, _best(Runs(pieces, coarse, len(coarse) - 1), *given).bound_s)
    width = count
    if math.isfinite(within_s):
        longest_s = within_s / shape.num_microbatches * (2 - _BETTER)
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


def running(values: ArrayLike) -> FloatArray:
    """[n + 1] running sums that begin with nothing."""
    return np.concatenate([[0.0], np.cumsum(values)])


@dataclass(frozen=True)
class StageRuns:
    """Runs as one stage of a shape.

    Args:
        time_s: [nodes, width] with the least recomputation that fits, infinite where none does.
        ways: for each recomputation its name, until which piece runs recompute, and their time.
    """

    runs: Runs
    time_s: FloatArray
    ways: tuple[tuple[str, IntArray, FloatArray], ...]

    def recomputed(self, node: int, end_node: int) -> Recomputed:
        """What a run recomputes."""
        run = node, end_node - node - 1
        least: Recomputed = (None, 0)
        for name, until, way_s in self.ways:
            if way_s[run] == self.time_s[run] and way_s[run] > self.runs.time_s[run]:
                least = name, int(until[run] - self.runs.nodes[node])
        return least


def stage_runs(
    runs: Runs,
    shape: Shape,
    job: Job,
    static_bytes: FloatArray,
    everywhere: Recomputed | None = None,
) -> list[StageRuns]:
    """What runs take as each stage of a shape without virtual stages, as `best_cut` has it."""
    limited = job.memory_bytes is not None
    limit_bytes = 1e300 if job.memory_bytes is None else job.memory_bytes
    of_parameters_bytes = runs.sums(static_bytes)
    stages = []
    for stage in range(shape.num_stages):
        in_flight = min(shape.num_microbatches, shape.num_stages - stage)
        least_s = np.full(runs.end.shape, np.inf)
        if everywhere is None or everywhere[0] is None:
            fits = runs.inside
            if limited:
                fits = fits & (runs.excess_bytes(limit_bytes, in_flight, of_parameters_bytes) <= 0)
            least_s = np.where(fits, runs.time_s, np.inf)
        ways = []
        for name, way in runs.pieces.ways.items():
            if everywhere is not None and everywhere[0] != name:
                continue
            if everywhere is None and not limited:
                continue  # nothing asks for it
            layers = None if everywhere is None else everywhere[1]
            until = runs.recomputed_until(way, limit_bytes, in_flight, of_parameters_bytes, layers)
            fits = runs.inside & (until <= runs.end)
            again_s = way.again_s[np.where(fits, until, runs.first)] - way.again_s[runs.first]
            way_s = np.where(fits, runs.time_s + again_s, np.inf)
            ways.append((name, until, way_s))
            least_s = np.minimum(least_s, way_s)
        stages.append(StageRuns(runs, least_s, tuple(ways)))
    return stages


def forced_s(stage: StageRuns, number: int, shape: Shape, passed_s: FloatArray) -> FloatArray:
    """[nodes, width] the iteration time (s) of 1F1B that a run forces as a stage.

    `passed_s` [n + 1] is the time of a microbatch through all pieces up to each. Either all its
    microbatches between the way of the first forward there and of the last backward back;
    or one of these ways goes on to the last stage, past what 1F1B puts ahead of the stage's first
    backward, or behind its last forward.
    """
    runs, microbatches = stage.runs, shape.num_microbatches
    steady = microbatches - min(microbatches, shape.num_stages - number)
    forward_s = runs.sums(runs.pieces.forward_s)
    can_be = np.isfinite(stage.time_s)
    backward_s = np.where(can_be, stage.time_s - forward_s, 0.0)
    all_s = passed_s[-1]
    forced = np.maximum.reduce(
        [
            passed_s[runs.first] + microbatches * (forward_s + backward_s),
            all_s + (microbatches - 1) * backward_s + steady * forward_s,
            all_s + (microbatches - 1) * forward_s + steady * backward_s,
        ]
    )
    return np.where(can_be, forced, np.inf)


def _best(
    runs: Runs, shape: Shape, job: Job, static_bytes: FloatArray, everywhere: Recomputed | None
) -> BestCut:
    stages = stage_runs(runs, shape, job, static_bytes, everywhere)
    bound_s, path = _evenest(stages, shape, runs.pieces.time_s)
    if not math.isfinite(bound_s):
        return BestCut()
    # Once more with what the ways through other stages take where these recompute as well: that is
    # no bound, but nearer to the truth.
    taken = [each.time_s[a, b - a - 1] for each, a, b in zip(stages, path, path[1:], strict=False)]
    if sum(taken) > runs.pieces.time_s[-1] * (2 - _BETTER):
        passed_s = np.interp(np.arange(len(runs.pieces.time_s)), runs.nodes[path], running(taken))
        _, path = _evenest(stages, shape, passed_s)
    recomputed = tuple(
        stage.recomputed(int(a), int(b))
        for stage, a, b in zip(stages, path, path[1:], strict=False)
    )
    return BestCut(bound_s, tuple(runs.nodes[path].tolist()), recomputed)


def _evenest(
    stages: Sequence[StageRuns], shape: Shape, passed_s: FloatArray
) -> tuple[float, IntArray]:
    """The least time (s) that any cut forces, and of those cuts that with the evenest stages."""
    forced = [forced_s(stage, number, shape, passed_s) for number, stage in enumerate(stages)]
    least_s, path = least_path(forced, largest=True)
    if math.isfinite(least_s):
        even = [
            np.where(force <= least_s * (2 - _BETTER), stage.time_s**2, np.inf)
            for force, stage in zip(forced, stages, strict=True)
        ]
        _, path = least_path(even, largest=False)
    return least_s, path


def _way(profile: LayerProfile, by_piece: Sequence[Measure], name: str) -> Way:
    ways = [m.way(name) for m in by_piece]
    saved = [
        max(0.0, m.activation_bytes - w.activation_bytes) if w else 0.0
        for m, w in zip(by_piece, ways, strict=True)
    ]
    return Way(
        np.array([w is not None for w in ways]),
        running([w.time_s[0] if w else 0.0 for w in ways]),
        running(saved),
        np.array([working(profile, m, w) for m, w in zip(by_piece, ways, strict=True)]),
    )
