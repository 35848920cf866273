"""Sets a GPU's clock as a page asks for it: in the GPU's guard, or in the rank of an emulated GPU.

The clock of a unit is wanted when the GPU has finished the stage's previous unit, not when Python
enqueues anything: a change that takes milliseconds then falls into the wait before the unit, where
there is one.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Iterable

from envpipe_megatron.gpu.base import Gpu
from envpipe_megatron.gpu.clock.page import BEGUN, DUE, GIVEN_BACK, ClockPage, following

logger = logging.getLogger(__name__)

#: Python's switch interval in a process whose only work is this thread's, s.
SWITCH_INTERVAL_S = 1e-4
#: How long to wait for a call of the driver, which may hang.
_JOIN_S = 2.0
#: No call that sets a clock takes so long, s, unless the driver hangs.
_HANGS_S = 120.0
_KEPT_LATENCIES = 4096
#: The thread looks at the page this often, s: the rarer, the longer nothing came, for this share of
#: that. A change of a clock takes longer, and a look takes a core some 10 us.
_SOONEST_S, _LATEST_S, _SHARE = 1e-4, 5e-4, 1 / 40
#: After so long a wait, it is not a unit that is being waited for.
_CALM_S, _CALM_LOOK_S = 2.0, 2e-3


class PageController:
    """Serves the requests of a page in order, from the one that came due last.

    Of requests that are due, only the latest is applied, and not if it leaves the clock as it is. A
    driver that fails ends this, not the training; the page says why. The clock is reset where a
    request gives it back; at the end whoever made this resets it, once `close` has returned True.

    Args:
        gpu: an object that nobody else uses meanwhile.
    """

    def __init__(self, gpu: Gpu, page: ClockPage) -> None:
        self._gpu, self._page = gpu, page
        self._next = following(page.before_last_due())
        #: When the end of the unit before was seen, by a request that waits a while behind it.
        self._ended_s: float | None = None
        #: The clock of the last request that was due, until it is set, and whether it took the
        #: place of another one.
        self._due_mhz: int | None = None
        self._replaces = False
        self._dwelling_since_s = float("-inf")
        self._latencies_s: deque[tuple[float, float]] = deque(maxlen=_KEPT_LATENCIES)
        self._changes = self._coalesced = 0
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="envpipe-clock", daemon=True)

    def start(self) -> None:
        """Serve on a thread from here on, until the page is over; else call `serve`."""
        self._thread.start()

    def serve(self) -> bool:
        """Serve what is due now; return True if something was."""
        first = self._next
        try:
            self._serve_due()
        except Exception as error:  # a driver may fail in any way; training must go on
            logger.error("Clock control of %s stops: %s", self._gpu.name, error)
            self._page.fail(str(error))
        return self._next != first

    def has_ended(self) -> bool:
        """Return whether no clock is to be set any more; tell the rank of a thread that cannot."""
        if not self._page.is_over:
            called_s, returned_s = self._page.last_call_s
            if not self._thread.is_alive():
                self._page.fail("The thread that sets clocks has ended")
            elif called_s > returned_s and time.monotonic() > called_s + _HANGS_S:
                self._page.fail(f"The driver of {self._gpu.name} hangs in a call that sets a clock")
        return self._page.is_over

    def close(self) -> bool:
        """Set no clock any more; return False while a call that sets one does not return.

        A unit that never ends is not waited for.
        """
        self._closing = True
        if self._thread.ident is not None:
            self._thread.join(_JOIN_S)
            if self._thread.is_alive():
                return False
        self._page.guard.set_mhz = 0
        self._summarize()
        return True

    def _run(self) -> None:
        served_s = time.monotonic()
        while not self._closing and not self._page.is_over:
            now_s = time.monotonic()
            if self.serve():
                served_s = now_s
            passed_s = now_s - served_s
            often_s = min(max(_SOONEST_S, _SHARE * passed_s), _LATEST_S)
            time.sleep(often_s if passed_s < _CALM_S else _CALM_LOOK_S)

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
        if mhz is None or self._closing or self._page.is_over:
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
        self._page.guard.set_mhz, self._page.guard.returned_s = held_mhz, returned_s
        if known_s is not None:
            self._latencies_s.append((entered_s - known_s, returned_s - entered_s))
        self._due_mhz = None
        self._changes += 1

    def _summarize(self) -> None:
        """Tell the rank how many changes were made and how fast, for the job's summary.

        `wake_to_lock_s` is from the thread's knowing of a unit's end to its entering the back end,
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
