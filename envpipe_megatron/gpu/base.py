"""The interface of every GPU back end: clocks to set, meters to read, and the forbid check.

The forbid check refuses to set a real GPU's clock while the environment forbids it. It is here and
not in the back ends: none can replace `lock_frequency` and `reset_frequency`, so none forgets it.

Changing a clock needs rights, reading it does not: a `ReadThroughGpu` reads through another object.
Here are the two that change no clock, `command` and `zeusd` have the others; `gpu.registry` makes
them.
"""

from __future__ import annotations

import logging
import math
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, final

from envpipe_megatron.errors import EnvPipeError

if TYPE_CHECKING:
    from envpipe_megatron.gpu.registry import Device
    from envpipe_megatron.gpu.site import SiteConfig

_LOG = logging.getLogger(__name__)

SAFE_UID = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{0,95}")
"""A real GPU's uid: it can be no option of a command, and no other folder's file."""

FORBID_VARIABLE = "ENVPIPE_FORBID_CLOCK_CONTROL"


class GpuError(EnvPipeError):
    """A GPU, real or emulated, cannot do what was requested."""


class GpuPermissionError(GpuError):
    """This process may not do it; another back end or user may, or where nothing forbids it."""


class GpuNotSupportedError(GpuError):
    """The GPU or its driver does not offer this."""


class NoDriverError(GpuError):
    """This machine has no driver of a vendor, or not its library."""


@dataclass(frozen=True, slots=True)
class GpuAddress:
    """Names a GPU for other processes of the node, and for the next job.

    `uid` is a real GPU's UUID, of an emulated one its folder and index (`/folder#0`): the same in
    every process, even where other GPUs are visible.
    """

    backend: str
    uid: str


@dataclass(frozen=True, slots=True)
class ClockState:
    """The request for a clock, the clock itself, and what holds it back, read together.

    `requested_mhz` is None where nothing is requested, and of a back end whose driver has no getter
    for a lock; reasons are words such as `power cap`, () where they are not known.
    """

    requested_mhz: int | None
    observed_mhz: int
    throttle_reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PowerState:
    """The state that sets clocks and power beside our requests; it changes and is read rarely.

    Workload power profiles are names such as `max-Q`: those that anybody requested, and those that
    the driver enforces after it has arbitrated between them; () where GPU or driver have none.
    What is not known of the limits is None. EnvPipe never changes any of this.
    """

    requested_profiles: tuple[str, ...] = ()
    enforced_profiles: tuple[str, ...] = ()
    power_limit_w: float | None = None
    default_power_limit_w: float | None = None

    @property
    def is_capped(self) -> bool:
        """True if the limit is known to be below the default."""
        limit_w, default_w = self.power_limit_w, self.default_power_limit_w
        return limit_w is not None and default_w is not None and limit_w < default_w

    def __str__(self) -> str:
        """Return, for people, such as `max-Q enforced, power limit 500 W (700 W by default)`."""
        text = f"{', '.join(self.enforced_profiles) or 'no power profile'} enforced"
        if self.requested_profiles != self.enforced_profiles:
            text += f", {', '.join(self.requested_profiles) or 'none'} requested"
        if self.power_limit_w is None:
            return f"{text}, power limit not known"
        default = f" ({self.default_power_limit_w:g} W by default)" if self.is_capped else ""
        return f"{text}, power limit {self.power_limit_w:g} W{default}"


@dataclass(frozen=True, slots=True)
class EnergyReading:
    """The energy counter at its last refresh, and when that was on the time base of `Gpu.time_s()`.

    Only differences mean anything: of two readings, energy by time is the exact mean power. The
    refresh was within `time_uncertainty_s` of `time_s`; 0 if the GPU gives the instant. Where it
    does not, `gpu.energy_counter` finds it by watching the counter.
    """

    energy_j: float
    time_s: float
    time_uncertainty_s: float = 0.0


def clock_control_forbidden() -> bool:
    """Return whether the environment forbids changing the clocks of real GPUs.

    Every value but an empty one and `0` forbids: a typo must not unlock hardware.
    """
    return os.environ.get(FORBID_VARIABLE, "").strip() not in ("", "0")


def nearest_frequencies(wanted_mhz: int, supported_mhz: Sequence[int]) -> tuple[int, ...]:
    """Return the supported clocks next to a wanted one, at most one per side, highest first."""
    below = [f for f in supported_mhz if f <= wanted_mhz]
    above = [f for f in supported_mhz if f > wanted_mhz]
    return tuple(([min(above)] if above else []) + ([max(below)] if below else []))


