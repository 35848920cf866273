"""Adds up what the agents of all nodes meter, as they meter it: both ends of that connection.

An agent connects by TCP, says which node it is and the job's token, gets back how many bytes of its
energy log are known, and sends the log's bytes from there on:

    agent -> collector   {"token": ..., "node": ..., "log": identity of its file}
    collector -> agent   {"have": bytes} or {"error": why}
    agent -> collector   lines of the energy log, or in place of lines that earlier starts wrote
                         {"earlier": {"bytes": of these, "unreadable": ..., "lines": their sums}}
    collector -> agent   {"have": bytes}, after each piece

The file is the truth: after a cut, or when the collector has moved to another node, an agent sends
what is not known, and nothing twice. A collector keeps sums and no lines.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import secrets
import socket
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from envpipe_megatron.formats.energy import parse_entry, parse_line
from envpipe_megatron.formats.energy_sums import LogSums
from envpipe_megatron.launch.agent.ledger import NodeLog
from envpipe_megatron.launch.bill.bill import Bill

logger = logging.getLogger(__name__)

#: Size limit of a line, and of what an agent sends at once.
MAX_BYTES = 256 * 1024
#: A message in place of lines begins with it.
_EARLIER = b'{"earlier": '
_HELLO_S = 10.0
#: Lines come a thousand times a second in a large job, and the live line looks at all its GPUs.
_REPORT_EACH_S = 1.0
_BACKLOG = 1024
#: A node that lost its power does not close its connection, and may come back with another log:
#: the connection ends after half a minute without an answer to a probe.
_KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}

_ANSWER_S = 5.0
#: A name may have an address that does not answer, and then another.
_NEXT_ADDRESS_S = 0.25
#: Lines of earlier starts that are added up at once: those of some tenths of a second.
_PIECE_BYTES = 2**20
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0


async def holds_within(
    timeout_s: float, condition: Callable[[], bool], changed: asyncio.Event
) -> bool:
    """Wait for a condition, at most for a time, and return it; it is checked after each change."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while not condition():
                changed.clear()
                await changed.wait()
    return condition()


class Collector:
    """A server for the agents of one job, whose lines it adds to a bill.

    `on_lines` is called within a second after lines were added, and when all nodes have ended.
    """

    def __init__(self, bill: Bill, on_lines: Callable[[], None] = lambda: None) -> None:
        self.bill = bill
        self.token = secrets.token_hex(16)
        self._on_lines = on_lines
        self._reported_s = -math.inf
        self._reporting: asyncio.TimerHandle | None = None
        #: Bytes of each log that are in the bill, by node and identity of the log.
        self._known_bytes: dict[tuple[str, str], int] = {}
        #: Which log each node sends now, and the connection to it.
        self._sending: dict[str, tuple[str, asyncio.StreamWriter]] = {}
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[Any]] = set()
        self._complete = asyncio.Event()

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
            for name, value in _KEEPALIVE.items():
                if hasattr(socket, name):  # macOS calls the first one otherwise
                    listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
            self._server = await asyncio.start_server(self._serve, sock=listener, backlog=_BACKLOG)
        port = self._server.sockets[0].getsockname()[1]
        return {"host": host, "port": port, "token": self.token}

    async def close(self) -> None:
        """Stop listening, and close all connections."""
        if self._server is not None:
            self._server.close()
        if self._reporting is not None:
            self._reporting.cancel()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections)

    async def all_ended(self, timeout_s: float) -> bool:
        """Wait until every node that ever sent something ends its bill; False after a time."""
        return await holds_within(timeout_s, lambda: not self.bill.running(), self._complete)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        log = None
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            async with asyncio.timeout(_HELLO_S):
                log = self._hello(json.loads(await reader.readline()), writer)
                await writer.drain()
            rest = b""
            while log is not None and (data := await reader.read(MAX_BYTES)):
                if not self._is_current(log, writer):
                    break  # what came late over a cut connection is sent again over the new one
                *lines, rest = (rest + data).split(b"\n")
                if len(rest) > MAX_BYTES:
                    raise ValueError("a line without an end")
                self._take(log, lines)
                writer.write(json.dumps({"have": self._known_bytes[log]}).encode() + b"\n")
                await writer.drain()
        except asyncio.CancelledError:
            pass  # by `close`; asyncio takes a handler that ends as cancelled for a failed one
        except Exception as error:  # whatever it was that connected
            logger.info("An agent's connection ended: %r", error)
        finally:
            if log is not None and self._is_current(log, writer):
                del self._sending[log[0]]
            writer.close()
            self._connections.discard(task)

    def _hello(self, hello: dict[str, Any], writer: asyncio.StreamWriter) -> tuple[str, str] | None:
        """Answer an agent; return its node and log, None if it is refused."""
        node, log = str(hello["node"]), str(hello["log"])
        sent_log, before = self._sending.get(node, (log, None))
        answer: dict[str, Any]
        if not secrets.compare_digest(str(hello["token"]), self.token):
            answer = {"error": "another job's collector is here"}
        elif sent_log != log:
            answer = {"error": f"another agent calls its node {node}, too: give each a --node-name"}
        else:
            answer = {"have": self._known_bytes.setdefault((node, log), 0)}
            if before is not None:
                before.close()  # cut off, which this end does not know yet
            self._sending[node] = log, writer
        writer.write(json.dumps(answer).encode() + b"\n")
        return (node, log) if "have" in answer else None

    def _is_current(self, log: tuple[str, str], writer: asyncio.StreamWriter) -> bool:
        return self._sending.get(log[0]) == (log[1], writer)

    def _take(self, log: tuple[str, str], lines: Iterable[bytes]) -> None:
        """Add whole lines of a log to the bill, or what comes in their place."""
        for line in lines:
            if line.startswith(_EARLIER):
                said = json.loads(line)["earlier"]
                for read in list(map(parse_entry, said["lines"])):
                    self.bill.add(read)
                self.bill.unreadable += said["unreadable"]
                self._known_bytes[log] += said["bytes"]
                continue
            self._known_bytes[log] += len(line) + 1
            if not line.strip():
                continue
            try:
                self.bill.add(parse_line(line))
            except ValueError:
                self.bill.unreadable += 1
        if not self.bill.running():
            self._complete.set()
            self._report()
        elif self._reporting is None:
            loop = asyncio.get_running_loop()
            due_s = max(loop.time(), self._reported_s + _REPORT_EACH_S)
            self._reporting = loop.call_at(due_s, self._report)

    def _report(self) -> None:
        if self._reporting is not None:
            self._reporting.cancel()
            self._reporting = None
        self._reported_s = asyncio.get_running_loop().time()
        try:
            self._on_lines()
        except Exception:  # a closed terminal, say
            logger.exception("The bill is added up, but no longer shown while it grows")
            self._on_lines = lambda: None


