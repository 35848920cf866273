"""The energy log of one GPU: windows of iterations, written as training goes on."""

from __future__ import annotations

import logging
import math
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envpipe_megatron.runtime.energy_meter import EnergyMeter, MeterError, append_window
from envpipe_megatron.runtime.executor import StageRecord

logger = logging.getLogger(__name__)

#: Ten refreshes of a counter that refreshes every 100 ms; a shorter window says little.
MIN_WINDOW_S = 1.0


@dataclass
class _Window:
    phase: str
    first_iteration: int
    last_iteration: int
    begin_s: float
    end_s: float


class EnergyLog:
    """Groups iterations of one phase into windows, and appends each to a file when it is metered.

    A window is metered when the counter has refreshed past its end. A counter that fails ends the
    log, not the training.

    Args:
        meter: of this rank's GPU.
        path: the JSON Lines file, which all ranks of a node may share.
        labels: what every line says of this GPU, such as rank and stage.
    """

    def __init__(self, meter: EnergyMeter, path: Path | None, labels: dict[str, Any]) -> None:
        self._meter = meter
        self._path = path
        self._labels = labels
        self._open: _Window | None = None
        self._waiting: deque[_Window] = deque()
        self._failed = False
        self.energy_j: dict[str, float] = {}
        self.duration_s: dict[str, float] = {}

    def add(self, phase: str, iteration: int, record: StageRecord) -> None:
        """Count one more iteration.

        Iterations of a phase follow each other without a gap in the bill: what runs between two of
        them, such as the optimizer, is billed with the later one.
        """
        self._flush(self._meter.last_refresh_s)
        begin_s = record.begin_s
        current = self._open
        if current and current.phase != phase:
            self.interrupt()
        elif current and current.end_s - current.begin_s >= MIN_WINDOW_S:
            begin_s = current.end_s
            self.interrupt()
        current = self._open
        if current is None:
            current = _Window(phase, iteration, iteration, begin_s, begin_s)
        current.last_iteration = iteration
        current.end_s = record.end_of_iteration_s
        self._open = current

    def interrupt(self) -> None:
        """End the open window: something that is not training follows."""
        if self._open:
            self._waiting.append(self._open)
            self._open = None

    def close(self) -> None:
        """Write what is left."""
        self.interrupt()
        self._flush(math.inf)

    def _flush(self, up_to_s: float) -> None:
        """Write the windows that ended by then."""
        while self._waiting and (self._waiting[0].end_s <= up_to_s or self._meter.error):
            window = self._waiting.popleft()
            try:
                energy_j = self._meter.energy_j(window.begin_s, window.end_s)
            except MeterError as error:
                if not self._failed:
                    logger.error("The energy log ends, training goes on: %s", error)
                self._failed = True
                continue
            duration_s = window.end_s - window.begin_s
            self.energy_j[window.phase] = self.energy_j.get(window.phase, 0.0) + energy_j
            self.duration_s[window.phase] = self.duration_s.get(window.phase, 0.0) + duration_s
            if self._path is not None:
                entry = {
                    **self._labels,
                    "phase": window.phase,
                    "first_iteration": window.first_iteration,
                    "last_iteration": window.last_iteration,
                    "begin_s": window.begin_s,
                    "duration_s": duration_s,
                    "energy_j": energy_j,
                }
                try:
                    append_window(self._path, entry)
                except OSError as error:
                    logger.error("The energy log %s ends, training goes on: %s", self._path, error)
                    self._path = None
