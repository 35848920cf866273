"""What goes on on a GPU: who uses it, how busy and how warm it is. Reads only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import pynvml

from envpipe_megatron.formats.timeline import IDLE
from envpipe_megatron.gpu.backends.nvml import NvmlGpu
from envpipe_megatron.gpu.backends.nvml_errors import NvmlError
from envpipe_megatron.gpu.backends.nvml_library import call_gpu

#: What a GPU may be busy with that only answers those who read its meters.
_MOST_BUSY_PERCENT = 5


@dataclass(frozen=True)
class GpuActivity:
    """A GPU at one instant; what it does not report is () or None.

    `processes` are those that compute on it, by the node's numbers, which a container may not know.
    """

    index: int
    uid: str
    name: str
    processes: tuple[int, ...]
    busy_percent: int | None
    temperature_c: int | None
    throttle_reasons: tuple[str, ...]

    def unrest(self) -> list[str]:
        """What speaks against measuring on it, in words; nothing if it is quiet."""
        found = []
        if self.processes:
            found.append(f"GPU {self.index} is used by process {_listed(self.processes)}")
        if self.busy_percent is not None and self.busy_percent > _MOST_BUSY_PERCENT:
            found.append(f"GPU {self.index} is {self.busy_percent} % busy")
        held = [reason for reason in self.throttle_reasons if reason != IDLE]
        if held:
            found.append(f"GPU {self.index} is held back by {_listed(held)}")
        return found


def read_activity(uid: str) -> GpuActivity:
    """Look at a GPU, by its UUID; NvmlError if it cannot be read."""
    gpu = NvmlGpu(uid)
    try:
        busy = call_gpu(uid, "read the use", pynvml.nvmlDeviceGetUtilizationRates).gpu
    except NvmlError:
        busy = None
    return GpuActivity(
        gpu.index,
        uid,
        gpu.name,
        read_processes(uid),
        busy,
        read_temperature_c(uid),
        gpu.clock_state().throttle_reasons,
    )


def read_processes(uid: str) -> tuple[int, ...]:
    """What computes on a GPU, by its UUID and the node's numbers; () if it does not tell."""
    read = pynvml.nvmlDeviceGetComputeRunningProcesses
    try:
        return tuple(process.pid for process in call_gpu(uid, "list the processes", read))
    except NvmlError:
        return ()


def read_temperature_c(uid: str) -> int | None:
    """The temperature of a GPU by its UUID, in degrees Celsius; None if it does not tell."""
    read, sensor = pynvml.nvmlDeviceGetTemperature, pynvml.NVML_TEMPERATURE_GPU
    try:
        return int(call_gpu(uid, "read the temperature", read, sensor))
    except NvmlError:
        return None


def _listed(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))
