"""The energy log of one GPU: windows of iterations, written as training goes on."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from envpipe_megatron.formats.energy import ENERGY_FORMAT, FRAMEWORK, PLAN
from envpipe_megatron.runtime.energy.meter import EnergyMeter, MeterError, WindowEnergy
from envpipe_megatron.runtime.execution.executor import StageRecord

logger = logging.getLogger(__name__)

#: Windows that wait for a counter that stands still; with more, it is not coming back for them.
_MOST_WAITING = 64


@dataclass
class _Window:
    phase: str
    first_iteration: int
    last_iteration: int
    begin_s: float
    end_s: float
    iterations: int = 0
    compute_s: float = 0.0
    blocking_s: float = 0.0
    #: Whether its end is that of a whole step, with the optimizer.
    step_ended: bool = False
    #: Its first iterations, past whose end the counter was seen to refresh.
    metered: _Window | None = None

    @property
    def duration_s(self) -> float:
        return self.end_s - self.begin_s


@dataclass
class PhaseTotals:
    """What the metered windows of one phase add up to: J, s and iterations."""

    energy_j: float = 0.0
    uncertainty_j: float = 0.0
    duration_s: float = 0.0
    compute_s: float = 0.0
    blocking_s: float = 0.0
    iterations: int = 0


class EnergyLog:
    """Groups iterations of one phase into windows, and appends each to a file when it is metered.

    A window lasts at least ten refreshes of the counter, unless its phase ends before, and is
    metered when the counter has refreshed past its end: while the counter stands still, the window
    grows. Of a window that cannot be metered to its end, the iterations that the counter had passed
    are written; the rest is left out, with one message, and later windows are written again. A file
    that cannot be written (disk full) ends the log, not the training.

    Args:
        meter: of this rank's GPU.
        append: takes each line: into the JSON Lines file that all ranks of a node may share, or to
            the node's agent. It may raise OSError. None counts alone.
        labels: what every line says of this GPU; see `envpipe_megatron.formats.energy`.
    """

    def __init__(
        self,
        meter: EnergyMeter,
        append: Callable[[dict[str, Any]], None] | None,
        labels: Mapping[str, object],
    ) -> None:
        self._meter = meter
        self._append = append
        self._labels = dict(labels)
        self._open: _Window | None = None
        self._waiting: deque[_Window] = deque()
        self._failing = False
        #: For each phase, what was metered of it.
        self.totals: dict[str, PhaseTotals] = {}

    def add(
        self,
        phase: str,
        iteration: int,
        record: StageRecord,
        receives: NDArray[np.bool_],
        begun_s: float | None = None,
    ) -> float:
        """Count one more iteration; never reads or waits.

        Iterations of a phase follow each other without a gap in the bill: what runs between two of
        them is billed with the later one. So is what runs between two phases, where `end_step` told
        that the earlier one's last step was over.

        Args:
            phase: windows of different phases are kept apart.
            iteration: its number in the job.
            record: what this stage measured in it.
            receives: [units_per_stage] whether a unit's input comes from another stage: the wait
                before it is blocking, the wait before another is idle.
            begun_s: when its step began, on the meter's time base, if that is known; else it begins
                with its first unit.

        Returns:
            where its bill begins, s.
        """
        begin_s = record.begin_s if begun_s is None else min(begun_s, record.begin_s)
        window, begin_s = self._window(phase, iteration, begin_s, record.end_of_iteration_s)
        window.compute_s += float(record.unit_time_s.sum())
        window.blocking_s += float(record.receive_wait_s[receives].sum())
        return begin_s

    def add_step_of_framework(self, iteration: int, begin_s: float, end_s: float) -> float:
        """Count a step that the framework ran by itself, of which nobody knows the units.

        Returns:
            where its bill begins, s.
        """
        window, begin_s = self._window(FRAMEWORK, iteration, begin_s, end_s)
        window.step_ended = True
        return begin_s

    def add_between_phases(self, iteration: int, begin_s: float, end_s: float) -> float:
        """Bill what prepares the phase that the iteration begins.

        Returns:
            where its bill begins, s.
        """
        window, begin_s = self._window(PLAN, iteration, begin_s, end_s)
        window.iterations = 0
        window.step_ended = True
        return begin_s

    def end_step(self, end_s: float) -> None:
        """The last iteration's step ends only now: the optimizer's energy is billed with it."""
        if self._open and end_s >= self._open.end_s:
            self._open.end_s = end_s
            self._open.step_ended = True

    def _window(
        self, phase: str, iteration: int, begin_s: float, end_s: float
    ) -> tuple[_Window, float]:
        """The open window, with one more iteration; and where that one's bill begins."""
        last_s, min_window_s = self._meter.last_refresh_s, self._meter.min_window_s
        self._flush(last_s)
        if end_s - last_s > min_window_s:
            self._tell(str(self._meter.error or f"no refresh of the counter since {last_s} s"))
        elif begin_s <= last_s:
            self._failing = False
        current = self._open
        if current and (current.phase == phase or current.step_ended):
            begin_s = current.end_s
        if current and current.phase != phase:
            self.interrupt()
        elif current and current.duration_s >= min_window_s and current.end_s <= last_s:
            self.interrupt()
            self._flush(last_s)
        current = self._open
        if current is None:
            current = _Window(phase, iteration, iteration, begin_s, begin_s)
        elif current.end_s <= last_s:
            current.metered = replace(current, metered=None)
        current.first_iteration = min(current.first_iteration, iteration)
        current.last_iteration = max(current.last_iteration, iteration)
        current.iterations += 1
        current.end_s = end_s
        current.step_ended = False
        self._open = current
        return current, begin_s

    def interrupt(self) -> None:
        """End the open window: something that is not training follows, and is not billed."""
        if self._open:
            self._waiting.append(self._open)
            self._open = None

    def close(self) -> None:
        """Write what is left, after one more look at the counter."""
        self.interrupt()
        self._meter.catch_up()
        while self._waiting:
            self._write(self._waiting.popleft())

    def _flush(self, up_to_s: float) -> None:
        """Write the windows that ended by then, and give up on those that wait in vain."""
        while self._waiting and (
            self._waiting[0].end_s <= up_to_s or len(self._waiting) > _MOST_WAITING
        ):
            self._write(self._waiting.popleft())

    def _write(self, window: _Window) -> None:
        try:
            energy = self._meter.window(window.begin_s, window.end_s)
        except MeterError as error:
            self._tell(str(error))
            if window.metered:
                self._write(window.metered)
            return
        self._count(window, energy)
        if self._append is None:
            return
        # Rounding can make the two a hair longer than the window they are parts of.
        idle_s = max(0.0, window.duration_s - window.compute_s - window.blocking_s)
        entry = {
            "format": ENERGY_FORMAT,
            **self._labels,
            "phase": window.phase,
            "first_iteration": window.first_iteration,
            "last_iteration": window.last_iteration,
            "begin_s": window.begin_s,
            "duration_s": window.duration_s,
            "energy_j": energy.energy_j,
            "energy_uncertainty_j": energy.uncertainty_j,
            "compute_s": window.compute_s,
            "blocking_s": window.blocking_s,
            "idle_s": idle_s,
        }
        try:
            self._append(entry)
        except OSError as error:
            logger.error("The energy log ends, training goes on: %s", error)
            self._append = None

    def _tell(self, reason: str) -> None:
        """Say once why nothing is metered, until something is again."""
        if not self._failing:
            logger.error("The energy log has a gap, training goes on: %s", reason)
        self._failing = True

    def _count(self, window: _Window, energy: WindowEnergy) -> None:
        total = self.totals.setdefault(window.phase, PhaseTotals())
        total.energy_j += energy.energy_j
        total.uncertainty_j = math.hypot(total.uncertainty_j, energy.uncertainty_j)
        total.duration_s += window.duration_s
        total.compute_s += window.compute_s
        total.blocking_s += window.blocking_s
        total.iterations += window.iterations
