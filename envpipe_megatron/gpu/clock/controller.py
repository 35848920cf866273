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
from envpipe_megatron.gpu.clock.page import BEGUN, DUE, MASK, ClockPage

logger = logging.getLogger(__name__)

_KEPT_LATENCIES = 4096


class PageController:
    """Sets the clock of the last request that is due, and not if that leaves the clock as it is.

    A driver that fails ends this, not the training; the page says why. The clock is reset where a
    request gives it back; at the end whoever made this resets it.

    Args:
        gpu: an object that nobody else uses meanwhile.
    """

    def __init__(self, gpu: Gpu, page: ClockPage) -> None:
        self._gpu, self._page = gpu, page
        #: The last request that was seen: here, the one before that which came due last.
        self._number = max(page.counted(DUE) - 1, 0)
        #: The clock that follows the one before it, and when, on the monotonic clock; 0 for none.
        self._next_mhz, self._next_s = 0, 0.0
        #: The clock that is due, until it is set; whether it took the place of another one, and
        #: when it was seen to be due, None once it has been held back.
        self._due_mhz: int | None = None
        self._replaces = False
        self._known_s: float | None = None
        self._dwelling_since_s = float("-inf")
        self._latencies_s: deque[tuple[float, float]] = deque(maxlen=_KEPT_LATENCIES)

    def serve(self) -> bool:
        """Serve what is due now; return True if something was."""
        due, begun = self._page.counted(DUE), self._page.counted(BEGUN)
        try:
            came = self._take(due, begun)
            self._apply()
        except Exception as error:  # a driver may fail in any way; training must go on
            logger.error("Clock control of %s stops: %s", self._gpu.name, error)
            self._page.fail(str(error))
            return True
        self._page.guard.served_due, self._page.guard.served_begun = due, begun
        return came

    def close(self) -> None:
        """Note that the clock is about to be reset; nothing is to be served any more.

        The rank gets how fast the latest requests were served: `wake_to_lock_s`, from when a unit's
        end was seen to the call of the back end, and `lock_call_s`, from there to its return, a
        `spread` each, without those that were held back.
        """
        self._page.guard.set_mhz = 0
        latencies_s = {
            "wake_to_lock_s": spread(before for before, _ in self._latencies_s),
            "lock_call_s": spread(call for _, call in self._latencies_s),
        }
        self._page.guard.summary = json.dumps(latencies_s).encode()

    def _take(self, due: int, begun: int) -> bool:
        """See which clock is due, by the numbers of the page; return True if another one is."""
        came = due != self._number
        if came:
            missed = (due - self._number) % MASK - 1
            mhz, first_mhz, delay_s = self._page.request(due)
            self._number, self._next_mhz = due, mhz if first_mhz else 0
            # The host's clock counts the delay from when the end was seen.
            self._next_s = self._want(first_mhz or mhz, missed) + delay_s
        next_mhz = self._next_mhz
        if next_mhz and (begun == due or time.monotonic() >= self._next_s):
            came, self._next_mhz = True, 0
            self._want(next_mhz)
        return came

    def _want(self, frequency_mhz: int, missed: int = 0) -> float:
        """Take note of a clock that is due, and how many were before it; return when that is."""
        missed += self._due_mhz is not None
        self._page.guard.coalesced += missed
        self._due_mhz, self._replaces, now_s = frequency_mhz, missed > 0, time.monotonic()
        self._known_s = now_s
        return now_s

    def _apply(self) -> None:
        """Set the clock that is due, if any, unless it is held back for the dwell time."""
        mhz, dwell_s = self._due_mhz, self._page.rank.min_dwell_s
        # A rank that has given up on a guard that hangs resets the clock itself.
        if mhz is None or self._page.is_over:
            return
        if self._replaces and mhz == self._page.guard.set_mhz:
            self._due_mhz = None
            return
        if dwell_s > 0.0:
            now_s = self._gpu.time_s()
            if now_s - self._dwelling_since_s < dwell_s:
                self._known_s = None
                return
            self._dwelling_since_s = now_s
        entered_s = time.monotonic()
        self._page.guard.called_s = entered_s
        if mhz:
            self._gpu.lock_frequency(mhz)
        else:
            self._gpu.reset_frequency()
        returned_s = time.monotonic()
        self._page.guard.beats += 1  # many calls in turn may take long, and none of them hangs
        self._page.guard.set_mhz, self._page.guard.returned_s = mhz, returned_s
        self._page.guard.changes += 1
        if self._known_s is not None:
            self._latencies_s.append((entered_s - self._known_s, returned_s - entered_s))
        self._due_mhz = None


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
