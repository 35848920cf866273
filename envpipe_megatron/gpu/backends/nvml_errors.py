"""NVML's error codes as named errors, each with what to do about it."""

import pynvml

from envpipe_megatron.gpu.base import GpuError, GpuPermissionError


class NvmlError(GpuError):
    """NVML could not do what was asked."""


class NvmlPermissionError(NvmlError, GpuPermissionError):
    """This process may not change the GPU's clock."""


class NvmlNotSupportedError(NvmlError):
    """The GPU or its driver does not offer this."""


class MigModeError(NvmlNotSupportedError):
    """The GPU is divided by MIG: instances share one clock, power sensor and energy counter."""


class VirtualGpuError(NvmlNotSupportedError):
    """The GPU is a share that a hypervisor gives out (vGPU); its clocks are the host's."""


class GpuLostError(NvmlError):
    """The GPU fell off the bus, or must be reset before it can be used again."""


class GpuNotFoundError(NvmlError):
    """NVML sees no such GPU."""


class NoNvmlError(NvmlError):
    """This machine has no NVIDIA driver, or no NVML library."""


_NEEDS_NO_ROOT = (
    "Training needs no root: let an administrator run zeusd or grant a command in the site "
    "configuration"
)

_NAMED: dict[int, tuple[type[NvmlError], str, str]] = {
    pynvml.NVML_ERROR_NO_PERMISSION: (
        NvmlPermissionError,
        "the driver refuses it to this process",
        f"The driver asks for root or CAP_SYS_ADMIN. {_NEEDS_NO_ROOT}",
    ),
    pynvml.NVML_ERROR_NOT_SUPPORTED: (
        NvmlNotSupportedError,
        "GPU or driver do not support it",
        "Locked clocks and energy counters need a data-center or workstation GPU since Volta; "
        "check with nvidia-smi -q",
    ),
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: (
        NvmlNotSupportedError,
        "the installed driver is too old to know this call",
        "Update the NVIDIA driver",
    ),
    pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH: (
        NvmlNotSupportedError,
        "the installed driver knows this call in another version",
        "Update the NVIDIA driver, or nvidia-ml-py",
    ),
    pynvml.NVML_ERROR_GPU_IS_LOST: (
        GpuLostError,
        "the GPU is lost: it fell off the bus",
        "Look for an Xid in the kernel log; the node needs a GPU reset or a reboot",
    ),
    pynvml.NVML_ERROR_RESET_REQUIRED: (
        GpuLostError,
        "the GPU needs a reset before it can be used again",
        "Have an administrator reset the GPU or reboot the node",
    ),
    pynvml.NVML_ERROR_NOT_FOUND: (
        GpuNotFoundError,
        "there is no such GPU",
        "List the GPUs of this node with nvidia-smi -L",
    ),
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: (
        NvmlError,
        "the kernel's driver and the library libnvidia-ml.so.1 are of different versions",
        "The driver was updated while it ran: reboot, or reload its kernel modules; in a container "
        "use the host's library",
    ),
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: (
        NoNvmlError,
        "no NVIDIA driver is loaded",
        "Load the driver, or give the container GPUs (docker run --gpus all)",
    ),
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: (
        NoNvmlError,
        "there is no libnvidia-ml.so.1",
        "Install the NVIDIA driver, or give the container GPUs with the 'utility' capability",
    ),
    pynvml.NVML_ERROR_TIMEOUT: (
        NvmlError,
        "the driver gave up waiting for the GPU",
        "Try again; if it stays, look for an Xid in the kernel log",
    ),
}


def named_error(error: pynvml.NVMLError, action: str) -> NvmlError:
    """Return NVML's error as one of this module's; `action` follows 'Cannot' in its message."""
    kind, cause, remedy = _NAMED.get(
        error.value,
        (
            NvmlError,
            f"NVML says '{error}'",
            "Check the GPU with nvidia-smi and look for an Xid in the kernel log",
        ),
    )
    return kind(f"Cannot {action}: {cause}", remedy=remedy)
