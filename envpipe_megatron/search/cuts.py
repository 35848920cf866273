"""The cut of a model into stages that takes the least time, by dynamic programming.

A stage is a run of pieces. Its time, memory and least recomputation depend on the run and on the
stage's place alone, and so does the iteration time that it forces: the cut whose stages force the
least is a path through runs. 1F1B takes that time or a little more, which the simulator says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from envpipe_megatron.core.arrays import FloatArray, IntArray
from envpipe_megatron.search.configuration import Job
from envpipe_megatron.search.layer_profile import Sizes
from envpipe_megatron.search.runs import BETTER, Pieces, Runs, running, runs_within

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
    all_nodes = np.arange(count + 1)
    given = shape, job, static_bytes, everywhere
    if count > _COARSE_NODES:
        step = -(-count // _COARSE_NODES)
        coarse = np.unique([*all_nodes[::step], 1, count - 1, count])
        within_s = min(within_s, _best(pieces, coarse, math.inf, *given).bound_s)
    return _best(pieces, all_nodes, within_s, *given)


def least_path(
    runs: Sequence[Runs], weights: Sequence[FloatArray], *, largest: bool
) -> tuple[float, IntArray]:
    """The path whose largest run, or whose sum of runs, is least.

    Args:
        weights: of each stage's runs, infinite where there is no run.

    Returns that value, infinite if there is no path, and [num_stages + 1] the nodes.
    """
    combine, num_nodes = np.maximum if largest else np.add, len(runs[0].nodes)
    best = np.full(num_nodes, np.inf)
    best[-1] = -np.inf if largest else 0.0
    choices = []
    for of_stage, weight in zip(reversed(runs), reversed(weights), strict=True):
        rows, width = of_stage.rows, weight.shape[1]
        behind = np.pad(best[1:], (0, width), constant_values=np.inf)
        through = combine(weight, sliding_window_view(behind, width)[rows])
        choices.append(through.argmin(axis=1))
        best = np.full(num_nodes, np.inf)
        best[rows] = through[np.arange(len(rows)), choices[-1]]
    if not math.isfinite(best[0]):
        return math.inf, np.zeros(len(runs) + 1, dtype=int)
    path = [0]
    for of_stage, choice in zip(runs, reversed(choices), strict=True):
        path.append(path[-1] + 1 + int(choice[path[-1] - of_stage.rows.start]))
    return float(best[0]), np.array(path)


@dataclass(frozen=True)
class StageRuns:
    """Runs as one stage of a shape.

    Args:
        time_s: [rows, width] with the least recomputation that fits, infinite where none does.
        ways: for each recomputation its name, until which piece runs recompute, and their time.
    """

    runs: Runs
    time_s: FloatArray
    ways: tuple[tuple[str, IntArray, FloatArray], ...]

    def place(self, node: int, end_node: int) -> tuple[int, int]:
        """Where arrays have a run."""
        return node - self.runs.rows.start, end_node - node - 1

    def recomputed(self, node: int, end_node: int) -> Recomputed:
        """What a run recomputes."""
        run = self.place(node, end_node)
        least: Recomputed = (None, 0)
        for name, until, way_s in self.ways:
            if way_s[run] == self.time_s[run] and way_s[run] > self.runs.time_s[run]:
                known = self.runs.pieces.ways[name].known
                least = name, int(known[until[run]] - known[self.runs.nodes[node]])
        return least


def stage_runs(
    of_stages: Sequence[Runs],
    shape: Shape,
    job: Job,
    static_bytes: FloatArray,
    everywhere: Recomputed | None = None,
) -> list[StageRuns]:
    """What runs take as each stage of a shape without virtual stages, as `best_cut` has it."""
    limited = job.memory_bytes is not None
    limit_bytes = 1e300 if job.memory_bytes is None else job.memory_bytes
    stages = []
    for stage, runs in enumerate(of_stages):
        of_parameters_bytes = runs.sums(static_bytes)
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
    """[rows, width] the iteration time (s) of 1F1B that a run forces as a stage.

    `passed_s` [n + 1] is the time of a microbatch through all pieces up to each. Either all its
    microbatches between the way of the first forward there and of the last backward back;
    or one of these ways goes on to the last stage, past what 1F1B puts ahead of the stage's first
    backward, or behind its last forward; or both do, with what is between these two units.
    """
    runs, microbatches = stage.runs, shape.num_microbatches
    steady = microbatches - min(microbatches, shape.num_stages - number)
    forward_s = runs.sums(runs.pieces.forward_s)
    can_be = np.isfinite(stage.time_s)
    backward_s = np.where(can_be, stage.time_s - forward_s, 0.0)
    all_s = passed_s[-1]
    terms = [
        passed_s[runs.first] + microbatches * (forward_s + backward_s),
        all_s + (microbatches - 1) * backward_s + steady * forward_s,
        all_s + (microbatches - 1) * forward_s + steady * backward_s,
    ]
    if steady:  # else the last forward is ahead of the first backward
        behind_s = all_s - passed_s[runs.end]
        terms.append(all_s + behind_s + steady * (forward_s + backward_s))
    return np.where(can_be, np.maximum.reduce(terms), np.inf)


def _best(
    pieces: Pieces,
    nodes: IntArray,
    within_s: float,
    shape: Shape,
    job: Job,
    static_bytes: FloatArray,
    everywhere: Recomputed | None,
) -> BestCut:
    longest_s = within_s / shape.num_microbatches * (2 - BETTER)
    runs = runs_within(pieces, nodes, shape.num_stages, longest_s)
    if runs is None:
        return BestCut()
    stages = stage_runs(runs, shape, job, static_bytes, everywhere)
    bound_s, path = _evenest(stages, shape, pieces.time_s)
    if not math.isfinite(bound_s):
        return BestCut()
    # Once more with what the ways through other stages take where these recompute as well: that is
    # no bound, but nearer to the truth.
    of_path = zip(stages, path[:-1].tolist(), path[1:].tolist(), strict=True)
    taken = [stage.time_s[stage.place(node, end)] for stage, node, end in of_path]
    if sum(taken) > pieces.time_s[-1] * (2 - BETTER):
        passed_s = np.interp(np.arange(len(pieces.time_s)), nodes[path], running(taken))
        _, path = _evenest(stages, shape, passed_s)
    recomputed = tuple(map(StageRuns.recomputed, stages, path[:-1].tolist(), path[1:].tolist()))
    return BestCut(bound_s, tuple(nodes[path].tolist()), recomputed)


def _evenest(
    stages: Sequence[StageRuns], shape: Shape, passed_s: FloatArray
) -> tuple[float, IntArray]:
    """The least time (s) that any cut forces, and of those cuts that with the evenest stages."""
    runs = [stage.runs for stage in stages]
    forced = [forced_s(stage, number, shape, passed_s) for number, stage in enumerate(stages)]
    least_s, path = least_path(runs, forced, largest=True)
    if math.isfinite(least_s):
        even = [
            np.where(force <= least_s * (2 - BETTER), stage.time_s**2, np.inf)
            for force, stage in zip(forced, stages, strict=True)
        ]
        _, path = least_path(runs, even, largest=False)
    return least_s, path
