"""Stretches of iterations at one setting of clocks, long enough for the energy counter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import numpy as np

from envpipe_megatron.core.arrays import FloatArray
from envpipe_megatron.runtime.channel.collectives import Collectives
from envpipe_megatron.runtime.execution.executor import StageRecord
from envpipe_megatron.runtime.execution.orders import (
    IterationOrder,
    PhaseRun,
    iterations,
    whole,
)

#: Of a shorter iteration, as a step without units is, no more are run than of this one, s.
_LEAST_S = 1e-3


class Stretches:
    """Runs them on all ranks alike, the first at the clocks at which iterations are shortest.

    Args:
        settle_iterations: run and not measured after each change of clocks, one at least.
        min_window_s: iterations are added until they last so long.
        collectives: to all ranks.
    """

    def __init__(
        self, settle_iterations: int, min_window_s: float, collectives: Collectives
    ) -> None:
        self._settle_iterations = settle_iterations
        self._min_window_s = min_window_s
        self._collectives = collectives
        self._shortest_s: float | None = None

    def settle(self, order: IterationOrder) -> PhaseRun[None]:
        """Let new clocks settle."""
        longest_s = _LEAST_S
        for _ in range(self._settle_iterations):
            settled = yield order
            longest_s = max(longest_s, settled.iteration_time_s)
        if self._shortest_s is None:
            self._shortest_s = min(self._collectives.by_stage(longest_s, min))

    def measure(self, order: IterationOrder, at_least: int) -> PhaseRun[list[StageRecord]]:
        """What this stage measures in iterations that fill a window, once clocks have settled."""
        assert self._shortest_s is not None
        count = max(at_least, math.ceil(self._min_window_s / self._shortest_s))
        return (yield from whole(partial(iterations, order, count), self._collectives))


def ends_and_gaps_s(records: Sequence[StageRecord]) -> tuple[FloatArray, FloatArray]:
    """What one stage measures of its tail in iterations that followed each other.

    For each iteration but the last: the end of its last unit after its own begin, in s, and the
    time from there to the begin of the next iteration, in s; see `control.window.tail_times_s`.
    """
    ends_s = [float(record.end_s[-1]) for record in records[:-1]]
    gaps_s = [
        after.begin_s - (before.begin_s + before.end_s[-1]) for before, after in pairwise(records)
    ]
    return np.array(ends_s), np.array(gaps_s)
