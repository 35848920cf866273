"""Search for the split of layers over stages with the least bottleneck.

All searches run over the same graph: node (stage, first layer), edge to (stage + 1, first layer of
that stage). A stage's time depends on its own edge alone, so the least bottleneck is a shortest
path in the minimax sense, found by dynamic programming. The iteration time is no such maximum over
stages, but one bounds it from below (`SplitSpace.bound_s`): splits within the bound are listed in
the order of a cost that is a sum over stages, and each is timed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from envpipe_megatron.core.arrays import BoolArray, FloatArray, IntArray
from envpipe_megatron.core.kinds import WHOLE, Kind
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.timeline import RELATIVE_TOLERANCE, LongestPath
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.policies.partitions.layers import (
    LayerTable,
    Split,
    in_flight_1f1b,
)

#: Splits that one search times at most, and units it computes for that.
_MAX_SPLITS = 20_000
_MAX_UNITS = 100_000_000
#: Units of a batch of timelines in memory at once (8 bytes each).
_BATCH_UNITS = 8_000_000


@dataclass(frozen=True)
class Found:
    """A split, its 1F1B iteration time at the highest clocks, and how sure it is the best one.

    `num_considered` splits were timed; `exact`: no split that was left out can be better.
    """

    split: Split
    iteration_time_s: float
    num_considered: int
    exact: bool


class SplitSpace:
    """Every contiguous split of a table's layers over the stages of a 1F1B pipeline.

    Arrays over edges are [num_stages, L + 1, L + 1]: stage, its first transformer layer, and the
    first of the next stage. The embedding adds to the first stage, the loss to the last.
    `memory_limit_bytes` is the most that a stage may hold at 1F1B's peak.

    EnvPipeError: fewer layers than the stages need, or a limit that no split keeps.
    """

    def __init__(
        self,
        table: LayerTable,
        num_stages: int,
        num_microbatches: int,
        memory_limit_bytes: float | None = None,
    ) -> None:
        if num_stages < 2 or num_microbatches < 1:
            raise EnvPipeError(
                "A split needs at least two stages and one microbatch",
                value=(num_stages, num_microbatches),
            )
        self.table = table
        self.num_stages, self.num_microbatches = num_stages, num_microbatches
        self.memory_limit_bytes = memory_limit_bytes
        num_layers = table.num_transformer_layers
        if num_stages > len(table.names):
            raise EnvPipeError(
                f"{table.source} has too few layers for {num_stages} stages",
                value=num_layers,
                remedy="Each stage needs a layer; the embedding and the loss count where profiled.",
            )
        first = np.arange(num_layers + 1)
        self.allowed: BoolArray = self.sums(np.ones(len(table.names))) > 0.5
        self.allowed[0] &= (first == 0)[:, None]
        self.allowed[-1] &= (first == num_layers)[None, :]
        self.forward_s = self.sums(table.time_s[Kind.FORWARD][:, 0])
        self.backward_s = self.sums(table.time_s[Kind.BACKWARD][:, 0])
        self.stage_time_s = self.forward_s + self.backward_s
        if memory_limit_bytes is not None:
            self._limit_memory(memory_limit_bytes)
        self.bound_s = self._iteration_bound_s()
        self._schedule = builders.one_f_one_b(num_stages, num_microbatches)

    def sums(self, values: FloatArray) -> FloatArray:
        """[num_stages, L + 1, L + 1] the sum of a value of each layer over each edge's layers."""
        before, after = self._running_sums(values)
        sums: FloatArray = after[:, None, :] - before[:, :, None]
        return sums

    def edge_sums(self, values: FloatArray, edges: tuple[NDArray[np.intp], ...]) -> FloatArray:
        """[num_edges, n] the sums of [num_layers, n] values over some edges, given by index."""
        before, after = self._running_sums(values)
        sums: FloatArray = after[edges[0], edges[2]] - before[edges[0], edges[1]]
        return sums

    def before_s(self) -> FloatArray:
        """[num_stages, L + 1, 1] forward plus backward of all layers ahead of each first layer."""
        return self._running_sums(self._layer_time_s())[0][:, :, None]

    def bottleneck_s(self, split: Split) -> float:
        """The slowest stage of a split, forward plus backward at the highest clocks."""
        edges = np.cumsum((0, *split))
        return float(self.stage_time_s[np.arange(self.num_stages), edges[:-1], edges[1:]].max())

    def iteration_times_s(self, splits: IntArray) -> FloatArray:
        """[num_splits] 1F1B iteration times at the highest clocks of [num_splits, num_stages]."""
        schedule = self._schedule
        width = schedule.units_per_stage
        kinds = list(enumerate(schedule.is_backward.ravel().tolist()))
        edges = np.cumsum(np.pad(splits, ((0, 0), (1, 0))), axis=1)
        stages = np.arange(self.num_stages)
        batch = max(1, _BATCH_UNITS // schedule.num_units)
        times = []
        for some in np.array_split(edges, max(1, -(-len(edges) // batch))):
            by_kind_s = [
                kind[stages, some[:, :-1], some[:, 1:]].T.copy()
                for kind in (self.forward_s, self.backward_s)
            ]
            path = LongestPath(schedule, [by_kind_s[k][node // width] for node, k in kinds])
            path.find_ends(np.maximum)
            times.append(np.max(path.end_s[width - 1 :: width], axis=0))
        return np.concatenate(times)

    def _layer_time_s(self) -> FloatArray:
        """[num_layers] forward plus backward of each layer at the highest clocks."""
        forward_s, backward_s = (self.table.time_s[kind][:, 0] for kind in WHOLE)
        time_s: FloatArray = forward_s + backward_s
        return time_s

    def _running_sums(self, values: FloatArray) -> tuple[FloatArray, FloatArray]:
        """[num_stages, L + 1, ...] a value's sum up to each first layer, and to each next one."""
        total = np.concatenate([np.zeros_like(values[:1]), np.cumsum(values, axis=0)])
        layers = np.arange(self.table.num_transformer_layers + 1)
        before = np.repeat(total[None, layers + self.table.has_embedding], self.num_stages, axis=0)
        after = before.copy()
        before[0], after[-1] = 0.0, total[-1]
        return before, after

    def _iteration_bound_s(self) -> FloatArray:
        """[num_stages, L + 1, L + 1] an iteration time that each stage alone forces.

        All microbatches on the stage between the first forward's way there and the last backward's
        way back; or one of the two ways goes on to the last stage, past what 1F1B puts before the
        stage's first backward or after its last forward; or both do, with what is between
        these two units.
        """
        microbatches = self.num_microbatches
        layers_s = self._layer_time_s()
        all_s, passed_s = layers_s.sum(), self._running_sums(layers_s)[1][:, None, :]
        steady = (microbatches - in_flight_1f1b(self.num_stages, microbatches))[:, None, None]
        forward_s, backward_s = self.forward_s, self.backward_s
        # Without a unit between, the last forward is ahead of the first backward.
        both_s = np.where(steady > 0, all_s + all_s - passed_s + steady * self.stage_time_s, 0.0)
        bound_s: FloatArray = np.maximum.reduce(
            [
                self.before_s() + microbatches * self.stage_time_s,
                all_s + (microbatches - 1) * backward_s + steady * forward_s,
                all_s + (microbatches - 1) * forward_s + steady * backward_s,
                both_s,
            ]
        )
        return bound_s

    def _limit_memory(self, limit_bytes: float) -> None:
        static, activation = self.table.memory_bytes, self.table.activation_bytes
        held_bytes = np.zeros(self.allowed.shape)
        if static is None and activation is None:
            raise EnvPipeError(
                f"{self.table.source} has no bytes for the memory limit to apply to",
                remedy="Add the columns memory and activation, or leave the limit out.",
            )
        if static is not None:
            held_bytes += self.sums(static)
        if activation is not None:
            held = in_flight_1f1b(self.num_stages, self.num_microbatches)
            held_bytes += held[:, None, None] * self.sums(activation)
        fits = self.allowed & (held_bytes <= limit_bytes * (1 + RELATIVE_TOLERANCE))
        least, split = minimax(held_bytes, self.allowed)
        if least > limit_bytes * (1 + RELATIVE_TOLERANCE):
            edges = np.cumsum((0, *split))
            tightest = int(held_bytes[np.arange(self.num_stages), edges[:-1], edges[1:]].argmax())
            raise EnvPipeError(
                f"No split keeps the memory limit of {limit_bytes:.6g} bytes: with the least peak, "
                f"{split}, stage {tightest} is the tightest and holds {least:.6g} bytes",
                remedy="Raise --memory-limit, use more stages, or recompute activations.",
            )
        self.allowed = fits


def minimax(weight: FloatArray, allowed: BoolArray) -> tuple[float, Split]:
    """The split whose largest edge is smallest, and that edge; infinite if there is none.

    `weight` and `allowed` are [num_stages, L + 1, L + 1].
    """
    num_stages, nodes, _ = weight.shape
    best = np.where(np.arange(nodes) == nodes - 1, -np.inf, np.inf)
    choices = []
    for stage in reversed(range(num_stages)):
        through = np.where(allowed[stage], np.maximum(weight[stage], best), np.inf)
        choices.append(through.argmin(axis=1))
        best = through.min(axis=1)
    edges = [0]
    for choice in reversed(choices):
        edges.append(int(choice[edges[-1]]))
    return float(best[0]), tuple(np.diff(edges).tolist())


def cheapest_splits(cost: FloatArray, allowed: BoolArray) -> Iterator[Split]:
    """All splits over allowed edges, from the least sum of edge costs upwards.

    The k shortest paths by recursive enumeration (Jimenez and Marzal, WAE'99): each node keeps its
    best completions so far, and a heap of the next one through each successor.
    """
    num_stages, nodes, _ = cost.shape
    found: dict[tuple[int, int], list[tuple[float, int, int]]] = {}
    waiting: dict[tuple[int, int], list[tuple[float, int, int]]] = {}

    def completion(stage: int, first: int, rank: int) -> float | None:
        """The cost of a node's completion of that rank; None if there are fewer."""
        if stage == num_stages:
            return 0.0 if first == nodes - 1 and rank == 0 else None
        node = stage, first
        if node not in found:
            found[node], waiting[node] = [], []
            for following in np.flatnonzero(allowed[stage, first]).tolist():
                offer(node, following, 0)
        known, heap = found[node], waiting[node]
        while len(known) <= rank:
            if not heap:
                return None
            known.append(heappop(heap))
            offer(node, known[-1][1], known[-1][2] + 1)
        return known[rank][0]

    def offer(node: tuple[int, int], following: int, rank: int) -> None:
        rest = completion(node[0] + 1, following, rank)
        if rest is not None:
            edge = float(cost[node[0], node[1], following])
            heappush(waiting[node], (edge + rest, following, rank))

    overall = 0
    while completion(0, 0, overall) is not None:
        layers, first, rank = [], 0, overall
        for stage in range(num_stages):
            _, following, rank = found[stage, first][rank]
            layers.append(following - first)
            first = following
        yield tuple(layers)
        overall += 1


def list_splits(
    space: SplitSpace, cost: FloatArray, allowed: BoolArray
) -> tuple[list[Split], FloatArray, bool]:
    """The cheapest splits over allowed edges, as many as one search times.

    Returns the splits, cheapest first; their iteration times, s; whether these are all there are.
    """
    most = min(_MAX_SPLITS, max(100, _MAX_UNITS // (2 * space.num_stages * space.num_microbatches)))
    splits = list(islice(cheapest_splits(cost, allowed), most + 1))
    complete = len(splits) <= most
    splits = splits[:most]
    return splits, space.iteration_times_s(np.array(splits)), complete


def fastest(space: SplitSpace, allowed: BoolArray) -> Found:
    """The split over allowed edges with the least 1F1B iteration time; of equal ones the evenest.

    Even means the least sum of squared stage times, hence the least standard deviation.
    """
    lower_s, split = minimax(space.bound_s, allowed)
    best_s = float(space.iteration_times_s(np.array([split]))[0])
    num_considered = 0
    while True:
        reachable = allowed & (space.bound_s <= best_s * (1 + RELATIVE_TOLERANCE))
        splits, times_s, complete = list_splits(space, space.stage_time_s**2, reachable)
        num_considered += len(splits)
        found_s = min(best_s, float(times_s.min()))
        ties = np.flatnonzero(times_s <= found_s * (1 + RELATIVE_TOLERANCE))
        if ties.size:
            split = splits[ties[0]]
        at_bound = bool(ties.size) and found_s <= lower_s * (1 + RELATIVE_TOLERANCE)
        if complete or at_bound or found_s >= best_s * (1 - RELATIVE_TOLERANCE):
            return Found(split, found_s, num_considered, complete or at_bound)
        best_s = found_s  # fewer edges can lead to a better one: the list may now be complete


def least_bottleneck(space: SplitSpace) -> Found:
    """The split with the least slowest stage; of equal ones the fastest, then the evenest.

    The bottleneck is exact always; `exact` speaks of the iteration time among equal bottlenecks.
    """
    least_s, _ = minimax(space.stage_time_s, space.allowed)
    within = space.stage_time_s <= least_s * (1 + RELATIVE_TOLERANCE)
    return fastest(space, space.allowed & within)
