"""NVML in this process: initialised when it is needed, as after a fork or another's shutdown.

`call_library` calls a function of pynvml, `call_gpu` one that takes a GPU; both from any thread.
ctypes releases Python's interpreter lock while NVML works. NVML's error codes come as GpuErrors,
each with what to do about it. `visible_among` says which GPUs CUDA shows, and in which order.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import pynvml

from envpipe_megatron.gpu.base import (
    GpuError,
    GpuNotSupportedError,
    GpuPermissionError,
    NoDriverError,
)
from envpipe_megatron.gpu.registry import ORDER_VARIABLE, VISIBLE_VARIABLE, Device, pci_address

UID_START = "GPU-"
"""With which the UUID of every whole GPU begins."""

if not hasattr(pynvml, "nvmlDeviceWorkloadPowerProfileGetCurrentProfiles"):
    raise NoDriverError(
        "The module pynvml is not that of nvidia-ml-py 12.570.86 or newer",
        value=pynvml.__file__,
        remedy="pip uninstall pynvml, an old package; then pip install --force-reinstall "
        "'nvidia-ml-py>=12.570.86'",
    )

_NEEDS_NO_ROOT = (
    "Training needs no root: let an administrator run zeusd or grant a command in the site "
    "configuration"
)

_TOO_OLD = (
    GpuNotSupportedError,
    "the installed driver does not know this call, or knows another version of it",
    "Update the NVIDIA driver, or nvidia-ml-py",
)

_NAMED: dict[int, tuple[type[GpuError], str, str]] = {
    pynvml.NVML_ERROR_NO_PERMISSION: (
        GpuPermissionError,
        "the driver refuses it to this process",
        f"The driver asks for root or CAP_SYS_ADMIN. {_NEEDS_NO_ROOT}",
    ),
    pynvml.NVML_ERROR_NOT_SUPPORTED: (
        GpuNotSupportedError,
        "GPU or driver do not support it",
        "Locked clocks and energy counters need a data-center or workstation GPU since Volta; "
        "check with nvidia-smi -q",
    ),
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: _TOO_OLD,
    pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH: _TOO_OLD,
    pynvml.NVML_ERROR_GPU_IS_LOST: (
        GpuError,
        "the GPU is lost: it fell off the bus",
        "Look for an Xid in the kernel log; the node needs a GPU reset or a reboot",
    ),
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: (
        GpuError,
        "the kernel's driver and the library libnvidia-ml.so.1 are of different versions",
        "The driver was updated while it ran: reboot, or reload its kernel modules; in a container "
        "use the host's library",
    ),
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: (
        NoDriverError,
        "no NVIDIA driver is loaded",
        "Load the driver, or give the container GPUs (docker run --gpus all)",
    ),
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: (
        NoDriverError,
        "there is no libnvidia-ml.so.1",
        "Install the NVIDIA driver, or give the container GPUs with the 'utility' capability",
    ),
    pynvml.NVML_ERROR_IN_USE: (
        GpuError,
        "another client of the driver has the GPU in use",
        "Look for what else manages GPUs here (DCGM, fabric manager, a reset that is under way), "
        "and try again",
    ),
}


def _named_error(error: pynvml.NVMLError, action: str) -> GpuError:
    """Return NVML's error as one of ours; `action` follows 'Cannot' in its message."""
    kind, cause, remedy = _NAMED.get(
        error.value,
        (
            GpuError,
            f"NVML says '{error}'",
            "Check the GPU with nvidia-smi and look for an Xid in the kernel log",
        ),
    )
    return kind(f"Cannot {action}: {cause}", remedy=remedy)


_handles: dict[str, Any] = {}
"""NVML's handles of GPUs, by uid."""
# Where other code initialises NVML in a forked child, it refuses those of the parent.
os.register_at_fork(after_in_child=_handles.clear)


def call_library(action: str, function: Callable[..., Any], *arguments: object) -> Any:
    """Call a function of pynvml that takes no GPU; `action` follows 'Cannot' in an error.

    Raises GpuError if it failed, or NVML cannot be initialised.
    """
    try:
        try:
            return function(*arguments)
        except pynvml.NVMLError_Uninitialized:
            # The first call of this process, or other code (a framework's monitor) shut NVML down.
            _handles.clear()
            pynvml.nvmlInit()
            return function(*arguments)
    except pynvml.NVMLError as error:
        raise _named_error(error, action) from error


def call_gpu(uid: str, action: str, function: Callable[..., Any], *arguments: object) -> Any:
    """Call a function of pynvml whose first argument is a GPU; `action` as in `call_library`.

    The uid is its UUID (`GPU-...`), never an index: NVML's and CUDA's differ. Raises
    GpuError if NVML sees no such GPU, GpuError as `call_library` does.
    """
    return call_library(f"{action} of {uid}", lambda: function(handle_of(uid), *arguments))


def handle_of(uid: str) -> Any:
    """Return NVML's handle of a GPU; raises GpuError if it sees none with this uid, NVMLError."""
    handle = _handles.get(uid)
    if handle is None:
        handle = _handles[uid] = _find(uid)
    return handle