class Uplink:
    """One task that sends what the log has and the collector has not, until it is stopped."""

    def __init__(self, log: NodeLog) -> None:
        self._log = log
        self._endpoint: Any = None
        self._task: asyncio.Task[None] | None = None
        self._grown = asyncio.Event()
        self._known = asyncio.Event()
        #: Bytes that the collector is known to have.
        self.known_bytes = 0
        #: Why nothing is sent; empty if it is.
        self.trouble = ""

    def send_to(self, endpoint: Any) -> None:
        """Send to a collector from here on; the same one twice changes nothing."""
        if endpoint == self._endpoint:
            return
        self._endpoint = endpoint
        self.known_bytes = 0
        if self._task is not None:
            self._task.cancel()
        self._task = asyncio.create_task(self._run())

    def grown(self) -> None:
        """The log has more."""
        self._grown.set()

    async def all_known(self, timeout_s: float) -> bool:
        """Wait until the collector has the whole log; False after a time."""
        if self._task is None:
            return False
        return await holds_within(timeout_s, self._knows_all, self._known)

    def why_unknown(self) -> str:
        """Why the collector has not got the whole log; empty if it has."""
        if self._task is None:
            return "the node of rank 0 runs no collector"
        if self._knows_all():
            return ""
        return self.trouble or "not all was confirmed in time"

    def _knows_all(self) -> bool:
        return self.known_bytes >= self._log.size

    async def close(self) -> None:
        """Stop sending."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                await self._connected()
            except Exception as error:  # whatever is at the other end of the network
                unanswered = isinstance(error, TimeoutError) and not str(error)
                reason = f"no answer within {_ANSWER_S:g} s" if unanswered else str(error)
                if not self.trouble:  # it was connected
                    pause_s = _FIRST_PAUSE_S
                if reason != self.trouble:
                    logger.warning("Cannot reach the job's bill; will try again: %s", reason)
                self.trouble = reason
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _connected(self) -> NoReturn:
        """Send until the connection ends, which is an error."""
        async with asyncio.timeout(_ANSWER_S):
            reader, writer = await asyncio.open_connection(
                self._endpoint["host"], self._endpoint["port"], happy_eyeballs_delay=_NEXT_ADDRESS_S
            )
        try:
            hello = {"node": self._log.node, "log": self._log.identity}
            hello["token"] = self._endpoint["token"]
            writer.write(json.dumps(hello).encode() + b"\n")
            await self._answered(reader)
            self.trouble = ""
            while True:
                self._grown.clear()
                data, log_bytes = self._piece(self.known_bytes)
                if not data:
                    await self._grown.wait()
                    continue
                wanted = self.known_bytes + log_bytes
                writer.write(data)
                while self.known_bytes < wanted:
                    await self._answered(reader)
        finally:
            writer.close()

    def _piece(self, offset: int) -> tuple[bytes, int]:
        """Data to send next, of earlier starts sums; and how many bytes of the log they cover."""
        left = self._log.earlier_bytes - offset
        earlier = self._log.read(offset, min(left, _PIECE_BYTES)) if left > 0 else b""
        if earlier:
            made = _added_up(earlier)
            if len(made) <= MAX_BYTES:
                return made, len(earlier)
        data = self._log.read(offset, MAX_BYTES)
        return data, len(data)

    async def _answered(self, reader: asyncio.StreamReader) -> None:
        async with asyncio.timeout(_ANSWER_S):
            line = await reader.readline()
        if not line:
            raise ConnectionError("the collector hung up")
        answer = json.loads(line)
        if "error" in answer:
            raise ConnectionError(answer["error"])
        self.known_bytes = answer["have"]
        self._known.set()


def _added_up(data: bytes) -> bytes:
    """A message with the sums of a log's lines."""
    made: list[Any] = []
    sums, unreadable = LogSums(made.append), 0
    for line in filter(bytes.strip, data.splitlines()):
        try:
            parse_line(line)
            sums.add(json.loads(line))
        except ValueError:
            unreadable += 1
    sums.flush()
    said = {"bytes": len(data), "unreadable": unreadable, "lines": made}
    return _EARLIER + json.dumps(said).encode() + b"}\n"
