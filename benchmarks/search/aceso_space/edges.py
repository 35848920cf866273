"""All stages that a division below some time can have, with a lower bound on the time of each.

Enter at `stage_edges`. A *state* is a number of stages and of GPUs that are still to come. In each
state a stage can begin only from the first cut from which the rest can be done in time to the last
cut that the stages before can have reached in time; both follow stage by stage, since longer stages
take longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.search.aceso_space.options import StageOption, Stages
from envpipe_megatron.core.arrays import FloatArray, IntArray
from envpipe_megatron.search.configuration import Job


@dataclass(frozen=True)
class Stage:
    """One of `StageEdges`."""

    level: int
    option: int
    first: int
    end: int
    switch: int
    outside_s: float


@dataclass(frozen=True)
class StageEdges:
    """Stages: arrays [num_edges], sorted by tail, except `starts`.

    Args:
        tail, head: nodes, which are cuts in a state, numbered from the end of the pipeline.
        level: microbatches in flight, which is the number of stages from this one on.
        option: the number of its sizes.
        first, end: its first piece, and the one behind its last.
        switch, outside_s, again_s, over_bytes: as of `Stages`.
        starts: nodes at which the first stage can begin.
    """

    tail: IntArray
    head: IntArray
    level: IntArray
    option: IntArray
    first: IntArray
    end: IntArray
    switch: IntArray
    outside_s: FloatArray
    again_s: FloatArray
    over_bytes: FloatArray
    starts: IntArray

    def bounds_s(self, edges: IntArray, options: Sequence[StageOption]) -> FloatArray:
        """Closer lower bounds on the times of some edges."""
        times_s = self.outside_s[edges]
        for number, option in enumerate(options):
            here = np.flatnonzero(self.option[edges] == number)
            if len(here):
                edge = edges[here]
                times_s[here] += option.costs.recompute_bound_s(
                    self.first[edge], self.end[edge], self.over_bytes[edge], self.level[edge]
                )
        return times_s

    def stage(self, edge: int) -> Stage:
        """The stage of one edge."""
        return Stage(
            int(self.level[edge]),
            int(self.option[edge]),
            int(self.first[edge]),
            int(self.end[edge]),
            int(self.switch[edge]),
            float(self.outside_s[edge]),
        )


State = tuple[int, int]


def stage_edges(
    job: Job, cuts: IntArray, options: Sequence[StageOption], limit_s: float
) -> StageEdges | None:
    """Stages of divisions of which every stage takes at most some s; None if there are none.

    Args:
        cuts: where stages can begin or end, from 0 to the number of pieces.
    """
    windows = _windows(job, cuts, options, limit_s)
    if (0, 0) not in windows:
        return None
    nodes, num_nodes = {}, 0
    for state, (low, high) in sorted(windows.items()):
        nodes[state] = num_nodes - low
        num_nodes += high - low + 1
    parts = []
    for (level, gpus), (low, high) in sorted(windows.items()):
        for number, option in enumerate(options):
            behind = (level - 1, gpus - option.num_gpus)
            if behind not in windows:
                continue
            begins = np.arange(low, high + 1)
            ends = np.arange(windows[behind][0], windows[behind][1] + 1)
            before, until = job.num_gpus - gpus, job.num_gpus - gpus + option.num_gpus
            crosses = (
                before > 0 and before % job.gpus_per_node == 0,
                until % job.gpus_per_node == 0,
            )
            stages = option.stages(cuts, begins, ends, level, crosses, limit_s)
            if len(stages.begin):
                parts.append((stages, nodes[(level, gpus)], nodes[behind], level, number))
    if not parts:
        return None
    starts = [
        nodes[state] for state, (low, _) in windows.items() if state[1] == job.num_gpus and low == 0
    ]
    return _joined(cuts, parts, np.array(starts))


def _joined(
    cuts: IntArray, parts: Sequence[tuple[Stages, int, int, int, int]], starts: IntArray
) -> StageEdges:
    stages = [part[0] for part in parts]
    lengths = [len(each.begin) for each in stages]
    tail = np.concatenate([each.begin + part[1] for each, part in zip(stages, parts, strict=True)])
    head = np.concatenate([each.end + part[2] for each, part in zip(stages, parts, strict=True)])
    order = np.argsort(tail, kind="stable")
    return StageEdges(
        tail=tail[order],
        head=head[order],
        level=np.repeat([part[3] for part in parts], lengths)[order],
        option=np.repeat([part[4] for part in parts], lengths)[order],
        first=cuts[np.concatenate([each.begin for each in stages])[order]],
        end=cuts[np.concatenate([each.end for each in stages])[order]],
        switch=np.concatenate([each.switch for each in stages])[order],
        outside_s=np.concatenate([each.outside_s for each in stages])[order],
        again_s=np.concatenate([each.again_s for each in stages])[order],
        over_bytes=np.concatenate([each.over_bytes for each in stages])[order],
        starts=starts,
    )


def _windows(
    job: Job, cuts: IntArray, options: Sequence[StageOption], limit_s: float
) -> dict[State, tuple[int, int]]:
    """For each state, the first and the last number of a cut at which a stage can begin."""
    every, final = job.num_gpus, len(cuts) - 1
    first = {(0, 0): final}
    level, reached = 0, {0: final}
    while reached:
        level += 1
        begins = dict.fromkeys(range(every + 1), final)
        for option in options:
            gpus = [each for each in reached if each + option.num_gpus <= every]
            ends = np.array([reached[each] for each in gpus], dtype=np.int64)
            found = _first_begins(option, cuts, ends, level, limit_s)
            for each, end, begin in zip(gpus, ends, found, strict=True):
                if begin < end:
                    total = each + option.num_gpus
                    begins[total] = min(int(begin), begins[total])
        first.update(
            {
                (level, gpus): max(cut, int(gpus < every))
                for gpus, cut in begins.items()
                if cut < final
            }
        )
        # A cut behind the first piece leaves a piece to the stages before.
        reached = {
            gpus: max(cut, 1) for gpus, cut in begins.items() if cut < final and gpus < every
        }
    last = {(at, gpus): 0 for (at, gpus), cut in first.items() if gpus == every and cut == 0}
    for at in range(level, 0, -1):
        reached = {gpus: cut for (each, gpus), cut in last.items() if each == at}
        for option in options:
            gpus = [each for each in reached if (at - 1, each - option.num_gpus) in first]
            from_cuts = np.array([reached[each] for each in gpus], dtype=np.int64)
            found = _last_ends(option, cuts, from_cuts, at, limit_s)
            for each, end in zip(gpus, found, strict=True):
                state = (at - 1, each - option.num_gpus)
                end = min(int(end), final - (at - 1))  # a piece for each stage behind
                if end >= first[state] and end > reached[each]:
                    last[state] = max(end, last.get(state, 0))
    return {state: (first[state], cut) for state, cut in last.items()}


def _first_begins(
    option: StageOption, cuts: IntArray, ends: IntArray, level: int, limit_s: float
) -> IntArray:
    """The smallest number of a cut from which a stage to each end keeps the limit, or the end."""
    low, high = np.zeros_like(ends), ends.copy()
    while (low < high).any():
        middle = (low + high) // 2
        fits = option.least_s(cuts[middle], cuts[ends], level) <= limit_s
        low, high = np.where(fits, low, middle + 1), np.where(fits, middle, high)
    return low


def _last_ends(
    option: StageOption, cuts: IntArray, begins: IntArray, level: int, limit_s: float
) -> IntArray:
    """The largest number of a cut to which a stage from each begin keeps the limit."""
    low, high = begins.copy(), np.full_like(begins, len(cuts) - 1)
    while (low < high).any():
        middle = (low + high + 1) // 2
        fits = option.least_s(cuts[begins], cuts[middle], level) <= limit_s
        low, high = np.where(fits, middle, low), np.where(fits, high, middle - 1)
    return low
