"""NVIDIA GPUs through NVML (nvidia-ml-py): any since Volta, with the clocks that the device lists.

Locking needs root or CAP_SYS_ADMIN; everything else is open to every user. A lock outlives the
process that made it, and NVML has no getter for it: its clocks are those that run, that are
possible or that applications ask for, its offsets shift clocks against voltages, and none shows a
lock of another program. So nothing is derived from them.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pynvml

from envpipe_megatron.formats.energy import IDLE
from envpipe_megatron.gpu.backends.nvml_library import (
    MigModeError,
    NvmlError,
    NvmlNotSupportedError,
    NvmlPermissionError,
    VirtualGpuError,
    WorkloadProfiles,
    call_gpu,
    call_library,
)
from envpipe_megatron.gpu.base import (
    ClockState,
    EnergyReading,
    Gpu,
    GpuAddress,
    GpuError,
    PowerState,
)
from envpipe_megatron.gpu.presets import override_for

_LOG = logging.getLogger(__name__)

THROTTLE_REASONS = {
    pynvml.nvmlClocksThrottleReasonGpuIdle: IDLE,
    pynvml.nvmlClocksThrottleReasonApplicationsClocksSetting: "application clocks",
    pynvml.nvmlClocksThrottleReasonSwPowerCap: "power cap",
    pynvml.nvmlClocksThrottleReasonHwSlowdown: "hardware slowdown",
    pynvml.nvmlClocksThrottleReasonSyncBoost: "sync boost",
    pynvml.nvmlClocksThrottleReasonSwThermalSlowdown: "software thermal slowdown",
    pynvml.nvmlClocksThrottleReasonHwThermalSlowdown: "hardware thermal slowdown",
    pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown: "power brake",
    pynvml.nvmlClocksThrottleReasonDisplayClockSetting: "display clocks",
}
"""NVML's bits in words; a bit that is not here is shown as its number."""

_VIRTUAL_GPU = pynvml.NVML_GPU_VIRTUALIZATION_MODE_VGPU

_EXPECTED_PERIOD_S = 0.1
_STEP_S = 0.002
_LEAD_S = 0.009
"""How long before the expected instant, which is uncertain itself, watching begins: a first read
that showed the new value already would miss the refresh."""
_FRESH_S = 0.04
"""A reading younger than this is returned again."""
STALL_S = 3.0
"""Thirty refreshes. A GPU that is on draws power, so its counter must have moved."""


@dataclass(frozen=True, slots=True)
class NvmlDevice:
    """A GPU of this node.

    `index` is NVML's, which is PCI bus order whatever CUDA_VISIBLE_DEVICES says; `pci_bus_id` is as
    NVML writes it, `00000000:1B:00.0`.
    """

    index: int
    uid: str
    pci_bus_id: str
    name: str


def list_nvml_gpus() -> tuple[NvmlDevice, ...]:
    """Return the GPUs that NVML sees, in its order; what cannot be identified is left out.

    NVML counts GPUs that this process may not use, too. Raises NvmlError if NVML is not there or
    does not work.
    """
    devices = []
    for index in range(call_library("count the GPUs", pynvml.nvmlDeviceGetCount)):
        try:
            devices.append(call_library(f"identify GPU {index}", _identify_index, index))
        except NvmlError as error:
            hidden = isinstance(error, NvmlPermissionError)
            _LOG.log(
                logging.DEBUG if hidden else logging.WARNING, "GPU %d is left out: %s", index, error
            )
    return tuple(devices)


def _identify_index(index: int) -> NvmlDevice:
    return _identify(pynvml.nvmlDeviceGetHandleByIndex(index))


def _identify(handle: object) -> NvmlDevice:
    return NvmlDevice(
        pynvml.nvmlDeviceGetIndex(handle),
        pynvml.nvmlDeviceGetUUID(handle),
        pynvml.nvmlDeviceGetPciInfo(handle).busId,
        pynvml.nvmlDeviceGetName(handle),
    )


