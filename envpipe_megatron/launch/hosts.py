"""Runs a job on the hosts of a hostfile: reads the file, and starts each node over ssh.

Enter at `read_hostfile`, `ssh_command` and `run_nodes`, as `cli/jobs/launch.py` does.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from ipaddress import IPv6Address
from pathlib import Path
from typing import IO

from envpipe_megatron.console import drop_output, say_as_launcher
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.files import read_text
from envpipe_megatron.launch.signals import handled

_SLOTS, _MOST = r"(0*[1-9]\d*)", r"(\s+max[_-]slots=\d+)*"
#: No leading dash: ssh would take such a host for an option. Two colons: an IPv6 address.
_LINE = re.compile(
    r"(?P<user>\w[\w.-]*@)?(\[(?P<address>[\w.]*:[\w.:]*)\]|(?P<host>\w[\w.-]*|[\w.]*(:[\w.]*){2,}))"
    rf"(:(?P<colon>{_SLOTS})|{_MOST}\s+slots=(?P<slots>{_SLOTS}))?{_MOST}",
    re.ASCII,
)

#: Variables of this environment that a node gets; PET_ are torchrun's own.
CARRIED_PREFIXES = ("ENVPIPE_", "NCCL_", "GLOO_", "CUDA_", "TORCH_", "OMP_", "MKL_", "PET_")
CARRIED_NAMES = ("PYTHONPATH", "LD_LIBRARY_PATH")
#: These are of one machine alone.
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

#: For a node to end, beside twice what torchrun gives its ranks, which may have to be ended once
#: more: then the energy bill waits for other nodes.
STOP_GRACE_S = 90.0
#: From the request to the client to end until it is killed, and for output that is still to come.
_LAST_GRACE_S = 5.0
_OF_SSH = 255
#: A signal that another thread gets, or that comes just before the wait, does not end the wait.
_LOOK_S = 0.2


@dataclass(frozen=True)
class Host:
    """One line of a hostfile: `host` or `user@host`, processes to start, and where it stands."""

    target: str
    slots: int | None
    where: str

    @property
    def name(self) -> str:
        """The host without a user."""
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
    if match := _LINE.fullmatch(words):
        host, slots = match["address"] or match["host"], match["colon"] or match["slots"]
        # The end of a bare address may be meant as a number of processes.
        is_clear = match["address"] or slots or not _is_address(host.rpartition(":")[0])
        if ":" not in host or (is_clear and _is_address(host)):
            return Host((match["user"] or "") + host, int(slots) if slots else None, where)
    raise EnvPipeError(
        f"{where}: this is not a host and its number of processes",
        value=words,
        remedy="Write host slots=N, host:N or [IPv6 address]:N, with N from 1.",
    )


def _is_address(text: str) -> bool:
    try:
        return bool(IPv6Address(text))
    except ValueError:
        return False


def carried_environment(environ: Mapping[str, str], exported: Sequence[str]) -> dict[str, str]:
    """Return the variables that a node gets from this environment, `exported` ones among them.

    Raises EnvPipeError if a name to export is not set here.
    """
    for name in exported:
        if name not in environ:
            raise EnvPipeError(
                "--export names a variable that is not set here",
                value=name,
                remedy="Give a name alone, and set the variable before.",
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


@dataclass(frozen=True)
class NodeProcess:
    """A command that runs a node, and ends it when its standard input ends."""

    host: str
    command: tuple[str, ...]


def run_nodes(nodes: Sequence[NodeProcess], stop_grace_s: float = STOP_GRACE_S) -> int:
    """Run all nodes to their end. The output of each is printed line by line, after `[host] `.

    When a node fails, or SIGINT, SIGTERM or SIGHUP arrives, the standard input of all is closed.
    What has not ended after the grace is terminated, then killed; a second SIGINT kills at once.

    Returns 0, or the exit status of the first node that failed, or 128 and the signal's number.
    Raises EnvPipeError if there is no such program; nothing was started.
    """
    for node in nodes:
        if shutil.which(node.command[0]) is None:
            raise EnvPipeError(
                "The program that reaches the hosts is not there",
                value=node.command[0],
                remedy="Install an ssh client, or name another with --ssh.",
            )
    return _Run(stop_grace_s).run(nodes)


class _Run:
    """All nodes of a job. Whatever ends the job first decides its exit status.

    Threads read the nodes' output and wait for their ends; what happens is handled in `run` alone,
    one event after the other.
    """

    def __init__(self, stop_grace_s: float) -> None:
        self._stop_grace_s = stop_grace_s
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._live: dict[str, subprocess.Popen[bytes]] = {}
        self._status: int | None = None
        self._interrupted = False
        #: When nodes that were stopped are ended by which signal.
        self._deadlines: list[tuple[float, float, signal.Signals]] = []

    def run(self, nodes: Sequence[NodeProcess]) -> int:
        with handled(lambda number: self._events.put(partial(self._on_signal, number))):
            for node in nodes:
                self._start(node)
            while self._live:
                with contextlib.suppress(queue.Empty):
                    self._events.get(timeout=_LOOK_S)()
                self._end_late_ones()
        return self._status or 0

    def _start(self, node: NodeProcess) -> None:
        if self._status is not None:
            return
        pipe = subprocess.PIPE
        try:
            # A terminal's Ctrl-C is for us: the client would end before its node does.
            process = subprocess.Popen(
                node.command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
            )
        except OSError as error:
            self._stop(1, f"{node.host} could not be started: {error}")
            return
        self._live[node.host] = process
        threading.Thread(target=self._watch, args=(node.host, process), daemon=True).start()

    def _watch(self, host: str, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout
        assert process.stderr
        mark = f"[{host}] ".encode()
        relays = [
            threading.Thread(target=self._relay, args=(pipe, mark, sink), daemon=True)
            for pipe, sink in (
                (process.stdout, sys.stdout.buffer),
                (process.stderr, sys.stderr.buffer),
            )
        ]
        for relay in relays:
            relay.start()
        status = process.wait()
        # What a wrapper of ssh has left may keep the pipes open forever.
        end_s = time.monotonic() + _LAST_GRACE_S
        for relay in relays:
            relay.join(max(0.0, end_s - time.monotonic()))
        self._events.put(partial(self._ended, host, status))

    def _relay(self, pipe: IO[bytes], mark: bytes, to: IO[bytes]) -> None:
        """Print whole lines, so that those of different nodes do not mix."""
        with pipe:
            for line in pipe:
                try:
                    to.write(mark + line.removesuffix(b"\n") + b"\n")
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
        late_s = time.monotonic() + self._stop_grace_s
        self._deadlines = [
            (late_s, self._stop_grace_s, signal.SIGTERM),
            (late_s + _LAST_GRACE_S, _LAST_GRACE_S, signal.SIGKILL),
        ]
        for process in self._live.values():
            _close(process)

    def _end_late_ones(self) -> None:
        if not self._deadlines or time.monotonic() < self._deadlines[0][0]:
            return
        _, grace_s, number = self._deadlines.pop(0)
        for host in self._live:
            say_as_launcher(
                f"{host} did not end within {grace_s:g} s; processes may be left there."
            )
        self._send(number)

    def _on_signal(self, number: signal.Signals) -> None:
        kills = self._interrupted and number is signal.SIGINT
        self._interrupted |= number is signal.SIGINT
        if kills:
            say_as_launcher(f"Killing the connections to {', '.join(self._live)}.")
            self._send(signal.SIGKILL)
        elif self._status is not None:
            say_as_launcher(f"Waiting for {', '.join(self._live)}; another Ctrl-C kills.")
        else:
            self._stop(128 + number, f"{number.name} arrived; another Ctrl-C kills")

    def _send(self, number: signal.Signals) -> None:
        """Signal all clients, and what they have started themselves to reach their hosts."""
        for process in self._live.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)


def _close(process: subprocess.Popen[bytes]) -> None:
    """Close a node's standard input."""
    assert process.stdin
    process.stdin.close()
