"""Reads what an operator asks of a running job, on the planning rank; `iterations.Switch` asks."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from envpipe_megatron.files import read_text
from envpipe_megatron.formats.wishes import CONTROL_FILE, Wishes, parse_wishes

logger = logging.getLogger(__name__)

#: How often it is read, s.
_LOOK_S = 1.0


class ControlFile:
    """Reads a job's control file every second until `close`, on a thread: nobody waits for a disk.

    What it asks for is logged as it changes: a job that starts again may find what was asked of an
    earlier one. A file that is broken, or cannot be read, is logged once, and changes nothing.

    Args:
        folder: the job's.
        without: what is asked for while there is no file.
    """

    def __init__(self, folder: Path, without: Wishes) -> None:
        self.wishes = self._without = without
        self.path = folder / CONTROL_FILE
        with suppress(OSError):  # the working folder is gone
            self.path = self.path.absolute()
        self._failure, self._over = "", False
        with suppress(RuntimeError):  # threads are used up: nobody is heard
            threading.Thread(target=self._run, name="envpipe-control", daemon=True).start()

    def about(self) -> dict[str, Any]:
        """Return what the node's agent needs, to ask in an operator's name."""
        return {"file": str(self.path), "asked": self._without.to_json()}

    def close(self) -> None:
        """Read it no more; returns at once."""
        self._over = True

    def _run(self) -> None:
        while not self._over:
            self._look()
            time.sleep(_LOOK_S)

    def _look(self) -> None:
        wishes, failure = self.wishes, ""
        try:
            wishes = parse_wishes(read_text(self.path), self.path)
        except FileNotFoundError:
            wishes = self._without
        except Exception as error:  # a disk or a text may be bad in any way
            failure = str(error)
            if failure != self._failure:
                logger.error("What was asked before is kept, training goes on: %s", failure)
        if wishes != self.wishes:
            logger.warning("Asked for from now on, by %s: %s", self.path, wishes.to_json())
        self.wishes, self._failure = wishes, failure