class NvmlGpu(Gpu):
    """One NVIDIA GPU. Any number of threads and processes may have one for the same GPU.

    It is named by its UUID (`GPU-...`) or PCI bus id (`0000:1b:00.0`), never by an index: torch's,
    CUDA's and NVML's differ; `index` is NVML's, for people and for commands that know no other
    name. A reset leaves `reset_range_mhz`, None for the driver's default. A call is over when the
    driver has taken it, also for a process that is killed in it: nothing takes effect late. Raises
    MigModeError for a MIG instance, GpuNotFoundError if NVML sees no such GPU, NvmlError if
    it cannot be read. Where the driver lists no clocks (WSL, boards with one memory for CPU and
    GPU), `unlisted` says so, `supported_frequencies_mhz` has the highest or the present one, and
    none is locked.
    """

    read_apart = True

    def __init__(self, uid: str, *, reset_range_mhz: tuple[int, int] | None = None) -> None:
        if uid.startswith("MIG-"):
            raise _mig_error("Cannot control or measure a MIG instance", uid)
        found: NvmlDevice = call_gpu(uid, "read the identity", _identify)
        self.address = GpuAddress("nvml", found.uid)
        self.index = found.index
        self.pci_bus_id = found.pci_bus_id
        self.name = found.name
        self.unlisted: NvmlError | None = None
        try:
            self.supported_frequencies_mhz = self._read_supported()
        except NvmlNotSupportedError as error:
            self.unlisted = NvmlNotSupportedError(
                f"{self.name} lists no SM clocks to choose from: {error.what}",
                value=found.uid,
                remedy="Its clocks cannot be locked; train without clock control",
            )
            reads = pynvml.nvmlDeviceGetMaxClockInfo, pynvml.nvmlDeviceGetClockInfo
            known = (self._if_known("read the clock", read, pynvml.NVML_CLOCK_SM) for read in reads)
            self.supported_frequencies_mhz = (next(filter(None, known), 0),)
        self._reset_range_mhz = reset_range_mhz
        self._instant_power: bool | None = None
        self._reasons = pynvml.nvmlDeviceGetCurrentClocksEventReasons
        self._profiles = WorkloadProfiles(self._call)
        self._counter = EnergyCounter(self._read_counter_j, f"{self.name} ({found.uid})")

    def _call(self, action: str, function: Callable[..., Any], *arguments: object) -> Any:
        return call_gpu(self.address.uid, action, function, *arguments)

    def _if_known(self, action: str, function: Callable[..., Any], *arguments: object) -> Any:
        """As `_call`; None where GPU or driver do not have it."""
        try:
            return self._call(action, function, *arguments)
        except NvmlNotSupportedError:
            return None

    def _read_supported(self) -> tuple[int, ...]:
        """The SM clocks under the memory clock with which CUDA runs."""
        override = override_for(self.name)
        memory_mhz = self._call("read the memory clocks", pynvml.nvmlDeviceGetSupportedMemoryClocks)
        chosen_mhz = max(memory_mhz, default=0)
        if override and override.memory_clock_mhz in memory_mhz:
            chosen_mhz = override.memory_clock_mhz
        clocks = self._call(
            "read the SM clocks", pynvml.nvmlDeviceGetSupportedGraphicsClocks, chosen_mhz
        )
        if not clocks:
            raise NvmlNotSupportedError("the list is empty")
        return tuple(sorted(set(clocks), reverse=True))

    def _lock(self, frequency_mhz: int) -> None:
        self._set_range(f"lock the clock at {frequency_mhz} MHz", frequency_mhz, frequency_mhz)

    def _reset(self) -> None:
        if self._reset_range_mhz is None:
            self._change("reset the clock", pynvml.nvmlDeviceResetGpuLockedClocks)
        else:
            low, high = self._reset_range_mhz
            self._set_range(f"reset the clock to the site's {low} to {high} MHz", low, high)

    def _set_range(self, action: str, low_mhz: int, high_mhz: int) -> None:
        self._change(action, pynvml.nvmlDeviceSetGpuLockedClocks, low_mhz, high_mhz)

    def _change(self, action: str, function: Callable[..., None], *arguments: int) -> None:
        try:
            self._call(action, function, *arguments)
        except (NvmlNotSupportedError, NvmlPermissionError) as error:
            # The driver gives one code for all causes; its modes show which one it is.
            obstacle = self.control_obstacle()
            raise (obstacle or error) from error

    def control_obstacle(self) -> NvmlError | None:
        """Return what makes this GPU refuse locks to every user, None if nothing is known to.

        It reads the modes of MIG and virtualization, and tries nothing.
        """
        uid = self.address.uid
        try:
            mig, _ = self._call("read the MIG mode", pynvml.nvmlDeviceGetMigMode)
        except NvmlError:  # most GPUs do not have MIG
            mig = pynvml.NVML_DEVICE_MIG_DISABLE
        if mig == pynvml.NVML_DEVICE_MIG_ENABLE:
            return _mig_error("Cannot lock the clock of a GPU in MIG mode", uid)
        try:
            mode = self._call("read the mode", pynvml.nvmlDeviceGetVirtualizationMode)
        except NvmlError:
            return self.unlisted
        if mode != _VIRTUAL_GPU:
            return self.unlisted
        return VirtualGpuError(
            "Cannot lock the clock of a virtual GPU, which belongs to its host",
            value=uid,
            remedy="Train without clock control, or on a GPU that is passed through whole",
        )

    @property
    def observed_frequency_mhz(self) -> int:
        """The SM clock that the GPU reports now."""
        clock = self._call("read the clock", pynvml.nvmlDeviceGetClockInfo, pynvml.NVML_CLOCK_SM)
        return int(clock)

    def clock_state(self) -> ClockState:
        """Return request, clock, throttle reasons and power limit; four calls, so some ms.

        Where a GPU does not report limit or reasons, they stay empty.
        """
        requested_mhz = self._requested_mhz
        return ClockState(
            requested_mhz,
            self.observed_frequency_mhz,
            self._throttle_reasons(),
            self._power_limit_w(pynvml.nvmlDeviceGetEnforcedPowerLimit),
        )

    def power_state(self) -> PowerState:
        """Return power profiles and limits; what this GPU or its driver do not have stays empty."""
        return PowerState(
            *self._profiles.read(),
            self._power_limit_w(pynvml.nvmlDeviceGetEnforcedPowerLimit),
            self._power_limit_w(pynvml.nvmlDeviceGetPowerManagementDefaultLimit),
        )

    def _throttle_reasons(self) -> tuple[str, ...]:
        try:
            bits = self._call("read the throttle reasons", self._reasons)
        except NvmlNotSupportedError:
            if self._reasons is pynvml.nvmlDeviceGetCurrentClocksThrottleReasons:
                return ()
            # Drivers before 535 know the call by its old name alone.
            self._reasons = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons
            return self._throttle_reasons()
        set_bits = (1 << place for place in range(bits.bit_length()) if bits >> place & 1)
        return tuple(THROTTLE_REASONS.get(bit, f"reason {bit:#x}") for bit in set_bits)

    def _power_limit_w(self, function: Callable[..., Any]) -> float | None:
        limit_mw = self._if_known("read the power limit", function)
        return None if limit_mw is None else float(limit_mw) / 1000

    @property
    def power_w(self) -> float:
        """The instantaneous power.

        Newer GPUs have a field for it; on those up to the A100 the plain power is instantaneous,
        and on any between it is the mean of the last second.
        """
        if self._instant_power is not False:
            fields = self._if_known(
                "read the power",
                pynvml.nvmlDeviceGetFieldValues,
                [pynvml.NVML_FI_DEV_POWER_INSTANT],
            )
            self._instant_power = bool(fields) and fields[0].nvmlReturn == pynvml.NVML_SUCCESS
            if self._instant_power:
                return float(fields[0].value.uiVal) / 1000
        return float(self._call("read the power", pynvml.nvmlDeviceGetPowerUsage)) / 1000

    def read_energy(self) -> EnergyReading:
        """Return the counter at its last refresh; may wait for the next one, up to 0.1 s."""
        return self._counter.read()

    def _read_counter_j(self) -> float:
        energy_mj = self._call("read the energy", pynvml.nvmlDeviceGetTotalEnergyConsumption)
        return float(energy_mj) / 1000

    def time_s(self) -> float:
        """Return the monotonic clock's instant."""
        return time.monotonic()


