"""Starts processes that end in order: those beside a rank, and commands that end with a parent.

Run as a program, this becomes a command that gets SIGTERM when its parent dies, however it dies:

    python -P child.py PARENT COMMAND ...
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
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
    package = str(Path(__file__).resolve().parents[1])
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


def ignore_signals_of_ranks() -> None:
    """Ignore what batch systems send to all of a job's processes, and mean its ranks."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def end_with_parent(parent: int, number: signal.Signals) -> None:
    """Get a signal when the parent ends, or end now if it is gone; only Linux has the signal."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(128 + number)


if __name__ == "__main__":
    end_with_parent(int(sys.argv[1]), signal.SIGTERM)
    os.execvp(sys.argv[2], sys.argv[2:])
