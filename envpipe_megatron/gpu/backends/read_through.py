"""GPUs that are read through another one: changing a clock needs rights, reading it does not.

`ReadThroughGpu` is the base of all of them. Here are the two that change no clock; `command` and
`zeusd` have the others. `gpu.opening` makes them.
"""

import logging
from dataclasses import replace
from typing import ClassVar

from envpipe_megatron.gpu.base import (
    ClockState,
    EnergyReading,
    Gpu,
    GpuAddress,
    GpuPermissionError,
    PowerState,
)

_LOG = logging.getLogger(__name__)


class ReadThroughGpu(Gpu):
    """Name, clock table and meters of another GPU object, whose own clock control is never used.

    A subclass sets the clock its own way, and names its `backend`.
    """

    backend: ClassVar[str]

    def __init__(self, reader: Gpu) -> None:
        self.address = GpuAddress(self.backend, reader.address.uid)
        self.name = reader.name
        self.supported_frequencies_mhz = reader.supported_frequencies_mhz
        self._reader = reader

    @property
    def observed_frequency_mhz(self) -> int:
        """The reader's clock."""
        return self._reader.observed_frequency_mhz

    def clock_state(self) -> ClockState:
        """Return the reader's state, with what was requested of this object."""
        return replace(self._reader.clock_state(), requested_mhz=self._requested_mhz)

    def power_state(self) -> PowerState:
        """Return the reader's."""
        return self._reader.power_state()

    @property
    def power_w(self) -> float:
        """The reader's power."""
        return self._reader.power_w

    def read_energy(self) -> EnergyReading:
        """Return the reader's counter."""
        return self._reader.read_energy()

    def time_s(self) -> float:
        """Return the reader's instant."""
        return self._reader.time_s()


class DryRunGpu(ReadThroughGpu):
    """A GPU that sets nothing; it logs resets, and requests (thousands of them) at level DEBUG."""

    backend = "dry_run"
    drives_hardware = False

    def _lock(self, frequency_mhz: int) -> None:
        _LOG.debug("dry run: would lock %s at %d MHz", self.name, frequency_mhz)

    def _reset(self) -> None:
        _LOG.info("dry run: would reset the clock of %s", self.name)


class ReadOnlyGpu(ReadThroughGpu):
    """A GPU for a job that may not change clocks: meters work, a lock is always refused.

    Resetting does nothing, since nothing can have been locked here.
    """

    backend = "none"
    drives_hardware = False
    read_only = True

    def _lock(self, frequency_mhz: int) -> None:
        raise GpuPermissionError(
            f"{self.name} was opened for reading alone, so its clock cannot be locked",
            value=frequency_mhz,
            remedy="Run `envpipe doctor` to see which control back ends are allowed and why not",
        )

    def _reset(self) -> None:
        pass
