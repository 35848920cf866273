"""The thread that sets a GPU's clock for each unit: of the rank's process, or of its guard's.

The clock of a unit is requested when the GPU has finished the stage's previous unit, not when
Python enqueues anything: a change that takes milliseconds then falls into the wait before the unit,
where there is one.

Woken by the GPU, a thread of the rank gets Python's global interpreter lock, which the training
thread holds all the time, one *switch interval* later, 5 ms by default: the interval is shorter
from a controller's first request until it closes.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from envpipe_megatron.gpu.base import Gpu, GpuError
from envpipe_megatron.gpu.clock.completion import Completion

logger = logging.getLogger(__name__)

#: Python's switch interval while a controller has requests, s.
SWITCH_INTERVAL_S = 1e-4
#: How long to wait for the thread or a call of the driver: GPU and driver may hang.
_JOIN_S = 2.0
_RETRY_RESET_S = 1.0
#: How often one who waits for a thread looks whether it is still there.
_LOOK_S = 0.05

_KEPT_LATENCIES = 4096

#: A clock in MHz for when something is complete; what is called when all before it is served; None
#: to end.
Item = tuple[Completion, int] | Callable[[], None] | None


class Requests(Protocol):
    """Requests that a controller has still to serve, in order."""

    def put(self, item: Item) -> None:
        """Add to it; any thread may."""

    def get(self, *, timeout: float | None = None) -> Item:
        """Take the next one; Empty: there is none for so long, in s."""

    def empty(self) -> bool:
        """True if there is none now."""


class ClockController:
    """Applies requests in order, each when its completion is true; skips what changes nothing.

    If the thread falls behind, only the latest request that is due is applied. The training thread
    never waits for the GPU's driver. A failing driver stops the control, not the training; the
    error is kept and the clock is reset. Queues are `SimpleQueue`, whose calls a signal handler may
    interrupt and make again.

    Args:
        min_dwell_s: least time between two changes, on the GPU's time base; a request that comes
            earlier is applied when the time is over, unless a later one has replaced it.
        relock: apply requests for the clock that is set already, too: a control that shows what the
            calls alone cost.
        on_start: called once on the controller's thread, before it looks at any completion.
        queue: by default what `request` asks for.
        on_change: called with the clock that is set, None if there is none, and `last_change_s`.
    """

    #: Whether requests wait for what they come after; else for what the stream holds.
    waits = True

    def __init__(
        self,
        gpu: Gpu,
        min_dwell_s: float = 0.0,
        *,
        relock: bool = False,
        on_start: Callable[[], None] = lambda: None,
        queue: Requests | None = None,
        on_change: Callable[[int | None, float], None] = lambda mhz, time_s: None,
    ) -> None:
        self._gpu = gpu
        self._on_start = on_start
        self._min_dwell_s = min_dwell_s
        self._relock = relock
        self._on_change = on_change
        self._queue: Requests = SimpleQueue() if queue is None else queue
        #: Taken from the queue to be looked at, and not served yet.
        self._next: Item = None
        #: Each is answered, when the clock is back, with what went wrong.
        self._resets: SimpleQueue[SimpleQueue[Exception | None]] = SimpleQueue()
        #: True when nothing is locked, nor ever will be. Python 3.11 takes a thread that runs for
        #: one that has ended where a signal handler raises inside `join` or `is_alive`.
        self._given_back = False
        #: Held while the driver is called: nothing is locked after a reset by `close` or `stop`.
        self._driver = threading.Lock()
        self._touched = False
        self._closing = False
        #: How often somebody else has reset the clock; what was set before no longer counts.
        self._epoch = 0
        self._asked: tuple[int, int] | None = None
        self._applied: tuple[int, int] | None = None
        #: The clock of the last request that was due, until it is set.
        self._due_mhz: int | None = None
        self._dwelling_since_s = float("-inf")
        self._latencies_s: deque[tuple[float, float]] = deque(maxlen=_KEPT_LATENCIES)
        self.changes = 0
        self.coalesced = 0
        #: When a call last returned that set another clock, on the monotonic clock: in the future
        #: while one is under way.
        self.last_change_s = float("-inf")
        self.error: Exception | None = None
        self._pid = os.getpid()
        #: Python's own, from the first request on.
        self._switch_interval_s: float | None = None
        self._resetter = threading.Thread(
            target=self._run_resets, name="envpipe-reset", daemon=True
        )
        self._resetter.start()
        self._thread = threading.Thread(target=self._run, name="envpipe-clock", daemon=True)
        self._thread.start()

    def request(self, frequency_mhz: int, after: Completion) -> None:
        """Set the clock once the GPU has finished what `after` stands for; returns at once.

        Called by one thread only.
        """
        asked = (self._epoch, frequency_mhz)
        # Where the last request was for the same clock, the thread need not even wake up.
        if (asked != self._asked or self._relock) and self.error is None:
            if self._asked is None and not self._closing:  # one that only measures needs none
                self._switch_interval_s = sys.getswitchinterval()
                sys.setswitchinterval(min(SWITCH_INTERVAL_S, self._switch_interval_s))
            self._asked = asked
            self._queue.put((after, frequency_mhz))

    def forget(self) -> None:
        """Somebody else has reset the clock: the next request is applied even if it is equal."""
        self._epoch += 1

    def stop(self, error: Exception) -> None:
        """Give up control for this reason: keep the error, reset the clock, lock nothing more.

        Any thread may call it. Errors after the first are dropped.
        """
        if self.error is not None:
            return
        self.error = error
        # The last clock may be a low one, which would slow the whole pipeline. Where the driver
        # refuses this too, `close` tries again, and logs it.
        self._give_back()
        logger.error("Clock control of %s stops, training goes on: %s", self._gpu.name, error)

    def wait_idle(self) -> None:
        """Return when every request made so far has been applied, held back, or given up."""
        served: SimpleQueue[None] = SimpleQueue()
        self._queue.put(lambda: served.put(None))
        while self.error is None and self._thread.is_alive() and not self._closing:
            with suppress(Empty):
                served.get(timeout=_LOOK_S)
                return

    def close(self) -> None:
        """Stop the thread and undo its lock, if it ever set one; safe to call twice.

        The reset does not wait for a GPU that never finishes a unit, nor long for a driver that
        does not come back (the clock is reset if it ever does). If it fails, that is logged, and
        kept in `error` unless an earlier error is there. In a forked child nothing happens.
        """
        if os.getpid() != self._pid:
            return
        if not self._closing:
            self._closing = True
            self._queue.put(None)
            if self._switch_interval_s is not None:
                sys.setswitchinterval(self._switch_interval_s)
        self._thread.join(_JOIN_S)
        problem = self._give_back()
        if problem is not None:
            self.error = self.error or problem
            logger.error("The clock of %s could not be reset: %s", self._gpu.name, problem)

    @property
    def in_driver(self) -> bool:
        """True if a call of the driver is under way; after `close`, one that does not return."""
        return self._driver.locked()

    def summary(self) -> dict[str, Any]:
        """Return how many changes were made and how fast, for the job's summary.

        `wake_to_lock_s` is from the thread's knowing of a unit's end to its entering the back end,
        `lock_call_s` from there to the back end's return: a `spread` each, of the latest requests,
        those held back by the dwell time left out.
        """
        latencies_s = list(self._latencies_s)
        return {
            "changes": self.changes,
            "coalesced": self.coalesced,
            "error": None if self.error is None else str(self.error),
            "wake_to_lock_s": spread(before for before, _ in latencies_s),
            "lock_call_s": spread(call for _, call in latencies_s),
        }

    def _run(self) -> None:
        try:
            self._on_start()
            while not self._closing and self.error is None:
                self._serve(self._take())
        except Exception as error:  # a driver may fail in any way; training must go on
            self.stop(error)

    def _take(self) -> Item:
        """The next item, or None when the time of a change held back has come (or on closing)."""
        if self._next is not None:
            item, self._next = self._next, None
            return item
        dwell_left_s = None
        if self._due_mhz is not None:
            over_s = self._dwelling_since_s + self._min_dwell_s
            dwell_left_s = max(0.0, over_s - self._gpu.time_s())
        try:
            return self._queue.get(timeout=dwell_left_s)
        except Empty:
            return None

    def _serve(self, item: Item) -> None:
        known_s = None
        if callable(item):
            item()
            return
        if item is not None:
            completion, self._due_mhz = item
            # Waiting gives up the interpreter, and getting it back takes time.
            if not completion.query():
                completion.synchronize()
            known_s = time.monotonic()
            if self._next_is_due():
                self.coalesced += 1
                return
        if self._due_mhz is not None and self._may_change(self._due_mhz):
            self._lock(self._due_mhz, known_s)

    def _next_is_due(self) -> bool:
        """True if a newer request has come due while this one waited: then this one is stale."""
        if self._next is None and not self._queue.empty():
            self._next = self._queue.get()
        return isinstance(self._next, tuple) and self._next[0].query()

    def _may_change(self, frequency_mhz: int) -> bool:
        if self._applied == (self._epoch, frequency_mhz) and not self._relock:
            self._due_mhz = None
            return False
        if self._min_dwell_s > 0.0:  # else the time base, which may be slow, is left alone
            now_s = self._gpu.time_s()
            if now_s - self._dwelling_since_s < self._min_dwell_s:
                return False
            self._dwelling_since_s = now_s
        return True

    def _lock(self, frequency_mhz: int, known_s: float | None) -> None:
        """Lock the clock; that it should be was known at `known_s`, None if it was held back."""
        applied = (self._epoch, frequency_mhz)
        with self._driver:
            if self._closing or self.error is not None:
                return
            self._touched = True
            if self._applied != applied:
                self._changed_at(float("inf"), self._applied[1] if self._applied else None)
            entered_s = time.monotonic()
            self._gpu.lock_frequency(frequency_mhz)
            returned_s = time.monotonic()
            self._changed_at(min(self.last_change_s, returned_s), frequency_mhz)
        if known_s is not None:
            self._latencies_s.append((entered_s - known_s, returned_s - entered_s))
        self._due_mhz = None
        self._applied = applied
        self.changes += 1

    def _changed_at(self, time_s: float, frequency_mhz: int | None) -> None:
        self.last_change_s = time_s
        self._on_change(frequency_mhz, time_s)

    def _give_back(self) -> Exception | None:
        """Undo the lock, if there is one, and return what went wrong.

        Never on the calling thread: that is the main thread mostly, which a signal handler that
        raises may take out of the driver's library with the library's locks held, for the next
        reset to wait for. And a driver may hang.
        """
        answer: SimpleQueue[Exception | None] = SimpleQueue()
        self._resets.put(answer)
        until_s = time.monotonic() + _JOIN_S
        while not self._given_back:
            with suppress(Empty):
                return answer.get(timeout=_LOOK_S)
            if time.monotonic() > until_s:
                return GpuError(
                    "A call that changes the clock does not return", value=self._gpu.name
                )
        return None

    def _run_resets(self) -> None:
        problem: Exception | None = None
        while True:
            answer: SimpleQueue[Exception | None] | None = None
            with suppress(Empty):
                # A driver that refused, or a daemon that restarts, is asked again, whatever the
                # rank does meanwhile: it trains on at what may be a low clock.
                answer = self._resets.get(timeout=_RETRY_RESET_S if problem else None)
            with self._driver:
                problem = self._reset()
            self._given_back = problem is None
            if answer is not None:
                answer.put(problem)
            if self._given_back:
                return

    def _reset(self) -> Exception | None:
        try:
            if self._touched:
                self._gpu.reset_frequency()
                self._touched = False
                self._on_change(None, self.last_change_s)
        except Exception as problem:  # a driver may fail in any way
            return problem
        return None


def spread(values_s: Iterable[float]) -> dict[str, float | int]:
    """Median, 99th percentile, maximum and count; only the count if there is nothing."""
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
