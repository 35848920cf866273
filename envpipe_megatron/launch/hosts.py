"""Runs a job on the hosts of a hostfile: reads the file, and starts each node over ssh.

Enter at `read_hostfile`, `ssh_command` and `run_nodes`, as `cli/jobs/launch.py` does.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import queue
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

from envpipe_megatron.child import LOOK_S, Signals
from envpipe_megatron.console import drop_output, say_as_launcher
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.files import read_text

#: A number of more digits is a port of ssh's: no node runs so many processes.
_SLOTS, _MOST = r"0*[1-9]\d{0,2}", r"(\s+max[_-]slots=\d+)*"
#: No leading dash: ssh would take such a host for an option. An IPv6 address has brackets or slots:
#: else its end may be meant as a number of processes.
_LINE = re.compile(
    r"(?P<user>\w[\w.-]*@)?"
    rf"((\[(?P<boxed>[\w.]*:[\w.:]*)\]|(?P<name>\w[\w.-]*))(:(?P<colon>{_SLOTS}))?"
    r"|(?P<bare>[\w.]*:[\w.]*:[\w.:]*)(?=.*\sslots=))"
    rf"{_MOST}(\s+slots=(?P<slots>{_SLOTS}))?{_MOST}",
    re.ASCII,
)

#: Variables of this environment that a node gets; PET_ are torchrun's own.
CARRIED_PREFIXES = ("ENVPIPE_", "NCCL_", "GLOO_", "CUDA_", "TORCH_", "OMP_", "MKL_", "PET_")
CARRIED_NAMES = ("PYTHONPATH", "LD_LIBRARY_PATH")
#: These are of one machine only.
_NOT_CARRIED = ("ENVPIPE_AGENT_SOCKET", "CUDA_VISIBLE_DEVICES")

#: No questions for passwords, an end when the host does not answer, and no shared connection that
#: would stay in the background with our pipes. Options that the user gives come first, and win.
_SSH_OPTIONS = (
    "-T",
    *("-o", "BatchMode=yes"),
    *("-o", "ConnectTimeout=30"),
    *("-o", "ServerAliveInterval=15"),
    *("-o", "ControlMaster=no"),
)

#: How long a node has to end, beside twice what torchrun gives its ranks, which may have to be
#: ended once more: then the energy bill waits for other nodes.
STOP_GRACE_S = 90.0
#: How long to wait for output that is still to come when the client has ended.
_LAST_GRACE_S = 5.0
_OF_SSH = 255


@dataclass(frozen=True)
class Host:
    """One line of a hostfile: `host` or `user@host`, processes to start, its place in the file."""

    target: str
    slots: int | None
    where: str

    @property
    def name(self) -> str:
        """Return the host without a user."""
        return self.target.rpartition("@")[2]


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """Read the hosts, in the order of their node ranks.

    Blank lines and what follows `#` are passed over, and so is MPI's `max_slots=N`. Raises
    EnvPipeError if a line is not of these forms, a host is there twice, or there is none.
    """
    hosts: dict[str, Host] = {}
    try:
        text = read_text(path)
    except ValueError as error:
        raise EnvPipeError(f"Hostfile {path} is not readable: {error}") from error
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].strip()
        if not words:
            continue
        host = _read_line(words, f"{path}:{number}")
        before = hosts.setdefault(host.name.lower(), host)
        if before is not host:
            raise EnvPipeError(
                f"{host.where}: the host was named before, at {before.where}",
                value=host.name,
                remedy="Name each host once, with all of its slots.",
            )
    if not hosts:
        raise EnvPipeError(
            f"{path} names no host", remedy="Write one on each line, such as: node1 slots=8"
        )
    return tuple(hosts.values())


def _read_line(words: str, where: str) -> Host:
    match = _LINE.fullmatch(words)
    if match is None or (match["colon"] and match["slots"]):
        raise EnvPipeError(
            f"{where}: this is not a host and its number of processes",
            value=words,
            remedy="Write host slots=N, host:N or [IPv6 address]:N, with N from 1 to 999. A port "
            "is ssh's: --ssh 'ssh -p PORT', or ~/.ssh/config.",
        )
    host = match["boxed"] or match["name"] or match["bare"]
    slots = match["colon"] or match["slots"]
    return Host((match["user"] or "") + host, int(slots) if slots else None, where)


def carried_environment(environ: Mapping[str, str], exported: Sequence[str]) -> dict[str, str]:
    """Return the variables that a node gets from this environment, `exported` ones among them.

    Raises EnvPipeError if a name to export is not set here.
    """
    for name in exported:
        if name not in environ:
            raise EnvPipeError(
                "--export names a variable that is not set here",
                value=name,
                remedy="Give a name only, and set the variable before.",
            )
    return {
        name: value
        for name, value in environ.items()
        if name in exported
        or (
            name not in _NOT_CARRIED
            and (name in CARRIED_NAMES or name.startswith(CARRIED_PREFIXES))
        )
    }


def ssh_command(
    ssh: str,
    host: Host,
    arguments: Sequence[str],
    *,
    python: str,
    folder: Path,
    environ: Mapping[str, str],
) -> tuple[str, ...]:
    """Return the words that start `envpipe launch` on a host.

    Args:
        ssh: the client and options of it, as a shell would read them; EnvPipeError if one cannot.
        arguments: those of `envpipe launch` there.
        python: the Python there.
        folder: the folder to run in there.
        environ: variables to set there.
    """
    try:
        client = shlex.split(ssh)
    except ValueError as error:
        raise EnvPipeError(f"--ssh is not a command: {error}", value=ssh) from error
    if not client:
        raise EnvPipeError("--ssh is empty", remedy="Leave it out for the system's ssh.")
    assignments = [f"{name}={value}" for name, value in sorted(environ.items())]
    words = ["env", *assignments, python, "-m", "envpipe_megatron.cli", "launch", *arguments]
    # The node takes the shell's place, and its exit status is the connection's.
    there = f"cd {shlex.quote(str(folder))} && exec {shlex.join(words)}"
    return (*client, *_SSH_OPTIONS, host.target, there)


def run_nodes(commands: Mapping[str, Sequence[str]], stop_grace_s: float = STOP_GRACE_S) -> int:
    """Run all nodes to their end. The output of each is printed line by line, after `[host] `.

    When a node fails, or SIGINT, SIGTERM or SIGHUP arrives, the standard input of all is closed.
    What has not ended after the grace is killed; a second signal kills at once.

    Returns 0, or the exit status of the first node that failed, or 128 and the signal's number.

    Args:
        commands: what runs a node, by its host, and ends it when standard input ends.
        stop_grace_s: how long nodes may take to end.
    """
    return _Run(stop_grace_s).run(commands)


class _Run:
    """All nodes of a job. The first that ends the job decides its exit status.

    Threads read the nodes' output and wait for their ends; what happens is handled in `run` only,
    one event after the other.
    """

    def __init__(self, stop_grace_s: float) -> None:
        self._stop_grace_s = stop_grace_s
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._live: dict[str, subprocess.Popen[bytes]] = {}
        self._status: int | None = None
        #: When nodes that were stopped are killed.
        self._kill_s = math.inf

    def run(self, commands: Mapping[str, Sequence[str]]) -> int:
        put = self._events.put
        with Signals() as signals:
            signals.call(lambda: put(lambda: self._interrupt(signals)), lambda: put(self._kill))
            for host, command in commands.items():
                if self._status is None:
                    self._start(host, command)
            while self._live:
                with contextlib.suppress(queue.Empty):
                    self._events.get(timeout=LOOK_S)()
                if time.monotonic() >= self._kill_s:
                    self._kill_s = math.inf
                    for host in self._live:
                        why = f"did not end within {self._stop_grace_s:g} s"
                        say_as_launcher(f"{host} {why}; processes may be left there.")
                    self._kill()
        return self._status or 0

    def _start(self, host: str, command: Sequence[str]) -> None:
        pipe, process = subprocess.PIPE, None
        try:
            # A terminal's Ctrl-C is for us: the client would end before its node does.
            process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
            )
            assert process.stdout
            assert process.stderr
            relays = (
                _in_thread(self._relay, process.stdout, f"[{host}] ", sys.stdout.buffer),
                _in_thread(self._relay, process.stderr, f"[{host}] ", sys.stderr.buffer),
            )
            _in_thread(self._watch, host, process, relays)
        except (OSError, RuntimeError) as error:  # there is no ssh client or no thread, say
            if process is not None:
                _close(process)
            self._stop(1, f"{host} could not be started: {error}")
        else:
            self._live[host] = process

    def _watch(
        self, host: str, process: subprocess.Popen[bytes], relays: Sequence[threading.Thread]
    ) -> None:
        status = process.wait()
        # What a wrapper of ssh has left may keep the pipes open forever.
        end_s = time.monotonic() + _LAST_GRACE_S
        for relay in relays:
            relay.join(max(0.0, end_s - time.monotonic()))
        self._events.put(partial(self._ended, host, status))

    def _relay(self, pipe: IO[bytes], mark: str, to: IO[bytes]) -> None:
        """Print whole lines, so that those of different nodes do not mix.

        Those of a progress bar end in a carriage return. Latin-1 has a letter for each byte.
        """
        with io.TextIOWrapper(pipe, "latin-1", newline="") as lines:
            for line in lines:
                end = "" if line.endswith(("\r", "\n")) else "\n"
                try:
                    to.write(f"{mark}{line}{end}".encode("latin-1"))
                    to.flush()
                except OSError as error:
                    # Nobody reads it any more; what nodes print while they end is dropped.
                    drop_output(to)
                    why = f"The output cannot be written: {error.strerror}"
                    self._events.put(partial(self._stop, 1, why))

    def _ended(self, host: str, status: int) -> None:
        _close(self._live.pop(host))
        if status < 0:
            reason = f"its client was ended by {signal.Signals(-status).name}"
            status = 128 - status
        else:
            reason = f"exit status {status}"
        if status == _OF_SSH:
            reason += (
                ", which is ssh's own: it could not connect, it lost the connection, or a signal "
                "ended the node"
            )
        if status:
            self._stop(status, f"{host} failed, {reason}")

    def _stop(self, status: int, why: str) -> None:
        """End all nodes in order; only the first reason counts."""
        if self._status is not None:
            return
        self._status = status
        others = f"Stopping {', '.join(self._live)}." if self._live else "No other node runs."
        say_as_launcher(f"{why}. {others}")
        self._kill_s = time.monotonic() + self._stop_grace_s
        for process in self._live.values():
            _close(process)

    def _interrupt(self, signals: Signals) -> None:
        number = signals.arrived or signal.SIGTERM
        why = f"{number.name} arrived; another one kills"
        if self._status is None:
            self._stop(128 + number, why)
        else:
            say_as_launcher(f"{why}. Waiting for {', '.join(self._live)}.")

    def _kill(self) -> None:
        """Kill all clients, and what they have started themselves to reach their hosts."""
        say_as_launcher(f"Killing the connections to {', '.join(self._live)}.")
        for process in self._live.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _in_thread(run: Callable[..., None], *arguments: object) -> threading.Thread:
    """Run in a thread that the end of this process does not wait for."""
    thread = threading.Thread(target=run, args=arguments, daemon=True)
    thread.start()
    return thread


def _close(process: subprocess.Popen[bytes]) -> None:
    """Close a node's standard input."""
    assert process.stdin
    process.stdin.close()
