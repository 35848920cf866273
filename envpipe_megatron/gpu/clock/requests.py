"""A rank's requests by a page, served in the process of its guard, which looks for them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue

from envpipe_megatron.gpu.base import Gpu
from envpipe_megatron.gpu.clock.completion import Later
from envpipe_megatron.gpu.clock.controller import ClockController, Item
from envpipe_megatron.gpu.clock.page import BEGUN, DUE, ClockPage, following

#: One who waits for a word looks at it this often, s: the rarer, the longer it has waited, for this
#: share of that. A change of a clock takes longer, and a look takes a core some 10 us.
_SOONEST_S, _LATEST_S, _SHARE = 1e-4, 5e-4, 1 / 40
#: After so long a wait, it is not a unit that is being waited for.
_CALM_S, _CALM_LOOK_S = 2.0, 2e-3


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
        """Whether no clock is to be set any more; the rank learns of a thread that has died."""
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
    """What this process puts into it comes before what the rank asks for."""

    def __init__(self, page: ClockPage, summarize: Callable[[], None]) -> None:
        self._closed = False
        self._page, self._summarize = page, summarize
        self._own: SimpleQueue[Item] = SimpleQueue()
        self._next = following(page.before_last_due())

    def put(self, item: Item) -> None:
        """From this process; behind None, nobody waits for the GPU any more."""
        self._closed = self._closed or item is None
        self._own.put(item)

    def empty(self) -> bool:
        """Whether there is nothing from either."""
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
        number, self._next = self._next, following(self._next)
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
