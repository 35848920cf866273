"""The rank's end of its clock: requests are words that rank, stream and guard share.

A request that wakes a thread of this process hands Python's lock over and gets it back, and where
the host has no lead over the GPU, each unit is that much longer. Here a request is a store, and a
word that the stream counts up behind the unit before. Where units run on no stream they have ended
when their Python has, and the host counts.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from envpipe_megatron.gpu.base import Gpu, GpuError
from envpipe_megatron.gpu.clock.controller import spread
from envpipe_megatron.gpu.clock.page import BEGUN, DUE, ClockPage
from envpipe_megatron.runtime.channel.cuda_device import counter_in_stream
from envpipe_megatron.runtime.execution.executor import Later

logger = logging.getLogger(__name__)

#: How often one who waits for the guard looks, and how long at most at the end, s.
_LOOK_S, _LAST_ANSWER_S = 2e-4, 2.0

#: What streams may still write to, whatever has ended here.
_pages: list[ClockPage] = []

#: Has a word (its offset in a page) count to a number behind all that the device holds by now.
Count = Callable[[int, int], None]


def count_by_stream(page: ClockPage) -> Count:
    """Have the current stream count; GpuError if it cannot."""
    try:
        count = counter_in_stream(page)
        _pages.append(page)
        count(DUE, 0)
        torch.cuda.current_stream().synchronize()
    except RuntimeError as refused:
        raise GpuError(
            f"A stream of this GPU can mark no unit: {refused}",
            remedy="Clocks stay at their default. A newer driver can",
        ) from refused
    return count


class ServedClock:
    """Asks for clocks by a page.

    Args:
        count: counts by the current stream, or at once.
        look: called again and again by those who wait for an answer.
        waits: whether requests wait for units that an executor has timed; else for what the stream
            holds.
    """

    def __init__(
        self,
        gpu: Gpu,
        page: ClockPage,
        count: Count,
        look: Callable[[], object] = lambda: time.sleep(_LOOK_S),
        *,
        waits: bool = True,
    ) -> None:
        self.page = page
        self.waits = waits
        #: Whether clocks are asked for at each request, even if it is for the same one.
        self.repeats = False
        self._gpu, self._count, self._look = gpu, count, look
        self._asked_mhz: int | None = None
        self._error: Exception | None = None
        self._pid = os.getpid()

    def request(self, frequency_mhz: int, later: Later | None = None) -> None:
        """Set the clock once the GPU has come to here, or as `later` says; returns at once.

        Here is behind all that the current stream holds. Called by one thread.
        """
        # Whether the guard has failed is seen by whoever asks for `error`, in each iteration.
        if (frequency_mhz == self._asked_mhz and not self.repeats) or self._error is not None:
            return
        self._asked_mhz = frequency_mhz
        number = self.page.ask(frequency_mhz, later.delay_s if later else 0.0)
        if number is None:
            self.stop(GpuError("The guard takes no requests", remedy="See its log"))
            return
        self._mark(DUE, number)
        if later is not None:
            later.on_begin = partial(self._mark, BEGUN, number)

    def stop(self, error: Exception) -> None:
        """Give up control for this reason: nothing is locked any more, and the guard resets."""
        if os.getpid() != self._pid:
            return
        self.page.end()
        if self.error is None:
            self._error = error
            logger.error("Clock control of %s stops, training goes on: %s", self._gpu.name, error)

    def wait_idle(self) -> None:
        """Return when every request made so far has been applied, held back, or given up."""
        self._wait_idle(math.inf)

    def close(self) -> None:
        """No clock is locked from here on; the guard resets it when it is released.

        A GPU that does not come to its last request, and a guard that hangs, are left after a
        while. Safe to call twice. In a forked child nothing happens.
        """
        if os.getpid() == self._pid:
            self._wait_idle(_LAST_ANSWER_S)
            self.page.end()

    @property
    def error(self) -> Exception | None:
        """Why no clock is set any more, as the rank or the guard knows it."""
        if self._error is None and (failure := self.page.failure) is not None:
            self._error = GpuError(failure)
            logger.error(
                "Clock control of %s stopped, training goes on: %s", self._gpu.name, self._error
            )
        return self._error

    @error.setter
    def error(self, error: Exception | None) -> None:
        self._error = error

    def summary(self) -> dict[str, Any]:
        """Return how many changes were made and how fast, as `PageController` says, and `error`.

        While the job runs, it is as of the call before. A guard whose rank was silent counts from 0
        again.
        """
        if not self.page.is_over:
            self.page.ask(0)
        said: dict[str, Any] = {}
        with suppress(ValueError):  # the guard has said nothing, or just says it
            said = json.loads(self.page.summary)
        none = spread(())
        return {
            "changes": 0,
            "coalesced": 0,
            "wake_to_lock_s": none,
            "lock_call_s": none,
            **said,
            "error": None if self.error is None else str(self.error),
        }

    def _wait_idle(self, limit_s: float) -> None:
        question = self.page.ask(0)  # none where too many wait, which nobody serves
        until_s = time.monotonic() + limit_s
        while question is not None and self.error is None and not self.page.is_over:
            if self.page.is_answered(question) or time.monotonic() >= until_s:
                return
            self._look()

    def _mark(self, where: int, number: int) -> None:
        try:
            self._count(where, number)
        except RuntimeError as refused:
            self.stop(GpuError(f"A stream can mark no unit: {refused}"))
