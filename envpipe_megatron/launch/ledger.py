"""Bills one GPU without a gap, whatever becomes of its rank."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from envpipe_megatron.energy_file import BETWEEN, ENERGY_FORMAT
from envpipe_megatron.gpu.base import Gpu
from envpipe_megatron.runtime.energy_meter import EnergyMeter, MeterError

logger = logging.getLogger(__name__)

_POLL_S = 0.1
#: How long a window may wait for the counter to refresh past its end.
_PATIENCE_S = 5.0
#: Without a window for so long, what was metered is billed: an evaluation, say, not an iteration.
_LONGEST_GAP_S = 300.0


class GpuLedger:
    """Turns what a rank tells of its windows into lines that leave nothing out.

    Each line is metered here, between the end of the line before and its own end, so that all lines
    of a GPU add up to the difference of two readings of its counter: when its rank first said hello
    and when the last one ended. What is not in a window of training is billed as `between`.

    Args:
        gpu: opened for reading alone.
        labels: what every line says of it.
        write: gets each line.
    """

    def __init__(
        self, gpu: Gpu, labels: Mapping[str, Any], write: Callable[[dict[str, Any]], None]
    ) -> None:
        self.gpu = gpu
        self.labels = dict(labels)
        self._write = write
        self._meter = EnergyMeter(gpu, poll_s=_POLL_S)
        self._until_s = self._meter.last_refresh_s
        self._last_iteration = 0
        self._waiting: deque[tuple[Mapping[str, Any], float]] = deque()
        #: J that were billed.
        self.energy_j = 0.0

    def take(self, window: Mapping[str, Any]) -> None:
        """A rank's line, which is billed as soon as the counter has refreshed past its end."""
        self._waiting.append((window, time.monotonic() + _PATIENCE_S))
        self.settle()

    def settle(self) -> None:
        """Bill what can be billed; neither reads the counter nor waits."""
        refreshed_s = self._meter.last_refresh_s
        while self._waiting:
            window, patient_until_s = self._waiting[0]
            if refreshed_s < _end_s(window) and time.monotonic() < patient_until_s:
                return
            self._waiting.popleft()
            self._bill_window(window)
        if refreshed_s - self._until_s > _LONGEST_GAP_S:
            self._bill_gap(refreshed_s)

    def look(self) -> None:
        """Read the counter once more; may take a second."""
        self._meter.catch_up()

    def finish(self) -> None:
        """Bill up to the counter's last refresh: the rank has ended. Another may follow."""
        while self._waiting:
            self._bill_window(self._waiting.popleft()[0])
        self._bill_gap(self._meter.last_refresh_s)

    @property
    def metered_j(self) -> float:
        """J up to the counter's last refresh, billed or not yet."""
        try:
            return self.energy_j + self._meter.energy_j(self._until_s, self._meter.last_refresh_s)
        except MeterError:
            return self.energy_j

    def close(self) -> None:
        """Stop metering."""
        self._meter.close()

    def _bill_window(self, window: Mapping[str, Any]) -> None:
        self._bill_gap(float(window["begin_s"]))
        begin_s, end_s = self._until_s, _end_s(window)
        if end_s <= begin_s:
            return  # billed already, as part of a long gap
        self._last_iteration = window["last_iteration"]
        self._bill({**self.labels, **window}, begin_s, end_s)

    def _bill_gap(self, end_s: float) -> None:
        if end_s <= self._until_s:
            return
        window = {
            "format": ENERGY_FORMAT,
            **self.labels,
            "phase": BETWEEN,
            "first_iteration": self._last_iteration,
            "last_iteration": self._last_iteration,
            "compute_s": 0.0,
            "blocking_s": 0.0,
            "idle_s": end_s - self._until_s,
        }
        self._bill(window, self._until_s, end_s)

    def _bill(self, line: dict[str, Any], begin_s: float, end_s: float) -> None:
        line["begin_s"], line["duration_s"] = begin_s, end_s - begin_s
        try:
            energy = self._meter.window(begin_s, end_s)
            line["energy_j"], line["energy_uncertainty_j"] = energy.energy_j, energy.uncertainty_j
        except MeterError as error:
            logger.error("A window was not seen by the node's agent: %s", error)
            if "energy_j" not in line:  # else the rank's own metering stands in
                return
        self._until_s = end_s
        self.energy_j += line["energy_j"]
        self._write(line)


def _end_s(window: Mapping[str, Any]) -> float:
    return float(window["begin_s"]) + float(window["duration_s"])
