"""An energy counter that does not say when it moved, with the instants of its refreshes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from envpipe_megatron.gpu.base import EnergyReading, GpuError

_EXPECTED_PERIOD_S = 0.1
_STEP_S = 0.002
_LEAD_S = 0.009
"""How long before the expected instant, which is uncertain itself, watching begins: a first read
that showed the new value already would miss the refresh."""
_FRESH_S = 0.04
"""A reading younger than this is returned again."""
STALL_S = 3.0
"""Thirty refreshes. A GPU that is on draws power, so its counter must have moved."""


class EnergyCounter:
    """One GPU's energy counter with the instants of its refreshes. Threads may share it.

    NVML's counter moves every 100 ms, one read takes 3.4 ms (measured on an H200), and it does not
    say when it moved. Dividing by the instants of reading would charge up to 100 ms of energy to
    the wrong side of each end of a window. So the counter is read in short steps around the instant
    at which it is expected to move, two to four reads a refresh. It moved after the last read that
    showed the old value began, and before the first that shows the new one ended: the middle of the
    two is the refresh, and half their distance (4.4 ms on an H200) its uncertainty. A window of 1 s
    at constant power is then wrong by less than 1 %, and one of 10 s by less than 0.1 %.

    The expected instant only decides when to look. A counter with another period is read more
    often; its readings are as exact.
    """

    def __init__(
        self,
        read_j: Callable[[], float],
        name: str,
        monotonic_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._read_j = read_j
        self._name = name
        self._monotonic_s = monotonic_s
        self._sleep = sleep
        self._lock = threading.Lock()
        self._reading: EnergyReading | None = None

    def read(self) -> EnergyReading:
        """Return the counter at its last refresh, or at the next one if that is due soon.

        A reading younger than 40 ms comes back at once; otherwise the call waits for the next
        refresh, up to 0.1 s. A caller that polls every 50 ms sees each refresh. A counter that went
        back, as where a driver is reloaded, is read as it is. Raises GpuError if it could not be
        read, or has not moved for `STALL_S`; the next call starts again.
        """
        with self._lock:
            last = self._reading
            if last is not None:
                age_s = self._monotonic_s() - last.time_s
                if age_s < _FRESH_S:
                    return last
                self._sleep(-(age_s + _LEAD_S) % _EXPECTED_PERIOD_S)
            # Forgotten until another is found: after an error the next call starts again.
            self._reading = None
            self._reading = self._watch()
            return self._reading

    def _watch(self) -> EnergyReading:
        """Read until the counter moves."""
        first_s = after_s = self._monotonic_s()
        old_j = self._read_j()
        while True:
            self._sleep(_STEP_S)
            begin_s = self._monotonic_s()
            energy_j = self._read_j()
            end_s = self._monotonic_s()
            if energy_j != old_j:
                half_s = (end_s - after_s) / 2
                return EnergyReading(energy_j, after_s + half_s, half_s)
            if end_s - first_s > STALL_S:
                raise GpuError(
                    f"The energy counter of {self._name} has not moved for {STALL_S:g} s",
                    value=energy_j,
                    remedy="Check the GPU with nvidia-smi; its energy is not measured meanwhile",
                )
            after_s = begin_s
