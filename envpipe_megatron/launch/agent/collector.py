"""Adds up what the agents of all nodes meter, as they meter it: both ends of that connection.

An agent connects by TCP, and sends its node's energy log in pieces, each a line of JSON:

    agent -> collector   {"token": the job's, "node": ..., "log": identity of its file,
                          "at": where in the file, "bytes": of it, "lines": "..."}
    collector -> agent   {"have": bytes of this log that are added up} or {"error": why}

In place of lines that earlier starts wrote, their sums are sent. A piece that does not begin where
the ones before end is passed over, and the answer says where to go on.

The file is the truth: after a cut, or when the collector has moved to another node, an agent sends
what is not known, and nothing twice. A collector keeps sums and no lines.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import socket
from typing import Any, NoReturn

from envpipe_megatron.formats.bill import Bill
from envpipe_megatron.formats.energy import parse_line
from envpipe_megatron.formats.energy_sums import LogSums
from envpipe_megatron.launch.agent.ledger import NodeLog

logger = logging.getLogger(__name__)

#: Bytes of a log that are sent at once, and of earlier starts' lines that are added up before that:
#: those of some tenths of a second.
_PIECE_BYTES, _EARLIER_BYTES = 2**18, 2**20
#: Bytes of a piece as JSON, which may write a character in as many as three times its bytes.
_MOST_BYTES = 4 * _EARLIER_BYTES
_HELLO_S = 10.0
_BACKLOG = 1024
#: A node that lost its power does not close its connection, and may come back with another log:
#: the connection ends after half a minute without an answer to a probe.
_KEEPALIVE = {socket.TCP_KEEPIDLE: 15, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}

_ANSWER_S = 5.0
#: A name may have an address that does not answer, and then another.
_NEXT_ADDRESS_S = 0.25
_TRY_AGAIN_S = 1.0
#: Takes the place of a line that cannot be read: zeros, say, are six times as long in JSON.
_UNREADABLE = b"?"


class Collector:
    """A server for the agents of one job, whose lines it adds to a bill.

    Attributes:
        is_the_jobs: whether rank 0 is on this node, whose collector is the job's.
    """

    def __init__(self) -> None:
        self.bill = Bill()
        self.is_the_jobs = False
        self.token = secrets.token_hex(16)
        #: Bytes of each log that are in the bill, by node and identity of the log.
        self._known_bytes: dict[tuple[str, str], int] = {}
        #: Which log each node sends now, and the connection to it.
        self._sending: dict[str, tuple[str, asyncio.StreamWriter]] = {}
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[Any]] = set()

    async def start(self, host: str) -> dict[str, Any]:
        """Listen, and return the endpoint for agents, who know this node by `host`.

        All addresses are listened at, as the job's own transports do: a name that other nodes know
        this one under may be a loopback address here. The token keeps strangers out.
        """
        if self._server is None:
            both = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if both else socket.AF_INET
            listener = socket.create_server(("", 0), family=family, dualstack_ipv6=both)
            # Connections inherit these.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, True)
            for option, value in _KEEPALIVE.items():
                listener.setsockopt(socket.IPPROTO_TCP, option, value)
            self._server = await asyncio.start_server(
                self._serve, sock=listener, backlog=_BACKLOG, limit=_MOST_BYTES
            )
        port = self._server.sockets[0].getsockname()[1]
        return {"host": host, "port": port, "token": self.token}

    async def close(self) -> None:
        """Stop listening, and close all connections."""
        if self._server is not None:
            self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        patience_s: float | None = _HELLO_S  # of a stranger
        try:
            while True:
                async with asyncio.timeout(patience_s):
                    line = await reader.readline()
                if not line:
                    break
                answer = self._take(json.loads(line), writer)
                writer.write(json.dumps(answer).encode() + b"\n")
                await writer.drain()
                if "error" in answer:
                    break
                patience_s = None
        except asyncio.CancelledError:
            pass  # by `close`; asyncio takes a handler that ends as cancelled for a failed one
        except Exception as error:  # anything may connect
            logger.info("An agent's connection ended: %r", error)
        finally:
            for node in [node for node, (_, its) in self._sending.items() if its is writer]:
                del self._sending[node]
            writer.close()
            self._connections.discard(task)

    def _take(self, piece: dict[str, Any], writer: asyncio.StreamWriter) -> dict[str, Any]:
        """Add a piece of a log to the bill, if it is the next one; return the answer."""
        node, log = str(piece["node"]), str(piece["log"])
        if not secrets.compare_digest(str(piece["token"]), self.token):
            return {"error": "another job's collector is here"}
        if self._sending.get(node, (log,))[0] != log:
            return {"error": f"another agent calls its node {node}, too: give each a --node-name"}
        self._sending[node] = log, writer
        known = self._known_bytes.setdefault((node, log), 0)
        if piece["at"] != known:  # it came before, over a connection that was cut
            return {"have": known}
        self._known_bytes[node, log] += piece["bytes"]
        lines = piece["lines"].encode("utf-8", "surrogateescape").split(b"\n")
        for line in filter(bytes.strip, lines):
            try:
                self.bill.add(parse_line(line))
            except ValueError:
                self.bill.unreadable += 1
        return {"have": self._known_bytes[node, log]}


class Uplink:
    """Sends what the log has and the collector has not, until it is stopped."""

    def __init__(self, log: NodeLog) -> None:
        self._log = log
        #: The collector; None before the first.
        self.endpoint: Any = None
        self._task: asyncio.Task[None] | None = None
        self._grown = asyncio.Event()
        log.grown = self._grown.set
        #: Bytes that the collector is known to have.
        self.known_bytes = 0
        #: Why nothing can be sent; empty if it can.
        self.failure = ""

    def send_to(self, endpoint: Any) -> None:
        """Send to a collector from here on; the same one twice changes nothing."""
        if endpoint == self.endpoint:
            return
        self.endpoint = endpoint
        self.known_bytes = 0
        if self._task is not None:
            self._task.cancel()
        self._task = asyncio.create_task(self._run())

    def knows_all(self) -> bool:
        """Return whether the collector has the whole log."""
        with contextlib.suppress(OSError):  # another host of its NFS deleted it
            return self._task is not None and self.known_bytes >= self._log.size
        return False

    def why_unknown(self) -> str:
        """Return why the collector does not have the whole log; empty if it has."""
        if self._task is None:
            return "the node of rank 0 runs no collector"
        return "" if self.knows_all() else self.failure or "not all was confirmed in time"

    async def _run(self) -> None:
        while True:
            try:
                await self._connected()
            except Exception as error:  # anything may be at the other end
                unanswered = isinstance(error, TimeoutError) and not str(error)
                reason = f"no answer within {_ANSWER_S:g} s" if unanswered else str(error)
                if reason != self.failure:
                    logger.warning("Cannot reach the job's bill; will try again: %s", reason)
                self.failure = reason
            await asyncio.sleep(_TRY_AGAIN_S)

    async def _connected(self) -> NoReturn:
        """Send until the connection ends, which is an error."""
        async with asyncio.timeout(_ANSWER_S):
            reader, writer = await asyncio.open_connection(
                self.endpoint["host"], self.endpoint["port"], happy_eyeballs_delay=_NEXT_ADDRESS_S
            )
        try:
            while True:
                self._grown.clear()
                piece = self._piece(self.known_bytes)
                if not piece["bytes"]:
                    await self._grown.wait()
                    continue
                writer.write(json.dumps(piece).encode() + b"\n")
                async with asyncio.timeout(_ANSWER_S):
                    line = await reader.readline()
                if not line:
                    raise ConnectionError("the collector hung up")
                answer = json.loads(line)
                if "error" in answer:
                    raise ConnectionError(answer["error"])
                if answer["have"] == self.known_bytes:
                    raise ConnectionError("the collector takes nothing")
                self.known_bytes = int(answer["have"])
                self.failure = ""
        finally:
            writer.close()

    def _piece(self, at: int) -> dict[str, Any]:
        """Return what the log has from a place on; of earlier starts, sums."""
        earlier_bytes = self._log.earlier_bytes - at
        is_earlier = earlier_bytes > 0
        most_bytes = min(earlier_bytes, _EARLIER_BYTES) if is_earlier else _PIECE_BYTES
        data = self._log.read(at, most_bytes)
        lines = _added_up(data) if is_earlier else data
        return {
            "token": self.endpoint["token"],
            "node": self._log.node,
            "log": self._log.identity,
            "at": at,
            "bytes": len(data),
            "lines": lines.decode("utf-8", "surrogateescape"),
        }


def _added_up(data: bytes) -> bytes:
    """Return a log's lines, sums in place of windows, and `_UNREADABLE` of each that is none."""
    made: list[bytes] = []
    sums = LogSums(lambda one: made.append(json.dumps(one.line()).encode()))
    for line in filter(bytes.strip, data.split(b"\n")):
        try:
            sums.add(parse_line(line))
        except ValueError:
            made.append(_UNREADABLE)
    sums.flush()
    return b"\n".join(made)
