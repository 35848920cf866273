"""Ranks of one machine under torchrun: whatever ends them, none runs on and clocks are reset."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from envpipe_megatron.gpu.emulated.emulated_gpu import reset_all
from envpipe_megatron.gpu.emulated.store import ROOT_VARIABLE
from envpipe_megatron.quickstart.settings import QuickstartError

#: What starts a line of a rank's standard output that is meant for the command.
EVENT_MARK = "@envpipe "
#: How long ranks get to give their clocks back before they are killed.
GRACE_S = 15.0


def rank_environment(emulated: Path) -> dict[str, str]:
    """This process's environment, for ranks whose emulated GPUs live in a folder."""
    environment = {
        **os.environ,
        ROOT_VARIABLE: str(emulated.resolve()),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        # Nothing is compiled: importing the compiler takes each rank three seconds.
        "TORCHDYNAMO_DISABLE": "1",
    }
    # Peers are on this machine; gloo would look up its name otherwise, which may not resolve.
    loopback = {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}  # Linux, macOS
    if loopback:
        environment.setdefault("GLOO_SOCKET_IFNAME", loopback.pop())
    return environment


def torchrun_command(num_ranks: int, program: Sequence[str]) -> list[str]:
    """Command that starts ranks of a script, or of `--module` and a module, with arguments."""
    return [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1",
        "--nproc-per-node", str(num_ranks), *program,
    ]  # fmt: skip


@contextlib.contextmanager
def running_ranks(
    num_ranks: int,
    program: Sequence[str],
    environment: Mapping[str, str],
    log_path: Path,
    emulated: Path,
) -> Iterator[Iterator[dict[str, Any]]]:
    """Run ranks of a program, and give what they tell; when left, none runs, clocks are reset.

    SIGTERM and SIGHUP end this like Ctrl-C. QuickstartError if a rank failed.
    """
    rank_pids: list[int] = []

    def events() -> Iterator[dict[str, Any]]:
        for event in events_of(ranks, log):
            if event["event"] == "rank":
                rank_pids.append(event["pid"])
            else:
                yield event

    with (
        ended_like_ctrl_c(signal.SIGTERM, signal.SIGHUP),
        log_path.open("w") as log,
        started_ranks(
            torchrun_command(num_ranks, program), environment, log, emulated, rank_pids
        ) as ranks,
    ):
        yield events()
        code = ranks.wait()
    if code != 0:
        raise QuickstartError(
            f"A rank failed (exit code {code}); clocks are reset",
            remedy=f"The first error is in {log_path}.",
        )


@contextlib.contextmanager
def started_ranks(
    command: list[str],
    environment: Mapping[str, str],
    log: IO[str],
    emulated: Path,
    rank_pids: Iterable[int],
) -> Iterator[subprocess.Popen[str]]:
    """The ranks under torchrun; when left, none runs any more and all clocks are reset."""
    # Its own session: Ctrl-C reaches this process alone, which then stops the ranks in order.
    ranks = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        start_new_session=True,
    )
    try:
        yield ranks
    finally:
        try:
            _stop(ranks, rank_pids)
        finally:
            if ranks.stdout:
                ranks.stdout.close()  # a rank that is only starting ends when it wants to speak
            reset_all(emulated)  # also what a rank that was killed left behind


def events_of(ranks: subprocess.Popen[str], log: IO[str]) -> Iterator[dict[str, Any]]:
    """Yield what the ranks report, until all have ended; other lines of theirs go to the log."""
    assert ranks.stdout is not None
    for line in ranks.stdout:
        if line.startswith(EVENT_MARK):
            yield json.loads(line[len(EVENT_MARK) :])
        else:
            log.write(line)


def emit(turn: Path, event: str, **fields: Any) -> None:
    """Tell the command something, from a rank; all can open `turn`, for their turns to speak."""
    line = EVENT_MARK + json.dumps({"event": event, **fields}) + "\n"
    # One rank at a time: what is longer than a pipe takes at once would mix with others' lines.
    with turn.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        sys.stdout.write(line)
        sys.stdout.flush()


@contextlib.contextmanager
def ended_like_ctrl_c(*signals: signal.Signals) -> Iterator[None]:
    """Let signals that would end this process at once interrupt it, so that it cleans up."""

    def interrupt(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    # What somebody ignores (nohup) stays ignored.
    handled = [s for s in signals if signal.getsignal(s) is signal.SIG_DFL]
    for number in handled:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, signal.SIG_DFL)


def leave_on_sigterm() -> None:
    """Let a rank that is stopped leave through its `finally` blocks, which give clocks back."""

    def leave(signum: int, frame: object) -> None:
        raise SystemExit(128 + signum)

    signal.signal(signal.SIGTERM, leave)


def _stop(ranks: subprocess.Popen[str], rank_pids: Iterable[int]) -> None:
    if ranks.poll() is not None:
        return
    ranks.terminate()  # torchrun passes it on to the ranks, which give their clocks back
    try:
        ranks.wait(GRACE_S)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):  # a second Ctrl-C is impatience
        ranks.kill()
        for pid in rank_pids:  # torchrun cannot take them along any more
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        ranks.wait()
