"""Work of the planning rank beside training."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Background(Generic[T]):
    """One piece of work at a time on a thread, which training does not wait for.

    A piece that lasts longer than `limit_s` is given up: it is left behind with the process.
    """

    def __init__(self, limit_s: float = 900.0) -> None:
        self._limit_s = limit_s
        self._until_s = math.inf
        self._thread: threading.Thread | None = None
        self._ended: list[T | Exception] = []

    @property
    def busy(self) -> bool:
        """Whether a piece of work was begun whose result was not taken."""
        return self._thread is not None

    def start(self, make: Callable[[], T]) -> None:
        """Begin; what was begun before and not taken is dropped."""
        ended: list[T | Exception] = []

        def run() -> None:
            try:
                ended.append(make())
            except Exception as error:  # whoever takes the result raises it
                ended.append(error)

        self._ended = ended
        self._until_s = time.monotonic() + self._limit_s
        self._thread = threading.Thread(target=run, name="envpipe-planner", daemon=True)
        self._thread.start()

    def take(self) -> T | None:
        """The result, once; None as long as there is none.

        Raises what the work raised, TimeoutError if it was given up.
        """
        if not self._ended:
            if self.busy and time.monotonic() > self._until_s:
                self._thread, self._ended = None, []
                raise TimeoutError(f"no end in {self._limit_s:g} s")
            return None
        self._thread = None
        result = self._ended.pop()
        if isinstance(result, Exception):
            raise result
        return result
