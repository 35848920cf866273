"""Completions: the clock controller waits for the device to end a unit. Free of torch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Protocol

#: How often one who waits for the first of two things looks at both, s: a driver takes longer.
_LOOK_S = 1e-3


class Completion(Protocol):
    """Something that becomes true when the device has ended a unit; may be waited for anywhere.

    Both methods must let other Python threads run while they wait (a CUDA event's do).
    """

    def synchronize(self) -> None:
        """Return when it is true."""

    def query(self) -> bool:
        """True if it is true; returns at once."""


class Done:
    """A completion that is true from the start."""

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        """Always true."""
        return True


class Later:
    """True so long after another completion, or as soon as what is set as `begun` is.

    The host's clock counts from when whoever waits has seen that the other one is true.
    """

    def __init__(self, after: Completion, delay_s: float) -> None:
        #: Set by another thread, at most once.
        self.begun: Completion | None = None
        #: Called when it is.
        self.on_begin: Callable[[], None] = lambda: None
        self.delay_s = delay_s
        self._after = after
        self._seen_s: float | None = None

    def begins(self, begun: Completion) -> None:
        """Note that the next unit was handed over; `begun` is true when it has begun."""
        self.begun = begun
        self.on_begin()

    def synchronize(self) -> None:
        """Sleep until it is true; nothing waits for the first of a time and an event of a GPU."""
        self._after.synchronize()
        while not self.query():
            time.sleep(min(_LOOK_S, max(self._left_s(), 0.0)))

    def query(self) -> bool:
        """True if it is true; returns at once."""
        begun = self.begun
        return (begun is not None and begun.query()) or self._left_s() <= 0

    def _left_s(self) -> float:
        if self._seen_s is None:
            if not self._after.query():
                return math.inf
            self._seen_s = time.monotonic()
        return self._seen_s + self.delay_s - time.monotonic()
