"""Memory that a rank, a stream of its GPU and the GPU's guard share: which clock is wanted when.

A rank that asks its own process for a clock wakes a thread, which takes Python's interpreter lock
from it as often; a rank that stores two words does neither. Each word below is stored by one side
alone. Numbers count from 1 and go on from 0 behind their largest.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os

MASK = 0xFFFFFFFF
#: Requests that may wait for the GPU; a host is a few iterations ahead of it at most.
CAPACITY = 1 << 16
_TEXT_BYTES = 4096
_LINE_BYTES = 64


class _Request(ctypes.Structure):
    #: 0 MHz asks for an answer alone.
    _fields_ = (("frequency_mhz", ctypes.c_uint32), ("delay_us", ctypes.c_uint32))


class _OfStream(ctypes.Structure):
    _fields_ = (("number", ctypes.c_uint32), ("line", ctypes.c_char * (_LINE_BYTES - 4)))


class _OfRank(ctypes.Structure):
    _fields_ = (("asked", ctypes.c_uint32), ("over", ctypes.c_uint32), ("line", ctypes.c_char * 56))


class _OfGuard(ctypes.Structure):
    _fields_ = (
        ("taken", ctypes.c_uint32),
        ("answered", ctypes.c_uint32),
        ("failed", ctypes.c_uint32),
        ("set_mhz", ctypes.c_uint32),
        ("last_change_s", ctypes.c_double),
        ("text", ctypes.c_char * _TEXT_BYTES),
    )


class _Words(ctypes.Structure):
    _fields_ = (
        ("due", _OfStream),
        ("begun", _OfStream),
        ("rank", _OfRank),
        ("guard", _OfGuard),
        ("requests", _Request * CAPACITY),
    )


#: Where a stream counts, in bytes: requests whose unit has ended, and of those that wait a while
#: behind that, requests whose own unit has begun.
DUE, BEGUN = _Words.due.offset, _Words.begun.offset


class ClockPage:
    """The memory, by the descriptor of its file; OSError if it cannot be had.

    Attributes:
        address: where it begins in this process.
        num_bytes: its size.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.num_bytes = -(-ctypes.sizeof(_Words) // mmap.PAGESIZE) * mmap.PAGESIZE
        os.ftruncate(descriptor, self.num_bytes)
        self._memory = mmap.mmap(descriptor, self.num_bytes)
        self._words = _Words.from_buffer(self._memory)
        self.address = ctypes.addressof(self._words)

    @staticmethod
    def create() -> ClockPage:
        """One that a child gets by its descriptor, and nobody else can open."""
        page = ClockPage(os.memfd_create("envpipe-clock"))
        page._words.guard.last_change_s = -math.inf
        return page

    # --- the rank -------------------------------------------------------------------------------

    def ask(self, frequency_mhz: int, delay_s: float = 0.0) -> int | None:
        """Store a request; its number, None if too many wait.

        It is due when DUE counts it, and so long after that, or when BEGUN does. One for 0 MHz is
        answered when all before it are served.
        """
        words, rank = self._words, self._words.rank
        number: int = (rank.asked + 1) & MASK
        if (number - words.guard.taken) & MASK >= CAPACITY:
            return None
        request = words.requests[number % CAPACITY]
        request.frequency_mhz, request.delay_us = frequency_mhz, round(1e6 * delay_s)
        rank.asked = number
        return number

    def end(self) -> None:
        """No clock is wanted any more."""
        self._words.rank.over = 1

    def count(self, where: int, number: int) -> None:
        """Store what a stream would; for GPUs without one."""
        ctypes.c_uint32.from_address(self.address + where).value = number

    # --- the guard ------------------------------------------------------------------------------

    def before_last_due(self) -> int:
        """Number before the one that a stream counted last."""
        return max(int(self._words.due.number) - 1, 0)

    def take(self, number: int) -> tuple[int, float]:
        """The clock in MHz and the delay in s of a request, which makes room."""
        request = self._words.requests[number % CAPACITY]
        self._words.guard.taken = number
        return request.frequency_mhz, request.delay_us / 1e6

    def answer(self, number: int, text: str) -> None:
        """What is served up to a number, in words for the rank."""
        self._say(text)
        self._words.guard.answered = number

    def fail(self, text: str) -> None:
        """No clock is set any more, for this reason."""
        self._say(text)
        self._words.guard.failed = 1

    def change(self, frequency_mhz: int | None, time_s: float) -> None:
        """The clock was set at this instant; the future while a call is under way."""
        self._words.guard.set_mhz = frequency_mhz or 0
        self._words.guard.last_change_s = time_s

    def _say(self, text: str) -> None:
        self._words.guard.text = text.encode()[: _TEXT_BYTES - 1]

    # --- either ---------------------------------------------------------------------------------

    @property
    def asked(self) -> int:
        """Number of the last request."""
        return int(self._words.rank.asked)

    @property
    def is_over(self) -> bool:
        """Whether the rank wants no clock any more, or the guard can set none."""
        return bool(self._words.rank.over or self._words.guard.failed)

    @property
    def set_mhz(self) -> int | None:
        """The clock that was set last, None if there is none."""
        return self._words.guard.set_mhz or None

    @property
    def last_change_s(self) -> float:
        """When it was, on the monotonic clock; in the future while a call is under way."""
        return float(self._words.guard.last_change_s)

    @property
    def text(self) -> str:
        """What the guard said last."""
        return bytes(self._words.guard.text).decode(errors="replace")

    @property
    def has_failed(self) -> bool:
        """Whether the guard sets no clock any more; `text` says why."""
        return bool(self._words.guard.failed)

    def is_answered(self, number: int) -> bool:
        """Whether all is served up to a number."""
        return _reached(self._words.guard.answered, number)

    def counted(self, where: int, number: int) -> bool:
        """Whether a stream has counted to a number."""
        return _reached(ctypes.c_uint32.from_address(self.address + where).value, number)


def _reached(value: int, number: int) -> bool:
    return (value - number) & MASK < 1 << 31
