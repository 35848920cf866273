"""The thread that sets a GPU's clock for each unit.

The clock of a unit is requested when the GPU has finished the stage's previous unit, not when
Python enqueues anything: a change that takes milliseconds then falls into the wait before the unit,
where there is one, and the wait runs at the clock of the unit that follows.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque

from envpipe_megatron.gpu.base import Gpu
from envpipe_megatron.runtime.completion import Completion

logger = logging.getLogger(__name__)

#: How long `close` waits for the thread, which may be waiting for a GPU that hangs.
_JOIN_S = 2.0


class ClockController:
    """Applies requests in order, each when its completion is true; skips what changes nothing.

    If the thread falls behind, only the latest request that is due is applied. The training thread
    never waits for the GPU's driver. A failing driver stops the control, not the training; the
    error is kept and the clock is left to `close`.

    Args:
        gpu: whose clock is set.
        min_dwell_s: least time between two changes, on the GPU's time base; a request that comes
            earlier is applied when the time is over, unless a later one has replaced it.
    """

    def __init__(self, gpu: Gpu, min_dwell_s: float = 0.0) -> None:
        self._gpu = gpu
        self._min_dwell_s = min_dwell_s
        self._changed = threading.Condition()
        #: Held while the driver is called: nothing is locked after `close` has reset the clock.
        self._driver = threading.Lock()
        self._touched = False
        self._requests: deque[tuple[Completion, int]] = deque()
        self._busy = False
        self._closing = False
        self._held_back_mhz: int | None = None
        self._current_mhz: int | None = None
        self._last_change_s = float("-inf")
        self.changes = 0
        self.coalesced = 0
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="envpipe-clock", daemon=True)
        self._thread.start()

    def request(self, frequency_mhz: int, after: Completion) -> None:
        """Set the clock once the GPU has finished what `after` stands for; returns at once."""
        with self._changed:
            if self.error is None:
                self._requests.append((after, frequency_mhz))
                self._changed.notify_all()

    def wait_idle(self) -> None:
        """Return when every request made so far has been applied, held back, or given up."""
        with self._changed:
            self._changed.wait_for(
                lambda: self.error is not None or (not self._requests and not self._busy)
            )

    def close(self) -> None:
        """Stop the thread and undo its lock, if it ever set one.

        The reset does not wait for a GPU that never finishes a unit. If the driver refuses it, that
        is logged and kept in `error`, so that an error on the way here is not hidden by it.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(_JOIN_S)
        with self._driver:
            if not self._touched:
                return
            try:
                self._gpu.reset_frequency()
            except Exception as error:  # a driver may fail in any way
                self.error = error
                logger.error("The clock of %s could not be reset: %s", self._gpu.name, error)

    def _run(self) -> None:
        while True:
            try:
                # Not under the lock, which `request` needs: the time may come from the driver.
                dwell_left_s = self._dwell_left_s()
                with self._changed:
                    self._changed.wait_for(
                        lambda: self._requests or self._closing, timeout=dwell_left_s
                    )
                    if self._closing:
                        return
                    taken = self._requests.popleft() if self._requests else None
                    self._busy = True
                if taken is not None:
                    taken[0].synchronize()
                    self._held_back_mhz = taken[1]
                if not self._next_is_due():
                    self._apply_if_dwelt()
            except Exception as error:  # a driver may fail in any way; training must go on
                self.error = error
                logger.error("Clock control stops, training goes on: %s", error)
                # The last clock may be a low one, which would slow the whole pipeline.
                with contextlib.suppress(Exception):
                    self._gpu.reset_frequency()
                return
            finally:
                with self._changed:
                    self._busy = False
                    self._changed.notify_all()

    def _next_is_due(self) -> bool:
        """Whether a newer request has come due while this one waited: then this one is stale."""
        with self._changed:
            due = bool(self._requests) and self._requests[0][0].query()
        self.coalesced += due
        return due

    def _apply_if_dwelt(self) -> None:
        target = self._held_back_mhz
        if target is None or target == self._current_mhz:
            self._held_back_mhz = None
            return
        now_s = self._gpu.time_s()
        if now_s - self._last_change_s < self._min_dwell_s:
            return
        with self._driver:
            if self._closing:
                return
            self._touched = True
            self._gpu.lock_frequency(target)
        self._held_back_mhz = None
        self._current_mhz = target
        self._last_change_s = now_s
        self.changes += 1

    def _dwell_left_s(self) -> float | None:
        if self._held_back_mhz is None:
            return None
        return max(0.0, self._last_change_s + self._min_dwell_s - self._gpu.time_s())
