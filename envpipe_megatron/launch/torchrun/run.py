"""Runs torchrun, which ends when this process does."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from envpipe_megatron.child import TORCHRUN_MARK
from envpipe_megatron.launch.saying import say
from envpipe_megatron.launch.signals import Signals
from envpipe_megatron.launch.torchrun import child
from envpipe_megatron.launch.torchrun.command_line import TORCHRUN, shutdown_s

logger = logging.getLogger(__name__)

#: Beyond what torchrun gives its ranks. While it waits at the end for nodes that were lost, it
#: handles no signal for minutes.
_PATIENCE_S = 10.0
#: A signal that another thread gets, or that comes just before the wait, does not end the wait.
_LOOK_S = 0.2
#: How long ranks may take to end after torchrun was killed, before they are killed too, where it
#: gives them no longer: they may be saving a checkpoint.
_RANKS_END_S = 15.0
#: Meanwhile they may have started others.
_LOOK_AGAIN_S = 0.1


def run_torchrun(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    signals: Signals,
) -> int:
    """Run torchrun to its end; return its exit status, 128 plus the signal if it was killed.

    The first signal is passed on and ends it with its ranks; a second one, or 10 s more than its
    `--shutdown-timeout`, kills it. On Linux the death of this process ends it, too. Ranks that
    outlive a torchrun that was signalled or killed are ended here: one that is interrupted while it
    starts them leaves them behind.

    Args:
        arguments: torchrun's options, the script and its arguments.
        environment: added to this process's.
        signals: to this process.
    """
    mark, ranks_s = uuid.uuid4().hex, shutdown_s(arguments)
    process = subprocess.Popen(
        [sys.executable, child.__file__, str(os.getpid()), *TORCHRUN, *arguments],
        env={**os.environ, **environment, TORCHRUN_MARK: mark},
        stdin=subprocess.DEVNULL if signals.until_stdin_ends else None,
        start_new_session=True,  # a terminal's Ctrl-C comes here alone, and is passed on once
    )
    patience = threading.Timer(ranks_s + _PATIENCE_S, process.kill)
    asked = False

    def end() -> None:
        nonlocal asked
        asked = True
        process.send_signal(signals.to_pass_on)
        patience.start()
        say("ending the ranks (once more: kill them)")

    signals.call(end, process.kill)
    code = None
    while code is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(_LOOK_S)
    patience.cancel()
    if asked or code < 0:
        _end_marked(mark, max(_RANKS_END_S, ranks_s))
    return code if code >= 0 else 128 - code


def _end_marked(mark: str, grace_s: float) -> None:
    """End what a killed torchrun has started, by SIGTERM and then, after the grace, by SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        end_s = time.monotonic() + grace_s
        signalled: set[int] = set()
        while left := _marked(mark):
            for pid in left:
                if pid not in signalled:
                    signalled.add(pid)
                    logger.warning("Process %d has outlived torchrun: %s", pid, number.name)
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)
            if time.monotonic() >= end_s:
                break
            time.sleep(_LOOK_AGAIN_S)


def _marked(mark: str) -> list[int]:
    """Processes of this machine that have the mark from their parents; none without /proc."""
    entry = f"{TORCHRUN_MARK}={mark}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if entry in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found
