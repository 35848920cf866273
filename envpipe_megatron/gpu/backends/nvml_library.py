"""NVML in this process: initialised once, again after a fork, and whole calls on a GPU.

Calls may come from any thread. ctypes gives up Python's interpreter lock while NVML works.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pynvml

from envpipe_megatron.gpu.backends.nvml_errors import GpuNotFoundError, named_error


class _Library:
    """NVML's initialisation in this process: a new object each time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._initialisation: object | None = None

    def after_fork(self) -> None:
        # Another thread of the parent may have held the lock: it would never be released here.
        self._lock = threading.Lock()
        self.forget()

    def initialise(self) -> object:
        """Make NVML ready in this process, and return its initialisation."""
        with self._lock:
            if self._initialisation is None:
                pynvml.nvmlInit()
                self._initialisation = object()
            return self._initialisation

    def forget(self) -> None:
        """Initialise again at the next call. Once too often does no harm."""
        self._initialisation = None


_LIBRARY = _Library()
os.register_at_fork(after_in_child=_LIBRARY.after_fork)


def call_library(action: str, function: Callable[..., Any], *arguments: object) -> Any:
    """Call a function of pynvml that takes no GPU.

    Args:
        action: what it is for, to follow 'Cannot' in an error.
        function: the function.
        arguments: its arguments.

    Raises:
        NvmlError: it failed, or NVML cannot be initialised.
    """
    return _call(action, lambda _: function(*arguments))


def _call(action: str, work: Callable[[object], Any]) -> Any:
    """Do work on an initialised NVML, giving it the initialisation."""
    try:
        try:
            return work(_LIBRARY.initialise())
        except pynvml.NVMLError_Uninitialized:
            # Something else in this process (a monitor of the framework) shut NVML down.
            _LIBRARY.forget()
            return work(_LIBRARY.initialise())
    except pynvml.NVMLError as error:
        raise named_error(error, action) from error


class NvmlHandle:
    """A GPU as NVML knows it, found again after every initialisation.

    Args:
        uid: the GPU's UUID (`GPU-...`) or PCI bus id (`0000:1b:00.0`). Never an index: NVML's and
            CUDA's differ.
    """

    def __init__(self, uid: str) -> None:
        self._uid = uid
        self._found: tuple[object, Any] = (None, None)

    def call(self, action: str, function: Callable[..., Any], *arguments: object) -> Any:
        """Call a function of pynvml whose first argument is a GPU.

        Args:
            action: what it is for, to follow 'Cannot' in an error, for example `read the power`.
            function: the function.
            arguments: those after the GPU.

        Raises:
            GpuNotFoundError: NVML sees no such GPU.
            NvmlError: it failed, or NVML cannot be initialised.
        """

        def work(initialisation: object) -> Any:
            found_in, device = self._found
            if found_in is not initialisation:
                device = self._find()
                self._found = (initialisation, device)
            return function(device, *arguments)

        return _call(f"{action} of {self._uid}", work)

    def _find(self) -> Any:
        try:
            if self._uid.startswith("GPU-"):
                return pynvml.nvmlDeviceGetHandleByUUID(self._uid)
            return pynvml.nvmlDeviceGetHandleByPciBusId(self._uid)
        except (pynvml.NVMLError_NotFound, pynvml.NVMLError_InvalidArgument) as error:
            raise GpuNotFoundError(
                "NVML sees no GPU with this UUID or PCI bus id",
                value=self._uid,
                remedy="List those of this node with nvidia-smi -L; a container may hide GPUs",
            ) from error
