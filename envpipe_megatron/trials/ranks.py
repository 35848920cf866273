"""Ranks of one machine under torchrun: however they end, none runs on and clocks are reset.

A command calls `run_ranks`; each rank calls `report_to_command`, then `emit`.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from envpipe_megatron.child import Signals
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.gpu.emulated.emulated_gpu import EmulatedGpu
from envpipe_megatron.gpu.emulated.store import ROOT_VARIABLE, list_emulated
from envpipe_megatron.launch.node import run_torchrun

#: Starts a line of a rank's standard output that is meant for the command.
EVENT_MARK = "@envpipe "


def rank_environment(emulated: Path) -> dict[str, str]:
    """Return this process's environment, for ranks whose emulated GPUs are in a folder."""
    environment = {
        # torchrun's, as a pod of several nodes has them, would make it wait for the other nodes.
        **{name: value for name, value in os.environ.items() if not name.startswith("PET_")},
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


def run_ranks(
    num_ranks: int,
    program: Sequence[str],
    environment: Mapping[str, str],
    log_path: Path,
    take: Callable[[dict[str, Any]], object],
) -> None:
    """Run ranks of a program to their end, and take what they report; then clocks are reset.

    SIGTERM and SIGHUP end this like Ctrl-C. EnvPipeError if a rank failed.

    Args:
        num_ranks: all on this machine.
        program: a script, or `--module` and a module. Each rank calls `report_to_command` first.
        environment: the ranks'.
        log_path: file of all that they print beside their reports.
        take: gets each report, in another thread; what it raises ends the ranks, and this.
    """
    words = ["--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(num_ranks)]
    with log_path.open("w") as log, Signals() as signals:

        def take_line(line: str) -> None:
            if line.startswith(EVENT_MARK):
                take(json.loads(line[len(EVENT_MARK) :]))
            else:
                log.write(line)

        try:
            code = run_torchrun([*words, *program], environment, signals, take=take_line, log=log)
        finally:
            root = Path(environment[ROOT_VARIABLE])
            for index in list_emulated(root):  # also what a rank that was killed left behind
                EmulatedGpu.open(root, index).reset_frequency()
    if signals.arrived:
        raise KeyboardInterrupt
    if code != 0:
        raise EnvPipeError(
            f"A rank failed (exit code {code}); clocks are reset",
            remedy=f"The first error is in {log_path}.",
        )


def emit(event: str, **fields: Any) -> None:
    """Report an event to the command, from a rank."""
    line = EVENT_MARK + json.dumps({"event": event, **fields}) + "\n"
    # One rank at a time: what is longer than a pipe takes at once would mix with others' lines.
    # All ranks can open the file that their program is called with; NFS locks none for reading.
    with Path(sys.argv[1]).open("r+") as file:
        with suppress(OSError):  # a disk without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        sys.stdout.write(line)
        sys.stdout.flush()


def report_to_command() -> None:
    """Let the command end this rank, which leaves by its `finally` blocks: they reset clocks."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
