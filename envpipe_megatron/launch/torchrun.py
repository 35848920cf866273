"""Runs torchrun, which ends when this process does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence

import click

from envpipe_megatron.launch import child

#: torchrun gives its ranks 30 s. Where it waits for other nodes that have ended otherwise than it,
#: at the end, it hears no signal for minutes.
_PATIENCE_S = 40.0


def run_torchrun(
    arguments: Sequence[str],
    environment: Mapping[str, str] | None = None,
    *,
    until_stdin_ends: bool = False,
) -> int:
    """Run torchrun to its end.

    SIGTERM, SIGINT and SIGHUP end it, which ends its ranks; a second one, or 40 s, kills it. On
    Linux the death of this process ends it, too.

    Args:
        arguments: torchrun's options, the script and its arguments.
        environment: added to this process's.
        until_stdin_ends: end it when standard input ends.

    Returns:
        its exit status, 128 and the signal where it was killed.
    """
    torchrun = [sys.executable, "-m", "torch.distributed.run", *arguments]
    process = subprocess.Popen(
        [sys.executable, child.__file__, str(os.getpid()), *torchrun],
        env={**os.environ, **(environment or {})},
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
    return code if code >= 0 else 128 - code


def _end_with_stdin() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
