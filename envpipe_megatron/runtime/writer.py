"""Writes files on one thread of a rank: training waits for no disk. `Session` has one `Writer`."""

from __future__ import annotations

import logging
import math
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TypeAlias

logger = logging.getLogger(__name__)

#: What failed is tried again after so long, and the end of a job waits so long for a disk.
_AGAIN_S, _JOIN_S = 30.0, 5.0
_Waiting: TypeAlias = defaultdict[str, deque[Callable[[], object]]]
#: Asks for all that waits to be written, and for an answer on a queue; None ends the thread.
_Ready: TypeAlias = SimpleQueue[SimpleQueue[None] | None]
_LACKING = "The files of this rank are not complete: their disk %s"


class Writer:
    """Makes calls that write files, those of one key in their order.

    One that raises OSError is made again, before those after it: with the next of its key, after a
    while, and in `close`. Another error is logged, and ends that call.
    """

    def __init__(self) -> None:
        self._waiting: _Waiting = defaultdict(deque)
        #: Its lock cannot stay taken when a signal handler raises.
        self._ready: _Ready = SimpleQueue()
        self._hangs = False
        self._thread = threading.Thread(
            target=_write, args=(self._waiting, self._ready), name="envpipe-writer", daemon=True
        )
        with suppress(RuntimeError):  # the interpreter is ending, or threads are used up
            self._thread.start()  # here: a handler that raises from it leaves a thread that waits
        weakref.finalize(self, self._ready.put, None).atexit = False

    def put(self, key: str, call: Callable[[], object], most: float = math.inf) -> None:
        """Have a file written; returns at once. Left out if as many as `most` of its key wait."""
        calls = self._waiting[key]
        if len(calls) >= most:
            return
        calls.append(call)
        if len(calls) == most:
            logger.warning("A disk is slow: of %s, what follows is left out until it writes", key)
        self._ready.put(SimpleQueue())

    def close(self) -> None:
        """Make all calls that wait; a disk that hangs is waited for once, and left behind.

        Later calls are made, too.
        """
        if self._hangs:
            return
        written: SimpleQueue[None] = SimpleQueue()
        self._ready.put(written)
        if self._thread.ident is None:  # it could not be started
            self._ready.put(None)
            _write(self._waiting, self._ready)
        with suppress(Empty):
            written.get(timeout=_JOIN_S)
            if any(self._waiting.values()):
                logger.error(_LACKING, "takes nothing")
            return
        self._hangs = True
        logger.error(_LACKING, "does not answer")


def _write(waiting: _Waiting, ready: _Ready) -> None:
    failing: set[str] = set()
    while True:
        answer: SimpleQueue[None] | None = SimpleQueue()
        with suppress(Empty):  # what failed is tried again, if nothing follows
            answer = ready.get(timeout=_AGAIN_S if failing else None)
        if answer is None:
            return
        for key in list(waiting):
            _make(waiting, key, failing)
        answer.put(None)


def _make(waiting: _Waiting, key: str, failing: set[str]) -> None:
    """Make the calls of a key; it is among `failing` after one that is to be made again."""
    calls = waiting[key]
    try:
        while calls:
            try:
                calls[0]()
            except OSError:
                raise
            except Exception:  # of facts that JSON has no type for, say
                logger.exception("A file could not be written, training goes on")
            calls.popleft()
        failing.discard(key)
    except OSError as error:
        if key not in failing:
            said = "%s could not be written, and is tried again. Training goes on: %s"
            logger.error(said, error.filename or key, error)
        failing.add(key)
