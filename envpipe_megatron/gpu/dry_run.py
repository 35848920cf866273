"""A GPU that says what it would set, and sets nothing."""

import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from envpipe_megatron.gpu.base import ClockState, EnergyReading, Gpu, GpuAddress, GpuError

_LOG = logging.getLogger(__name__)

HISTORY_LENGTH = 4096
"""Requests remembered: about one long iteration of many microbatches, and no leak over days."""


class DryRunGpu(Gpu):
    """Logs clock requests; reads through another GPU where there is one.

    With `reader` the name, the clock table and all meters are that GPU's, whose clocks are never
    touched. Without one it stands alone: power and energy are 0, time is the monotonic clock.

    Args:
        reader: the GPU to read from.
        name: product name; needed without a reader.
        supported_frequencies_mhz: clock table in MHz, any order; needed without a reader.

    Raises:
        GpuError: neither a reader nor a table of clocks was given.
    """

    drives_hardware: ClassVar[bool] = False

    def __init__(
        self,
        reader: Gpu | None = None,
        *,
        name: str | None = None,
        supported_frequencies_mhz: Sequence[int] = (),
    ) -> None:
        table = supported_frequencies_mhz or (reader.supported_frequencies_mhz if reader else ())
        if not table:
            raise GpuError(
                "A dry-run GPU without another GPU to read from needs a table of clocks",
                remedy="Pass supported_frequencies_mhz, for example those of a preset",
            )
        self.address = GpuAddress("dry_run", reader.address.uid if reader else f"none#{id(self)}")
        self.name = name or (reader.name if reader else "dry run")
        self.supported_frequencies_mhz = tuple(sorted(set(table), reverse=True))
        self._reader = reader
        self._requested_mhz: int | None = None
        self._history: deque[int | None] = deque(maxlen=HISTORY_LENGTH)

    @property
    def would_set(self) -> list[int | None]:
        """The clocks in MHz that would have been set, oldest first, None for a reset.

        Bounded to the last `HISTORY_LENGTH`.
        """
        return list(self._history)

    def _lock(self, frequency_mhz: int) -> None:
        _LOG.info("dry run: would lock %s at %d MHz", self.name, frequency_mhz)
        self._requested_mhz = frequency_mhz
        self._history.append(frequency_mhz)

    def _reset(self) -> None:
        _LOG.info("dry run: would reset the clock of %s", self.name)
        self._requested_mhz = None
        self._history.append(None)

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
