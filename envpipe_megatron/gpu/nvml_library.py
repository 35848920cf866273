"""NVML in this process: initialised once, again after a fork, and whole calls on a GPU.

Calls may come from any thread. ctypes gives up Python's interpreter lock while NVML works.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pynvml

from envpipe_megatron.gpu.nvml_errors import GpuNotFoundError, named_error


class _Library:
    """Whether NVML is initialised, as a number that grows with every initialisation; 0 if not."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.generation = 0
        self._initialisations = 0

    def initialise(self) -> int:
        """Make NVML ready in this process, and return the number of its initialisation."""
        if self.generation:
            return self.generation
        with self.lock:
            if not self.generation:
                pynvml.nvmlInit()
                self._initialisations += 1
                self.generation = self._initialisations
            return self.generation

    def after_fork(self) -> None:
        # Another thread of the parent may have held the lock: it would never be released here.
        self.lock = threading.Lock()
        self.generation = 0

    def forget(self, generation: int) -> None:
        """Initialise again at the next call, unless another thread has done so since."""
        with self.lock:
            if self.generation == generation:
                self.generation = 0


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


def _call(action: str, work: Callable[[int], Any]) -> Any:
    """Do work on an initialised NVML, giving it the number of the initialisation."""
    try:
        generation = _LIBRARY.initialise()
        try:
            return work(generation)
        except pynvml.NVMLError_Uninitialized:
            # Something else in this process (a monitor of the framework) shut NVML down.
            _LIBRARY.forget(generation)
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
        self._found: tuple[int, Any] = (0, None)

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

        def work(generation: int) -> Any:
            found_in, device = self._found
            if found_in != generation:
                device = self._find()
                self._found = (generation, device)
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
