"""One iteration of a schedule: start, end, wait and slack of each unit, and its critical path."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import ArrayLike

from envpipe_megatron.core.arrays import FloatArray
from envpipe_megatron.core.longest_path import LongestPath
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.errors import EnvPipeError

#: Times closer than this fraction of the iteration count as equal: sums of the same durations in
#: another order differ by rounding alone.
RELATIVE_TOLERANCE = 1e-9


class Timeline:
    """When each unit starts and ends, all as early as they can.

    Args:
        duration_s: [num_stages, units_per_stage].
        latency_s: as `longest_path.latency_by_node` takes it.
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
        self._path = LongestPath(schedule, durations.ravel().tolist(), latency_s)
        self._path.find_ends()
        #: [num_stages, units_per_stage] end of each unit; the iteration starts at 0.
        self.end_s: FloatArray = np.array(self._path.end_s).reshape(shape)
        self._tail_s = np.broadcast_to(tail_s, shape[:1])
        stage_end_s = self.end_s[:, -1] + self._tail_s
        #: Until the last stage has ended its tail.
        self.iteration_time_s = float(stage_end_s.max())
        self._last_stage = int(stage_end_s.argmax())

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
        self._path.find_latest_ends((self.iteration_time_s - self._tail_s).tolist())
        return np.array(self._path.latest_end_s).reshape(self.end_s.shape) - self.end_s

    def critical_path(self) -> list[int]:
        """Nodes of the path that sets the iteration time, from its end to its start."""
        threshold_s = RELATIVE_TOLERANCE * self.iteration_time_s
        wait_s = self.wait_s.ravel().tolist()
        return critical_path(self.schedule, wait_s, threshold_s, self._last_stage)


def critical_path(
    schedule: Schedule, wait_s: Sequence[float], threshold_s: float, last_stage: int = 0
) -> list[int]:
    """The critical path's nodes, from the last unit of the stage that ends last to the start.

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


def is_envelope(schedule: Schedule, path: Iterable[int]) -> bool:
    """Whether every unit of a path lies on the outer envelope."""
    return schedule.outer_envelope.issuperset(path)
