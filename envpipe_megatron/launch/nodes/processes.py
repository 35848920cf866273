"""Runs one process for each node, and ends all of them together."""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import IO

from envpipe_megatron.console import drop_output
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.launch.saying import say
from envpipe_megatron.launch.signals import handled

#: For a node to end, beside twice what torchrun gives its ranks, which may have to be ended once
#: more: then the energy bill waits for other nodes.
STOP_GRACE_S = 90.0
#: From the request to the client to end until it is killed, and for output that is still to come.
_LAST_GRACE_S = 5.0
_OF_SSH = 255
#: A signal that another thread gets, or that comes just before the wait, does not end the wait.
_LOOK_S = 0.2


@dataclass(frozen=True)
class NodeProcess:
    """What runs a node: a command that ends it when its standard input ends."""

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
        say(f"{why}. {others}")
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
            say(f"{host} did not end within {grace_s:g} s; processes may be left there.")
        self._send(number)

    def _on_signal(self, number: signal.Signals) -> None:
        kills = self._interrupted and number is signal.SIGINT
        self._interrupted |= number is signal.SIGINT
        if kills:
            say(f"Killing the connections to {', '.join(self._live)}.")
            self._send(signal.SIGKILL)
        elif self._status is not None:
            say(f"Waiting for {', '.join(self._live)}; another Ctrl-C kills.")
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
