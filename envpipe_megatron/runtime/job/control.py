"""Reads what an operator asks of a running job, on the planning rank; `iterations` asks it.

A disk that hangs holds up a thread that nobody waits for.
"""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from envpipe_megatron.files import read_text
from envpipe_megatron.tuning.wishes import CONTROL_FILE, Wishes, parse_wishes

logger = logging.getLogger(__name__)

#: How often it is read, s.
_LOOK_S = 1.0


class ControlFile:
    """Reads a job's control file every second, on a thread of its own, from now until `close`.

    A file that is broken, or cannot be read, is logged once, and what was asked before stays.

    Args:
        folder: the job's.
        without: what is asked for while there is no file.
        reads: whether this is the rank that reads it.

    Attributes:
        wishes: what is asked for by now.
    """

    def __init__(self, folder: Path, without: Wishes, *, reads: bool = True) -> None:
        self.wishes = self._without = without
        self.path = folder.absolute() / CONTROL_FILE
        self._failure = ""
        self._stop: SimpleQueue[None] = SimpleQueue()
        thread = threading.Thread(target=self._run, name="envpipe-control", daemon=True)
        with suppress(RuntimeError):  # threads are used up: nobody is heard
            if reads:
                thread.start()

    def about(self) -> dict[str, Any]:
        """Return what the node's agent needs, to ask in an operator's name."""
        return {"file": str(self.path), "asked": self._without.to_json()}

    def close(self) -> None:
        """Read it no more; a disk that hangs is left behind."""
        self._stop.put(None)

    def _run(self) -> None:
        while True:
            self._look()
            with suppress(Empty):
                self._stop.get(timeout=_LOOK_S)
                return

    def _look(self) -> None:
        failure = ""
        try:
            self.wishes = parse_wishes(read_text(self.path), self.path)
        except FileNotFoundError:
            self.wishes = self._without
        except Exception as error:  # a disk or a text may be bad in any way
            failure = str(error)
            if failure != self._failure:
                logger.error("What was asked before is kept, training goes on: %s", failure)
        self._failure = failure
