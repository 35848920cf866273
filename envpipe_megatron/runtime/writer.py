"""Writes files on one thread of a rank: training waits for no disk. `Session` has one `Writer`."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue

logger = logging.getLogger(__name__)

#: What failed is tried again after so long, and the end of a job waits so long for a disk.
_AGAIN_S, _JOIN_S = 30.0, 5.0
_LACKING = "The files of this rank are not complete: their disk %s"


class Writer:
    """Makes calls that write files, those of one key in their order.

    One that raises OSError is made again, before those behind it: with the next of its key, after a
    while, and in `close`. Another error is logged, and ends that call.
    """

    def __init__(self) -> None:
        self._waiting: defaultdict[str, deque[Callable[[], object]]] = defaultdict(deque)
        #: Keys; None ends the thread. Its lock cannot stay taken when a signal handler raises.
        self._ready: SimpleQueue[str | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.RLock()  # a signal handler may close
        self._hangs = False

    def put(self, key: str, call: Callable[[], object]) -> None:
        """Have a file written; returns at once."""
        self._waiting[key].append(call)
        self._ready.put(key)
        with self._starting:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="envpipe-writer", daemon=True)
                with suppress(RuntimeError):  # the interpreter is ending, or threads are used up
                    thread.start()
                    self._thread = thread

    def num_waiting(self, key: str) -> int:
        """How many calls of a key have not ended."""
        return len(self._waiting[key])

    def close(self) -> None:
        """Make all calls that wait; a disk that hangs is waited for once, and left behind."""
        if self._hangs:
            return
        self._ready.put(None)
        if self._thread is None:
            self._run()
            return
        self._thread.join(_JOIN_S)
        self._hangs = self._thread.is_alive()
        if self._hangs:
            logger.error(_LACKING, "does not answer")
        else:
            self._thread = None  # the next call has another

    def _run(self) -> None:
        failing: set[str] = set()
        key: str | None = ""
        while key is not None:
            with suppress(Empty):  # what failed is tried again all the same
                key = self._ready.get(timeout=_AGAIN_S if failing else None)
            for each in failing | {key or ""}:
                try:
                    self._make(self._waiting[each])
                    failing.discard(each)
                except OSError as error:
                    if each not in failing:
                        said = "%s could not be written, and is tried again. Training goes on: %s"
                        logger.error(said, error.filename, error)
                    failing.add(each)
        if failing:
            logger.error(_LACKING, "takes nothing")

    @staticmethod
    def _make(calls: deque[Callable[[], object]]) -> None:
        while calls:
            try:
                calls[0]()
            except OSError:
                raise
            except Exception:  # of facts that JSON has no type for, say
                logger.exception("A file could not be written, training goes on")
            calls.popleft()
