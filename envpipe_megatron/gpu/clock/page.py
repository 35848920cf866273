"""Memory that a rank, a stream of its GPU and the GPU's guard share: which clock is wanted when.

A rank that asks its own process for a clock wakes a thread, which takes Python's interpreter lock
from it as often; a rank that stores a word, and has the stream store another, does neither. Each
word below is stored by one side only, as long as both live: that a guard was lost, its rank stores.
Numbers begin at 1, and do so again after their largest; 0 is none. A `controller.PageController`
serves the requests.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os

from envpipe_megatron.child import open_memory

MASK = 0xFFFFFFFF
#: Requests that may wait for the GPU; a host is a few iterations ahead of it at most.
CAPACITY = 1 << 16
_TEXT_BYTES = 4096
_NO_FILE = -1
_LINE_BYTES = 64
#: A request is one word, so that nobody sees half of it: 16 bits of which round of the page it is,
#: 16 of the clock in MHz (0 asks for an answer only), 32 of the delay in us.
_ROUND, _CLOCK, _MOST_DELAY_US = 48, 32, MASK
#: In place of a clock: it is to be given back to the driver.
GIVEN_BACK = 0xFFFF


class _OfStream(ctypes.Structure):
    _fields_ = (("number", ctypes.c_uint32), ("line", ctypes.c_char * (_LINE_BYTES - 4)))


class _OfRank(ctypes.Structure):
    """Words of the rank: `over` if it wants no clock any more, `beats` to show that it lives."""

    _fields_ = (
        ("min_dwell_s", ctypes.c_double),
        ("over", ctypes.c_uint32),
        ("beats", ctypes.c_uint32),
        ("line", ctypes.c_char * (_LINE_BYTES - 16)),
    )


class _OfGuard(ctypes.Structure):
    """Words of the guard.

    Requests up to `taken` have freed their places, those up to `answered` are served. `set_mhz` is
    the clock that was set last, 0 if it was given back or reset. The last call that set one began
    at `called_s`, on the monotonic clock, and returned at `returned_s`. `beats` show that it lives.
    """

    _fields_ = (
        ("taken", ctypes.c_uint32),
        ("answered", ctypes.c_uint32),
        ("failed", ctypes.c_uint32),
        ("set_mhz", ctypes.c_uint32),
        ("beats", ctypes.c_uint32),
        ("called_s", ctypes.c_double),
        ("returned_s", ctypes.c_double),
        ("summary", ctypes.c_char * _TEXT_BYTES),
        ("failure", ctypes.c_char * _TEXT_BYTES),
    )


class _Words(ctypes.Structure):
    _fields_ = (
        ("due", _OfStream),
        ("begun", _OfStream),
        ("rank", _OfRank),
        ("guard", _OfGuard),
        ("requests", ctypes.c_uint64 * CAPACITY),
    )


_NUM_BYTES = -(-ctypes.sizeof(_Words) // mmap.PAGESIZE) * mmap.PAGESIZE
#: Where a stream counts, in bytes: requests whose unit has ended, and of those that wait a while
#: after that, requests whose own unit has begun.
DUE, BEGUN = _Words.due.offset, _Words.begun.offset


class ClockPage:
    """The memory, by the descriptor of its file; OSError if it cannot be had.

    Attributes:
        address: where it begins in this process.
        num_bytes: its size.
        rank, guard: the words that the rank, or the guard, stores.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._asked = 0
        self.num_bytes = _NUM_BYTES
        self._memory = mmap.mmap(descriptor, self.num_bytes)
        self._words = _Words.from_buffer(self._memory)
        self.rank, self.guard = self._words.rank, self._words.guard
        self._requests = self._words.requests
        self.address = ctypes.addressof(self._words)

    @staticmethod
    def create(min_dwell_s: float = 0.0, *, shared: bool = True) -> ClockPage:
        """Make one without a name, which a child gets by its descriptor; `close_file` is to follow.

        Args:
            min_dwell_s: least time between two changes, on the GPU's time base; a request that
                comes earlier is applied when the time is over, unless a later one replaces it.
            shared: without, it is of this process only, and has no file.
        """
        descriptor = open_memory() if shared else _NO_FILE
        try:
            if shared:  # all of it now: a store into a full file system would end this process
                os.posix_fallocate(descriptor, 0, _NUM_BYTES)
            page = ClockPage(descriptor)
        except BaseException:
            if shared:
                os.close(descriptor)
            raise
        page.rank.min_dwell_s = min_dwell_s
        page.guard.called_s = page.guard.returned_s = -math.inf
        return page

    def close_file(self) -> None:
        """Close the descriptor, once the child has it; the memory stays, by one of mmap's own."""
        if self.descriptor != _NO_FILE:
            os.close(self.descriptor)

    # --- the rank -------------------------------------------------------------------------------

    def ask(self, frequency_mhz: int, delay_s: float = 0.0) -> int | None:
        """Store a request; its number, None if too many wait.

        It is due when DUE counts it, and so long after that, or when BEGUN does. One for 0 MHz is
        answered when all before it are served. `following` and `_round` are written out here: at
        units the host's caches are cold, and a call of Python's takes microseconds.
        """
        number = self._asked % MASK + 1
        if (number - self.guard.taken) & MASK >= CAPACITY:
            return None
        word = (number // CAPACITY + 1 & 0xFFFF) << _ROUND | frequency_mhz << _CLOCK
        if delay_s > 0:
            word |= round(min(1e6 * delay_s, _MOST_DELAY_US))
        self._requests[number % CAPACITY] = word
        self._asked = number
        return number

    def end(self) -> None:
        """Say that no clock is wanted any more."""
        self.rank.over = 1

    def count(self, where: int, number: int) -> None:
        """Store what a stream would; for GPUs without one."""
        ctypes.c_uint32.from_address(self.address + where).value = number

    # --- the guard ------------------------------------------------------------------------------

    def before_last_due(self) -> int:
        """Return the number before the one that a stream counted last."""
        return max(int(self._words.due.number) - 1, 0)

    def request(self, number: int) -> tuple[int, float] | None:
        """Return the clock in MHz and the delay in s of a request; None if it is not there yet."""
        word = self._requests[number % CAPACITY]
        if word >> _ROUND != _round(number):
            return None
        return word >> _CLOCK & 0xFFFF, (word & _MOST_DELAY_US) / 1e6

    def fail(self, why: str) -> None:
        """Say why no clock is set any more."""
        self.guard.failure = why.encode(errors="replace")[: _TEXT_BYTES - 1]
        self.guard.failed = 1

    # --- either ---------------------------------------------------------------------------------

    @property
    def min_dwell_s(self) -> float:
        """Least time between two changes of the clock."""
        return float(self.rank.min_dwell_s)

    @property
    def is_over(self) -> bool:
        """True if the rank wants no clock any more, or the guard can set none."""
        return bool(self.rank.over or self.guard.failed)

    @property
    def set_mhz(self) -> int | None:
        """The clock that was set last, None if there is none."""
        return self.guard.set_mhz or None

    @property
    def last_call_s(self) -> tuple[float, float]:
        """Begin and end of the last call that set it, on the monotonic clock."""
        return float(self.guard.called_s), float(self.guard.returned_s)

    @property
    def last_change_s(self) -> float:
        """End of that call; inf while it is under way."""
        called_s, returned_s = self.last_call_s
        return math.inf if called_s > returned_s else returned_s

    @property
    def summary(self) -> str:
        """The guard's last summary; half of it while the guard writes it."""
        return bytes(self.guard.summary).decode(errors="replace")

    @property
    def failure(self) -> str | None:
        """The reason for which the guard sets no clock any more; None while it does."""
        if not self.guard.failed:
            return None
        return bytes(self.guard.failure).decode(errors="replace")

    def is_answered(self, number: int) -> bool:
        """Return whether all is served up to a number."""
        return _reached(self.guard.answered, number)

    def counted(self, where: int, number: int) -> bool:
        """Return whether a stream has counted to a number."""
        return _reached(ctypes.c_uint32.from_address(self.address + where).value, number)


def following(number: int) -> int:
    """Return the number of the next request."""
    return number % MASK + 1


def _round(number: int) -> int:
    return (number // CAPACITY + 1) & 0xFFFF


def _reached(value: int, number: int) -> bool:
    return (value - number) & MASK < 1 << 31
