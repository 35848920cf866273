"""The energy log of one node, which its agent alone writes."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.formats.energy import BEGUN, ENDED, NOTE_FORMAT, append_line


class NodeLog:
    """`energy-<node>.jsonl`, appended to; an earlier start's lines stay, and its bill goes on.

    One that is deleted or renamed meanwhile is written on under no name, or its new one.

    Attributes:
        grown: called after each line.
        goes_on: whether an earlier start has written it, too.
        identity: tells this file from another of a node of the same name; its first note keeps it.
        earlier_bytes: what earlier starts have written.

    Raises EnvPipeError if another agent writes it, OSError if it cannot be written.
    """

    def __init__(self, folder: Path, node: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.node = node
        self.grown: Callable[[], None] = lambda: None
        self.path = log_path(folder, node)
        self._lock = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._lock)
            raise EnvPipeError(
                "Another agent writes this energy log",
                value=str(self.path),
                remedy="Give each job an --output of its own, and each agent of one machine a "
                "--node-name of its own.",
            ) from error
        except OSError:  # a file system without locks
            pass
        try:
            earlier = self._earlier_identity()
            self.goes_on = earlier is not None
            self.identity = earlier or uuid.uuid4().hex
            self.earlier_bytes = self.size
            self.note(BEGUN, log=self.identity)
        except OSError:
            os.close(self._lock)
            raise

    @property
    def size(self) -> int:
        """Bytes that are written."""
        return self._file.stat().st_size

    def append(self, line: dict[str, Any]) -> None:
        """Append a line with the node's name, or raise OSError: the disk is full, say."""
        try:
            append_line(self._file, {**line, "node": self.node})
        except OSError as error:
            error.filename = str(self.path)
            raise
        self.grown()

    def note(self, note: str, **fields: Any) -> None:
        """Append a note; see `formats.energy`.

        Each has the time, so that none is one of an earlier start given twice.
        """
        now = datetime.now(UTC).isoformat()
        self.append({"format": NOTE_FORMAT, "note": note, "time": now, **fields})

    def end(self, exit_code: int) -> None:
        """Append the last line: the bill of this node is complete."""
        self.note(ENDED, exit_code=exit_code)

    def read(self, offset: int, most_bytes: int) -> bytes:
        """Whole lines from an offset on; none if there are none yet."""
        with self._file.open("rb") as file:
            file.seek(offset)
            data = file.read(most_bytes)
        return data[: data.rfind(b"\n") + 1]

    @property
    def _file(self) -> Path:
        """What was opened, whatever becomes of its name: the job's bill needs all of it."""
        return Path(f"/proc/self/fd/{self._lock}") if self._lock >= 0 else self.path

    def _earlier_identity(self) -> str | None:
        with self._file.open("rb") as file:
            for line in file:  # the first may be torn
                with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
                    return str(json.loads(line)["log"])
        return None

    def close(self) -> None:
        """Let others write it; safe to call twice."""
        lock, self._lock = self._lock, -1  # the number may be another file's by then
        with contextlib.suppress(OSError):
            os.close(lock)


def log_path(folder: Path, node: str) -> Path:
    """Where the log of a node is."""
    name = re.sub(r"[^\w.-]", "_", node)
    return folder / f"energy-{name}.jsonl"
