"""Energy of windows of time, from a counter that refreshes ten times a second.

Another process reads a real GPU's counter, and a thread any other, and nothing else does: a read
takes milliseconds, which the training thread does not have. The thread also takes in what the
process has seen, however long a step is. The counter at an instant is interpolated between the
refreshes around it.
"""

from __future__ import annotations

import logging
import math
import statistics
import threading
import time
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from envpipe_megatron.core.arrays import FloatArray
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.gpu.base import EnergyReading, Gpu, GpuError
from envpipe_megatron.gpu.energy_counter import FRESH_S, EnergyReader, ReaderGoneError
from envpipe_megatron.tuning.measured.powers import RESOLUTION_J

logger = logging.getLogger(__name__)

#: A window shorter than this says little: its ends lie somewhere within a refresh.
_MIN_REFRESHES = 10
#: A counter that has not refreshed for this many periods has stopped: nothing is guessed beyond.
_MAX_SILENT_REFRESHES = 3
#: How far back windows may start, s.
_HORIZON_S = 12 * 3600.0
#: From one look at the counter to the next, so that each refresh is seen.
POLL_S = 0.05
#: From one taking in of what another process has seen to the next, s: the socket between holds the
#: refreshes of half a minute.
_TAKE_S = 5.0
#: The refresh period until two refreshes have been seen, as NVIDIA's counters have it.
_TYPICAL_REFRESH_S = 0.1
#: No GPU draws as much, W: a counter that has counted more has leapt.
MOST_POWER_W = 1e5
#: Refreshes around an end of a window that show how much the power varies there.
_NEIGHBOURS = 5
#: How long to wait for the thread; a driver that hangs must not take training with it.
_LOOK_TIMEOUT_S = 1.0
#: How long to wait for the first look: its process starts first.
_FIRST_LOOK_S = 10.0


class MeterError(EnvPipeError):
    """A window that the meter did not see."""


class CounterAt(NamedTuple):
    """Where a GPU's energy counter was at an instant on the GPU's time base; its uncertainty."""

    time_s: float
    energy_j: float
    uncertainty_j: float


class WindowEnergy(NamedTuple):
    """The counter at both ends of a window."""

    begin: CounterAt
    end: CounterAt

    @property
    def energy_j(self) -> float:
        """Return the energy between both ends."""
        return max(self.end.energy_j - self.begin.energy_j, 0.0)

    @property
    def uncertainty_j(self) -> float:
        """Return the standard uncertainty of `energy_j`."""
        return math.hypot(self.begin.uncertainty_j, self.end.uncertainty_j, RESOLUTION_J)


