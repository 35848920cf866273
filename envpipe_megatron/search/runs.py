"""The graph of runs: nodes are pieces at which a stage may begin, and a run of pieces is an edge.

A cut of a model into stages is a path of one run for each stage. `least_path` finds the best one,
`cheapest_paths` lists all; `PieceRuns` says what runs take and hold. Every search over cuts
(`cuts`, `space`, `partition`) is one over this graph.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from heapq import heappop, heappush

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from envpipe_megatron.core.arrays import BoolArray, FloatArray, IntArray
from envpipe_megatron.search.configuration import workspace_bytes
from envpipe_megatron.search.layer_profile import Pieces, WaySums

#: A cut must be better by more than rounding.
BETTER = 1 - 1e-12


class Runs:
    """Runs from some nodes to others: arrays are [rows, width].

    Column k of a node's row is the run from there to the k-th node after it; `inside` says whether
    there is one.

    Args:
        nodes: pieces at which stages may begin, from 0, and the number of pieces.
        rows: numbers of the nodes at which these begin.
        width: of how many nodes a stage consists at most.
    """

    def __init__(self, nodes: IntArray, rows: range, width: int) -> None:
        self.nodes, self.rows = nodes, rows
        index = np.array(rows)[:, None] + np.arange(1, width + 1)
        self.inside: BoolArray = index < len(nodes)
        self.first, self.end = nodes[rows, None], nodes[np.minimum(index, len(nodes) - 1)]

    def place(self, node: int, end_node: int) -> tuple[int, int]:
        """Return where arrays have the run between two nodes."""
        return node - self.rows.start, end_node - node - 1

    def sums(self, running_sums: FloatArray) -> FloatArray:
        """Sum a value over each run, from its running sums."""
        sums: FloatArray = running_sums[self.end] - running_sums[self.first]
        return sums


class PieceRuns(Runs):
    """Runs of a model's pieces, with what they take and hold."""

    def __init__(self, pieces: Pieces, nodes: IntArray, rows: range, width: int) -> None:
        super().__init__(nodes, rows, width)
        self.pieces = pieces

    def largest(self, values: FloatArray) -> FloatArray:
        """Return the largest of a value in each run."""
        if not values.any():
            return np.zeros(self.end.shape)
        by_node = np.maximum.reduceat(values, self.nodes[:-1])
        width = self.end.shape[1]
        windows = sliding_window_view(np.pad(by_node, (0, width)), width)[self.rows]
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
        """Parameters that one GPU holds."""
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
        """Return the bytes by which each run exceeds its memory, with nothing recomputed.

        `of_parameters_bytes`, [rows, width], are held for each run's parameters.
        """
        beside = workspace_bytes(
            self.pieces.profile, *self._workspaces, working_bytes, self.parameters
        )
        return of_parameters_bytes + in_flight * self.held_bytes + beside - limit_bytes

    def recomputed_until(
        self,
        way: WaySums,
        limit_bytes: float,
        in_flight: int,
        of_parameters_bytes: FloatArray,
        layers: int | None,
    ) -> IntArray:
        """Return the piece up to which each run recomputes; after all of them if it cannot fit.

        As little as memory allows, or the first `layers` that can be recomputed.
        """
        never = self.pieces.num_pieces + 1
        best = np.full(self.end.shape, never)
        saved = way.saved_bytes
        for working_bytes, blocked in way.levels:
            excess = self.excess_bytes(limit_bytes, in_flight, of_parameters_bytes, working_bytes)
            if layers is None:
                wanted = saved[self.first] + np.maximum(excess, 0.0) / in_flight
                found = np.searchsorted(saved, wanted * BETTER, side="left")
                until = np.maximum(found, self.first)  # where pieces ahead save nothing
            else:
                until = way.until(self.first, self.end, layers)
                left = excess - in_flight * (saved[until] - saved[self.first])
                until = np.where(left <= 0, until, never)
            best = np.minimum(best, np.where(until <= blocked[self.first], until, never))
        return best


