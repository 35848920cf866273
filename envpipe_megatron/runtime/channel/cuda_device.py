"""One-sided copies on NVIDIA GPUs, by the driver: memory of other processes, and stream words."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from envpipe_megatron.errors import first_line
from envpipe_megatron.gpu.clock.page import ClockPage
from envpipe_megatron.gpu.registry import uid_of_cuda_device, vendor_of
from envpipe_megatron.runtime.channel.carrier import ChannelError
from envpipe_megatron.runtime.channel.flag_page import MASK, FlagPage, Word
from envpipe_megatron.runtime.channel.puts import GRACE_S

try:
    from cuda.bindings import driver
except ImportError:
    driver = None

#: CU_MEMHOSTREGISTER_PORTABLE and _DEVICEMAP: streams may use it.
_REGISTER_FLAGS = 1 | 2
#: CU_STREAM_WAIT_VALUE_GEQ, and a write that comes after all before it.
_WAIT_GEQ = _WRITE_DEFAULT = 0
#: CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, CU_STREAM_NON_BLOCKING.
_PEER_ACCESS = _NON_BLOCKING = 1
#: Smaller memory would lie in a block with other memory, which its handle would share, too.
_WHOLE_BYTES = 2 * 2**20
_STDERR = 2
_ANY_DISTANCE = ("", "SYS", "4", "5")


def obstacle() -> str | None:
    """Return why this GPU takes no part in one-sided copies; None if nothing is against it."""
    disabled, level = (os.environ.get(f"NCCL_P2P_{name}", "") for name in ("DISABLE", "LEVEL"))
    if disabled not in ("", "0"):
        return f"NCCL_P2P_DISABLE={disabled}"
    if level in ("LOC", "0"):
        return f"NCCL_P2P_LEVEL={level}"
    if driver is None:
        return "the package cuda-bindings is missing (pip install 'envpipe-megatron[put]')"
    return None


def uuid() -> str:
    """Name the current device."""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def check_distance(own_uuid: str, other_uuid: str) -> None:
    """Raise EnvPipeError if NCCL_P2P_LEVEL allows no copies between two GPUs, or may not."""
    level = os.environ.get("NCCL_P2P_LEVEL", "")
    if level in _ANY_DISTANCE:
        return
    own, other = (uid_of_cuda_device(uuid) for uuid in (own_uuid, other_uuid))
    if not vendor_of(own).are_near(own, other, level):
        raise ChannelError(f"NCCL_P2P_LEVEL={level}, and these GPUs are further apart")


def register(page: ClockPage | FlagPage) -> int:
    """Let streams use a page's memory, until it is gone; its address for them.

    By ctypes: clocks need no `cuda-bindings`. RuntimeError: the driver refuses, or is too old.
    """
    torch.cuda.current_stream().synchronize()  # the driver needs torch's context
    address, device = ctypes.c_void_p(page.address), ctypes.c_uint64()
    num_bytes, flags = ctypes.c_size_t(page.num_bytes), ctypes.c_uint(_REGISTER_FLAGS)
    _succeeds("cuMemHostRegister_v2", _function("cuMemHostRegister_v2")(address, num_bytes, flags))
    # What is mapped there later is else taken for this memory, in copies to the GPU too.
    weakref.finalize(page, _function("cuMemHostUnregister"), address).atexit = False
    get_pointer = _function("cuMemHostGetDevicePointer_v2")
    status = get_pointer(ctypes.byref(device), address, ctypes.c_uint(0))
    _succeeds("cuMemHostGetDevicePointer_v2", status)
    return device.value


def counter_in_stream(page: ClockPage) -> Callable[[int, int], None]:
    """Register a page; return what has the current stream store a number at an offset in it.

    The number is stored after all that the stream holds. This is called at units, where the host's
    caches are cold: a stream of torch's takes 62 us there, and cuda-bindings 7 more than ctypes.

    RuntimeError, from both: the driver refuses, or is too old.
    """
    address, device = register(page), torch.cuda.current_device()
    write = _function("cuStreamWriteValue32_v2")
    write.argtypes = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint

    def count(offset: int, number: int) -> None:
        status = write(_current_handle(device), address + offset, number, _WRITE_DEFAULT)
        if status != 0:
            _succeeds("cuStreamWriteValue32", status)

    return count


def _current_handle(device: int) -> int:
    """Return the current stream's handle; torch's object for it takes 60 us at a unit."""
    return torch._C._cuda_getCurrentRawStream(device)


def _function(name: str) -> Any:
    """Return a function of the driver, which torch has loaded; RuntimeError: it has none."""
    try:
        return getattr(ctypes.CDLL("libcuda.so.1"), name)
    except (OSError, AttributeError) as error:
        raise RuntimeError(f"no {name}: {error}") from error


def _succeeds(name: str, status: int) -> None:
    if status != 0:
        raise RuntimeError(f"{name}: error {status} of CUDA")


class CudaDevice:
    """The current device. RuntimeError, from each method: the driver or torch refuses.

    Args:
        exchange: gives a value to the other side of a boundary, and returns what that gives; takes
            the boundary, this side and the value.
    """

    def __init__(self, exchange: Callable[[int, int, Any], Any]) -> None:
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._exchange = exchange
        #: For each boundary the addresses of this side's memory and the other's.
        self._shared: dict[int, tuple[int, int]] = {}
        #: The most that torch was seen to have taken; who watches its memory resets its own count.
        self._peak_bytes = 0
        self._units: CudaStream | None = None
        # One for all: a stream waits for what it stood for when the wait was enqueued.
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's

    def open(self, page: FlagPage) -> None:
        """Let streams use the page's words: register its memory with the driver."""
        page.device_address = register(page)

    def share(self, boundary: int, side: int, num_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return memory for the other side to put messages into, and the other side's for this one.

        Both sides of a boundary call it together, with one size. It takes the place of what they
        shared before; 0 gives that back. MemoryError: one of them cannot, and both keep what they
        have; RuntimeError: the other side is gone.

        Not torch's symmetric memory: it counts what a process has ever shared, so that two can
        only meet that have shared as much with others (seen in torch 2.13).
        """
        own = theirs = 0
        error, handle = "", b""
        try:
            if num_bytes:
                own = self._allocated(-(-num_bytes // _WHOLE_BYTES) * _WHOLE_BYTES)
                handle = bytes(_call(driver.cuIpcGetMemHandle, own).reserved)
        except RuntimeError as refused:
            error = first_line(refused)
        handle, their_error = self._exchange(boundary, side, (handle, error))
        if num_bytes and not (error or their_error):
            try:
                opened = driver.CUipcMemHandle()
                opened.reserved = handle
                theirs = int(_call(driver.cuIpcOpenMemHandle, opened, _PEER_ACCESS))
            except RuntimeError as refused:
                error = first_line(refused)
        their_error = self._exchange(boundary, side, error) or their_error
        failed = error or (their_error and f"on the other side: {their_error}")
        gone = (own, theirs) if failed else self._shared.pop(boundary, (0, 0))
        if gone[1]:
            torch.cuda.synchronize()
            _call(driver.cuIpcCloseMemHandle, gone[1])
        self._exchange(boundary, side, None)  # the other side has closed it, too
        if gone[0]:
            _call(driver.cuMemFree, gone[0])
        if failed:
            raise MemoryError(failed)
        self._shared[boundary] = own, theirs
        return _bytes_at(own, num_bytes), _bytes_at(theirs, num_bytes)

    def _allocated(self, num_bytes: int) -> int:
        """Allocate memory that torch does not need at its peak; RuntimeError: there is none.

        torch keeps what it has freed until it is asked to give it back.
        """
        self._peak_bytes = max(self._peak_bytes, torch.cuda.max_memory_allocated())
        free, _ = torch.cuda.mem_get_info()
        spare = free + torch.cuda.memory_reserved() - self._peak_bytes
        if num_bytes > spare:
            left = max(0, spare)
            raise RuntimeError(f"{left} bytes are left beside the most that torch has taken")
        try:
            return int(_call(driver.cuMemAlloc, num_bytes))
        except RuntimeError:
            torch.cuda.empty_cache()
            return int(_call(driver.cuMemAlloc, num_bytes))

    def units(self) -> CudaStream:
        """Return the stream that units run on: the current one, which mostly stays the same."""
        if self._units is None or self._units.handle != _current_handle(self._device.index):
            self._units = CudaStream(torch.cuda.current_stream(), self._event)
        return self._units

    def new_stream(self) -> CudaStream:
        """Make a stream of our own, which does not wait for the default one.

        torch's own are a few that all share: what stood behind a wait would be somebody's.
        """
        made = int(_call(driver.cuStreamCreate, _NON_BLOCKING))
        stream = torch.cuda.ExternalStream(made, self._device)  # type: ignore[no-untyped-call]
        own = CudaStream(stream, self._event)
        weakref.finalize(own, driver.cuStreamDestroy, made).atexit = False
        return own

    def bind_thread(self) -> None:
        """Let another thread wait for this device; a new one would open a context on device 0."""
        torch.cuda.set_device(self._device)

    def abandon(self) -> None:
        """End this process in a while, if it has not ended by itself, without waiting for a stream.

        So pages stay registered, and what C++ does when Python has ended is left out. All else that
        waits for the device, such as code inside of a unit, is ended with all threads' stacks on
        stderr.
        """
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))
        library = ctypes.CDLL(None)
        library.on_exit(library._exit, None)
        self.expect_again(GRACE_S)

    def expect_again(self, within_s: float | None) -> None:
        """End the process, with all stacks, unless called again in time; None: no longer.

        By a thread of C, which does not need Python's lock.
        """
        _END.set(within_s)


class _End:
    """The time after which this process ends, by faulthandler's thread.

    A child by os.fork would wait for that thread as it ends, and has none: so there is none while a
    process forks.
    """

    def __init__(self) -> None:
        self._changes = threading.RLock()
        self._within_s: float | None = None
        os.register_at_fork(
            before=self._before_fork, after_in_parent=self._in_parent, after_in_child=self._in_child
        )

    def set(self, within_s: float | None) -> None:
        with self._changes:
            self._within_s = within_s
            if within_s is None:
                faulthandler.cancel_dump_traceback_later()
            else:
                faulthandler.dump_traceback_later(within_s, exit=True, file=_STDERR)

    def _before_fork(self) -> None:
        self._changes.acquire()
        if self._within_s is not None:
            faulthandler.cancel_dump_traceback_later()

    def _in_parent(self) -> None:
        if self._within_s is not None:
            self.set(self._within_s)
        self._changes.release()

    def _in_child(self) -> None:
        self._within_s = None
        self._changes.release()


_END = _End()


class CudaStream:
    """A stream of torch's, a queue of work on the device."""

    def __init__(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        self.handle: int = stream.cuda_stream
        self._stream = stream
        self._event = event

    def wait(self, word: Word, value: int) -> None:
        """Hold up what follows until the word has counted to a value.

        By the GPU's front end, which takes no SM and sees a host's store too.
        """
        self._at(driver.cuStreamWaitValue32, word, value, _WAIT_GEQ)

    def write(self, word: Word, value: int) -> None:
        """Set the word after all before it: by the front end, after a fence over the system."""
        self._at(driver.cuStreamWriteValue32, word, value, _WRITE_DEFAULT)

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        """Copy bytes, by the copy engine where the memory is another GPU's."""
        _call(driver.cuMemcpyAsync, into.data_ptr(), source.data_ptr(), source.nbytes, self.handle)

    def after(self, other: CudaStream) -> None:
        """Hold up what follows until the other stream has done what it holds now."""
        self._event.record(other._stream)
        self._stream.wait_event(self._event)

    def _at(self, function: Any, word: Word, value: int, flags: int) -> None:
        address = word.page.device_address + word.offset
        _call(function, self.handle, address, value & MASK, flags)


def _bytes_at(address: int, num_bytes: int) -> torch.Tensor:
    """Return the driver's memory as a tensor, which does not free it."""
    if not num_bytes:
        return torch.empty(0, dtype=torch.uint8)
    at = {"shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "version": 2}
    tensor: torch.Tensor = torch.as_tensor(SimpleNamespace(__cuda_array_interface__=at))
    return tensor


def _call(function: Any, *arguments: Any) -> Any:
    """Call the driver; RuntimeError: it refuses."""
    status, *result = function(*arguments)
    if int(status) != 0:
        raise RuntimeError(f"{function.__name__}: {status.name}")
    return result[0] if result else None
