"""Bills one GPU without a gap, whatever becomes of its rank."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from envpipe_megatron.formats.energy import BETWEEN, ENERGY_FORMAT, EnergyWindow, parse_line
from envpipe_megatron.gpu.base import Gpu
from envpipe_megatron.runtime.energy.meter import EnergyMeter, MeterError

logger = logging.getLogger(__name__)

_POLL_S = 0.1
#: How long a window may wait for the counter to refresh past its end.
_PATIENCE_S = 5.0
#: Without a window for so long, what was metered is billed: an evaluation, say, not an iteration.
_LONGEST_GAP_S = 300.0


@dataclass(frozen=True)
class _Window:
    """A rank's line, and where it lies on the GPU's time base."""

    line: Mapping[str, Any]
    begin_s: float
    end_s: float


class GpuLedger:
    """Turns what a rank tells of its windows into lines that leave nothing out.

    Each line is metered here, between the end of the line before and its own end, so that all lines
    of a GPU add up to the difference of two readings of its counter: when its rank first said hello
    and when the last one ended. What is not in a window of training is billed as `between`.

    Where the counter stands still, a rank's own figure stands in, and the next line takes back what
    that was too much, or adds what it was too little. Only what a counter that went back has hidden
    stays as the rank told it, or is lost.

    Args:
        gpu: opened for reading alone.
        labels: what every line says of it.
        write: gets each line.

    Raises:
        GpuError: the GPU does not tell the time.
    """

    def __init__(
        self, gpu: Gpu, labels: Mapping[str, Any], write: Callable[[dict[str, Any]], None]
    ) -> None:
        self.gpu = gpu
        self.labels = dict(labels)
        self._write = write
        begin_s = gpu.time_s()
        self._meter = EnergyMeter(gpu, poll_s=_POLL_S)
        if self._meter.last_refresh_s > -math.inf:  # else the counter is not read yet
            begin_s = self._meter.last_refresh_s
        #: Where the last line ended.
        self._until_s = begin_s
        #: An instant that the counter has passed, and J from the begin up to there.
        self._seen = (begin_s, 0.0)
        self._last_iteration: int | None = 0
        self._waiting: deque[tuple[_Window, float]] = deque()
        self._failing = False
        self._most_metered_j = 0.0
        #: J that were billed.
        self.energy_j = 0.0

    def take(self, line: Mapping[str, Any]) -> None:
        """A rank's line, which is billed as soon as the counter has refreshed past its end.

        Raises:
            ValueError, TypeError, KeyError, OverflowError: it is none; nothing has changed.
        """
        whole = {**self.labels, **line}
        if not isinstance(parse_line(json.dumps(whole).encode()), EnergyWindow):
            raise ValueError("Not a window of training")
        begin_s = float(whole["begin_s"])
        end_s = begin_s + whole["duration_s"]
        if not -math.inf < begin_s <= end_s <= self.gpu.time_s() + _PATIENCE_S:
            raise ValueError(f"A window that ends at {end_s} s, which is still to come")
        self._waiting.append((_Window(whole, begin_s, end_s), time.monotonic() + _PATIENCE_S))
        self.settle()

    def settle(self) -> None:
        """Bill what can be billed; neither reads the counter nor waits."""
        refreshed_s = self._meter.last_refresh_s
        while self._waiting:
            window, patient_until_s = self._waiting[0]
            if refreshed_s < window.end_s and time.monotonic() < patient_until_s:
                return
            self._waiting.popleft()
            self._bill_window(window)
        if refreshed_s - self._until_s > _LONGEST_GAP_S:
            self._bill_gap(refreshed_s)

    def look(self) -> None:
        """Read the counter once more; may take a second."""
        self._meter.catch_up()

    def finish(self) -> None:
        """Bill up to the counter's last refresh: the rank has ended. Another may follow.

        A window that lies wholly beyond it goes on waiting.
        """
        self.settle()
        refreshed_s = self._meter.last_refresh_s
        while self._waiting and self._waiting[0][0].begin_s < refreshed_s:
            self._bill_window(self._waiting.popleft()[0])
        self._bill_gap(refreshed_s)

    @property
    def metered_j(self) -> float:
        """J up to the counter's last refresh, billed or not yet; never less than it was before."""
        seen_s, seen_j = self._seen
        with contextlib.suppress(MeterError):
            seen_j += self._meter.energy_j(seen_s, self._meter.last_refresh_s)
        self._most_metered_j = max(self._most_metered_j, self.energy_j, seen_j)
        return self._most_metered_j

    def close(self) -> None:
        """Stop metering."""
        self._meter.close()

    def _bill_window(self, window: _Window) -> None:
        self._bill_gap(window.begin_s)
        refreshed_s = self._meter.last_refresh_s
        end_s = min(window.end_s, refreshed_s) if refreshed_s > self._until_s else window.end_s
        if end_s <= self._until_s:
            return  # billed already, as part of a long gap
        line, length_s = dict(window.line), window.end_s - window.begin_s
        # Part of it may be billed already, or not be seen yet.
        share = min(1.0, (end_s - self._until_s) / length_s) if length_s else 0.0
        for name in ("energy_j", "compute_s", "blocking_s"):
            if line.get(name) is not None:
                line[name] *= share
        self._bill(line, end_s)
        self._last_iteration = line.get("last_iteration")

    def _bill_gap(self, end_s: float) -> None:
        end_s = min(end_s, self._meter.last_refresh_s)
        if end_s <= self._until_s:
            return
        line = {
            "format": ENERGY_FORMAT,
            **self.labels,
            "phase": BETWEEN,
            "first_iteration": self._last_iteration,
            "last_iteration": self._last_iteration,
            "compute_s": 0.0,
            "blocking_s": 0.0,
        }
        self._bill(line, end_s)

    def _bill(self, line: dict[str, Any], end_s: float) -> None:
        """Bill from the end of the last line to this one's; `energy_j` in it may stand in."""
        line["begin_s"], line["duration_s"] = self._until_s, end_s - self._until_s
        compute_s, blocking_s = line.get("compute_s"), line.get("blocking_s")
        if compute_s is not None and blocking_s is not None:
            line["idle_s"] = max(0.0, line["duration_s"] - compute_s - blocking_s)
        seen_s, seen_j = self._seen
        refreshed_s = self._meter.last_refresh_s
        try:
            if end_s > refreshed_s:
                raise MeterError(f"The energy counter has not refreshed since {refreshed_s} s")
            energy = self._meter.window(seen_s, end_s)
        except MeterError as error:
            self._tell(error)
            if end_s <= refreshed_s:  # nor will it be seen later
                self._seen = end_s, self.energy_j + line.get("energy_j", 0.0)
            if "energy_j" not in line:
                self._until_s = end_s
                return
        else:
            self._failing = False
            self._seen = end_s, seen_j + energy.energy_j
            line["energy_j"] = max(0.0, self._seen[1] - self.energy_j)
            line["energy_uncertainty_j"] = energy.uncertainty_j
        self._write(line)
        # Only now: what could not be written is in the next line.
        self._until_s = end_s
        self.energy_j += line["energy_j"]

    def _tell(self, error: MeterError) -> None:
        """Say once why the counter is not seen, until it is again."""
        if not self._failing:
            logger.error("What a GPU takes is not seen by the node's agent: %s", error)
        self._failing = True
