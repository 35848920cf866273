"""The timeline of one rank: recorded iterations, written while training goes on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from envpipe_megatron.formats.timeline import (
    CLOCK_FORMAT,
    MOST_CLOCK_SAMPLES,
    TIMELINE_FORMAT,
    is_recorded,
)
from envpipe_megatron.gpu.base import ClockState
from envpipe_megatron.runtime.execution.executor import StageRecord

#: Looks at a clock per line: those of a minute.
_SAMPLES_A_LINE = 120


class TimelineLog:
    """Appends the recorded iterations of one rank to a file.

    `append` takes each line, and waits for no disk; None if nothing is recorded. Every line has
    `labels`.
    """

    def __init__(
        self,
        append: Callable[[dict[str, Any]], None] | None,
        labels: Mapping[str, object],
    ) -> None:
        self._append = append
        self._labels = dict(labels)
        self._seen: Counter[str] = Counter()
        #: Phases of which an iteration is to be recorded.
        self._due: set[str] = set()
        self._samples: list[tuple[float, int | None, int, str]] = []
        self._samples_left = MOST_CLOCK_SAMPLES

    def add(
        self,
        phase: str,
        iteration: int,
        record: StageRecord,
        executed: Callable[[], list[str]],
        frequencies_mhz: list[int] | None,
    ) -> None:
        """Add an iteration that has run, in the format of `formats.timeline`; returns at once.

        Args:
            phase: with the batch's name.
            iteration: its number.
            record: its times.
            executed: returns the units as plans write them, in the order in which they ran.
            frequencies_mhz: what was requested for each; None if no clock is controlled.
        """
        index = self._seen[phase]
        self._seen[phase] += 1
        # Where few iterations have their units timed, the next of those takes the place of others.
        if is_recorded(phase, index):
            self._due.add(phase)
        if self._append is None or phase not in self._due or not record.timed:
            return
        self._due.remove(phase)
        start_us, end_us = (
            np.rint(1e6 * times_s).astype(np.int64).tolist()
            for times_s in (record.start_s, record.end_s)
        )
        line = {
            "format": TIMELINE_FORMAT,
            **self._labels,
            "phase": str(phase),
            "iteration": iteration,
            "begin_s": record.begin_s,
            "iteration_time_s": record.iteration_time_s,
            "units": " ".join(executed()),
            "start_us": start_us,
            "end_us": end_us,
        }
        if frequencies_mhz is not None:
            line["frequency_mhz"] = frequencies_mhz
        self._append(line)

    def add_clock(self, time_s: float, state: ClockState) -> None:
        """Add a look at the clock; returns at once. One thread may call it, until `close`."""
        if self._append is None or not self._samples_left:
            return
        self._samples_left -= 1
        reasons = ", ".join(state.throttle_reasons)
        self._samples.append((round(time_s, 3), state.requested_mhz, state.observed_mhz, reasons))
        if len(self._samples) == _SAMPLES_A_LINE:
            self.close()

    def close(self) -> None:
        """Append what was seen of the clock since the last such line."""
        if self._append is None or not self._samples:
            return
        names = "time_s", "requested_mhz", "observed_mhz", "throttle_reasons"
        columns = zip(names, map(list, zip(*self._samples, strict=True)), strict=True)
        self._samples = []
        self._append({"format": CLOCK_FORMAT, **self._labels, **dict(columns)})
