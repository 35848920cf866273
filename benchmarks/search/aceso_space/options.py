"""Sizes that a stage can have, and all stages that they allow between some cuts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.search.aceso_space.costs import StageCosts
from envpipe_megatron.core.arrays import BoolArray, FloatArray, IntArray
from envpipe_megatron.search.layer_profile import Sizes


@dataclass(frozen=True)
class Switched:
    """Other sizes, on as many GPUs, to which a stage switches before one of its pieces.

    Args:
        switch_s: [num_pieces] of moving a microbatch between the ranks, forward and back.
    """

    sizes: Sizes
    data_parallel: int
    costs: StageCosts
    switch_s: FloatArray


@dataclass(frozen=True)
class Stages:
    """Stages: [num_stages] arrays.

    Args:
        begin, end: numbers of cuts.
        switch: the piece before which sizes change; 0 for none.
        outside_s: time without recomputation.
        again_s: a rough lower bound on the time of recomputation.
        over_bytes: what is held too much without recomputation.
    """

    begin: IntArray
    end: IntArray
    switch: IntArray
    outside_s: FloatArray
    again_s: FloatArray
    over_bytes: FloatArray

    def at(self, kept: BoolArray) -> Stages:
        """Some of them."""
        return Stages(*(values[kept] for values in vars(self).values()))


@dataclass(frozen=True)
class StageOption:
    """Sizes that a stage can have. One that switches them recomputes nothing."""

    sizes: Sizes
    data_parallel: int
    costs: StageCosts
    switched: Switched | None = None

    @property
    def num_gpus(self) -> int:
        """GPUs of such a stage."""
        return self.sizes.gpus * self.data_parallel

    def least_s(self, first: IntArray, end: IntArray, in_flight: int) -> FloatArray:
        """A lower bound on the time that holds for all longer stages."""
        if self.switched is None:
            return self.costs.least_s(first, end, in_flight)
        quicker_s = np.minimum(self.costs.piece_s, self.switched.costs.piece_s)
        before_s = np.concatenate([[0.0], np.cumsum(quicker_s)])
        least_s: FloatArray = before_s[end] - before_s[first]
        return least_s

    def stages(
        self,
        cuts: IntArray,
        begins: IntArray,
        ends: IntArray,
        in_flight: int,
        crosses: tuple[bool, bool],
        limit_s: float,
    ) -> Stages:
        """Stages from any of some cuts to any of others that stay below a limit.

        Args:
            begins, ends: numbers of cuts.
            crosses: whether the messages before and behind come from another node.
        """
        if self.switched is not None:
            return self._switched_stages(cuts, begins, ends, in_flight, crosses, limit_s)
        pairs = np.nonzero(begins[:, None] < ends)
        begin, end = begins[pairs[0]], ends[pairs[1]]
        outside_s = self.costs.run_s(cuts[begin], cuts[end], crosses)
        kept = outside_s <= limit_s
        begin, end, outside_s = begin[kept], end[kept], outside_s[kept]
        over_bytes = self.costs.over_bytes(cuts[begin], cuts[end], in_flight)
        again_s = np.zeros(len(begin))
        full = np.flatnonzero(over_bytes > 0)
        again_s[full] = self.costs.rough_bound_s(
            cuts[begin[full]], cuts[end[full]], over_bytes[full], in_flight
        )
        stages = Stages(begin, end, np.zeros_like(begin), outside_s, again_s, over_bytes)
        return stages.at(outside_s + again_s <= limit_s)

    def _switched_stages(
        self,
        cuts: IntArray,
        begins: IntArray,
        ends: IntArray,
        in_flight: int,
        crosses: tuple[bool, bool],
        limit_s: float,
    ) -> Stages:
        """Each stage with the best switch with which it fits."""
        assert self.switched is not None
        first, end, behind = cuts[begins][:, None], cuts[ends][None, :], self.switched.costs
        shape = (len(begins), len(ends))
        best_s, best = np.full(shape, np.inf), np.zeros(shape, dtype=np.int64)
        for switch in range(int(first.min()) + 1, int(end.max())):
            switch_s = self.switched.switch_s[switch]
            if switch_s > limit_s:
                continue
            inside = (first < switch) & (switch < end)
            at, rows, columns = np.array(switch), np.minimum(first, switch), np.maximum(end, switch)
            held = self.costs.held(rows, at, at).with_other(
                behind.held(at, columns, np.maximum(columns - 1, switch))
            )
            over_bytes = self.costs.over_of(held, in_flight)
            over_bytes = over_bytes + in_flight * self.costs.input_bytes(rows)
            time_s = (
                self.costs.compute_s(rows, at)
                + behind.compute_s(at, columns)
                + switch_s
                + self.costs.receive_s(rows, crosses[0])
                + behind.send_s(columns, crosses[1])
            )
            better = inside & (over_bytes <= 0) & (time_s < best_s)
            best_s = np.where(better, time_s, best_s)
            best = np.where(better, switch, best)
        row, column = np.nonzero(best_s <= limit_s)
        nothing = np.zeros(len(row))
        time_s, switch_at = best_s[row, column], best[row, column]
        return Stages(begins[row], ends[column], switch_at, time_s, nothing, nothing)
