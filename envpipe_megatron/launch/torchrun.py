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

import click

from envpipe_megatron.gpu.process_identity import ProcessIdentity, wait_for_any_end
from envpipe_megatron.launch import child

logger = logging.getLogger(__name__)

#: torchrun gives its ranks 30 s. Where it waits for other nodes that have ended otherwise than it,
#: at the end, it hears no signal for minutes.
_PATIENCE_S = 40.0
#: How long ranks may take to end after a torchrun that was killed, before they are killed.
_RANKS_END_S = 15.0
#: Meanwhile they may have started others.
_LOOK_AGAIN_S = 1.0
#: In the environment of all that a torchrun starts: what it is known by.
_MARK_VARIABLE = "ENVPIPE_TORCHRUN"


def run_torchrun(
    arguments: Sequence[str],
    environment: Mapping[str, str] | None = None,
    *,
    until_stdin_ends: bool = False,
) -> int:
    """Run torchrun to its end.

    SIGTERM, SIGINT and SIGHUP end it, which ends its ranks; a second one, or 40 s, kills it. On
    Linux the death of this process ends it, too, and ranks that outlive a torchrun that was killed
    are ended here, however far they have got.

    Args:
        arguments: torchrun's options, the script and its arguments.
        environment: added to this process's.
        until_stdin_ends: end it when standard input ends.

    Returns:
        its exit status, 128 and the signal where it was killed.
    """
    torchrun = [sys.executable, "-m", "torch.distributed.run", *arguments]
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        [sys.executable, child.__file__, str(os.getpid()), *torchrun],
        env={**os.environ, **(environment or {}), _MARK_VARIABLE: mark},
        stdin=subprocess.DEVNULL if until_stdin_ends else None,
        start_new_session=True,  # a terminal's Ctrl-C comes here alone, and is passed on once
    )
    signals_taken = 0
    patience = threading.Timer(_PATIENCE_S, process.kill)
    patience.daemon = True

    def pass_on(signum: int, frame: object) -> None:
        nonlocal signals_taken
        signals_taken += 1
        if signals_taken == 1:
            click.echo("[envpipe] ending the ranks (once more: kill them)", err=True)
            process.terminate()
            patience.start()
        else:
            process.kill()

    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {
        number: signal.signal(number, pass_on)
        for number in numbers
        if signal.getsignal(number) is not signal.SIG_IGN  # nohup
    }
    if until_stdin_ends:
        threading.Thread(target=_end_with_stdin, daemon=True).start()
    try:
        code = process.wait()
    finally:
        patience.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)
    if code < 0:
        _end_marked(mark)
    return code if code >= 0 else 128 - code


def _end_marked(mark: str) -> None:
    """End all that a torchrun that was killed has started, in order where that is possible."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        end_s = time.monotonic() + _RANKS_END_S
        told: set[int] = set()
        while left := _marked(mark):
            for process in left:
                if process.pid not in told:
                    told.add(process.pid)
                    logger.warning("Process %d has outlived torchrun: %s", process.pid, number.name)
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process.pid, number)
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                break
            wait_for_any_end(left, min(left_s, _LOOK_AGAIN_S))


def _marked(mark: str) -> list[ProcessIdentity]:
    """Processes of this machine that have the mark from their parents; none where /proc is none."""
    entry = f"{_MARK_VARIABLE}={mark}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if entry in (folder / "environ").read_bytes().split(b"\0"):
                process = ProcessIdentity.of(int(folder.name))
                found += [process] if process is not None and process.is_alive() else []
    return found


def _end_with_stdin() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
