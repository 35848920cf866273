"""One-sided copies on NVIDIA GPUs: torch's symmetric memory, and the driver's stream memory."""

from __future__ import annotations

import ctypes
import faulthandler
import weakref
from typing import Any

import torch
from torch._C._distributed_c10d import ProcessGroup, _register_process_group, _SymmetricMemory
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from envpipe_megatron.runtime.channel.flag_page import FlagPage, Word
from envpipe_megatron.runtime.channel.puts import Stream

try:
    from cuda.bindings import driver
except ImportError:
    driver = None

#: CU_MEMHOSTREGISTER_PORTABLE and _DEVICEMAP: streams may use it.
_REGISTER_FLAGS = 1 | 2
#: CU_STREAM_WAIT_VALUE_GEQ, and a write that comes after all before it.
_WAIT_GEQ = _WRITE_DEFAULT = 0
#: For a process that has lost a neighbour to end by itself.
_GRACE_S = 15.0
_STDERR = 2


def obstacle() -> str | None:
    """Why this rank's GPU cannot take part in one-sided copies; None if nothing speaks against."""
    if driver is None:
        return "the package cuda-bindings is missing (pip install 'envpipe-megatron[put]')"
    return None


class CudaDevice:
    """The current device. RuntimeError, from each method: the driver or torch refuses."""

    def __init__(self) -> None:
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._groups: dict[str, ProcessGroup] = {}
        self._shared: dict[str, tuple[Any, ...]] = {}
        self._pages: dict[FlagPage, int] = {}
        # One for all: a stream waits for what it stood for when the wait was enqueued.
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's

    def open(self, page: FlagPage) -> None:
        """Register the page's memory with the driver."""
        torch.cuda.current_stream().synchronize()  # the driver needs torch's context
        _call(driver.cuMemHostRegister, page.address, page.num_bytes, _REGISTER_FLAGS)
        # What is mapped there later is else taken for this memory, in copies to the GPU too.
        weakref.finalize(page, driver.cuMemHostUnregister, page.address).atexit = False
        self._pages[page] = int(_call(driver.cuMemHostGetDevicePointer, page.address, 0))

    def share(self, name: str, side: int, num_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory of both sides, by torch's symmetric memory."""
        if name not in self._groups:
            # Not by new_group, in which every rank of the job would have to take part.
            store = PrefixStore(f"envpipe/{name}", _get_default_store())
            group = self._groups[name] = ProcessGroup(store, side, 2)
            # Newer stubs have a type of their own for names.
            group._set_group_name(name)  # type: ignore[arg-type]
            _register_process_group(name, group)  # type: ignore[arg-type]
        own = _SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, self._device)
        handle = _SymmetricMemory.rendezvous(own, name)
        theirs = handle.get_buffer(1 - side, (num_bytes,), torch.uint8)
        self._shared[name] = own, handle, theirs
        return own, theirs

    def units(self) -> Stream:
        """The current stream, which may be another at each call."""
        return CudaStream(torch.cuda.current_stream(), self._pages, self._event)

    def new_stream(self) -> Stream:
        """One that does not wait for the default stream."""
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]  # torch's
        return CudaStream(stream, self._pages, self._event)

    def bind_thread(self) -> None:
        """A new thread is on device 0, and would open a context there."""
        torch.cuda.set_device(self._device)

    def abandon(self) -> None:
        """End this process in a while, if it has not ended by itself, without waiting for a stream.

        torch frees shared memory when the device has done all its work: so Python never frees it,
        and what C++ does when Python has ended is left out. Whatever else waits for the device,
        such as code inside of a unit, is ended with all threads' stacks on stderr.
        """
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))
        library = ctypes.CDLL(None)
        library.on_exit(library._exit, None)
        faulthandler.dump_traceback_later(_GRACE_S, exit=True, file=_STDERR)


class CudaStream:
    """A stream of torch's."""

    def __init__(
        self, stream: torch.cuda.Stream, pages: dict[FlagPage, int], event: torch.cuda.Event
    ) -> None:
        self._stream = stream
        self._pages = pages
        self._event = event

    def wait(self, word: Word, value: int) -> None:
        """By the GPU's front end, which takes no SM and sees a host's store too."""
        at = self._pages[word.page] + word.offset
        value &= 0xFFFFFFFF
        _call(driver.cuStreamWaitValue32, self._stream.cuda_stream, at, value, _WAIT_GEQ)

    def write(self, word: Word, value: int) -> None:
        """By the GPU's front end, after a fence over the whole system."""
        at = self._pages[word.page] + word.offset
        value &= 0xFFFFFFFF
        _call(driver.cuStreamWriteValue32, self._stream.cuda_stream, at, value, _WRITE_DEFAULT)

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        """By the copy engine where the memory is another GPU's."""
        at = self._stream.cuda_stream
        _call(driver.cuMemcpyAsync, into.data_ptr(), source.data_ptr(), source.nbytes, at)

    def after(self, other: Stream) -> None:
        """By an event."""
        assert isinstance(other, CudaStream)
        self._event.record(other._stream)
        self._stream.wait_event(self._event)


def _call(function: Any, *arguments: Any) -> Any:
    """Call the driver; RuntimeError: it refuses."""
    status, *result = function(*arguments)
    if int(status) != 0:
        raise RuntimeError(f"{function.__name__}: {status.name}")
    return result[0] if result else None
