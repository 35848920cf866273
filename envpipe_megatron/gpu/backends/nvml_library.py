"""NVML in this process: initialised once, again after a fork or a shutdown by other code.

`call_library` calls a function of pynvml, `call_gpu` one that takes a GPU; both from any thread.
ctypes releases Python's interpreter lock while NVML works.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pynvml

from envpipe_megatron.gpu.backends.nvml_errors import GpuNotFoundError, named_error


class _Library:
    """Initialises NVML, and keeps the handles of GPUs, by uid, that this initialisation gave."""

    def __init__(self) -> None:
        self.start_anew()

    def start_anew(self) -> None:
        """As in a new process. In a forked one, a thread of the parent may hold the old lock."""
        self._lock = threading.Lock()
        self._handles: dict[str, Any] | None = None

    def initialised(self) -> dict[str, Any]:
        """Initialise NVML if that is due; return the handles."""
        with self._lock:
            if self._handles is None:
                pynvml.nvmlInit()
                self._handles = {}
            return self._handles

    def forget(self, handles: dict[str, Any]) -> None:
        """Initialise again at the next call, unless that was done since these handles."""
        with self._lock:
            if self._handles is handles:
                self._handles = None


_LIBRARY = _Library()
os.register_at_fork(after_in_child=_LIBRARY.start_anew)


def call_library(action: str, function: Callable[..., Any], *arguments: object) -> Any:
    """Call a function of pynvml that takes no GPU; `action` follows 'Cannot' in an error.

    Raises NvmlError if it failed, or NVML cannot be initialised.
    """
    return _call(action, lambda handles: function(*arguments))


def call_gpu(uid: str, action: str, function: Callable[..., Any], *arguments: object) -> Any:
    """Call a function of pynvml whose first argument is a GPU; `action` as in `call_library`.

    The uid is its UUID (`GPU-...`) or PCI bus id, never an index: NVML's and CUDA's differ. Raises
    GpuNotFoundError if NVML sees no such GPU, NvmlError as `call_library` does.
    """

    def work(handles: dict[str, Any]) -> Any:
        if uid not in handles:
            handles[uid] = _find(uid)
        return function(handles[uid], *arguments)

    return _call(f"{action} of {uid}", work)


def _call(action: str, work: Callable[[dict[str, Any]], Any]) -> Any:
    try:
        handles = _LIBRARY.initialised()
        try:
            return work(handles)
        except pynvml.NVMLError_Uninitialized:
            # Other code in this process (a monitor of the framework) shut NVML down.
            _LIBRARY.forget(handles)
            return work(_LIBRARY.initialised())
    except pynvml.NVMLError as error:
        raise named_error(error, action) from error


def _find(uid: str) -> Any:
    try:
        if uid.startswith("GPU-"):
            return pynvml.nvmlDeviceGetHandleByUUID(uid)
        return pynvml.nvmlDeviceGetHandleByPciBusId(uid)
    except (pynvml.NVMLError_NotFound, pynvml.NVMLError_InvalidArgument) as error:
        raise GpuNotFoundError(
            "NVML sees no GPU with this UUID or PCI bus id",
            value=uid,
            remedy="List those of this node with nvidia-smi -L; a container may hide GPUs",
        ) from error
