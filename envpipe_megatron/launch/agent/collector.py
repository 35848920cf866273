"""Adds up what the agents of all nodes meter, as they meter it.

An agent connects by TCP, says which node it is and the job's token, hears how many bytes of its
energy log are known, and sends the log's bytes from there on:

    agent -> collector   {"token": ..., "node": ..., "log": identity of its file}
    collector -> agent   {"have": bytes} or {"error": why}
    agent -> collector   lines of the energy log
    collector -> agent   {"have": bytes}, after each piece

The file is the truth: after a cut, or when the collector has moved to another node, an agent sends
whatever is not known, and nothing twice. A collector keeps sums and no lines.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from envpipe_megatron.formats.energy import parse_line
from envpipe_megatron.launch.bill.bill import Bill

logger = logging.getLogger(__name__)

#: The longest line, and the most that an agent sends at once.
MAX_BYTES = 256 * 1024
_HELLO_S = 10.0
#: Lines come a thousand times a second in a large job, and whoever is told looks at all its GPUs.
_TELL_EACH_S = 1.0
_BACKLOG = 1024
#: A node that lost its power says no good-bye, and must not be taken for one that comes back with
#: another log: its connection ends after half a minute in which it answers no probe.
_KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}


@dataclass
class _Source:
    """An agent's energy log, as far as it is known."""

    node: str
    log: str
    known_bytes: int = 0
    rest: bytes = b""
    connection: asyncio.StreamWriter | None = field(default=None, repr=False)


class Collector:
    """A server for the agents of one job.

    Args:
        bill: gets every line.
        on_lines: called a second after lines were added, at most, and when all nodes have ended.
    """

    def __init__(self, bill: Bill, on_lines: Callable[[], None] = lambda: None) -> None:
        self.bill = bill
        self.token = secrets.token_hex(16)
        self._on_lines = on_lines
        self._told_s = -math.inf
        self._telling: asyncio.TimerHandle | None = None
        self._sources: dict[tuple[str, str], _Source] = {}
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[Any]] = set()
        self._complete = asyncio.Event()

    async def start(self, host: str) -> dict[str, Any]:
        """Listen, and return the endpoint for agents.

        All addresses are listened at, as the job's own transports do: a name that other nodes know
        this one under may be a loopback address here. The token keeps strangers out.

        Args:
            host: the name or address under which other nodes know this one.
        """
        if self._server is None:
            both = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if both else socket.AF_INET
            listener = socket.create_server(("", 0), family=family, dualstack_ipv6=both)
            _notice_silence(listener)
            self._server = await asyncio.start_server(self._serve, sock=listener, backlog=_BACKLOG)
        port = self._server.sockets[0].getsockname()[1]
        return {"host": host, "port": port, "token": self.token}

    async def close(self) -> None:
        """Listen no more, and hang up."""
        if self._server is not None:
            self._server.close()
        if self._telling is not None:
            self._telling.cancel()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections)

    async def all_ended(self, timeout_s: float) -> bool:
        """Whether every node that ever sent something ends its bill, within a time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not self._all_ended():
                    self._complete.clear()
                    await self._complete.wait()
        return self._all_ended()

    def running(self) -> list[str]:
        """Nodes whose bill is not complete."""
        return [name for name, node in self.bill.nodes.items() if node.running]

    def _all_ended(self) -> bool:
        return not any(node.running for node in self.bill.nodes.values())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        source = None
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            async with asyncio.timeout(_HELLO_S):
                source = self._hello(json.loads(await reader.readline()), writer)
                await writer.drain()
            while source is not None and (data := await reader.read(MAX_BYTES)):
                if source.connection is not writer:
                    break  # what came late over a cut connection is sent again over the new one
                self._take(source, data)
                writer.write(json.dumps({"have": source.known_bytes}).encode() + b"\n")
                await writer.drain()
        except asyncio.CancelledError:
            pass  # by `close`; asyncio takes a handler that ends as cancelled for a failed one
        except Exception as error:  # whatever it was that connected
            logger.info("An agent's connection ended: %r", error)
        finally:
            if source is not None and source.connection is writer:
                source.connection = None
            writer.close()
            self._connections.discard(task)

    def _hello(self, hello: dict[str, Any], writer: asyncio.StreamWriter) -> _Source | None:
        answer: dict[str, Any]
        source = None
        if not secrets.compare_digest(str(hello["token"]), self.token):
            answer = {"error": "another job's collector is here"}
        elif clash := self._clash(str(hello["node"]), str(hello["log"])):
            answer = {"error": clash}
        else:
            key = str(hello["node"]), str(hello["log"])
            source = self._sources.setdefault(key, _Source(*key))
            if source.connection is not None:
                source.connection.close()  # cut off, which this end does not know yet
            source.connection = writer
            source.rest = b""
            answer = {"have": source.known_bytes}
        writer.write(json.dumps(answer).encode() + b"\n")
        return source

    def _clash(self, node: str, log: str) -> str:
        for source in self._sources.values():
            if source.node == node and source.log != log and source.connection is not None:
                return f"another agent calls its node {node}, too: give each a --node-name"
        return ""

    def _take(self, source: _Source, data: bytes) -> None:
        *lines, source.rest = (source.rest + data).split(b"\n")
        if len(source.rest) > MAX_BYTES:
            raise ValueError("a line without an end")
        for line in lines:
            source.known_bytes += len(line) + 1
            if not line.strip():
                continue
            try:
                self.bill.add(parse_line(line))
            except ValueError:
                self.bill.unreadable += 1
        if self._all_ended():
            self._complete.set()
            self._tell()
        elif self._telling is None:
            loop = asyncio.get_running_loop()
            due_s = max(loop.time(), self._told_s + _TELL_EACH_S)
            self._telling = loop.call_at(due_s, self._tell)

    def _tell(self) -> None:
        if self._telling is not None:
            self._telling.cancel()
            self._telling = None
        self._told_s = asyncio.get_running_loop().time()
        try:
            self._on_lines()
        except Exception:  # a closed terminal, say
            logger.exception("The bill is added up, but no longer told of while it grows")
            self._on_lines = lambda: None


def _notice_silence(listener: socket.socket) -> None:
    """Set what its connections inherit."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, True)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):  # macOS calls the first one otherwise
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
