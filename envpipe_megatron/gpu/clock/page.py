"""Memory that a rank, a stream of its GPU and the GPU's guard share: which clock is wanted when.

A rank that asks its own process for a clock wakes a thread, which takes Python's interpreter lock
from it as often; a rank that stores a word, and has the stream store another, does neither. Each
word below is stored by one side only. Numbers begin at 1, and do so again behind their largest; 0
is none. The guard serves the requests by a `PageController`, which looks for them.
"""

from __future__ import annotations

import ctypes
import json
import math
import mmap
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue

from envpipe_megatron.gpu.base import Gpu
from envpipe_megatron.gpu.clock.completion import Later
from envpipe_megatron.gpu.clock.controller import ClockController, Item

MASK = 0xFFFFFFFF
#: Requests that may wait for the GPU; a host is a few iterations ahead of it at most.
CAPACITY = 1 << 16
_TEXT_BYTES = 4096
_LINE_BYTES = 64
#: A request is one word, so that nobody sees half of it: 16 bits of which round of the page it is,
#: 16 of the clock in MHz (0 asks for an answer alone), 32 of the delay in us.
_ROUND, _CLOCK, _MOST_DELAY_US = 48, 32, MASK
#: One who waits for a word looks at it this often, s: the rarer, the longer it has waited, for this
#: share of that. A change of a clock takes longer, and a look takes a core some 10 us.
_SOONEST_S, _LATEST_S, _SHARE = 1e-4, 5e-4, 1 / 40
#: After so long a wait, it is not a unit that is being waited for.
_CALM_S, _CALM_LOOK_S = 2.0, 2e-3


class _OfStream(ctypes.Structure):
    _fields_ = (("number", ctypes.c_uint32), ("line", ctypes.c_char * (_LINE_BYTES - 4)))


class _OfRank(ctypes.Structure):
    _fields_ = (
        ("min_dwell_s", ctypes.c_double),
        ("relock", ctypes.c_uint32),
        ("over", ctypes.c_uint32),
        ("line", ctypes.c_char * (_LINE_BYTES - 16)),
    )


