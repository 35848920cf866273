"""JSON Lines that the ranks of a job append to, in its output folder."""

from __future__ import annotations

import logging
import re
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from envpipe_megatron.formats.energy import append_line
from envpipe_megatron.runtime.channel.collectives import Collectives

logger = logging.getLogger(__name__)


class NodeFiles:
    """The files of this rank's node: `energy.jsonl`, or `energy-<node>.jsonl` of several nodes.

    Ranks of one node may append to one file; nodes that do lose each other's lines on NFS. Every
    rank of the job makes one, together.

    Args:
        folder: the job's output folder, None where it has none.
        collectives: to all ranks.
    """

    def __init__(self, folder: Path | None, collectives: Collectives) -> None:
        self.node = socket.gethostname()
        alike = collectives.on_all(self.node == collectives.from_planner(self.node))
        name = re.sub(r"[^\w.-]", "_", self.node)
        self._of_node = "" if alike else f"-{name}"
        self._folder = folder

    def appender(self, name: str) -> Callable[[dict[str, Any]], None] | None:
        """What appends an object to the file that is called so; None where there is no folder."""
        return partial(append_line, self._path(name)) if self._folder else None

    def append(self, name: str, entry: dict[str, Any]) -> None:
        """Append an object; a full disk ends no training."""
        append = self.appender(name)
        if append is None:
            return
        try:
            append(entry)
        except OSError as error:
            logger.error("%s could not be written: %s", error.filename, error)

    def _path(self, name: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{name}{self._of_node}.jsonl"
