"""Sets a GPU's clock as a page asks for it: in the GPU's guard, or in the rank of an emulated GPU.

The clock of a unit is wanted when the GPU has finished the stage's previous unit, not when Python
enqueues anything: a change that takes milliseconds then falls into the wait before the unit, where
there is one.
"""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Iterable

from envpipe_megatron.gpu.base import Gpu
from envpipe_megatron.gpu.clock.page import BEGUN, DUE, GIVEN_BACK, ClockPage, following

logger = logging.getLogger(__name__)

_KEPT_LATENCIES = 4096


class PageController:
    """Serves the requests of a page in order, from the one that came due last.

    Of requests that are due, only the latest is applied, and not if it leaves the clock as it is. A
    driver that fails ends this, not the training; the page says why. The clock is reset where a
    request gives it back; at the end whoever made this resets it.

    Args:
        gpu: an object that nobody else uses meanwhile.
    """

    def __init__(self, gpu: Gpu, page: ClockPage) -> None:
        self._gpu, self._page = gpu, page
        self._next = following(page.before_last_due())
        #: When the end of the unit before was seen, by a request that waits a while after it.
        self._ended_s: float | None = None
        #: The clock of the last request that was due, until it is set, and whether it took the
        #: place of another one.
        self._due_mhz: int | None = None
        self._replaces = False
        self._dwelling_since_s = float("-inf")
        self._latencies_s: deque[tuple[float, float]] = deque(maxlen=_KEPT_LATENCIES)
        self._changes = self._coalesced = 0

    def serve(self) -> bool:
        """Serve what is due now; return True if something was."""
        first = self._next
        try:
            self._serve_due()
        except Exception as error:  # a driver may fail in any way; training must go on
            logger.error("Clock control of %s stops: %s", self._gpu.name, error)
            self._page.fail(str(error))
        return self._next != first

    def close(self) -> None:
        """Note that the clock is about to be reset; nothing is to be served any more."""
        self._page.guard.set_mhz = 0
        self._summarize()

    def _serve_due(self) -> None:
        known_s: float | None = None
        while (request := self._page.request(self._next)) is not None:
            frequency_mhz, delay_s = request
            if frequency_mhz and not self._is_due(delay_s):
                break
            number, self._next, self._ended_s = self._next, following(self._next), None
            self._page.guard.taken = number
            if frequency_mhz:
                self._replaces = self._due_mhz is not None
                self._coalesced += self._replaces
                self._due_mhz, known_s = frequency_mhz, time.monotonic()
                continue
            self._apply(known_s)
            self._summarize()
            self._page.guard.answered = number
        self._apply(known_s)

    def _is_due(self, delay_s: float) -> bool:
        page, number = self._page, self._next
        if delay_s and page.counted(BEGUN, number):
            return True
        if not page.counted(DUE, number):
            return False
        if not delay_s:
            return True
        # The host's clock counts from when the end was seen.
        now_s = time.monotonic()
        self._ended_s = now_s if self._ended_s is None else self._ended_s
        return now_s >= self._ended_s + delay_s

    def _apply(self, known_s: float | None) -> None:
        """Set the clock that is due, if any, unless it is held back for the dwell time.

        Args:
            known_s: when it was seen to be due; None if it was held back until now.
        """
        mhz, dwell_s = self._due_mhz, self._page.min_dwell_s
        # A rank that has given up on a guard that hangs resets the clock itself.
        if mhz is None or self._page.is_over:
            return
        held_mhz = 0 if mhz == GIVEN_BACK else mhz
        if self._replaces and held_mhz == (self._page.set_mhz or 0):
            self._due_mhz = None
            return
        if dwell_s > 0.0:
            now_s = self._gpu.time_s()
            if now_s - self._dwelling_since_s < dwell_s:
                return
            self._dwelling_since_s = now_s
        entered_s = time.monotonic()
        self._page.guard.called_s = entered_s
        if held_mhz:
            self._gpu.lock_frequency(held_mhz)
        else:
            self._gpu.reset_frequency()
        returned_s = time.monotonic()
        self._page.guard.beats += 1  # many calls in turn may take long, and none of them hangs
        self._page.guard.set_mhz, self._page.guard.returned_s = held_mhz, returned_s
        if known_s is not None:
            self._latencies_s.append((entered_s - known_s, returned_s - entered_s))
        self._due_mhz = None
        self._changes += 1

    def _summarize(self) -> None:
        """Tell the rank how many changes were made and how fast, for the job's summary.

        `wake_to_lock_s` is from when a unit's end was seen to the call of the back end,
        `lock_call_s` from there to the back end's return: a `spread` each, of the latest requests,
        those held back by the dwell time left out.
        """
        latencies_s = list(self._latencies_s)
        said = {
            "changes": self._changes,
            "coalesced": self._coalesced,
            "wake_to_lock_s": spread(before for before, _ in latencies_s),
            "lock_call_s": spread(call for _, call in latencies_s),
        }
        self._page.guard.summary = json.dumps(said).encode()


def spread(values_s: Iterable[float]) -> dict[str, float | int]:
    """Return median, 99th percentile, maximum and count; only the count of nothing."""
    ordered = sorted(values_s)
    if not ordered:
        return {"count": 0}
    last = len(ordered) - 1
    return {
        "median": ordered[round(0.5 * last)],
        "p99": ordered[round(0.99 * last)],
        "max": ordered[last],
        "count": len(ordered),
    }