def _find(uid: str) -> Any:
    try:
        return pynvml.nvmlDeviceGetHandleByUUID(uid)
    except (pynvml.NVMLError_NotFound, pynvml.NVMLError_InvalidArgument) as error:
        raise GpuError(
            "NVML sees no GPU with this UUID",
            value=uid,
            remedy="List those of this node with nvidia-smi -L; a container may hide GPUs",
        ) from error
    except pynvml.NVMLError_GpuIsLost:  # said of each UUID if any GPU has fallen off the bus
        for index in range(pynvml.nvmlDeviceGetCount()):
            with suppress(pynvml.NVMLError):
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                if pynvml.nvmlDeviceGetUUID(handle) == uid:
                    return handle
        raise


PROFILES = (
    *("max-P", "max-Q", "compute", "memory bound", "network", "balanced", "LLM inference"),
    *("LLM training", "RBM", "DCPCIE", "HMMA sparse", "HMMA dense", "sync balanced", "HPC", "MIG"),
    *("max-Q 1", "network bound", "high-throughput inference", "medium-throughput inference"),
    *("low-latency inference", "training", "inference", "max-Q 2", "max-Q 3"),
    "low-priority background",
)
"""NVML's numbers (NVML_POWER_PROFILE_...) in words; one that is not here is shown as its number."""


def read_power_profiles(uid: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return a GPU's workload power profiles by name, requested and enforced; () where none are.

    Blackwell has them, and Hopper with some drivers. Each is a set of clocks, limits and link
    states that NVIDIA tuned for a kind of work; an operator requests some of them, and the driver
    arbitrates. EnvPipe changes none. Raises GpuError if what is offered fails.
    """
    read = pynvml.nvmlDeviceWorkloadPowerProfileGetCurrentProfiles
    current = pynvml.c_nvmlWorkloadPowerProfileCurrentProfiles_v1_t()
    try:
        # nvidia-ml-py hands on what it is given.
        call_gpu(uid, "read the power profiles", read, ctypes.byref(current))
    except (GpuNotSupportedError, GpuPermissionError):
        return (), ()
    return _names(current.requestedProfilesMask), _names(current.enforcedProfilesMask)


def _names(mask: Any) -> tuple[str, ...]:
    bits = sum(word << 32 * place for place, word in enumerate(mask.mask))
    numbers = (number for number in range(bits.bit_length()) if bits >> number & 1)
    return tuple(PROFILES[n] if n < len(PROFILES) else f"profile {n}" for n in numbers)


def visible_among(devices: Sequence[Device], variables: Mapping[str, str]) -> tuple[Device, ...]:
    """Return the GPUs that CUDA would show to a process with these variables, in its order.

    The rules are in the CUDA C++ Programming Guide, section CUDA Environment Variables: an entry
    that names no GPU (`-1`, too high a number, an unknown UUID) hides itself and all after it. Like
    GPUs that CUDA numbers by their speed are taken to be numbered by PCI bus id. Raises GpuError if
    unlike ones are numbered so, one is named twice, or an instance of MIG is.
    """
    visible = variables.get(VISIBLE_VARIABLE)
    in_pci_order = sorted(devices, key=lambda device: pci_address(device.pci_bus_id))
    chosen: Sequence[Device] = in_pci_order
    by_number = True
    if visible is not None:
        entries = [entry.strip() for entry in visible.split(",")]
        by_number = any(re.fullmatch("[0-9]+", entry) for entry in entries)
        chosen = _chosen(entries, in_pci_order)
    names = sorted({device.name for device in in_pci_order})
    if by_number and chosen and len(names) > 1 and variables.get(ORDER_VARIABLE) != "PCI_BUS_ID":
        raise GpuError(
            "CUDA numbers unlike GPUs by their speed, which only CUDA can tell",
            value=names,
            remedy=f"Set {ORDER_VARIABLE}=PCI_BUS_ID, or name GPUs in {VISIBLE_VARIABLE} by UUID",
        )
    return tuple(chosen)


def _chosen(entries: Sequence[str], in_pci_order: Sequence[Device]) -> list[Device]:
    chosen: list[Device] = []
    for entry in entries:
        if entry.startswith("MIG-"):
            raise GpuNotSupportedError(
                "CUDA shows a MIG instance, whose clock and meter are its whole GPU's",
                value=entry,
                remedy="Train on whole GPUs, with MIG off, or without clock control",
            )
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


def _named(entry: str, in_pci_order: Sequence[Device]) -> Device | None:
    if re.fullmatch("[0-9]+", entry):
        number = int(entry)
        return in_pci_order[number] if number < len(in_pci_order) else None
    if not entry.startswith(UID_START):
        return None
    # The start of a UUID is enough if no other GPU's starts so.
    matching = [d for d in in_pci_order if d.uid.lower().startswith(entry.lower())]
    return matching[0] if len(matching) == 1 else None
