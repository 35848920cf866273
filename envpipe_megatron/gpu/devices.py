"""The GPUs of this machine: from what CUDA sees to UUIDs, and what goes on on each.

CUDA numbers the GPUs that CUDA_VISIBLE_DEVICES leaves, in its order; NVML numbers all GPUs of the
node. So no number of CUDA's ever goes to NVML: a UUID or a PCI bus id does. A process that has CUDA
asks it (`uid_of_cuda_device`); one that has not reads the variables as CUDA does (`visible_gpus`,
rules of the CUDA C++ Programming Guide, section CUDA Environment Variables).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import pynvml

from envpipe_megatron.formats.energy import IDLE
from envpipe_megatron.gpu.backends.nvml import NvmlDevice, NvmlGpu, list_nvml_gpus
from envpipe_megatron.gpu.backends.nvml_library import (
    GpuNotFoundError,
    MigModeError,
    NvmlError,
    call_gpu,
)
from envpipe_megatron.gpu.base import GpuError

VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"
ORDER_VARIABLE = "CUDA_DEVICE_ORDER"

_PCI = re.compile(r"([0-9a-f]{4,8}):([0-9a-f]{2}):([0-9a-f]{2})(?:\.([0-7]))?", re.IGNORECASE)
#: What a GPU may be busy with that only answers those who read its meters.
_MOST_BUSY_PERCENT = 5


@dataclass(frozen=True, slots=True)
class VisibleGpus:
    """The GPUs that CUDA shows to a process, in the order of its device numbers.

    `assumption` says what had to be assumed for this order, empty if nothing had to be.
    """

    devices: tuple[NvmlDevice, ...]
    assumption: str = ""


def uid_of_cuda_device(uuid: str) -> str:
    """Return the UUID, as NVML writes it, of `str(torch.cuda.get_device_properties(i).uuid)`.

    Raises GpuNotFoundError if NVML sees no such GPU.
    """
    devices = list_nvml_gpus()
    for device in devices:
        if device.uid.lower() == f"gpu-{uuid.lower().removeprefix('gpu-')}":
            return device.uid
    raise GpuNotFoundError(
        "CUDA uses a GPU that NVML does not see",
        value=uuid,
        remedy=f"NVML sees {', '.join(d.uid for d in devices) or 'none'}. Give the container "
        "the same GPUs for 'compute' and 'utility'; instances of MIG cannot be controlled",
    )


def visible_gpus(environment: Mapping[str, str] | None = None) -> VisibleGpus:
    """Return the GPUs that CUDA would show to a process with this environment, by default our own.

    As in CUDA, an entry that names no GPU (`-1`, too high a number, an unknown UUID) hides itself
    and all after it. Raises GpuError if the GPUs are unlike and numbered by speed, or one is
    named twice, MigModeError for a MIG instance.
    """
    variables = os.environ if environment is None else environment
    visible = variables.get(VISIBLE_VARIABLE)
    in_pci_order = sorted(list_nvml_gpus(), key=lambda device: pci_address(device.pci_bus_id))
    chosen: Sequence[NvmlDevice] = in_pci_order
    by_number = len(in_pci_order) > 1
    if visible is not None:
        entries = [entry.strip() for entry in visible.split(",")]
        by_number = by_number and any(re.fullmatch("[0-9]+", entry) for entry in entries)
        chosen = _chosen(entries, in_pci_order)
    assumption = ""
    if by_number and chosen and variables.get(ORDER_VARIABLE) != "PCI_BUS_ID":
        names = sorted({device.name for device in in_pci_order})
        if len(names) > 1:
            raise GpuError(
                "CUDA numbers unlike GPUs by their speed, which only CUDA can tell",
                value=names,
                remedy=f"Set {ORDER_VARIABLE}=PCI_BUS_ID, or name GPUs in {VISIBLE_VARIABLE} "
                "by UUID",
            )
        assumption = (
            f"{ORDER_VARIABLE} is not PCI_BUS_ID: as all GPUs are {names[0]}, CUDA is taken to "
            "number them by PCI bus id"
        )
    return VisibleGpus(tuple(chosen), assumption)


def narrowed(numbers: Sequence[int]) -> str:
    """The variable's value that leaves these of the GPUs that CUDA shows to this process.

    Empty where the variable leaves fewer; nothing is asked of NVML.
    """
    visible = os.environ.get(VISIBLE_VARIABLE)
    names = list(map(str, range(max(numbers) + 1))) if visible is None else visible.split(",")
    if max(numbers) >= len(names):
        return ""
    return ",".join(names[number].strip() for number in numbers)


def _chosen(entries: Sequence[str], in_pci_order: Sequence[NvmlDevice]) -> list[NvmlDevice]:
    chosen: list[NvmlDevice] = []
    for entry in entries:
        if entry.startswith("MIG-"):
            raise _mig_instance(entry)
        named = _named(entry, in_pci_order)
        if named is None:
            break
        if named in chosen:
            raise GpuError(
                f"{VISIBLE_VARIABLE} names a GPU twice",
                value=entry,
                remedy="Name each GPU once: CUDA shows none otherwise",
            )
        chosen.append(named)
    return chosen


def _named(entry: str, in_pci_order: Sequence[NvmlDevice]) -> NvmlDevice | None:
    if re.fullmatch("[0-9]+", entry):
        number = int(entry)
        return in_pci_order[number] if number < len(in_pci_order) else None
    if not entry.startswith("GPU-"):
        return None
    # The start of a UUID is enough if no other GPU's starts so.
    matching = [d for d in in_pci_order if d.uid.lower().startswith(entry.lower())]
    return matching[0] if len(matching) == 1 else None


def pci_address(text: str) -> tuple[int, int, int, int]:
    """Return domain, bus, device and function of a PCI bus id, however CUDA or NVML writes it.

    Raises GpuNotFoundError if it is none.
    """
    match = _PCI.fullmatch(text)
    if match is None:
        raise GpuNotFoundError("Not a PCI bus id", value=text, remedy="One is 0000:1b:00.0")
    domain, bus, device, function = (int(part or "0", 16) for part in match.groups())
    return domain, bus, device, function


def _mig_instance(uid: str) -> MigModeError:
    return MigModeError(
        "CUDA shows a MIG instance, whose clock and meter are its whole GPU's",
        value=uid,
        remedy="Train on whole GPUs, with MIG off, or without clock control",
    )


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
        """Say what speaks against measuring on it; nothing if it is quiet."""
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
    """Return the processes on a GPU, by the node's numbers; () if its driver does not tell."""
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
