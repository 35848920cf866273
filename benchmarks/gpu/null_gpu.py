"""A GPU that does nothing, for benchmarks of what surrounds one: it takes any request."""

from __future__ import annotations

import time
from collections.abc import Sequence

from envpipe_megatron.gpu.base import EnergyReading, Gpu, GpuAddress


class NullGpu(Gpu):
    """Power and energy are 0, time is the monotonic clock; a rank sets its clock at once."""

    drives_hardware = changes_clock = False
    name = "no GPU"
    observed_frequency_mhz: int = 0
    power_w: float = 0.0

    def __init__(self, frequencies_mhz: Sequence[int]) -> None:
        self.address = GpuAddress("null", f"none#{id(self)}")
        self.supported_frequencies_mhz = tuple(frequencies_mhz)
        self.observed_frequency_mhz = frequencies_mhz[0]

    def _lock(self, frequency_mhz: int) -> None:
        """Do nothing."""

    def _reset(self) -> None:
        """Do nothing."""

    def read_energy(self) -> EnergyReading:
        """Return 0 J at the present instant."""
        return EnergyReading(0.0, self.time_s())

    def time_s(self) -> float:
        """Return the monotonic clock's instant, s."""
        return time.monotonic()
