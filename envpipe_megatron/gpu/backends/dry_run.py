"""A GPU that says what it would set, and sets nothing."""

import logging
import time
from dataclasses import replace
from typing import ClassVar

from envpipe_megatron.gpu.base import ClockState, EnergyReading, Gpu, GpuAddress

_LOG = logging.getLogger(__name__)


class DryRunGpu(Gpu):
    """Logs clock requests; reads through another GPU where there is one.

    With `reader` the name, the clock table and all meters are that GPU's, whose clocks are never
    touched. Without one it stands alone: power and energy are 0, time is the monotonic clock.

    Args:
        reader: the GPU to read from.
        supported_frequencies_mhz: without a reader, the clock table in MHz, highest first.
    """

    drives_hardware: ClassVar[bool] = False

    def __init__(
        self, reader: Gpu | None = None, *, supported_frequencies_mhz: tuple[int, ...] = ()
    ) -> None:
        self.address = GpuAddress("dry_run", reader.address.uid if reader else f"none#{id(self)}")
        self.name = reader.name if reader else "dry run"
        self.supported_frequencies_mhz = (
            reader.supported_frequencies_mhz if reader else supported_frequencies_mhz
        )
        self._reader = reader
        self._requested_mhz: int | None = None

    def _lock(self, frequency_mhz: int) -> None:
        _LOG.info("dry run: would lock %s at %d MHz", self.name, frequency_mhz)
        self._requested_mhz = frequency_mhz

    def _reset(self) -> None:
        _LOG.info("dry run: would reset the clock of %s", self.name)
        self._requested_mhz = None

    @property
    def requested_frequency_mhz(self) -> int | None:
        """The clock in MHz last asked of this object, though nothing was set."""
        return self._requested_mhz

    @property
    def observed_frequency_mhz(self) -> int:
        """The reader's clock in MHz; alone, the maximum, since nothing was set."""
        if self._reader is not None:
            return self._reader.observed_frequency_mhz
        return self.supported_frequencies_mhz[0]

    def clock_state(self) -> ClockState:
        """Return the reader's state, with what was asked of this object."""
        if self._reader is None:
            return super().clock_state()
        return replace(self._reader.clock_state(), requested_mhz=self._requested_mhz)

    @property
    def power_w(self) -> float:
        """The reader's power in W; alone, 0."""
        return self._reader.power_w if self._reader is not None else 0.0

    def read_energy(self) -> EnergyReading:
        """Return the reader's counter; alone, 0 J at the present instant."""
        if self._reader is not None:
            return self._reader.read_energy()
        return EnergyReading(energy_j=0.0, time_s=self.time_s())

    def time_s(self) -> float:
        """Return the reader's instant in s; alone, the monotonic clock's."""
        return self._reader.time_s() if self._reader is not None else time.monotonic()