class Gpu(ABC):
    """One GPU: SM clock in MHz, power in W, energy in J, time in s.

    Attributes:
        backend: the name under which it is registered.
        drives_hardware: whether `_lock` and `_reset` change a real GPU. True unless a back end says
            otherwise, so that forgetting to say it is safe.
        changes_clock: whether a lock changes a clock, real or emulated.
        read_apart: whether a read of its counter takes so long that another process should read.
        late_request_s: how long a request of a process that was killed may still take effect: a
            guard resets once more after that time.
        supported_frequencies_mhz: every SM clock that can be locked, highest first.
    """

    backend: ClassVar[str]
    drives_hardware: ClassVar[bool] = True
    changes_clock: ClassVar[bool] = True
    read_apart: bool = False
    read_only: ClassVar[bool] = False
    late_request_s: float = 0.0
    address: GpuAddress
    name: str
    supported_frequencies_mhz: tuple[int, ...]

    def __init_subclass__(cls) -> None:
        """Refuse, by a TypeError, a subclass (or a mixin of it) that replaces a checked method."""
        for method in ("lock_frequency", "reset_frequency"):
            if getattr(cls, method) is not getattr(Gpu, method):
                raise TypeError(
                    f"{cls.__qualname__} replaces {method}, which carries the guard of "
                    f"{FORBID_VARIABLE}: implement _lock and _reset instead"
                )

    @classmethod
    def rights(cls, site: SiteConfig, devices: Sequence[Device]) -> str:
        """Return the evidence that this process may change these GPUs' clocks, found by reading.

        Raises GpuError, whose remedy says what would allow it, if it may not.
        """
        raise GpuError(f"back end {cls.backend} does not say who may change clocks")

    @final
    def lock_frequency(self, frequency_mhz: int) -> None:
        """Request that the SM clock be `frequency_mhz` from now on.

        Returning means that the request is installed: the clock settles later, and a power cap may
        keep it lower. Raises GpuPermissionError for a real GPU while the environment
        forbids clock control, GpuError for a clock that is not supported or if the back end
        fails.
        """
        self._refuse_if_forbidden(f"lock the clock at {frequency_mhz} MHz")
        self.check_supported(frequency_mhz)
        self._lock(frequency_mhz)

    @final
    def reset_frequency(self) -> None:
        """Undo any lock: back to the driver's default. Raises as `lock_frequency` does."""
        self._refuse_if_forbidden("reset the clock")
        self._reset()

    def check_supported(self, frequency_mhz: int) -> None:
        """Raise GpuError, with the nearest ones, for a clock that cannot be locked."""
        if frequency_mhz not in self.supported_frequencies_mhz:
            near = nearest_frequencies(frequency_mhz, self.supported_frequencies_mhz)
            raise GpuError(
                f"{self.name} cannot run at this SM clock in MHz",
                value=frequency_mhz,
                remedy=f"Nearest supported: {', '.join(f'{f} MHz' for f in near) or 'none'}",
            )

    def _refuse_if_forbidden(self, action: str) -> None:
        # Read at every call: a process may get the variable after it has made its GPU objects.
        if self.drives_hardware and clock_control_forbidden():
            raise GpuPermissionError(
                f"Refused to {action} on {self.name}: {FORBID_VARIABLE} is set",
                value=os.environ[FORBID_VARIABLE],
                remedy=f"Unset {FORBID_VARIABLE}, or use the dry_run or emulated back end",
            )

    @abstractmethod
    def _lock(self, frequency_mhz: int) -> None:
        """Install the request for a supported clock in MHz."""

    @abstractmethod
    def _reset(self) -> None:
        """Remove any lock."""

    def control_ends_s(self) -> float:
        """Return when the right to lock and to reset ends, in s since 1970; inf where it does not.

        Raises as `lock_frequency` does.
        """
        return math.inf

    @abstractmethod
    def clock_state(self) -> ClockState:
        """Return the clock and throttle reasons. May take milliseconds."""

    def power_state(self) -> PowerState:
        """Return power profiles and power limits. May take milliseconds."""
        return PowerState()

    @property
    @abstractmethod
    def power_w(self) -> float:
        """The power that the GPU reports now."""

    @abstractmethod
    def read_energy(self) -> EnergyReading:
        """Return the cumulative energy counter at its last refresh. May take milliseconds."""

    def time_s(self) -> float:
        """Return the present instant on the time base of `EnergyReading.time_s`: monotonic here."""
        return time.monotonic()


class ReadThroughGpu(Gpu):
    """Name, clock table and meters of another GPU object, whose own clock control is never used.

    A subclass sets the clock its own way, as the site has it, and names its `backend`. GpuError if
    that cannot be.
    """

    def __init__(self, reader: Gpu, site: SiteConfig | None = None) -> None:
        self.address = GpuAddress(self.backend, reader.address.uid)
        self.name = reader.name
        self.supported_frequencies_mhz = reader.supported_frequencies_mhz
        self.read_apart = reader.read_apart
        self._reader = reader

    def clock_state(self) -> ClockState:
        """Return the reader's."""
        return self._reader.clock_state()

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
    drives_hardware = changes_clock = False

    def _lock(self, frequency_mhz: int) -> None:
        _LOG.debug("dry run: would lock %s at %d MHz", self.name, frequency_mhz)

    def _reset(self) -> None:
        _LOG.info("dry run: would reset the clock of %s", self.name)


class ReadOnlyGpu(ReadThroughGpu):
    """A GPU for a job that may not change clocks: meters work, a lock is always refused.

    Resetting does nothing, since nothing can have been locked here.
    """

    backend = "none"
    drives_hardware = changes_clock = False
    read_only = True

    def _lock(self, frequency_mhz: int) -> None:
        raise GpuPermissionError(
            f"{self.name} was opened for reading only, so its clock cannot be locked",
            value=frequency_mhz,
            remedy="Run `envpipe doctor` to see which control back ends are allowed and why not",
        )

    def _reset(self) -> None:
        pass