class _OfGuard(ctypes.Structure):
    _fields_ = (
        ("taken", ctypes.c_uint32),
        ("answered", ctypes.c_uint32),
        ("failed", ctypes.c_uint32),
        ("set_mhz", ctypes.c_uint32),
        ("last_change_s", ctypes.c_double),
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
        self._asked = 0
        self.num_bytes = _NUM_BYTES
        self._memory = mmap.mmap(descriptor, self.num_bytes)
        self._words = _Words.from_buffer(self._memory)
        self._of_guard, self._requests = self._words.guard, self._words.requests
        self.address = ctypes.addressof(self._words)

    @staticmethod
    def create(min_dwell_s: float = 0.0, *, relock: bool = False) -> ClockPage:
        """One that a child gets by its descriptor, without a name; its file is to be closed.

        Both as the controller that serves it takes them.
        """
        # memfd_create is missing in Pythons that were built for old C libraries.
        descriptor = os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR, 0o600)
        try:
            # All of it now: a store into a file system that is full would end this process.
            os.posix_fallocate(descriptor, 0, _NUM_BYTES)
            page = ClockPage(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        page._words.rank.min_dwell_s, page._words.rank.relock = min_dwell_s, relock
        page._words.guard.last_change_s = -math.inf
        return page

    def close_file(self) -> None:
        """Whoever needs the memory has it; it stays, with a descriptor of mmap's own."""
        os.close(self.descriptor)

    # --- the rank -------------------------------------------------------------------------------

    def ask(self, frequency_mhz: int, delay_s: float = 0.0) -> int | None:
        """Store a request; its number, None if too many wait.

        It is due when DUE counts it, and so long after that, or when BEGUN does. One for 0 MHz is
        answered when all before it are served. `_following` and `_round` stand here themselves: at
        units the host's caches are cold, and a call of Python's takes microseconds.
        """
        number = self._asked % MASK + 1
        if (number - self._of_guard.taken) & MASK >= CAPACITY:
            return None
        word = (number // CAPACITY + 1 & 0xFFFF) << _ROUND | frequency_mhz << _CLOCK
        if delay_s > 0:
            word |= min(round(1e6 * delay_s), _MOST_DELAY_US)
        self._requests[number % CAPACITY] = word
        self._asked = number
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

    def has(self, number: int) -> bool:
        """True if a request is there."""
        return bool(self._words.requests[number % CAPACITY] >> _ROUND == _round(number))

    def take(self, number: int) -> tuple[int, float]:
        """The clock in MHz and the delay in s of a request that is there; frees its place."""
        word = self._words.requests[number % CAPACITY]
        self._words.guard.taken = number
        return word >> _CLOCK & 0xFFFF, (word & _MOST_DELAY_US) / 1e6

    def summarize(self, text: str) -> None:
        """Tell the rank what was done so far."""
        self._words.guard.summary = _cut(text)

    def answer(self, number: int) -> None:
        """All up to a number is served."""
        self._words.guard.answered = number

    def fail(self, why: str) -> None:
        """No clock is set any more."""
        self._words.guard.failure = _cut(why)
        self._words.guard.failed = 1

    def change(self, frequency_mhz: int | None, time_s: float) -> None:
        """The clock was set at this instant; the future while a call is under way."""
        self._words.guard.set_mhz = frequency_mhz or 0
        self._words.guard.last_change_s = time_s

    # --- either ---------------------------------------------------------------------------------

    @property
    def min_dwell_s(self) -> float:
        """Least time between two changes of the clock."""
        return float(self._words.rank.min_dwell_s)

    @property
    def relock(self) -> bool:
        """True if the clock that is set already is set again."""
        return bool(self._words.rank.relock)

    @property
    def is_over(self) -> bool:
        """True if the rank wants no clock any more, or the guard can set none."""
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
    def summary(self) -> str:
        """The guard's last summary; half of it while the guard writes it."""
        return bytes(self._words.guard.summary).decode(errors="replace")

    @property
    def failure(self) -> str | None:
        """Why the guard sets no clock any more; None while it does."""
        if not self._words.guard.failed:
            return None
        return bytes(self._words.guard.failure).decode(errors="replace")

    def is_answered(self, number: int) -> bool:
        """True if all is served up to a number."""
        return _reached(self._words.guard.answered, number)

    def counted(self, where: int, number: int) -> bool:
        """True if a stream has counted to a number."""
        return _reached(ctypes.c_uint32.from_address(self.address + where).value, number)


def _cut(text: str) -> bytes:
    return text.encode(errors="replace")[: _TEXT_BYTES - 1]


def _following(number: int) -> int:
    """The number of the next request."""
    return number % MASK + 1


def _round(number: int) -> int:
    return (number // CAPACITY + 1) & 0xFFFF


def _reached(value: int, number: int) -> bool:
    return (value - number) & MASK < 1 << 31


class PageController(ClockController):
    """Serves the requests of a page, from the one that came due last, and tells the page of it."""

    def __init__(self, gpu: Gpu, page: ClockPage) -> None:
        self._page = page
        super().__init__(
            gpu,
            page.min_dwell_s,
            relock=page.relock,
            queue=_PageRequests(page, self._summarize),
            on_change=page.change,
        )

    def stop(self, error: Exception) -> None:
        """As any controller; the rank learns why."""
        super().stop(error)
        self._page.fail(str(error))

    def close(self) -> None:
        """As any controller; nobody waits for the GPU meanwhile."""
        super().close()
        self._summarize()

    def has_ended(self) -> bool:
        """True if no clock is to be set any more; the rank learns of a thread that has died."""
        if not self._thread.is_alive() and not self._page.is_over:
            self._page.fail("The thread that sets clocks has ended")
        return self._page.is_over

    def _lock(self, frequency_mhz: int, known_s: float | None) -> None:
        # A rank that has given up on a guard that hangs resets the clock itself.
        if not self._page.is_over:
            super()._lock(frequency_mhz, known_s)

    def _summarize(self) -> None:
        self._page.summarize(json.dumps(self.summary()))


class _PageRequests:
    """Requests of a page; those that this process puts in come before the rank's."""

    def __init__(self, page: ClockPage, summarize: Callable[[], None]) -> None:
        self._closed = False
        self._page, self._summarize = page, summarize
        self._own: SimpleQueue[Item] = SimpleQueue()
        self._next = _following(page.before_last_due())

    def put(self, item: Item) -> None:
        """From this process; behind None, nobody waits for the GPU any more."""
        self._closed = self._closed or item is None
        self._own.put(item)

    def empty(self) -> bool:
        """True if there is nothing from either."""
        return self._own.empty() and not self._page.has(self._next)

    def get(self, *, timeout: float | None = None) -> Item:
        """Look for one until it is there; Empty: there was none for so long."""
        if not self.look_until(lambda: not self.empty(), timeout):
            raise Empty
        return self._take() if self._own.empty() else self._own.get()

    def look_until(self, is_true: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait; whether it has come true in time, and before this was closed."""
        begin_s = time.monotonic()
        while not is_true():
            passed_s = time.monotonic() - begin_s
            if self._closed or (timeout_s is not None and passed_s >= timeout_s):
                return False
            often_s = min(max(_SOONEST_S, _SHARE * passed_s), _LATEST_S)
            time.sleep(often_s if passed_s < _CALM_S else _CALM_LOOK_S)
        return True

    def _take(self) -> Item:
        number, self._next = self._next, _following(self._next)
        frequency_mhz, delay_s = self._page.take(number)
        if not frequency_mhz:
            return partial(self._answer, number)
        due = _Counted(self, partial(self._page.counted, DUE, number))
        if delay_s:
            later = Later(due, delay_s)
            later.begun = _Counted(self, partial(self._page.counted, BEGUN, number))
            due = _Counted(self, later.query)
        return due, frequency_mhz

    def _answer(self, number: int) -> None:
        self._summarize()
        self._page.answer(number)


@dataclass(frozen=True)
class _Counted:
    """True as soon as a look says so; no word can wake who waits for it."""

    requests: _PageRequests
    query: Callable[[], bool]

    def synchronize(self) -> None:
        """Look until it is true, or nobody waits any more."""
        self.requests.look_until(self.query)
