"""Runs one process for each node, and ends all of them together."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Any, NamedTuple

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.launch.saying import say

#: torchrun gives its processes 30 s to end; then the energy bill waits for other nodes.
STOP_GRACE_S = 120.0
#: From the request to the client to end until it is killed, and for output that is still to come.
_LAST_GRACE_S = 5.0
_CHUNK_BYTES = 1 << 16
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_OF_SSH = 255


@dataclass(frozen=True)
class NodeProcess:
    """What runs a node.

    Attributes:
        host: the name that its output is marked with.
        command: a program, and its arguments, that ends the node when its standard input ends.
    """

    host: str
    command: tuple[str, ...]


def run_nodes(nodes: Sequence[NodeProcess], stop_grace_s: float = STOP_GRACE_S) -> int:
    """Run all nodes to their end. The output of each is printed line by line, behind `[host] `.

    When a node fails, or SIGINT, SIGTERM or SIGHUP arrives, the standard input of all is closed.
    What has not ended after the grace is terminated, then killed; a second SIGINT kills at once.

    Args:
        nodes: at least one.
        stop_grace_s: seconds that nodes have to end by themselves.

    Returns:
        0, or the exit status of the first node that failed, or 128 and the signal's number.

    Raises:
        EnvPipeError: there is no such program; nothing was started.
    """
    for node in nodes:
        if shutil.which(node.command[0]) is None:
            raise EnvPipeError(
                "The program that reaches the hosts is not there",
                value=node.command[0],
                remedy="Install an ssh client, or name another with --ssh.",
            )
    return asyncio.run(_Run(stop_grace_s).run(nodes))


@dataclass
class _Live:
    """A node that runs; its standard input is open as long as it may."""

    process: asyncio.subprocess.Process
    stdin: int | None

    def end(self) -> None:
        """Close its standard input."""
        if self.stdin is not None:
            os.close(self.stdin)
            self.stdin = None

    def send(self, signum: signal.Signals) -> None:
        """Signal the client, and what it has started itself to reach the host."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signum)


