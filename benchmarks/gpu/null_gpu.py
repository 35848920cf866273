"""A GPU that does nothing, for benchmarks of what surrounds one: it takes any request."""

from __future__ import annotations

from collections.abc import Sequence

from envpipe_megatron.gpu.base import ClockState, EnergyReading, Gpu, GpuAddress


class NullGpu(Gpu):
    """Power and energy are 0, time is the monotonic clock; a rank sets its clock at once."""

    drives_hardware = changes_clock = False
    name = "no GPU"
    power_w: float = 0.0

    def __init__(self, frequencies_mhz: Sequence[int]) -> None:
        self.address = GpuAddress("null", f"none#{id(self)}")
        self.supported_frequencies_mhz = tuple(frequencies_mhz)

    def _lock(self, frequency_mhz: int) -> None:
        """Do nothing."""

    def _reset(self) -> None:
        """Do nothing."""

    def clock_state(self) -> ClockState:
        """Return the highest clock."""
        return ClockState(None, self.supported_frequencies_mhz[0])

    def read_energy(self) -> EnergyReading:
        """Return 0 J at the present instant."""
        return EnergyReading(0.0, self.time_s())
