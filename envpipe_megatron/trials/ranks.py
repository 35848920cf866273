"""Ranks of one machine under torchrun: however they end, none runs on and clocks are reset.

A command runs `running_ranks`; each rank calls `report_to_command`, then `emit`.
"""

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
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any, NoReturn

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.gpu.emulated.emulated_gpu import reset_all
from envpipe_megatron.gpu.emulated.store import ROOT_VARIABLE
from envpipe_megatron.launch.signals import handled

#: Starts a line of a rank's standard output that is meant for the command.
EVENT_MARK = "@envpipe "
#: How long ranks get to give their clocks back before they are killed.
GRACE_S = 15.0


def rank_environment(emulated: Path) -> dict[str, str]:
    """Return this process's environment, for ranks whose emulated GPUs are in a folder."""
    environment = {
        **os.environ,
        ROOT_VARIABLE: str(emulated.resolve()),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        # Nothing is compiled: importing the compiler takes each rank three seconds.
        "TORCHDYNAMO_DISABLE": "1",
    }
    # What torch needs for matrix products that give the same bits each time.
    environment.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Peers are on this machine; gloo would look up its name otherwise, which may not resolve.
    loopback = {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}  # Linux, macOS
    if loopback:
        environment.setdefault("GLOO_SOCKET_IFNAME", loopback.pop())
    return environment


def torchrun_command(num_ranks: int, program: Sequence[str]) -> list[str]:
    """Return the command that starts ranks of a script, or of `--module` and a module."""
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
    """Run ranks of a program, and give what they report; when left, none runs, clocks are reset.

    SIGTERM and SIGHUP end this like Ctrl-C. EnvPipeError if a rank failed.

    Args:
        num_ranks: all on this machine.
        program: as `torchrun_command` takes it. Each rank calls `report_to_command` first.
        environment: the ranks'.
        log_path: file of all that they print beside their reports.
        emulated: folder of their emulated GPUs.
    """
    rank_pids: list[int] = []
    with ended_like_ctrl_c(), log_path.open("w") as log:
        # Its own session: only this process gets Ctrl-C, and stops the ranks in order.
        ranks = subprocess.Popen(
            torchrun_command(num_ranks, program),
            env=environment,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )
        assert ranks.stdout is not None
        try:
            yield _events(ranks.stdout, log, rank_pids)
            code = ranks.wait()
        finally:
            try:
                _stop(ranks, rank_pids)
            finally:
                ranks.stdout.close()  # a rank that is only starting ends when it wants to speak
                reset_all(emulated)  # also what a rank that was killed left behind
    if code != 0:
        raise EnvPipeError(
            f"A rank failed (exit code {code}); clocks are reset",
            remedy=f"The first error is in {log_path}.",
        )


def _events(lines: IO[str], log: IO[str], rank_pids: list[int]) -> Iterator[dict[str, Any]]:
    """Yield what ranks report, until all have ended; note their processes, and log other lines."""
    for line in lines:
        if not line.startswith(EVENT_MARK):
            log.write(line)
            continue
        event = json.loads(line[len(EVENT_MARK) :])
        if event["event"] == "rank":
            rank_pids.append(event["pid"])
        else:
            yield event


def emit(event: str, **fields: Any) -> None:
    """Report an event to the command, from a rank."""
    line = EVENT_MARK + json.dumps({"event": event, **fields}) + "\n"
    # One rank at a time: what is longer than a pipe takes at once would mix with others' lines.
    # All ranks can open the file that their program is called with.
    with Path(sys.argv[1]).open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        sys.stdout.write(line)
        sys.stdout.flush()


def ended_like_ctrl_c() -> AbstractContextManager[None]:
    """Let SIGTERM and SIGHUP, which would end this process at once, interrupt it: it cleans up."""

    def interrupt(_: signal.Signals) -> NoReturn:
        raise KeyboardInterrupt

    return handled(interrupt)


def report_to_command() -> None:
    """Let the command end this rank, which leaves by its `finally` blocks: they reset clocks."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    emit("rank", pid=os.getpid())


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
