"""Iterations that have run: billed, and written down as soon as their times may be read.

Called by `session`.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.formats.energy import FRAMEWORK, Phase, phase_in_batch
from envpipe_megatron.runtime.energy.timeline_log import TimelineLog
from envpipe_megatron.runtime.energy.training import TrainingEnergy
from envpipe_megatron.runtime.execution.executor import Executor, StageRecord
from envpipe_megatron.runtime.execution.orders import IterationOrder
from envpipe_megatron.runtime.execution.stage_run import StageRun

#: A job of weeks must not grow.
_KEPT_ITERATIONS = 10_000


class Iterations:
    """Those of one rank."""

    def __init__(
        self, stage: int, executor: Executor, energy: TrainingEnergy, timeline: TimelineLog
    ) -> None:
        self._stage = stage
        self._executor = executor
        self._energy = energy
        self._timeline = timeline
        #: The last one that has ended; the phases get it when the next one begins.
        self.last_record: StageRecord | None = None
        #: The one whose times are to be read while the next one runs, and what writes it down.
        self._late: tuple[StageRun, Callable[[], None]] | None = None
        #: The last one whose units were timed, all of them, and what it ran.
        self._timed: tuple[IterationOrder, StageRecord] | None = None
        self._kept: deque[tuple[Phase, float, float]] = deque(maxlen=_KEPT_ITERATIONS)

    @property
    def latest(self) -> Sequence[tuple[Phase, float, float]]:
        """Phase, time on the GPU's time base in s, wall time in s.

        Waits for the last unit, if its times are not read yet.
        """
        self.catch_up()
        return self._kept

    def add(self, number: int, run: StageRun, batch: str, controlled: Callable[[], bool]) -> None:
        """All units of an iteration have run; its times are read now, or later.

        Args:
            number: of the iteration.
            batch: name of the batch whose iteration it is.
            controlled: whether clocks are still asked for.

        Raises ChannelError if a neighbour is gone or silent.
        """
        self.catch_up()
        record = self.last_record = run.end(number)
        if run.times_units and run.whole:
            self._timed = run.order, record
        # A step that did not run whole is none of a phase: nothing is compared with it.
        phase = phase_in_batch(run.order.phase, batch) if run.whole else FRAMEWORK
        self._energy.add(phase, number, record, run.order.schedule.receives[self._stage])
        clocks_mhz = run.frequencies_mhz if controlled() else None

        def write_down() -> None:
            self._energy.catch_up()
            self._timeline.add(phase, number, record, lambda: run.executed, clocks_mhz)
            self._kept.append((run.order.phase, record.iteration_time_s, record.wall_time_s))

        self._late = run, write_down
        if not run.order.billed_late:
            self.catch_up()

    def catch_up(self) -> None:
        """Write the last iteration down, if that was left until its times may be read."""
        if self._late is not None:
            (_, write_down), self._late = self._late, None
            write_down()

    def like(self, order: IterationOrder) -> StageRecord | None:
        """One whose units' times may stand for the next one's, which runs this; None: time them."""
        if order.times_units or self._timed is None:
            return None
        timed, record = self._timed
        same = timed.schedule is order.schedule and timed.frequency_mhz is order.frequency_mhz
        return record if same else None

    def make_way_for(self, order: Schedule) -> None:
        """Another order follows, which may replace memory that messages of a late one lie in."""
        if self._late is not None and self._late[0].order.schedule is not order:
            self.catch_up()

    def nothing_follows(self) -> None:
        """What comes next is no training: what the last record says of the next one is not so."""
        self.catch_up()
        if self.last_record is not None:
            self.last_record = replace(self.last_record, followed=False)

    def end(self) -> None:
        """Write the last one down, if it has ended: peers may be gone, so nothing is waited for."""
        self._executor.wait_no_more()
        with contextlib.suppress(Exception):  # the device may have failed
            if self._late is not None and self._late[0].has_ended:
                self.catch_up()