def runs_within(
    pieces: Pieces, nodes: IntArray, num_stages: int, longest_s: float
) -> list[PieceRuns]:
    """Return for each stage the runs of all cuts whose stages take no longer; none if none do.

    With little time to spare, a stage can begin at few of the nodes.
    """
    until_s, last = pieces.time_s[nodes], len(nodes) - 1
    ends = np.searchsorted(until_s, until_s + longest_s, side="right") - 1
    latest = [0]
    for stage in range(1, num_stages):
        latest.append(min(int(ends[latest[-1]]), last - num_stages + stage))
    found, following = [], last
    for stage in range(num_stages - 1, -1, -1):
        earliest = max(stage, int(np.searchsorted(ends, following)))
        rows = range(earliest, latest[stage] + 1)
        width = int((ends[rows] - rows).max()) if rows else 0
        if width < 1:
            return []
        found.append(PieceRuns(pieces, nodes, rows, width))
        following = earliest
    return found[::-1]


def least_path(
    runs: Sequence[Runs], weights: Sequence[FloatArray], *, largest: bool
) -> tuple[float, IntArray]:
    """Return the path whose largest run, or whose sum of runs, is least.

    Args:
        weights: of each stage's runs, infinite where there is no run.

    Returns that value, infinite if there is no path, and [num_stages + 1] the nodes.
    """
    values, following = _least_to_end(runs, weights, largest=largest)
    if not math.isfinite(values[0][0]):
        return math.inf, np.zeros(len(runs) + 1, dtype=int)
    path = [0]
    for of_stage in following:
        path.append(int(of_stage[path[-1]]))
    return float(values[0][0]), np.array(path)


def _least_to_end(
    runs: Sequence[Runs], weights: Sequence[FloatArray], *, largest: bool
) -> tuple[list[FloatArray], list[IntArray]]:
    """Return by stage, and after the last, [num_nodes] the least value from a node to the end.

    And by stage [num_nodes] the node that a path of that value goes on to.
    """
    combine, num_nodes = np.maximum if largest else np.add, len(runs[0].nodes)
    values, following = [np.full(num_nodes, np.inf)], []
    values[0][-1] = -np.inf if largest else 0.0
    for of_stage, weight in zip(reversed(runs), reversed(weights), strict=True):
        rows, width = of_stage.rows, weight.shape[1]
        behind = np.pad(values[-1][1:], (0, width), constant_values=np.inf)
        through = combine(weight, sliding_window_view(behind, width)[rows])
        values.append(np.full(num_nodes, np.inf))
        following.append(np.zeros(num_nodes, dtype=int))
        values[-1][rows] = through.min(axis=1)
        following[-1][rows] = np.array(rows) + 1 + through.argmin(axis=1)
    return values[::-1], following[::-1]


def cheapest_paths(
    runs: Sequence[Runs], weights: Sequence[FloatArray]
) -> Iterator[tuple[int, ...]]:
    """Yield all paths, as `least_path` gives one, from the least sum of runs upwards.

    Beginnings of paths are gone on with in the order of their sum with the least to the end (A*).
    """
    to_end, _ = _least_to_end(runs, weights, largest=False)
    begun: list[tuple[float, float, tuple[int, ...]]] = [(float(to_end[0][0]), 0.0, (0,))]
    while begun and math.isfinite(begun[0][0]):
        _, cost, path = heappop(begun)
        stage, node = len(path) - 1, path[-1]
        if stage == len(runs):
            yield path
            continue
        row = weights[stage][node - runs[stage].rows.start]
        behind = to_end[stage + 1][node + 1 : node + 1 + len(row)]
        for column in np.flatnonzero(np.isfinite(row[: len(behind)] + behind)).tolist():
            so_far = cost + float(row[column])
            whole = so_far + float(behind[column])
            heappush(begun, (whole, so_far, (*path, node + 1 + column)))
