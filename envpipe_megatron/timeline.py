"""When each unit of a schedule starts and ends, given how long each takes.

A unit starts when its stage has ended the unit before it in the order and its input has arrived
from the neighbour stage: the start is the length of the longest path to it through the schedule's
dependency graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import heappop, heappush

import numpy as np
from numpy.typing import ArrayLike, NDArray

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.schedule import Schedule

FloatArray = NDArray[np.float64]

#: Times closer than this fraction of the iteration count as equal: sums of the same durations in
#: another order differ by rounding alone.
RELATIVE_TOLERANCE = 1e-9


class TimelineError(EnvPipeError):
    """Durations or latencies that do not fit the schedule."""


class Timeline:
    """Start and end of each unit; kept up to date when durations change.

    Args:
        schedule: the order of units.
        duration_s: [num_stages, units_per_stage] how long each unit takes.
        latency_s: p2p latency, one number for every hop or one for each boundary between
            neighbouring stages. The hop from the last stage back to the first, which only chunks
            use, takes the longest of them.

    Raises:
        TimelineError: a wrong shape, or a duration or latency below zero or not a number.
    """

    def __init__(
        self,
        schedule: Schedule,
        duration_s: ArrayLike,
        latency_s: float | Sequence[float] = 0.0,
    ) -> None:
        self.schedule = schedule
        shape = (schedule.num_stages, schedule.units_per_stage)
        durations = np.array(duration_s, dtype=np.float64)
        if durations.shape != shape:
            raise TimelineError(
                "Durations must be [num_stages, units_per_stage]",
                value=durations.shape,
                remedy=f"The schedule is {shape}.",
            )
        if not np.all(durations >= 0) or not np.all(np.isfinite(durations)):
            node = int(np.flatnonzero(~((durations >= 0) & np.isfinite(durations)))[0])
            raise TimelineError(
                f"The duration of {schedule.describe(node)} is not a time",
                value=float(durations.ravel()[node]),
            )
        self._cross: list[int] = schedule.cross_dependency.tolist()
        self._latency = latency_by_node(schedule, latency_s)
        self._duration: list[float] = durations.ravel().tolist()
        self._end: list[float] = [0.0] * schedule.num_units
        self._start: list[float] = [0.0] * schedule.num_units
        self._rank: list[int] | None = None
        self._compute()

    @property
    def duration_s(self) -> FloatArray:
        """[num_stages, units_per_stage] how long each unit takes."""
        return self._as_array(self._duration)

    @property
    def start_s(self) -> FloatArray:
        """[num_stages, units_per_stage] start of each unit; the iteration starts at 0."""
        return self._as_array(self._start)

    @property
    def end_s(self) -> FloatArray:
        """[num_stages, units_per_stage] end of each unit."""
        return self._as_array(self._end)

    @property
    def iteration_time_s(self) -> float:
        """End of the last unit."""
        width = self.schedule.units_per_stage
        return max(self._end[width - 1 :: width])

    def receive_wait_s(self, node: int) -> float:
        """How long a stage waits for the input of a unit after its previous unit has ended."""
        previous_end = self._end[node - 1] if node % self.schedule.units_per_stage else 0.0
        return self._start[node] - previous_end

    def slack_s(self) -> FloatArray:
        """[num_stages, units_per_stage] how much later a unit may end with the same iteration."""
        width = self.schedule.units_per_stage
        successor = self.schedule.cross_successor.tolist()
        latest = [self.iteration_time_s] * self.schedule.num_units
        for node in reversed(self.schedule.topological_order):
            bound = latest[node]
            if (node + 1) % width:
                bound = latest[node + 1] - self._duration[node + 1]
            receiver = successor[node]
            if receiver >= 0:
                limit = latest[receiver] - self._duration[receiver] - self._latency[receiver]
                bound = min(bound, limit)
            latest[node] = bound
        return self._as_array(latest) - self.end_s

    def critical_path(self) -> list[int]:
        """Nodes of the path that sets the iteration time, from its end to its start."""
        return critical_path(
            self.schedule, self.receive_wait_s, RELATIVE_TOLERANCE * self.iteration_time_s
        )

    def update(self, duration_s: Mapping[int, float]) -> None:
        """Change the durations (s) of some nodes and move only what depends on them.

        Raises:
            TimelineError: a duration below zero.
        """
        rank = self._topological_rank()
        order = self.schedule.topological_order
        successor = self.schedule.cross_successor
        width = self.schedule.units_per_stage
        pending: list[int] = []
        for node, duration in duration_s.items():
            if not duration >= 0:
                raise TimelineError(
                    f"The duration of {self.schedule.describe(node)} is not a time", value=duration
                )
            self._duration[node] = duration
            heappush(pending, rank[node])
        last = -1
        while pending:
            current = heappop(pending)
            if current == last:
                continue
            last = current
            node = order[current]
            start, end = self._times_of(node)
            if end == self._end[node] and start == self._start[node]:
                continue
            self._start[node], self._end[node] = start, end
            if (node + 1) % width:
                heappush(pending, rank[node + 1])
            receiver = int(successor[node])
            if receiver >= 0:
                heappush(pending, rank[receiver])

    def _times_of(self, node: int) -> tuple[float, float]:
        start = self._end[node - 1] if node % self.schedule.units_per_stage else 0.0
        source = self._cross[node]
        if source >= 0:
            start = max(start, self._end[source] + self._latency[node])
        return start, start + self._duration[node]

    def _compute(self) -> None:
        # _times_of written out: a call a unit would double the time for 10^5 units.
        cross, latency, duration = self._cross, self._latency, self._duration
        starts, ends = self._start, self._end
        width = self.schedule.units_per_stage
        for node in self.schedule.topological_order:
            start = ends[node - 1] if node % width else 0.0
            source = cross[node]
            if source >= 0:
                arrival = ends[source] + latency[node]
                if arrival > start:
                    start = arrival
            starts[node] = start
            ends[node] = start + duration[node]

    def _topological_rank(self) -> list[int]:
        if self._rank is None:
            self._rank = [0] * self.schedule.num_units
            for rank, node in enumerate(self.schedule.topological_order):
                self._rank[node] = rank
        return self._rank

    def _as_array(self, values: Iterable[float]) -> FloatArray:
        return np.array(values).reshape(self.schedule.num_stages, self.schedule.units_per_stage)


def critical_path(
    schedule: Schedule, receive_wait_s: Callable[[int], float], threshold_s: float
) -> list[int]:
    """Walk the critical path back from the last unit (stage 0's, where there are backwards).

    A unit that waited for its input longer than the threshold is on the path because of the
    neighbour that fed it; otherwise because of the unit before it on its own stage. The same rule
    reads a computed timeline (threshold: rounding) and measured waits (threshold: measured noise of
    a receive without a bubble), as EnvPipe's code does it.

    Args:
        schedule: the order of units.
        receive_wait_s: the wait of a node for its input.
        threshold_s: waits up to this count as none.

    Returns:
        Nodes from the end of the path to its start.
    """
    width = schedule.units_per_stage
    cross = schedule.cross_dependency
    node = (schedule.num_units if schedule.forward_only else width) - 1
    path = [node]
    while True:
        source = int(cross[node])
        first_of_stage = node % width == 0
        if first_of_stage and source < 0:
            return path
        if source >= 0 and (first_of_stage or receive_wait_s(node) > threshold_s):
            node = source
        else:
            node -= 1
        path.append(node)


def is_envelope(schedule: Schedule, path: Iterable[int]) -> bool:
    """Whether every unit of a path lies on the outer envelope: reconfiguring is then done."""
    return schedule.outer_envelope.issuperset(path)


def latency_by_node(schedule: Schedule, latency_s: float | Sequence[float]) -> list[float]:
    """Latency of the hop that feeds each node; 0 where nothing does.

    Args:
        schedule: the order of units.
        latency_s: as `Timeline` takes it.

    Raises:
        TimelineError: neither one time nor one for each boundary, or below zero.
    """
    boundaries = schedule.num_stages - 1
    by_boundary = np.atleast_1d(np.asarray(latency_s, dtype=np.float64))
    if np.ndim(latency_s) == 0:
        by_boundary = np.repeat(by_boundary, boundaries)
    valid = np.isfinite(by_boundary) & (by_boundary >= 0)
    if by_boundary.shape != (boundaries,) or not np.all(valid):
        raise TimelineError(
            "The p2p latency must be one time, or one for each boundary between stages",
            value=latency_s,
            remedy=f"Give {boundaries} non-negative numbers in seconds.",
        )
    hop = np.append(by_boundary, by_boundary.max(initial=0.0))  # last: the hop back to stage 0
    cross = schedule.cross_dependency
    stage = np.arange(schedule.num_units) // schedule.units_per_stage
    source_stage = cross // schedule.units_per_stage
    chunk = schedule.chunks.ravel()
    wraps = chunk[cross] != chunk  # only the hop back to stage 0 changes the chunk
    boundary = np.where(wraps, boundaries, np.minimum(stage, source_stage))
    return [float(x) for x in np.where(cross >= 0, hop[np.clip(boundary, 0, boundaries)], 0.0)]
