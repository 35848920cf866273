"""One iteration of a schedule: start, end, wait and slack of each unit, and its critical path.

A unit starts when its stage has ended the unit before it and its input has arrived from the
neighbour stage: `LongestPath`, the one place that says how early and late units can end. Units that
run as one with the next take no time here, and what needs their output waits for the last of them.
Where a duration depends on the start, as with late clocks, callers go through `LongestPath.order`
themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

import numpy as np
from numpy.typing import ArrayLike

from envpipe_megatron.core.arrays import FloatArray
from envpipe_megatron.core.schedule import Placement, Schedule
from envpipe_megatron.errors import EnvPipeError

#: Times closer than this fraction of the iteration count as equal: sums of the same durations in
#: another order differ only by rounding.
RELATIVE_TOLERANCE = 1e-9


class Timeline:
    """Start and end of each unit, all as early as they can.

    Args:
        duration_s: [num_stages, units_per_stage].
        latency_s: as `latency_by_node` takes it.
        tail_s: [num_stages] the time after each stage's last unit, or one for all.

    Raises EnvPipeError for a wrong shape, or a duration or latency below zero or not a number.
    """

    def __init__(
        self,
        schedule: Schedule,
        duration_s: ArrayLike,
        latency_s: float | Sequence[float] = 0.0,
        tail_s: ArrayLike = 0.0,
    ) -> None:
        self.schedule = schedule
        shape = (schedule.num_stages, schedule.units_per_stage)
        durations = np.array(duration_s, dtype=np.float64)
        if durations.shape != shape:
            raise EnvPipeError(
                "Durations must be [num_stages, units_per_stage]",
                value=durations.shape,
                remedy=f"The schedule is {shape[0]} x {shape[1]}.",
            )
        valid = (durations >= 0) & np.isfinite(durations)
        if not valid.all():
            node = int(np.flatnonzero(~valid)[0])
            raise EnvPipeError(
                f"The duration of {schedule.describe(node)} is not a time",
                value=float(durations.ravel()[node]),
            )
        #: [num_stages, units_per_stage] how long each unit takes.
        self.duration_s = durations
        self._path = LongestPath(schedule, durations.ravel().tolist(), latency_s, tail_s)
        self._path.find_ends()
        #: [num_stages, units_per_stage] end of each unit; the iteration starts at 0.
        self.end_s: FloatArray = np.array(self._path.end_s).reshape(shape)
        #: Until the last stage has ended its tail.
        self.iteration_time_s = max(self._path.stage_end_s)

    @property
    def start_s(self) -> FloatArray:
        """[num_stages, units_per_stage] start of each unit."""
        cross = self.schedule.cross_dependency
        before_s = np.pad(self.end_s[:, :-1], ((0, 0), (1, 0)))
        arrival_s = np.where(cross >= 0, self.end_s.ravel()[cross] + self._path.hop_s, 0.0)
        return np.maximum(before_s, arrival_s.reshape(before_s.shape))

    @property
    def wait_s(self) -> FloatArray:
        """[num_stages, units_per_stage] the wait before each unit.

        The first unit's takes in the wait after the stage's last, tail included: in steady state
        they are one.
        """
        wait_s = self.start_s
        wait_s[:, 1:] -= self.end_s[:, :-1]
        wait_s[:, 0] += self.iteration_time_s - self.end_s[:, -1]
        return wait_s

    @property
    def slack_s(self) -> FloatArray:
        """[num_stages, units_per_stage] how much later a unit may end with the same iteration."""
        self._path.find_latest_ends(self.iteration_time_s)
        return np.array(self._path.latest_end_s).reshape(self.end_s.shape) - self.end_s

    def critical_path(self) -> list[int]:
        """Return nodes of the path that sets the iteration time, from its end to its start."""
        threshold_s = RELATIVE_TOLERANCE * self.iteration_time_s
        wait_s = self.wait_s.ravel().tolist()
        last_stage = self._path.stage_end_s.index(self.iteration_time_s)
        return critical_path(self.schedule, wait_s, threshold_s, last_stage)


def critical_path(
    schedule: Schedule, wait_s: Sequence[float], threshold_s: float, last_stage: int = 0
) -> list[int]:
    """Return the critical path's nodes, from the last unit of `last_stage` to the start.

    A unit that waited for its input longer than the threshold is on the path because of the
    neighbour that fed it; otherwise because of the unit before it on its own stage. The same rule
    reads a computed timeline (threshold: rounding) and measured waits (threshold: measured noise of
    a receive without a bubble), as EnvPipe's code does it.

    Args:
        wait_s: [num_units] the wait of each node for its input.
        last_stage: the one that ends last: stage 0, if there are backwards and no tails.
    """
    width = schedule.units_per_stage
    cross = schedule.cross_dependency
    path = [(last_stage + 1) * width - 1]
    while True:
        node = path[-1]
        source = int(cross[node])
        if source >= 0 and (node % width == 0 or wait_s[node] > threshold_s):
            path.append(source)
        elif node % width:
            path.append(node - 1)
        else:
            return path


class LongestPath:
    """Ends of all units by their durations, in any unit of time.

    `duration_s`, [num_units], is changed and not copied; latencies are as `latency_by_node` takes
    them, and tails as `Timeline`.
    """

    def __init__(
        self,
        schedule: Schedule,
        duration_s: list[float],
        latency_s: float | Sequence[float] = 0.0,
        tail_s: ArrayLike = 0.0,
    ) -> None:
        self.order = schedule.topological_order
        self.duration_s = duration_s
        #: [num_units] the earliest ends, as far as they have been found.
        self.end_s: list[float] = [0.0] * schedule.num_units
        #: [num_units] the latest ends, as far as they have been found.
        self.latest_end_s: list[float] = [0.0] * schedule.num_units
        #: [num_units] latency of the hop that feeds each node.
        self.hop_s = latency_by_node(schedule, latency_s)
        self._schedule, self._width = schedule, schedule.units_per_stage
        self._cross: list[int] = schedule.cross_dependency.tolist()
        self._tail_s: list[float] = np.broadcast_to(tail_s, schedule.num_stages).tolist()
        self._until_s = 0.0

    @property
    def stage_end_s(self) -> list[float]:
        """[num_stages] the earliest ends of the stages, tails included, once ends were found."""
        last_s = self.end_s[self._width - 1 :: self._width]
        return [end_s + tail_s for end_s, tail_s in zip(last_s, self._tail_s, strict=True)]

    def start_s(self, node: int) -> float:
        """Return the earliest start of a node, by the ends of those it waits for."""
        start_s = self.end_s[node - 1] if node % self._width else 0.0
        source = self._cross[node]
        return start_s if source < 0 else max(start_s, self.end_s[source] + self.hop_s[node])

    def find_ends(self) -> None:
        """Find the earliest ends of all nodes."""
        # start_s written out: one call per unit would double the time for 10^5 units.
        end_s, duration_s, hop_s = self.end_s, self.duration_s, self.hop_s
        cross, width = self._cross, self._width
        for node in self.order:
            start_s = end_s[node - 1] if node % width else 0.0
            source = cross[node]
            if source >= 0:
                start_s = max(start_s, end_s[source] + hop_s[node])
            end_s[node] = start_s + duration_s[node]

    def find_latest_ends(self, until_s: float) -> None:
        """Find the latest ends of all nodes if each stage must have ended its tail by `until_s`."""
        self._until_s = until_s
        for node in reversed(self.order):
            self.latest_end_s[node] = self.find_latest_end(node)

    def find_latest_end(self, node: int) -> float:
        """Return the latest end of a node, by the latest ends of those that wait for it."""
        latest, duration_s = self.latest_end_s, self.duration_s
        if (node + 1) % self._width:
            end_s = latest[node + 1] - duration_s[node + 1]
        else:
            end_s = self._until_s - self._tail_s[node // self._width]
        for waiting in self._schedule.waiting[node]:
            end_s = min(end_s, latest[waiting] - duration_s[waiting] - self.hop_s[waiting])
        return end_s

    def change(self, node: int, duration_s: float) -> set[int]:
        """Change one duration, and move only what depends on it, once all ends have been found.

        Returns the nodes whose earliest or latest end moved.
        """
        self.duration_s[node] = duration_s
        rank, width = self._schedule.topological_rank, self._width
        moved: set[int] = set()
        pending = [rank[node]]
        while pending:
            here = self.order[_pop(pending)]
            end_s = self.start_s(here) + self.duration_s[here]
            if end_s == self.end_s[here]:
                continue
            self.end_s[here] = end_s
            moved.add(here)
            if (here + 1) % width:
                heappush(pending, rank[here + 1])
            for waiting in self._schedule.waiting[here]:
                heappush(pending, rank[waiting])
        # Upwards: ranks negated, so that the heap yields the last node first.
        self._push_sources(node, pending)
        while pending:
            here = self.order[-_pop(pending)]
            end_s = self.find_latest_end(here)
            if end_s == self.latest_end_s[here]:
                continue
            self.latest_end_s[here] = end_s
            moved.add(here)
            self._push_sources(here, pending)
        return moved

    def _push_sources(self, node: int, pending: list[int]) -> None:
        rank = self._schedule.topological_rank
        if node % self._width:
            heappush(pending, -rank[node - 1])
        if self._cross[node] >= 0:
            heappush(pending, -rank[self._cross[node]])


def latency_by_node(schedule: Schedule, latency_s: float | Sequence[float]) -> list[float]:
    """Return the latency of the hop that feeds each node; 0 if nothing does.

    `latency_s` is one number for every hop, or one for each boundary between neighbouring stages
    (else EnvPipeError). The hop from the last stage back to the first, which only chunks use, takes
    the longest of them.
    """
    boundaries = schedule.num_stages - 1
    by_boundary = np.asarray(latency_s, dtype=np.float64)
    if by_boundary.ndim == 0:
        by_boundary = np.repeat(by_boundary, boundaries)
    valid = np.isfinite(by_boundary) & (by_boundary >= 0)
    if by_boundary.shape != (boundaries,) or not np.all(valid):
        raise EnvPipeError(
            "The p2p latency must be one time, or one for each boundary between stages",
            value=latency_s,
            remedy=f"Give {boundaries} non-negative numbers in seconds.",
        )
    hop = np.append(by_boundary, by_boundary.max(initial=0.0))  # last: the hop back to stage 0
    cross = schedule.cross_dependency
    stage = np.arange(schedule.num_units) // schedule.units_per_stage
    source_stage = cross // schedule.units_per_stage
    backward = schedule.is_backward.ravel()
    # Between the last stage and the first, the wrong way round for the unit's kind.
    wraps = np.where(backward, source_stage < stage, source_stage > stage)
    wraps &= schedule.placement is Placement.LOOPED
    boundary = np.where(wraps, boundaries, np.minimum(stage, source_stage))
    by_node = np.where(cross >= 0, hop[boundary], 0.0)
    hops_s: list[float] = by_node.tolist()
    return hops_s


def _pop(pending: list[int]) -> int:
    """Pop the least of a heap and its copies: a fifth of the time of `change`."""
    least = heappop(pending)
    while pending and pending[0] == least:
        heappop(pending)
    return least