def _mig_error(what: str, uid: str) -> MigModeError:
    return MigModeError(
        what,
        value=uid,
        remedy="Its instances share one clock and one meter: train on whole GPUs, with MIG off "
        "(an administrator can say nvidia-smi -mig 0)",
    )


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
        refresh, up to 0.1 s. A caller that polls every 50 ms sees each refresh. Raises GpuError
        if the counter could not be read, went back, or has not moved for `STALL_S`; the next
        call starts again.
        """
        with self._lock:
            last = self._reading
            if last is not None:
                age_s = self._monotonic_s() - last.time_s
                if age_s < _FRESH_S:
                    return last
                refreshes = math.ceil((age_s + _LEAD_S) / _EXPECTED_PERIOD_S)
                # Rounding could make this slightly negative.
                self._sleep(max(0.0, refreshes * _EXPECTED_PERIOD_S - _LEAD_S - age_s))
            # Forgotten until another is found: after an error the next call starts again.
            self._reading = None
            self._reading = self._watch(last)
            return self._reading

    def _watch(self, last: EnergyReading | None) -> EnergyReading:
        """Read until the counter moves."""
        first_s = after_s = self._monotonic_s()
        old_j = self._read_j()
        self._refuse_back(old_j, last.energy_j if last else old_j)
        while True:
            self._sleep(_STEP_S)
            begin_s = self._monotonic_s()
            energy_j = self._read_j()
            end_s = self._monotonic_s()
            self._refuse_back(energy_j, old_j)
            if energy_j > old_j:
                half_s = (end_s - after_s) / 2
                return EnergyReading(energy_j, after_s + half_s, half_s)
            if end_s - first_s > STALL_S:
                raise GpuError(
                    f"The energy counter of {self._name} has not moved for {STALL_S:g} s",
                    value=energy_j,
                    remedy="Check the GPU with nvidia-smi; its energy is not measured meanwhile",
                )
            after_s = begin_s

    def _refuse_back(self, energy_j: float, old_j: float) -> None:
        if energy_j < old_j:
            raise GpuError(
                f"The energy counter of {self._name} went back from {old_j:.3f} J",
                value=energy_j,
                remedy="The driver was reloaded or the GPU reset; windows over it have no energy",
            )
