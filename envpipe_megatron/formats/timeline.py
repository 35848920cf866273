"""Measured timelines: JSON Lines, one object for each rank and recorded iteration.

```json
{"format": "envpipe-timeline/1", "node": "n1", "gpu": "NVIDIA A100", "gpu_uid": "GPU-1a2b…",
 "rank": 0, "stage": 0, "phase": "steady", "iteration": 40, "begin_s": 812.5,
 "iteration_time_s": 0.6012, "units": "F0 F1 B0 B1", "start_us": [0, 98011, 400120, 500900],
 "end_us": [98010, 196022, 500801, 600050], "frequency_mhz": [1410, 1260, 1260, 1260]}
```

Units are in the order in which they ran, as plans write them; their starts and ends are
microseconds after the iteration's begin, which is on the time base of the energy log's windows.
Frequencies are those that were requested, and absent where no clock was controlled. Not every
iteration is recorded: see `is_recorded`. Lines of another format report the clock that was seen
on a real GPU each time it was read, in the first hour:

```json
{"format": "envpipe-clock/1", "node": "n1", "gpu_uid": "GPU-1a2b…", "rank": 0,
 "time_s": [812.5, 813.0], "requested_mhz": [1260, null], "observed_mhz": [1260, 1410],
 "throttle_reasons": ["", "idle"]}
```

A writer may add fields, such as the name of a `run`, and `clock_backend`: what set the clocks, of
which `dry_run` set none. Torn lines, which killed jobs leave, are passed over and counted.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from envpipe_megatron.core.kinds import Unit, parse_unit
from envpipe_megatron.files import read_lines
from envpipe_megatron.formats.energy import (
    AMOUNT,
    INDEX,
    MAX_AMOUNT,
    STAGE,
    Phase,
    read_text,
    split_phase,
)

TIMELINE_FORMAT = "envpipe-timeline/1"
CLOCK_FORMAT = "envpipe-clock/1"

#: The first iterations of the steady phase, and of another, all of which are recorded.
FIRST_STEADY, FIRST_OTHER = 10, 300
#: After these, every n-th is recorded, and half as many each time that the phase has become twice
#: as long as this: a job of weeks leaves megabytes per rank.
STEADY_STRIDE, STRIDE_GROWS = 100, 10_000
#: The most looks at a clock that are recorded: those of an hour.
MOST_CLOCK_SAMPLES = 7200
#: Looks at a clock in a line: those of a minute.
_SAMPLES_A_LINE = 120


def is_recorded(phase: str, index: int) -> bool:
    """Say whether an iteration of a phase is recorded; its first one has index 0."""
    stride = STEADY_STRIDE << (index // STRIDE_GROWS).bit_length()
    if split_phase(phase)[0] == Phase.STEADY:
        return index < FIRST_STEADY or index % stride == 0
    # Not the first one of a stretch at the highest clock, as which multiples of four come.
    return index < FIRST_OTHER or (index + 1) % stride == 0


class TimelineLog:
    """Appends the recorded iterations of one rank, and looks at its clock.

    `append` takes each line, and waits for no disk. Every line has `labels`.
    """

    def __init__(
        self, append: Callable[[dict[str, Any]], object], labels: Mapping[str, object]
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
        span_s: tuple[float, float],
        units_s: Iterable[NDArray[np.float64]] | None,
        executed: Callable[[], list[str]],
        frequencies_mhz: list[int] | None,
    ) -> None:
        """Add an iteration that has run; returns at once.

        Args:
            phase: with the batch's name.
            iteration: its number.
            span_s: when it began, and how long it took.
            units_s: [2, num_units] starts and ends of its units; None if they were not timed.
            executed: returns the units as plans write them, in the order in which they ran.
            frequencies_mhz: what was requested for each; None if no clock is controlled.
        """
        index = self._seen[phase]
        self._seen[phase] += 1
        # Where few iterations have their units timed, the next of those takes the place of others.
        if is_recorded(phase, index):
            self._due.add(phase)
        if phase not in self._due or units_s is None:
            return
        self._due.remove(phase)
        start_us, end_us = (np.rint(1e6 * each_s).astype(np.int64).tolist() for each_s in units_s)
        line = {
            "format": TIMELINE_FORMAT,
            **self._labels,
            "phase": str(phase),
            "iteration": iteration,
            "begin_s": span_s[0],
            "iteration_time_s": span_s[1],
            "units": " ".join(executed()),
            "start_us": start_us,
            "end_us": end_us,
        }
        if frequencies_mhz is not None:
            line["frequency_mhz"] = frequencies_mhz
        self._append(line)

    def add_clock(
        self, time_s: float, requested_mhz: int | None, observed_mhz: int, reasons: Sequence[str]
    ) -> None:
        """Add a look at the clock; returns at once. One thread may call it, until `close`."""
        if not self._samples_left:
            return
        self._samples_left -= 1
        self._samples.append((round(time_s, 3), requested_mhz, observed_mhz, ", ".join(reasons)))
        if len(self._samples) == _SAMPLES_A_LINE:
            self.close()

    def close(self) -> None:
        """Append what was seen of the clock since the last such line."""
        if not self._samples:
            return
        names = "time_s", "requested_mhz", "observed_mhz", "throttle_reasons"
        columns = zip(names, map(list, zip(*self._samples, strict=True)), strict=True)
        self._samples = []
        self._append({"format": CLOCK_FORMAT, **self._labels, **dict(columns)})


@dataclass(frozen=True, slots=True)
class GpuLabels:
    """Whose line it is.

    Args:
        gpu: the product's name.
        gpu_uid: names the GPU.
        run: the run of the job, empty if the job has only one.
        clock_backend: what set the clocks, such as `nvml` or `dry_run`; empty if not known.
    """

    node: str
    gpu: str
    gpu_uid: str
    rank: int
    stage: int
    run: str
    clock_backend: str = ""


@dataclass(frozen=True, slots=True)
class RankIteration:
    """One iteration of one rank.

    Args:
        phase: what the iteration was for.
        iteration: its number in the job.
        begin_s: on the time base of the GPU's meter, which compares only within a node.
        iteration_time_s: to the end of the iteration on this rank.
        order: the units' names, with spaces between them.
        start_us: [num_units] after the begin.
        end_us: [num_units] likewise.
        frequency_mhz: [num_units] the requested clocks; None if no clock was controlled.
    """

    labels: GpuLabels
    phase: str
    iteration: int
    begin_s: float
    iteration_time_s: float
    order: str
    start_us: NDArray[np.int64]
    end_us: NDArray[np.int64]
    frequency_mhz: NDArray[np.int64] | None

    @property
    def units(self) -> tuple[Unit, ...]:
        """In the order in which they ran."""
        return parse_order(self.order)


@dataclass(frozen=True, slots=True)
class ClockSamples:
    """Clock of one GPU at some instants, on the time base of its meter.

    One entry for each sample; `requested_mhz` is None if the clock was not locked, and
    `throttle_reasons` are what the GPU says holds its clock back, with commas between them.
    """

    labels: GpuLabels
    time_s: tuple[float, ...]
    requested_mhz: tuple[int | None, ...]
    observed_mhz: tuple[int, ...]
    throttle_reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class TimelineLogs:
    """Contents of timeline files, in the order of lines; unreadable ones as `file:line`."""

    iterations: tuple[RankIteration, ...] = ()
    clocks: tuple[ClockSamples, ...] = ()
    unreadable: tuple[str, ...] = ()


@lru_cache(maxsize=1024)
def parse_order(order: str) -> tuple[Unit, ...]:
    """Read units from names with spaces between them; ScheduleError if one is no unit."""
    return tuple(parse_unit(text) for text in order.split())


def read_timelines(paths: Iterable[Path]) -> TimelineLogs:
    """Read timeline files; lines that cannot be read are passed over."""
    read, unreadable = read_lines(paths, _parse_line)
    iterations = (line for line in read if isinstance(line, RankIteration))
    clocks = (line for line in read if isinstance(line, ClockSamples))
    return TimelineLogs(tuple(iterations), tuple(clocks), unreadable)


def _parse_line(line: bytes) -> RankIteration | ClockSamples:
    """Read one line; one of `TORN` if it is something else."""
    data = json.loads(line)
    if not isinstance(data, dict):
        raise ValueError
    if data.get("format") == CLOCK_FORMAT:
        return _clock_samples(data)
    if data.get("format") != TIMELINE_FORMAT:
        raise ValueError
    start_us, end_us = (_integers(data[name]) for name in ("start_us", "end_us"))
    known = data.get("frequency_mhz")
    read = RankIteration(
        labels=_labels(data),
        phase=read_text(data.get("phase")),
        iteration=INDEX(data["iteration"]),
        begin_s=AMOUNT(data["begin_s"]),
        iteration_time_s=AMOUNT(data["iteration_time_s"]),
        order=read_text(data.get("units")),
        start_us=start_us,
        end_us=end_us,
        frequency_mhz=None if known is None else _integers(known),
    )
    count = len(read.units)
    clocks = start_us if read.frequency_mhz is None else read.frequency_mhz
    if not count == len(start_us) == len(end_us) == len(clocks):
        raise ValueError
    # Units of a stage run one after another.
    if (
        start_us[0] < 0
        or end_us[-1] > 1e6 * MAX_AMOUNT
        or (end_us < start_us).any()
        or (start_us[1:] < end_us[:-1]).any()
    ):
        raise ValueError
    return read


def _clock_samples(data: dict[str, Any]) -> ClockSamples:
    times = tuple(map(AMOUNT, data["time_s"]))
    requested, observed = tuple(data["requested_mhz"]), tuple(data["observed_mhz"])
    if not times or not len(times) == len(requested) == len(observed):
        raise ValueError
    if any(type(mhz) is not int for mhz in (*observed, *(m for m in requested if m is not None))):
        raise TypeError
    reasons = tuple(data.get("throttle_reasons", ()))
    if reasons and len(reasons) != len(times):
        raise ValueError
    if any(type(reason) is not str for reason in reasons):
        raise TypeError
    return ClockSamples(_labels(data), times, requested, observed, reasons)


def _labels(data: dict[str, Any]) -> GpuLabels:
    return _shared_labels(
        *(read_text(data.get(name)) for name in ("node", "gpu", "gpu_uid")),
        INDEX(data["rank"]),
        STAGE(data["stage"]),
        *(read_text(data.get(name)) for name in ("run", "clock_backend")),
    )


_shared_labels = lru_cache(maxsize=4096)(GpuLabels)


def _integers(values: Any) -> NDArray[np.int64]:
    array = np.asarray(values)
    if array.ndim != 1 or array.dtype != np.int64:  # none at all are floats
        raise TypeError
    return array
