"""Runs torchrun on one node, and ends it with its ranks. `launch/node.py` bills it besides."""

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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from envpipe_megatron import child
from envpipe_megatron.child import LOOK_S, TORCHRUN_MARK, Signals
from envpipe_megatron.console import say_as_launcher
from envpipe_megatron.launch.options import read, shutdown_s

logger = logging.getLogger(__name__)

#: Starts torchrun. Without -P, Python would look for its modules in this folder first.
TORCHRUN = (sys.executable, "-P", "-m", "torch.distributed.run")
#: Beyond what torchrun gives its ranks. While it waits at the end for nodes that were lost, it
#: handles no signal for minutes.
_PATIENCE_S = 10.0
#: How long ranks may take to end after torchrun was killed, before they are killed too, where it
#: gives them no longer: they may be saving a checkpoint.
_RANKS_END_S = 15.0
#: Meanwhile they may have started others.
_LOOK_AGAIN_S = 0.1


def run_torchrun(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    signals: Signals,
    *,
    take: Callable[[str], object] | None = None,
    log: IO[str] | None = None,
    ranks_s: float | None = None,
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
        take: gets each line of the ranks' standard output, in a thread; what it raises ends them,
            and is raised here.
        log: of their standard error, else this process's.
        ranks_s: how long they get to end, where it is not torchrun's to say.
    """
    mark = uuid.uuid4().hex
    if ranks_s is None:
        ranks_s = shutdown_s(read(arguments))
    process = subprocess.Popen(
        [sys.executable, "-P", child.__file__, str(os.getpid()), *TORCHRUN, *arguments],
        env={**os.environ, **environment, TORCHRUN_MARK: mark},
        stdin=subprocess.DEVNULL if signals.until_stdin_ends else None,
        stdout=subprocess.PIPE if take else None,
        stderr=log,
        text=True,
        start_new_session=True,  # a terminal's Ctrl-C comes here only, and is passed on once
    )
    patience = threading.Timer(ranks_s + _PATIENCE_S, process.kill)
    asked = False
    raised: list[BaseException] = []

    def end() -> None:
        nonlocal asked
        if asked:
            return
        asked = True
        process.send_signal(signals.to_pass_on)
        patience.start()
        say_as_launcher("ending the ranks (once more: kill them)")

    def read_lines(take: Callable[[str], object]) -> None:
        try:
            for line in process.stdout or ():
                take(line)
        except BaseException as error:  # raised again where others can handle it
            raised.append(error)
            end()

    signals.call(end, process.kill)
    reader = threading.Thread(target=read_lines, args=(take,), daemon=True)
    if take:
        reader.start()
    code = None
    while code is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(LOOK_S)
    patience.cancel()
    if asked or code < 0:
        _end_marked(mark, max(_RANKS_END_S, ranks_s))
    if take:
        reader.join(_PATIENCE_S)  # what outlives the ranks may keep the pipe open
    if raised:
        raise raised[0]
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
    """Return processes of this machine that inherited the mark; none without /proc."""
    entry = f"{TORCHRUN_MARK}={mark}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if entry in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found
