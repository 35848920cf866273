"""Energy of windows of time, from a counter that refreshes ten times a second.

A thread reads the counter; nothing reads it on the training thread or at each unit. The energy at
an instant is interpolated between the refreshes around it.
"""

from __future__ import annotations

import json
import os
import threading
from bisect import bisect_left
from pathlib import Path
from typing import Any

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.gpu.base import Gpu


class MeterError(EnvPipeError):
    """A window that the meter did not see."""


class EnergyMeter:
    """Samples one GPU's energy counter from the moment it is made until `close`.

    Args:
        gpu: whose counter is read.
        poll_s: how often to look for a refresh.
        horizon_s: how far back windows may start.
    """

    def __init__(self, gpu: Gpu, poll_s: float = 0.05, horizon_s: float = 3600.0) -> None:
        self._gpu = gpu
        self._poll_s = poll_s
        self._horizon_s = horizon_s
        self._lock = threading.Lock()
        self._times_s: list[float] = []
        self._energies_j: list[float] = []
        self._stop = threading.Event()
        self.error: Exception | None = None
        self._sample()
        self._thread = threading.Thread(target=self._run, name="envpipe-meter", daemon=True)
        self._thread.start()

    def energy_j(self, start_s: float, end_s: float) -> float:
        """Energy between two instants on the GPU's time base.

        Past the last refresh it is extrapolated with the power between the last two: close a window
        some refreshes after its end.

        Raises:
            MeterError: the window starts before the meter does, or the counter could not be read.
        """
        if end_s > self.last_refresh_s:
            self._try_sample()
        if self.error is not None:
            raise MeterError(f"The energy counter of {self._gpu.name} failed: {self.error}")
        with self._lock:
            if start_s < self._times_s[0] - 1e-9:
                raise MeterError(
                    "The energy of a window was asked for that began before the meter",
                    value=start_s,
                    remedy=f"The meter began at {self._times_s[0]} s.",
                )
            return self._at(end_s) - self._at(start_s)

    @property
    def last_refresh_s(self) -> float:
        """The last refresh that was seen; energy up to there is interpolated and final."""
        with self._lock:
            return self._times_s[-1]

    def close(self) -> None:
        """Stop reading."""
        self._stop.set()
        self._thread.join()

    def _at(self, time_s: float) -> float:
        times, energies = self._times_s, self._energies_j
        if len(times) < 2:
            return energies[0]
        right = min(max(bisect_left(times, time_s), 1), len(times) - 1)
        left = right - 1
        power_w = (energies[right] - energies[left]) / (times[right] - times[left])
        return energies[left] + power_w * (time_s - times[left])

    def _run(self) -> None:
        while self.error is None and not self._stop.wait(self._poll_s):
            self._try_sample()

    def _try_sample(self) -> None:
        try:
            self._sample()
        except Exception as error:  # a driver may fail in any way; training must go on
            self.error = error

    def _sample(self) -> None:
        reading = self._gpu.read_energy()
        with self._lock:
            if self._times_s and reading.time_s <= self._times_s[-1]:
                return
            self._times_s.append(reading.time_s)
            self._energies_j.append(reading.energy_j)
            if self._times_s[-1] - self._times_s[0] > 2 * self._horizon_s:
                old = bisect_left(self._times_s, self._times_s[-1] - self._horizon_s)
                del self._times_s[:old], self._energies_j[:old]


def append_window(path: Path, window: dict[str, Any]) -> None:
    """Append one object to an energy log; a single write, so that many ranks may share the file.

    A writer that is killed while it writes leaves the start of a line at most (where it crosses a
    page), and the next writer ends that line: it spoils no other.
    """
    line = (json.dumps(window) + "\n").encode()
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        os.write(descriptor, b"\n" + line if torn else line)
    finally:
        os.close(descriptor)
