"""Files that training does not wait for, written by one thread of each rank.

`Session` has one `Writer`. Whoever writes while training goes on has an `InTurn` of it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue

logger = logging.getLogger(__name__)

#: What failed is tried again after so long.
_AGAIN_S = 30.0
#: How long the end of a job waits for a disk.
_JOIN_S = 5.0
_LACKING = "The files of this rank are not complete: their disk %s"


class Writer:
    """The thread. It begins with the first call, and ends with `close`."""

    def __init__(self) -> None:
        #: None ends it. Its lock cannot stay taken when a signal handler raises.
        self._ready: SimpleQueue[InTurn | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    def wake(self, calls: InTurn) -> None:
        """Have calls made; returns at once."""
        with self._starting:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="envpipe-writer", daemon=True)
                thread.start()
                self._thread = thread
        self._ready.put(calls)

    def close(self) -> None:
        """Make the calls that wait; a disk that hangs is left behind after some seconds."""
        if self._thread is None:
            return
        self._ready.put(None)
        self._thread.join(_JOIN_S)
        if self._thread.is_alive():
            logger.error(_LACKING, "does not answer")

    def _run(self) -> None:
        failing: dict[InTurn, None] = {}
        again_s, ends = 0.0, False
        while not ends:
            ready = []
            with suppress(Empty):
                wait_s = max(0.0, again_s - time.monotonic()) if failing else None
                woken = self._ready.get(timeout=wait_s)
                ends = woken is None
                ready = [woken] if woken is not None else []
            if ends or time.monotonic() >= again_s:
                ready, again_s = [*failing, *ready], time.monotonic() + _AGAIN_S
            for calls in ready:
                try:
                    calls.make()
                    failing.pop(calls, None)
                except OSError as error:
                    if calls not in failing:
                        said = "%s could not be written, and is tried again. Training goes on: %s"
                        logger.error(said, error.filename, error)
                    failing[calls] = None
        if failing:
            logger.error(_LACKING, "takes nothing")


class InTurn:
    """Calls that write files, made one after the other in the order of `put`.

    One that raises OSError is made again, before those behind it: when another comes, after a
    while, and at the end. Another error is logged, and ends that call.

    Args:
        writer: makes the calls; by default one that ends with `close`.
        most: if so many wait behind the first, those that come are left out and counted.
    """

    def __init__(self, writer: Writer | None = None, most: int | None = None) -> None:
        self._writer = writer or Writer()
        self._shared = writer is not None
        self._most = most
        self._waiting: deque[Callable[[], object]] = deque()
        self.left_out = 0

    def put(self, call: Callable[[], object]) -> None:
        """Have a file written; returns at once."""
        if self._most is not None and len(self._waiting) > self._most:
            self.left_out += 1
            return
        self._waiting.append(call)
        self._writer.wake(self)

    def make(self) -> None:
        """Make the calls that wait; on the writer's thread."""
        while self._waiting:
            try:
                self._waiting[0]()
            except OSError:
                raise
            except Exception as error:  # of facts that JSON has no type for, say
                logger.exception("A file could not be written, training goes on: %s", error)
            self._waiting.popleft()

    def close(self) -> None:
        """Have the writer end, unless it is another's."""
        if not self._shared:
            self._writer.close()
