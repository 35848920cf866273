"""A rank's requests by a page, served in the process of its guard, which looks for them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue

from envpipe_megatron.gpu.base import Gpu
from envpipe_megatron.gpu.clock.completion import Completion, Later
from envpipe_megatron.gpu.clock.controller import ClockController, Item
from envpipe_megatron.gpu.clock.page import BEGUN, DUE, MASK, ClockPage

#: One who waits for a word looks at it this often, s: the rarer, the longer it has waited, for this
#: share of that. A change of a clock takes longer, and a look takes a core some 10 us.
_SOONEST_S, _LATEST_S, _SHARE = 1e-4, 5e-4, 1 / 40
#: Behind so long a wait, it is no unit that is waited for.
_CALM_S, _CALM_LOOK_S = 2.0, 2e-3


class PageController(ClockController):
    """Serves the requests of a page, from the one that came due last, and tells the page of it.

    Args:
        min_dwell_s: as any controller's, and `relock`.
    """

    def __init__(self, gpu: Gpu, page: ClockPage, min_dwell_s: float, *, relock: bool) -> None:
        self._page = page
        self._requests = _PageRequests(page, lambda: json.dumps(self.summary()))
        super().__init__(
            gpu, min_dwell_s, relock=relock, queue=self._requests, on_change=page.change
        )

    def stop(self, error: Exception) -> None:
        """As any controller; the rank learns why."""
        super().stop(error)
        self._page.fail(str(error))

    def close(self) -> None:
        """As any controller; nobody waits for the GPU meanwhile."""
        self._requests.closed = True
        super().close()

    def _lock(self, frequency_mhz: int, known_s: float | None) -> None:
        # A rank that has given up on a guard that hangs resets the clock itself.
        if not self._page.is_over:
            super()._lock(frequency_mhz, known_s)


class _PageRequests:
    """What this process puts into it comes before what the rank asks for."""

    def __init__(self, page: ClockPage, summary: Callable[[], str]) -> None:
        self.closed = False
        self._page, self._summary = page, summary
        self._own: SimpleQueue[Item] = SimpleQueue()
        self._number = page.before_last_due()

    def put(self, item: Item) -> None:
        """From this process."""
        self._own.put(item)

    def empty(self) -> bool:
        """Whether there is nothing from either."""
        return self._own.empty() and self._page.asked == self._number

    def get(self, *, timeout: float | None = None) -> Item:
        """Look for one until it is there; Empty: there was none for so long."""
        begin_s = time.monotonic()
        while self.empty():
            if timeout is not None and time.monotonic() - begin_s >= timeout:
                raise Empty
            _let_pass(begin_s)
        return self._take() if self._own.empty() else self._own.get()

    def _take(self) -> Item:
        number = self._number = (self._number + 1) & MASK
        frequency_mhz, delay_s = self._page.take(number)
        if not frequency_mhz:
            return lambda: self._page.answer(number, self._summary())
        due: Completion = _Counted(self, partial(self._page.counted, DUE, number))
        if delay_s:
            later = Later(due, delay_s)
            later.begun = _Counted(self, partial(self._page.counted, BEGUN, number))
            due = _Counted(self, later.query)
        return due, frequency_mhz


@dataclass(frozen=True)
class _Counted:
    """True as soon as a look says so; no word can wake who waits for it."""

    requests: _PageRequests
    query: Callable[[], bool]

    def synchronize(self) -> None:
        """Look until it is true, or nobody waits any more."""
        begin_s = time.monotonic()
        while not self.query() and not self.requests.closed:
            _let_pass(begin_s)


def _let_pass(begin_s: float) -> None:
    passed_s = time.monotonic() - begin_s
    often_s = min(max(_SOONEST_S, _SHARE * passed_s), _LATEST_S)
    time.sleep(often_s if passed_s < _CALM_S else _CALM_LOOK_S)
