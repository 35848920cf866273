"""Python processes that a rank has beside it: its GPU's guard, its meter's reader, its planner."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import envpipe_megatron

TORCHRUN_MARK = "ENVPIPE_TORCHRUN"
"""Set for every process that torchrun starts, except these; the launcher finds survivors by it."""


def start_child(
    module: Sequence[str], order: object, pass_fds: Sequence[int] = (), **streams: Any
) -> subprocess.Popen[bytes]:
    """Start a module, with an order as JSON; OSError if that cannot be.

    Args:
        module: as arguments of Python's.
        pass_fds: descriptors that it gets.
        streams: `stdin`, `stdout` and `stderr` of Popen.
    """
    # It finds this package where this process found it.
    package = str(Path(envpipe_megatron.__file__).resolve().parents[1])
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    environment.pop(TORCHRUN_MARK, None)
    return subprocess.Popen(
        [sys.executable, *module, json.dumps(order)],
        pass_fds=pass_fds,
        env=environment,
        start_new_session=True,  # Ctrl-C and the end of a process group do not reach it
        **streams,
    )
