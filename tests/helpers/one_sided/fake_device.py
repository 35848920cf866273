"""GPUs for one-sided copies, of ranks that take turns: streams do their work in any order allowed.

As on a GPU, work reads and writes memory when it is run, and memory that a host has let go is used
again at once: who frees what a stream still needs sends garbage.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from taking_turns import Turns, always

from envpipe_megatron.runtime.channel.carrier import TensorSpec
from envpipe_megatron.runtime.channel.flag_page import FlagPage, Word
from envpipe_megatron.runtime.channel.puts import GRACE_S

_CPU = torch.device("cpu")


class FakeDevice:
    """A rank's GPU.

    Args:
        turns: of all ranks.
        rank: whose device it is.
        one_queue: whether all streams share one hardware queue, which stops where its first waits.
    """

    def __init__(self, turns: Turns, rank: int, *, one_queue: bool = False) -> None:
        self.turns = turns
        self.rank = rank
        #: Its ranks share memory at boundaries of the same numbers as those of another.
        self.pipeline = 0
        self.abandoned = False
        #: The driver's memory, and what of it is shared at each boundary.
        self.free_bytes, self.held_bytes = math.inf, dict[int, int]()
        #: Whether hosts wait for all that they enqueue, as for values that they look at.
        self.blocks = False
        #: Words that streams of this device have written.
        self.written: list[Word] = []
        self._one = _Queue(self) if one_queue else None
        self._queues: list[_Queue] = []
        self._pages: set[FlagPage] = set()
        self._memory: dict[int, Any] = {}
        self._free: dict[int, list[Any]] = defaultdict(list)
        self._units = self.new_stream()

    def open(self, page: FlagPage) -> None:
        """As `Device`'s."""
        self._pages.add(page)

    def share(self, boundary: int, side: int, num_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        """As `Device`'s; what both had before is of no use to anybody."""
        shared = self.turns.shared.setdefault((self.pipeline, boundary), ([], []))
        has_room = num_bytes <= self.free_bytes
        own = torch.full((num_bytes,), 0xEE, dtype=torch.uint8) if has_room else None
        shared[side].append(own)
        number, late_s = len(shared[side]), self.turns.now_s + self.turns.patience_s / 2
        self.turns.pause(lambda: len(shared[1 - side]) >= number or self.turns.now_s > late_s)
        if len(shared[1 - side]) < number:
            raise RuntimeError("the other side has not come")
        theirs = shared[1 - side][number - 1]
        if own is None or theirs is None:
            raise MemoryError("of a test")
        for before in shared[side][: number - 1]:
            if before is not None:
                before.fill_(0xEE)
        self.free_bytes += self.held_bytes.get(boundary, 0) - num_bytes
        self.held_bytes[boundary] = num_bytes
        assert len(theirs) == num_bytes
        return own, theirs

    def units(self) -> FakeStream:
        """As `Device`'s."""
        self.turns.pause()
        return self._units

    def new_stream(self) -> FakeStream:
        """As `Device`'s."""
        queue = self._one or _Queue(self)
        if queue not in self._queues:
            self._queues.append(queue)
            self.turns.actors.append(queue)
        return FakeStream(self, queue)

    def bind_thread(self) -> None:
        """As `Device`'s."""

    def abandon(self) -> None:
        """As `Device`'s."""
        self.abandoned = True
        self.turns.ends_at[self.rank] = self.turns.now_s + GRACE_S

    def expect_again(self, within_s: float | None) -> None:
        """As `Device`'s; here no thread looks by itself."""

    def idle(self) -> bool:
        """Return True if all has been done."""
        return not any(queue.work for queue in self._queues)

    def units_done(self) -> bool:
        """Return True if all units that were enqueued have been run."""
        return self._units.done == self._units.enqueued

    def synchronize(self) -> None:
        """The host waits for all streams."""
        self.turns.pause(self.idle)

    def make(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor, in memory that was let go last."""
        size = math.prod(shape) * dtype.itemsize
        if not size:
            return torch.empty(shape, dtype=dtype)
        whole = self._free[size].pop() if self._free[size] else np.full(size, 0xEE, np.uint8)
        handed_out = whole[:]  # lives as long as torch's storage of it
        self._memory[whole.ctypes.data] = whole
        weakref.finalize(handed_out, self._free[size].append, whole).atexit = False
        return torch.from_numpy(handed_out).view(dtype).reshape(shape)

    def seen(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory, which this does not keep from being let go."""
        whole = self._memory.get(tensor.untyped_storage().data_ptr())
        if whole is None:
            return tensor
        first = tensor.storage_offset() * tensor.dtype.itemsize
        part = torch.from_numpy(whole)[first : first + tensor.nbytes]
        return part.view(tensor.dtype).reshape(tensor.shape)


class FakeStream:
    """A stream of a device."""

    def __init__(self, device: FakeDevice, queue: _Queue) -> None:
        self._device = device
        self._queue = queue
        self.enqueued = self.done = 0

    def run(self, do: Callable[[], None], when: Callable[[], bool] = always) -> None:
        """Enqueue some work."""
        self._device.turns.pause()
        self.enqueued += 1
        self._queue.work.append(_Work(self, do, when))
        if self._device.blocks:
            self._device.synchronize()

    def wait(self, word: Word, value: int) -> None:
        """As `Stream`'s."""
        assert word.page in self._device._pages
        self.run(lambda: None, lambda: word.has(value))

    def write(self, word: Word, value: int) -> None:
        """As `Stream`'s."""

        def write() -> None:
            word.set(value)
            self._device.written.append(word)

        self.run(write)

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        """As `Stream`'s."""
        seen = self._device.seen(into), self._device.seen(source)
        assert seen[0].nbytes == seen[1].nbytes > 0
        self.run(lambda: ctypes.memmove(seen[0].data_ptr(), seen[1].data_ptr(), seen[0].nbytes))

    def after(self, other: Any) -> None:
        """As `Stream`'s."""
        enqueued = other.enqueued
        self.run(lambda: None, lambda: other.done >= enqueued)


@dataclass(frozen=True)
class _Work:
    stream: FakeStream
    do: Callable[[], None]
    when: Callable[[], bool]


class _Queue:
    """A hardware queue: its first comes first."""

    def __init__(self, device: FakeDevice) -> None:
        self.work: deque[_Work] = deque()
        self._device = device

    def ready(self) -> bool:
        runs = self._device.rank not in self._device.turns.dead
        return bool(self.work) and runs and self.work[0].when()

    def step(self) -> None:
        work = self.work.popleft()
        work.do()
        work.stream.done += 1


@dataclass(frozen=True)
class DeviceSpec(TensorSpec):
    """The contents of a message; its tensors lie in the memory of the rank whose turn it is."""

    devices: tuple[FakeDevice, ...] = ()

    @classmethod
    def on(cls, devices: tuple[FakeDevice, ...], *tensors: torch.Tensor) -> DeviceSpec:
        """Of messages like these tensors."""
        like = TensorSpec.of(tensors)
        return cls(like.shapes, like.dtypes, _CPU, devices)

    def make(self, how: Any = None) -> list[torch.Tensor]:
        """As `TensorSpec`'s."""
        device = self.devices[self.devices[0].turns.rank]
        parts = zip(self.shapes, self.dtypes, strict=True)
        return [device.make(shape, dtype) for shape, dtype in parts]
