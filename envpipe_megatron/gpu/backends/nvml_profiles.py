"""Workload power profiles of a GPU by name: Blackwell has them, and Hopper with some drivers.

Each is a set of clocks, limits and link states that NVIDIA tuned for a kind of work; an operator
requests some of them, and the driver arbitrates. `NvmlGpu` reads them here; nothing changes them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pynvml

from envpipe_megatron.gpu.backends.nvml_errors import NvmlNotSupportedError, NvmlPermissionError

PROFILES = (
    *("max-P", "max-Q", "compute", "memory bound", "network", "balanced", "LLM inference"),
    *("LLM training", "RBM", "DCPCIE", "HMMA sparse", "HMMA dense", "sync balanced", "HPC", "MIG"),
    *("max-Q 1", "network bound", "high-throughput inference", "medium-throughput inference"),
    *("low-latency inference", "training", "inference", "max-Q 2", "max-Q 3"),
    "low-priority background",
)
"""NVML's numbers (NVML_POWER_PROFILE_...) in words; one that is not here is shown as its number."""


class WorkloadProfiles:
    """Reads one GPU's profiles; a GPU or driver that once had none is not asked again.

    `call` is as `NvmlGpu` calls a function of pynvml.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call
        # nvidia-ml-py has them since 12.570.
        self._offered = all(
            hasattr(pynvml, name)
            for name in (
                "nvmlDeviceWorkloadPowerProfileGetCurrentProfiles",
                "c_nvmlWorkloadPowerProfileCurrentProfiles_v1_t",
            )
        )

    def read(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the requested and the enforced ones; NvmlError if what is offered fails."""
        if not self._offered:
            return (), ()
        current = pynvml.c_nvmlWorkloadPowerProfileCurrentProfiles_v1_t()
        try:
            self._call(
                "read the power profiles",
                pynvml.nvmlDeviceWorkloadPowerProfileGetCurrentProfiles,
                ctypes.byref(current),  # nvidia-ml-py hands on what it is given
            )
        except (NvmlNotSupportedError, NvmlPermissionError):
            self._offered = False
            return (), ()
        return _names(current.requestedProfilesMask), _names(current.enforcedProfilesMask)


def _names(mask: Any) -> tuple[str, ...]:
    bits = sum(word << 32 * place for place, word in enumerate(mask.mask))
    numbers = (number for number in range(bits.bit_length()) if bits >> number & 1)
    return tuple(PROFILES[n] if n < len(PROFILES) else f"profile {n}" for n in numbers)
