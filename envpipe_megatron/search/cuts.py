"""Weights of runs as stages: the cut that takes the least time, and estimates of energy.

A stage's time, memory and least recomputation depend only on its run and its place, and so does the
iteration time that it forces: the cut whose stages force the least is a path through runs
(`ShapeCuts.fastest`). 1F1B takes that time or a little more, which the simulator says. The energy
that a stage needs within a time is as much its own (`ShapeCuts.energy_weights`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from envpipe_megatron.core.arrays import FloatArray, IntArray
from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.search.configuration import Job, Recomputed, Shape
from envpipe_megatron.search.layer_profile import Pieces
from envpipe_megatron.search.runs import (
    BETTER,
    PieceRuns,
    least_path,
    runs_within,
)

#: Prices of time, W, as multiples of the largest power of a unit, that the estimate tries.
_TIME_PRICES = np.concatenate([[0.0], np.geomspace(1e-3, 1e2, 48)])
#: Most numbers of an array over prices.
_BLOCK = 1_000_000


class ShapeCuts:
    """All cuts of a shape without virtual stages, and what their runs weigh.

    Args:
        static_bytes: [n + 1] running sums of what is held for parameters.
        everywhere: what each stage recomputes; by default each as little as its memory allows, in
            the way that takes it the least time.
        within_s: cuts that force more need not be among them.
        nodes: pieces at which stages may begin, and the number of pieces; all by default.

    Attributes:
        runs: of each stage; none if there is no cut.
        time_s: for each stage [rows, width] what a microbatch takes (s) with the least
            recomputation that fits, infinite where none does.
        forced_s: for each stage [rows, width] the iteration time (s) that a run forces there.
    """

    def __init__(
        self,
        pieces: Pieces,
        shape: Shape,
        job: Job,
        static_bytes: FloatArray,
        everywhere: Recomputed | None = None,
        within_s: float = math.inf,
        nodes: IntArray | None = None,
    ) -> None:
        self.pieces, self.shape = pieces, shape
        self._static_bytes, self._limit_bytes = static_bytes, job.limit_bytes
        #: The names of ways to recompute, and how many layers; None for as few as fit.
        self._ways: list[tuple[str | None, int | None]] = [(name, None) for name in pieces.ways]
        if everywhere is not None:
            self._ways = [everywhere]
        nodes = np.arange(pieces.num_pieces + 1) if nodes is None else nodes
        longest_s = within_s / shape.num_microbatches / BETTER
        self.runs = runs_within(pieces, nodes, shape.num_stages, longest_s)
        stages = [self._stage(*each) for each in enumerate(self.runs)]
        self.time_s = [time_s for time_s, _ in stages]
        self._until = [until for _, until in stages]
        self.forced_s = self._forced_s()

    def _stage(self, stage: int, runs: PieceRuns) -> tuple[FloatArray, dict[str, IntArray]]:
        """Return a stage's `time_s`, and for each way until which piece runs recompute by it."""
        of_parameters_bytes = runs.sums(self._static_bytes)
        in_flight = min(self.shape.num_microbatches, self.shape.num_stages - stage)
        ways, least_s = {}, np.full(runs.end.shape, np.inf)
        for name, layers in self._ways:
            way = runs.pieces.ways[name]
            until = runs.recomputed_until(
                way, self._limit_bytes, in_flight, of_parameters_bytes, layers
            )
            fits = runs.inside & (until <= runs.end)
            again_s = way.again_s[np.where(fits, until, runs.first)] - way.again_s[runs.first]
            way_s = np.where(fits, runs.time_s + again_s, np.inf)
            least_s = np.minimum(least_s, way_s)
            if name is not None:
                ways[name] = until, way_s
        return least_s, {
            name: np.where((runs.time_s < way_s) & (way_s == least_s), until, runs.first)
            for name, (until, way_s) in ways.items()
        }

    def _forced_s(self) -> list[FloatArray]:
        """Return for each stage [rows, width] the iteration time (s) of 1F1B that a run forces.

        Either all its microbatches between the way of the first forward there and of the last
        backward back; or one of these ways goes on to the last stage, past what 1F1B puts ahead of
        the stage's first backward, or after its last forward; or both do, with what is between
        these two units.
        """
        passed_s, microbatches, forced = self.pieces.time_s, self.shape.num_microbatches, []
        all_s = passed_s[-1]
        for number, (runs, time_s) in enumerate(zip(self.runs, self.time_s, strict=True)):
            can_be = np.isfinite(time_s)
            steady = microbatches - min(microbatches, self.shape.num_stages - number)
            forward_s = runs.sums(runs.pieces.forward_s)
            backward_s = np.where(can_be, time_s - forward_s, 0.0)
            terms = [
                passed_s[runs.first] + microbatches * (forward_s + backward_s),
                all_s + (microbatches - 1) * backward_s + steady * forward_s,
                all_s + (microbatches - 1) * forward_s + steady * backward_s,
            ]
            if steady:  # else the last forward is ahead of the first backward
                behind_s = all_s - passed_s[runs.end]
                terms.append(all_s + behind_s + steady * (forward_s + backward_s))
            forced.append(np.where(can_be, np.maximum.reduce(terms), np.inf))
        return forced

    def recomputed(self, path: Sequence[int]) -> tuple[Recomputed, ...]:
        """Return what each stage of a path recomputes."""
        found = []
        for runs, by_way, run in zip(self.runs, self._until, pairwise(path), strict=True):
            first, at = runs.nodes[run[0]], runs.place(*run)
            least: Recomputed = (None, 0)
            for name, until in by_way.items():
                if until[at] > first:
                    known = self.pieces.ways[name].known
                    least = name, int(known[until[at]] - known[first])
            found.append(least)
        return tuple(found)

    def fastest(self) -> tuple[float, tuple[int, ...]]:
        """Return the least iteration time (s) that a cut forces, infinite if none fits; its path.

        Of equal ones that with the evenest stages.
        """
        return self.evenest(self.forced_s) if self.runs else (math.inf, ())

    def evenest(self, forced: Sequence[FloatArray]) -> tuple[float, tuple[int, ...]]:
        """Return the least time (s) that any cut forces, and the evenest of the cuts that do."""
        least_s, path = least_path(self.runs, forced, largest=True)
        if math.isfinite(least_s):
            even = [
                np.where(force <= least_s / BETTER, time_s**2, np.inf)
                for force, time_s in zip(forced, self.time_s, strict=True)
            ]
            _, path = least_path(self.runs, even, largest=False)
        return least_s, tuple(path.tolist())

    def energy_weights(
        self, within_s: float, longest_s: float, blocking_power_w: float
    ) -> list[FloatArray]:
        """Return for each stage [rows, width] J of a microbatch above waiting in an iteration time.

        Infinite where a run forces more than `within_s`. A stage can spread its microbatches over
        the iteration less the way of the first forward there and of the last backward back.
        """
        by_clock, weights = self.pieces.by_clock, []
        for runs, force, by_way in zip(self.runs, self.forced_s, self._until, strict=True):
            at = np.nonzero(force <= within_s)
            first, end = runs.nodes[runs.rows][at[0]], runs.end[at]
            forward, backward = (
                [sums[end] - sums[first] for sums in by_clock[kind]]
                for kind in (Kind.FORWARD, Kind.BACKWARD)
            )
            for name, until in by_way.items():
                again = (sums[until[at]] - sums[first] for sums in by_clock[name])
                backward = [each + more for each, more in zip(backward, again, strict=True)]
            window_s = (longest_s - self.pieces.time_s[first]) / self.shape.num_microbatches
            weight = np.full(force.shape, np.inf)
            weight[at] = least_energy_j([forward, backward], window_s, blocking_power_w)
            weights.append(weight)
        return weights


def least_energy_j(
    units: Sequence[Sequence[FloatArray]], window_s: FloatArray, blocking_power_w: float
) -> FloatArray:
    """Return the least energy (J), above what waiting takes, of units that have a time in all.

    Args:
        units: J and s of each at each clock, [..., num_frequencies].
        window_s: [...] that time.

    With clocks mixed freely it is the largest value over prices of time of the Lagrangian dual, and
    any price gives a bound.
    """
    power_w = max(float((energy_j / time_s).max()) for energy_j, time_s in units)
    least_j = np.full(window_s.shape, -np.inf)
    blocks = 1 + units[0][0].size * len(_TIME_PRICES) // _BLOCK  # all at once where units are few
    for prices_w in np.array_split(power_w * _TIME_PRICES, min(blocks, len(_TIME_PRICES))):
        price_w = prices_w.reshape(-1, *[1] * window_s.ndim)
        dual_j = -price_w * window_s
        for energy_j, time_s in units:
            dual_j += (energy_j + (price_w[..., None] - blocking_power_w) * time_s).min(axis=-1)
        np.maximum(least_j, dual_j.max(axis=0), out=least_j)
    return least_j
