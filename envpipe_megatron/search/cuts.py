"""What runs weigh as stages: the cut that takes the least time, and estimates of energy.

A stage's time, memory and least recomputation depend only on its run and its place, and so does the
iteration time that it forces: the cut whose stages force the least is a path through runs
(`best_cut`). 1F1B takes that time or a little more, which the simulator says. The energy that a
stage needs within a time is as much its own (`energy_weights`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from envpipe_megatron.core.arrays import BoolArray, FloatArray, IntArray
from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.search.configuration import Job
from envpipe_megatron.search.layer_profile import Sizes
from envpipe_megatron.search.runs import (
    BETTER,
    PieceRuns,
    Pieces,
    least_path,
    running,
    runs_within,
)

#: With more pieces a coarse cut is found first, which says how long a stage can be at most.
_COARSE_NODES = 96
#: Prices of time, W, as multiples of the largest power of a unit, that the estimate tries.
_TIME_PRICES = np.concatenate([[0.0], np.geomspace(1e-3, 1e2, 48)])

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


@dataclass(frozen=True)
class StageRuns:
    """Runs as one stage of a shape.

    Args:
        time_s: [rows, width] with the least recomputation that fits, infinite where none does.
        ways: for each recomputation its name, until which piece runs recompute, and their time.
    """

    runs: PieceRuns
    time_s: FloatArray
    ways: tuple[tuple[str, IntArray, FloatArray], ...]

    def recomputed(self, node: int, end_node: int) -> Recomputed:
        """What a run recomputes."""
        run = self.runs.place(node, end_node)
        least: Recomputed = (None, 0)
        for name, until, taken in self.taken():
            if taken[run]:
                known = self.runs.pieces.ways[name].known
                least = name, int(known[until[run]] - known[self.runs.nodes[node]])
        return least

    def taken(self) -> Iterator[tuple[str, IntArray, BoolArray]]:
        """For each recomputation its name, until which piece, and which runs are for the better."""
        for name, until, way_s in self.ways:
            taken = (way_s == self.time_s) & (way_s > self.runs.time_s) & np.isfinite(way_s)
            yield name, until, taken


def stage_runs(
    of_stages: Sequence[PieceRuns],
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
    taken = [stage.time_s[stage.runs.place(node, end)] for stage, node, end in of_path]
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


def energy_weights(
    stages: Sequence[StageRuns],
    allowed: Sequence[BoolArray],
    shape: Shape,
    blocking_power_w: float,
    longest_s: float,
) -> list[FloatArray]:
    """For each stage [rows, width] J of a microbatch above waiting, infinite where not allowed.

    A stage can spread its microbatches over the iteration less the way of the first forward there
    and of the last backward back.
    """
    pieces, places = stages[0].runs.pieces, [np.nonzero(each) for each in allowed]
    of_stages = list(zip([stage.runs for stage in stages], places, strict=True))
    first = np.concatenate([runs.first[rows, 0] for runs, (rows, _) in of_stages])
    end = np.concatenate([runs.end[place] for runs, place in of_stages])
    forward, backward = (
        [sums[end] - sums[first] for sums in pieces.by_clock[kind]]
        for kind in (Kind.FORWARD, Kind.BACKWARD)
    )
    for recomputed in zip(*(stage.taken() for stage in stages), strict=True):
        until = np.concatenate(
            [
                np.where(taken, upto, stage.runs.first)[place]
                for stage, place, (_, upto, taken) in zip(stages, places, recomputed, strict=True)
            ]
        )
        again = (sums[until] - sums[first] for sums in pieces.by_clock[recomputed[0][0]])
        backward = [each + more for each, more in zip(backward, again, strict=True)]
    window_s = (longest_s - pieces.time_s[first]) / shape.num_microbatches
    energy_j = least_energy_j([forward, backward], window_s, blocking_power_w)
    weights = [np.full(each.shape, np.inf) for each in allowed]
    ends = np.cumsum([len(place[0]) for place in places])
    for weight, place, of_stage in zip(weights, places, np.split(energy_j, ends[:-1]), strict=True):
        weight[place] = of_stage
    return weights


def least_energy_j(
    units: Sequence[Sequence[FloatArray]], window_s: FloatArray, blocking_power_w: float
) -> FloatArray:
    """The least energy (J), above what waiting takes, of units that have a time in all.

    Args:
        units: J and s of each at each clock, [..., num_frequencies].
        window_s: [...] that time.

    With clocks mixed freely it is the largest value over prices of time of the Lagrangian dual, and
    any price gives a bound.
    """
    power_w = max(float((energy_j / time_s).max()) for energy_j, time_s in units)
    least_j = np.full(window_s.shape, -np.inf)
    for price_w in power_w * _TIME_PRICES:
        dual_j = -price_w * window_s
        for energy_j, time_s in units:
            dual_j += (energy_j + (price_w - blocking_power_w) * time_s).min(axis=-1)
        np.maximum(least_j, dual_j, out=least_j)
    return least_j