class EnergyMeter:
    """Samples one GPU's energy counter from the moment it is made until `close`.

    A counter that cannot be read or stops spoils the windows that end then and no others: it is
    cumulative, so a window whose ends were both seen is right without the readings between them.
    One that goes back, as where a driver is reloaded, or leaps, as after a machine was suspended,
    begins anew. Where no other process reads, or it ends, a thread of this process does.
    """

    def __init__(self, gpu: Gpu, poll_s: float = POLL_S) -> None:
        self._gpu = gpu
        self._poll_s = poll_s
        self._lock = threading.RLock()
        self._times_s = array("d")
        self._energies_j = array("d")
        self._time_uncertainties_s = array("d")
        self._closing = threading.Event()
        #: The last reading's error; None when it went well.
        self.error: Exception | None = None
        self._looking: threading.Thread | None = None
        self._reader: EnergyReader | None = None
        if gpu.read_apart:
            with suppress(OSError):
                self._reader = EnergyReader(gpu.address.uid, poll_s)
        self._thread = self._start_thread(self._run)
        self._look(_FIRST_LOOK_S if gpu.read_apart else _LOOK_TIMEOUT_S)

    @property
    def last_refresh_s(self) -> float:
        """Return when the last refresh was seen; energy up to there is final."""
        with self._seen():
            return self._times_s[-1] if self._times_s else -math.inf

    @property
    def refresh_s(self) -> float:
        """Return the counter's refresh period: the median of the latest, as polls miss some."""
        with self._seen():
            latest = self._times_s[-2 * _MIN_REFRESHES :]
        if len(latest) < 2:
            return _TYPICAL_REFRESH_S
        return statistics.median(b - a for a, b in pairwise(latest))

    @property
    def min_window_s(self) -> float:
        """Return the least length of a window: ten refreshes."""
        return _MIN_REFRESHES * self.refresh_s

    def refreshes(self, begin_s: float) -> tuple[FloatArray, FloatArray]:
        """Return the instants of all refreshes since then, and the counter's J; does not read.

        None before the counter last went back or leapt, and none while it has stopped.
        """
        with self._seen():
            first = bisect_left(self._times_s, begin_s)
            return np.array(self._times_s[first:]), np.array(self._energies_j[first:])

    def catch_up(self) -> None:
        """Return when the meter has seen the counter of now, as of `FRESH_S` ago at most.

        For the end of a window that matters outside the loop of training: the caller waits for a
        refresh (0.1 s on an H200), and for a second at most if the driver hangs.
        """
        self._look(_LOOK_TIMEOUT_S)

    def window(self, start_s: float, end_s: float) -> WindowEnergy:
        """Return the energy between two instants on the GPU's time base; neither reads nor waits.

        Past the last refresh it is extrapolated with the power between the last two, for
        `_MAX_SILENT_REFRESHES` periods at most: close a window some refreshes after its end.

        The uncertainty is that of the interpolation at both ends (how much the power varies from
        refresh to refresh there, times the refresh period, or times the time to the last refresh
        where that is longer), of the instant of the refresh where the GPU does not say it, and the
        counter's resolution. Work that alternates faster than the counter refreshes shows in it
        too: the refreshes cut the alternation at different places.

        Raises MeterError if the window starts before the meter does or the counter leapt, or
        ends when the counter could not be read or stood still.
        """
        with self._seen():
            self._check_seen(end_s)  # first: it takes in what was read meanwhile
            times = self._times_s
            if start_s < times[0] - 1e-9:
                raise MeterError(
                    f"A window began before the meter of {self._gpu.name} did, or before its "
                    "counter went back or leapt, as where a driver is reloaded (s)",
                    value=start_s,
                    remedy=f"The counter is known from {times[0]} s on.",
                )
            return WindowEnergy(self._at(start_s), self._at(end_s))

    def close(self) -> None:
        """Stop reading."""
        self._closing.set()
        with self._seen():  # so that windows may be asked for later
            if self._reader is not None:
                self._reader.close()
                self._reader = None
        if self._thread is not None:
            self._thread.join(_LOOK_TIMEOUT_S)

    def _check_seen(self, end_s: float) -> None:
        last_s = self.last_refresh_s
        if end_s <= last_s:
            return
        if self.error is not None:
            raise MeterError(f"The energy counter of {self._gpu.name} failed: {self.error}")
        silent_s = _MAX_SILENT_REFRESHES * self.refresh_s
        if len(self._times_s) < 2 or end_s > last_s + silent_s:
            raise MeterError(
                f"The energy counter of {self._gpu.name} has not refreshed since {last_s} s, and a "
                "window ended later (s)",
                value=end_s,
                remedy="Look at the driver's log if this lasts; training goes on without it.",
            )

    def _at(self, time_s: float) -> CounterAt:
        times, energies = self._times_s, self._energies_j
        if len(times) < 2:
            return CounterAt(time_s, energies[0], 0.0)
        left = min(max(bisect_left(times, time_s), 1), len(times) - 1) - 1
        power_w = self._power_w(left)
        around = range(max(0, left - _NEIGHBOURS), min(left + _NEIGHBOURS + 1, len(times) - 1))
        powers_w = [self._power_w(i) for i in around]
        # A single power does not show how it varies: it may have been anything up to itself.
        varies_w = float(np.std(powers_w)) if len(powers_w) > 1 else power_w
        varied_j = varies_w * max(times[left + 1] - times[left], time_s - times[-1])
        refreshed_s = max(self._time_uncertainties_s[left : left + 2])
        return CounterAt(
            time_s,
            energies[left] + power_w * (time_s - times[left]),
            math.hypot(varied_j, power_w * refreshed_s),
        )

    def _power_w(self, left: int) -> float:
        """Return the mean power from a refresh to the next, W."""
        energy_j = self._energies_j[left + 1] - self._energies_j[left]
        return energy_j / (self._times_s[left + 1] - self._times_s[left])

    @contextmanager
    def _seen(self) -> Iterator[None]:
        """Take in all that was read so far; the lock is held within."""
        with self._lock:
            if self._reader is not None:
                self._take(self._reader.take())
            yield

    def _look(self, timeout_s: float) -> None:
        until_s = time.monotonic() + timeout_s
        with self._lock:
            fresh_s = self._gpu.time_s() - FRESH_S if self._reader else 0.0
            while self.last_refresh_s < fresh_s and self.error is None and self._reader:
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    return
                self._reader.wait(left_s)
            if self._reader is not None:
                return
            if self._looking is None or not self._looking.is_alive():  # else the driver hangs
                self._looking = self._start_thread(self._try_sample)
            looking = self._looking
        if looking is not None:
            looking.join(timeout_s)

    def _take(self, readings: Iterator[EnergyReading]) -> None:
        """Keep what the reader saw; in place of one that has ended, the thread goes on."""
        assert self._reader is not None
        try:
            for reading in readings:
                self._add(reading)
            failed = self._reader.error
            self.error = None if failed is None else GpuError(failed)
        except ReaderGoneError as gone:
            logger.info("%s: a thread of this process reads it", gone)
            self._reader.close()
            self._reader = None

    def _start_thread(self, target: Callable[[], None]) -> threading.Thread | None:
        thread = threading.Thread(target=target, name="envpipe-meter", daemon=True)
        with suppress(RuntimeError):  # the interpreter is ending
            thread.start()
            return thread
        return None

    def _run(self) -> None:
        while not self._closing.wait(0 if (reader := self._reader) else self._poll_s):
            if reader is not None:
                reader.wait_for_end(_TAKE_S)  # not missed for that long
            with self._seen():
                reads = self._reader is None
            if reads and not self._closing.is_set():
                self._try_sample()

    def _try_sample(self) -> None:
        try:
            self._add(self._gpu.read_energy())
            self.error = None
        except Exception as error:  # a driver may fail in any way; training must go on
            self.error = error

    def _add(self, reading: EnergyReading) -> None:
        with self._lock:
            times, energies = self._times_s, self._energies_j
            if not math.isfinite(reading.energy_j) or (times and reading.time_s <= times[-1]):
                return
            old = 0
            most_j = MOST_POWER_W * (reading.time_s - times[-1]) if times else 0.0
            if times and not 0 <= reading.energy_j - energies[-1] <= most_j:
                old = len(times)  # it has begun anew: nothing from before compares
            elif times and reading.time_s - times[0] > 1.25 * _HORIZON_S:
                old = bisect_left(times, reading.time_s - _HORIZON_S)
            del times[:old], energies[:old], self._time_uncertainties_s[:old]
            times.append(reading.time_s)
            energies.append(reading.energy_j)
            self._time_uncertainties_s.append(reading.time_uncertainty_s)