class _Run:
    """All nodes of a job. Whatever ends the job first decides its exit status."""

    def __init__(self, stop_grace_s: float) -> None:
        self._stop_grace_s = stop_grace_s
        self._live: dict[str, _Live] = {}
        self._stopping = asyncio.Event()
        self._interrupted = False
        self._killed = False
        self._status = 0

    async def run(self, nodes: Sequence[NodeProcess]) -> int:
        loop = asyncio.get_running_loop()
        for signum in _SIGNALS:
            # Under nohup, for one, a signal is ignored and stays so.
            if signal.getsignal(signum) != signal.SIG_IGN:
                loop.add_signal_handler(signum, self._on_signal, signum)
        ended = asyncio.gather(*(self._run_node(node) for node in nodes))
        stopped = asyncio.create_task(self._stopping.wait())
        either: list[asyncio.Future[Any]] = [ended, stopped]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        await self._wait_for_end(ended)
        return self._status

    async def _run_node(self, node: NodeProcess) -> None:
        # Pipes of our own: some asyncio waits, after a process has ended, for whoever else has its
        # pipes, such as what a wrapper of ssh has left.
        outputs = [await _open_pipe() for _ in range(2)]
        try:
            live = await _start(node, outputs)
        except OSError as error:
            self._stop(1, f"{node.host} could not be started: {error}")
            return
        self._live[node.host] = live
        if self._stopping.is_set():
            self._end(live)
        mark = f"[{node.host}] ".encode()
        sinks = (sys.stdout.buffer, sys.stderr.buffer)
        relays = [
            asyncio.create_task(self._relay(pipe.reader, mark, sink))
            for pipe, sink in zip(outputs, sinks, strict=True)
        ]
        status = await live.process.wait()
        live.end()
        await asyncio.wait(relays, timeout=_LAST_GRACE_S)
        for pipe in outputs:
            pipe.transport.close()
        await asyncio.wait(relays)
        del self._live[node.host]
        if status:
            self._failed(node.host, status)

    def _failed(self, host: str, status: int) -> None:
        if status < 0:
            told = f"its client was ended by {signal.Signals(-status).name}"
            status = 128 - status
        else:
            told = f"exit status {status}"
        if status == _OF_SSH:
            told += (
                ", which is ssh's own: it could not connect, it lost the connection, or a signal "
                "ended the node"
            )
        self._stop(status, f"{host} failed, {told}")

    def _stop(self, status: int, why: str) -> None:
        """End all nodes in order; only the first reason counts."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        self._status = status
        say(f"{why}. {self._others()}")
        for live in self._live.values():
            self._end(live)

    def _others(self) -> str:
        return f"Stopping {', '.join(self._live)}." if self._live else "No other node runs."

    def _end(self, live: _Live) -> None:
        live.end()
        if self._killed:
            live.send(signal.SIGKILL)

    async def _wait_for_end(self, ended: asyncio.Future[list[None]]) -> None:
        """Wait for nodes that were told to end, and end those that do not."""
        for grace_s, signum in (
            (self._stop_grace_s, signal.SIGTERM),
            (_LAST_GRACE_S, signal.SIGKILL),
        ):
            await asyncio.wait([ended], timeout=grace_s)
            for host, live in self._live.items():
                say(f"{host} did not end within {grace_s:g} s; processes may be left there.")
                live.send(signum)
        await ended

    def _on_signal(self, signum: signal.Signals) -> None:
        kills = self._interrupted and signum is signal.SIGINT
        self._interrupted |= signum is signal.SIGINT
        if kills:
            self._killed = True
            say(f"Killing the connections to {', '.join(self._live)}.")
            for live in self._live.values():
                live.send(signal.SIGKILL)
        elif self._stopping.is_set():
            say(f"Waiting for {', '.join(self._live)}; another Ctrl-C kills.")
        else:
            self._stop(128 + signum, f"{signum.name} arrived; another Ctrl-C kills")

    async def _relay(self, reader: asyncio.StreamReader, mark: bytes, to: IO[bytes]) -> None:
        """Print whole lines, so that those of different nodes do not mix."""
        pending = bytearray()
        while chunk := await reader.read(_CHUNK_BYTES):
            pending += chunk
            if b"\n" in chunk:
                lines, _, rest = bytes(pending).rpartition(b"\n")
                pending = bytearray(rest)
                self._print(b"".join(mark + line + b"\n" for line in lines.split(b"\n")), to)
        if pending:
            self._print(mark + bytes(pending) + b"\n", to)

    def _print(self, text: bytes, to: IO[bytes]) -> None:
        try:
            to.write(text)
            to.flush()
        except OSError as error:
            # Whoever read our output is gone; what nodes still say while they end goes nowhere.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, to.fileno())
            os.close(nowhere)
            self._stop(1, f"The output cannot be written: {error.strerror}")


class _Pipe(NamedTuple):
    """A pipe that we read, and the end that a process writes to."""

    reader: asyncio.StreamReader
    transport: asyncio.ReadTransport
    its_end: int


async def _open_pipe() -> _Pipe:
    our_end, its_end = os.pipe()
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(our_end, "rb", 0)
    )
    return _Pipe(reader, transport, its_end)


async def _start(node: NodeProcess, outputs: Sequence[_Pipe]) -> _Live:
    its_stdin, stdin = os.pipe()
    stdout, stderr = (pipe.its_end for pipe in outputs)
    try:
        process = await asyncio.create_subprocess_exec(
            *node.command,
            stdin=its_stdin,
            stdout=stdout,
            stderr=stderr,
            # A terminal's Ctrl-C is for us: the client would end before its node does.
            start_new_session=True,
        )
    except OSError:
        os.close(stdin)
        raise
    finally:
        for descriptor in (its_stdin, stdout, stderr):
            os.close(descriptor)
    return _Live(process, stdin)
