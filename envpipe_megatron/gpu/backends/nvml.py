"""NVIDIA GPUs through NVML (nvidia-ml-py): any since Volta, with the clocks that the device lists.

Locking needs root or CAP_SYS_ADMIN; everything else is open to every user. A lock outlives the
process that made it, and NVML has no getter for it: its clocks are those that run, that are
possible or that applications ask for, its offsets shift clocks against voltages, and none shows a
lock of another program. So nothing is derived from them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import pynvml

from envpipe_megatron.formats.energy import IDLE
from envpipe_megatron.gpu.backends.nvml_library import (
    UID_START,
    call_gpu,
    call_library,
    handle_of,
    read_power_profiles,
    visible_among,
)
from envpipe_megatron.gpu.base import (
    ClockState,
    EnergyReading,
    GpuAddress,
    GpuError,
    GpuNotSupportedError,
    GpuPermissionError,
    PowerState,
)
from envpipe_megatron.gpu.energy_counter import EnergyCounter
from envpipe_megatron.gpu.presets import override_for
from envpipe_megatron.gpu.registry import Activity, Device, Driver, VendorGpu
from envpipe_megatron.gpu.site import SiteConfig, in_user_namespace

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
_CAP_SYS_ADMIN = 21
#: How far apart two GPUs may be by NCCL_P2P_LEVEL, in NVML's numbers; others ask for NVLink.
_FURTHEST = {"PIX": 10, "1": 10, "PXB": 20, "2": 20, "PHB": 30, "3": 30}


class NvmlGpu(VendorGpu):
    """One NVIDIA GPU. Any number of threads and processes may have one for the same GPU.

    It is named by its UUID (`GPU-...`), never by an index: torch's, CUDA's and NVML's differ. A
    reset leaves `reset_range_mhz`, None for the driver's default. A call is over when the driver
    has taken it, also for a process that is killed in it: nothing takes effect late. Raises
    GpuError if NVML sees no such GPU, or it cannot be read. Where the driver lists no clocks (WSL,
    boards with one memory for CPU and GPU) or fails to, `supported_frequencies_mhz` has the highest
    or the present one, and none is to be locked: see `obstacle`.
    """

    backend = "nvml"
    read_apart = True

    def __init__(self, uid: str, *, reset_range_mhz: tuple[int, int] | None = None) -> None:
        self.address = GpuAddress(self.backend, uid)
        self.name = self._call("read the name", pynvml.nvmlDeviceGetName)
        self._unlisted: GpuError | None = None
        try:
            self.supported_frequencies_mhz = self._read_supported()
        except GpuError as error:
            self._unlisted = GpuNotSupportedError(
                f"{self.name} lists no SM clocks to choose from: {error.what}",
                value=uid,
                remedy="Its clocks cannot be locked; train without clock control",
            )
            reads = pynvml.nvmlDeviceGetMaxClockInfo, pynvml.nvmlDeviceGetClockInfo
            known = (self._if_known("read the clock", read, pynvml.NVML_CLOCK_SM) for read in reads)
            self.supported_frequencies_mhz = (next(filter(None, known), 0),)
        self._reset_range_mhz = reset_range_mhz
        self._counter = EnergyCounter(self._read_counter_j, f"{self.name} ({uid})")

    @classmethod
    def owns(cls, uid: str) -> bool:
        """Tell whether it is formed as the UUID of a GPU that is not an instance of MIG."""
        return uid.startswith(UID_START)

    @classmethod
    def from_uid(cls, uid: str, reset_range_mhz: tuple[int, int] | None = None) -> Self:
        """Open a GPU by its UUID."""
        return cls(uid, reset_range_mhz=reset_range_mhz)

    @classmethod
    def list_gpus(cls) -> tuple[Device, ...]:
        """Return the GPUs that NVML sees, in its order; what cannot be identified is left out.

        Raises GpuError if NVML is not there or does not work.
        """
        return tuple(found for found in _identify_all() if isinstance(found, Device))

    @classmethod
    def uid_of_cuda_device(cls, uuid: str) -> str | None:
        """Return its UUID if NVML sees it; no other GPU is asked, whose driver may hang."""
        uid = UID_START + uuid.lower().removeprefix(UID_START.lower())
        with suppress(GpuError):
            call_library(f"find {uid}", handle_of, uid)
            return uid
        return None

    def device(self) -> Device:
        """Return how NVML lists it now; no other GPU is asked."""
        found: Device = self._call("identify", _identify)
        return found

    @classmethod
    def unreadable(cls) -> tuple[GpuError, ...]:
        """Return the errors of GPUs that cannot be identified, except for those of other users.

        NVML counts GPUs that this process may not use, too.
        """
        errors = (found for found in _identify_all() if isinstance(found, GpuError))
        return tuple(error for error in errors if not isinstance(error, GpuPermissionError))

    @classmethod
    def driver(cls) -> Driver:
        """Return the driver's version, and the newest CUDA that it runs."""
        version = call_library("read the driver's version", pynvml.nvmlSystemGetDriverVersion)
        try:
            cuda = call_library("read the CUDA version", pynvml.nvmlSystemGetCudaDriverVersion_v2)
        except GpuError:  # NVML asks libcuda.so.1, which a container for tools only has not
            return Driver(version)
        return Driver(version, (cuda // 1000, cuda % 1000 // 10))

    @classmethod
    def visible(cls) -> tuple[Device, ...]:
        """Return the GPUs that CUDA would show, as `visible_among` does."""
        return visible_among(cls.list_gpus(), os.environ)

    @classmethod
    def are_near(cls, uid: str, other: str, level: str) -> bool:
        """Tell whether NVLink is between two GPUs, or no more than the level allows."""

        def is_near(handle: Any) -> bool:
            two = handle, handle_of(other)
            nvlink = pynvml.nvmlDeviceGetP2PStatus(*two, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
            distance = pynvml.nvmlDeviceGetTopologyCommonAncestor(*two)
            return bool(nvlink == pynvml.NVML_P2P_STATUS_OK or distance <= _FURTHEST.get(level, -1))

        return bool(call_gpu(uid, "read the topology", is_near))

    @classmethod
    def rights(cls, site: SiteConfig, devices: Sequence[Device]) -> str:
        """Return the evidence that NVML takes locks from this process; GpuError if it does not."""
        user = f"user {os.geteuid()}"
        if not has_sys_admin():
            raise GpuError(
                f"{user} has no CAP_SYS_ADMIN",
                remedy="Start the container with --cap-add SYS_ADMIN, or give it the socket of a "
                "zeusd"
                if os.geteuid() == 0
                else "Nothing needs to run as root: have an administrator run zeusd, or grant a "
                "command in the site configuration",
            )
        if in_user_namespace():
            raise GpuError(
                "CAP_SYS_ADMIN here is that of a user namespace (a rootless container), which the "
                "driver does not take",
                remedy="Give the container the socket of a zeusd that runs outside",
            )
        return f"{user} has CAP_SYS_ADMIN"

    def _call(self, action: str, function: Callable[..., Any], *arguments: object) -> Any:
        return call_gpu(self.address.uid, action, function, *arguments)

    def _if_known(self, action: str, function: Callable[..., Any], *arguments: object) -> Any:
        """Call as `_call` does; return None where GPU or driver do not have it."""
        try:
            return self._call(action, function, *arguments)
        except GpuNotSupportedError:
            return None

    def _read_supported(self) -> tuple[int, ...]:
        """Return the SM clocks under the memory clock with which CUDA runs."""
        override = override_for(self.name)
        memory_mhz = self._call("read the memory clocks", pynvml.nvmlDeviceGetSupportedMemoryClocks)
        chosen_mhz = max(memory_mhz, default=0)
        if override and override.memory_clock_mhz in memory_mhz:
            chosen_mhz = override.memory_clock_mhz
        clocks = memory_mhz and self._call(
            "read the SM clocks", pynvml.nvmlDeviceGetSupportedGraphicsClocks, chosen_mhz
        )
        if not clocks:
            raise GpuNotSupportedError("the list is empty")
        return tuple(sorted(set(clocks), reverse=True))

    def _lock(self, frequency_mhz: int) -> None:
        self._set_range(f"lock the clock at {frequency_mhz} MHz", frequency_mhz, frequency_mhz)

    def _reset(self) -> None:
        if self._reset_range_mhz is None:
            self._call("reset the clock", pynvml.nvmlDeviceResetGpuLockedClocks)
        else:
            low, high = self._reset_range_mhz
            self._set_range(f"reset the clock to the site's {low} to {high} MHz", low, high)

    def _set_range(self, action: str, low_mhz: int, high_mhz: int) -> None:
        self._call(action, pynvml.nvmlDeviceSetGpuLockedClocks, low_mhz, high_mhz)

    def obstacle(self) -> GpuError | None:
        """Return what makes this GPU refuse locks to every user, None if nothing is known to.

        The driver has one code for all causes; its modes of MIG and virtualization show which one
        it is. Nothing is tried.
        """
        uid = self.address.uid
        try:
            mig, _ = self._call("read the MIG mode", pynvml.nvmlDeviceGetMigMode)
        except GpuError:  # most GPUs do not have MIG
            mig = pynvml.NVML_DEVICE_MIG_DISABLE
        if mig == pynvml.NVML_DEVICE_MIG_ENABLE:
            return GpuNotSupportedError(
                "Cannot lock the clock of a GPU in MIG mode",
                value=uid,
                remedy="Its instances share one clock and one meter: train on whole GPUs, with MIG "
                "off (an administrator can say nvidia-smi -mig 0)",
            )
        try:
            mode = self._call("read the mode", pynvml.nvmlDeviceGetVirtualizationMode)
        except GpuError:
            return self._unlisted
        if mode != _VIRTUAL_GPU:
            return self._unlisted
        return GpuNotSupportedError(
            "Cannot lock the clock of a virtual GPU, which belongs to its host",
            value=uid,
            remedy="Train without clock control, or on a GPU that is passed through whole",
        )

    def clock_state(self) -> ClockState:
        """Return the clock, and reasons where the GPU reports them; two calls, so some ms."""
        return ClockState(
            None,
            self._call("read the clock", pynvml.nvmlDeviceGetClockInfo, pynvml.NVML_CLOCK_SM),
            self._throttle_reasons(),
        )

    def power_state(self) -> PowerState:
        """Return power profiles and limits; what this GPU or its driver do not have stays empty."""
        return PowerState(
            *read_power_profiles(self.address.uid),
            self._power_limit_w(pynvml.nvmlDeviceGetEnforcedPowerLimit),
            self._power_limit_w(pynvml.nvmlDeviceGetPowerManagementDefaultLimit),
        )

    def activity(self) -> Activity:
        """Return processes, use and temperature; what cannot be read is empty."""

        def seen(function: Callable[..., Any], *arguments: object) -> Any:
            try:
                return self._call("see what goes on", function, *arguments)
            except GpuError:
                return None

        processes = seen(pynvml.nvmlDeviceGetComputeRunningProcesses) or ()
        use = seen(pynvml.nvmlDeviceGetUtilizationRates)
        return Activity(
            tuple(process.pid for process in processes),
            None if use is None else use.gpu,
            seen(pynvml.nvmlDeviceGetTemperature, pynvml.NVML_TEMPERATURE_GPU),
        )

    def memory_clocks_mhz(self) -> tuple[int, ...]:
        """Return those that the driver lists; () if it lists none."""
        read = pynvml.nvmlDeviceGetSupportedMemoryClocks
        return tuple(sorted(self._if_known("read the memory clocks", read) or (), reverse=True))

    def _throttle_reasons(self) -> tuple[str, ...]:
        action, read = "read the throttle reasons", pynvml.nvmlDeviceGetCurrentClocksEventReasons
        bits = self._if_known(action, read)
        if bits is None:  # a driver before 535 knows it by another name, which CUDA 14 drops
            old = getattr(pynvml, "nvmlDeviceGetCurrentClocksThrottleReasons", None)
            bits = (old and self._if_known(action, old)) or 0
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
        field, read = pynvml.NVML_FI_DEV_POWER_INSTANT, pynvml.nvmlDeviceGetFieldValues
        for found in self._if_known("read the power", read, [field]) or ():
            if found.nvmlReturn == pynvml.NVML_SUCCESS:
                return float(found.value.uiVal) / 1000
        return float(self._call("read the power", pynvml.nvmlDeviceGetPowerUsage)) / 1000

    def read_energy(self) -> EnergyReading:
        """Return the counter at its last refresh; may wait for the next one, up to 0.1 s."""
        return self._counter.read()

    def _read_counter_j(self) -> float:
        energy_mj = self._call("read the energy", pynvml.nvmlDeviceGetTotalEnergyConsumption)
        return float(energy_mj) / 1000


def _identify_all() -> Iterator[Device | GpuError]:
    """Yield each GPU that NVML counts, or why it cannot be identified."""
    for index in range(call_library("count the GPUs", pynvml.nvmlDeviceGetCount)):
        action = f"identify GPU {index}"
        try:
            handle = call_library(action, pynvml.nvmlDeviceGetHandleByIndex, index)
            yield call_library(action, _identify, handle)
        except GpuError as error:
            _LOG.debug("GPU %d is left out: %s", index, error)
            yield error


def _identify(handle: Any) -> Device:
    return Device(
        NvmlGpu.backend,
        pynvml.nvmlDeviceGetIndex(handle),
        pynvml.nvmlDeviceGetUUID(handle),
        pynvml.nvmlDeviceGetName(handle),
        pynvml.nvmlDeviceGetPciInfo(handle).busId,
    )


def has_sys_admin() -> bool:
    """Return whether this process has the capability without which the driver locks no clock."""
    status = Path("/proc/self/status").read_text()
    effective = next(
        (line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")), "0"
    )
    return bool(int(effective, 16) >> _CAP_SYS_ADMIN & 1)
