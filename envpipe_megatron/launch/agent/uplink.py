"""Sends a node's energy log to the job's collector, through whatever happens to the network."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from typing import Any, NoReturn

from envpipe_megatron.formats.energy import parse_line
from envpipe_megatron.formats.energy_sums import LogSums
from envpipe_megatron.launch.agent.collector import EARLIER, MAX_BYTES, holds_within
from envpipe_megatron.launch.agent.node_log import NodeLog

logger = logging.getLogger(__name__)

_ANSWER_S = 5.0
#: A name may have an address that does not answer, and then another.
_NEXT_ADDRESS_S = 0.25
#: Lines of earlier starts that are added up at once: those of some tenths of a second.
_PIECE_BYTES = 2**20
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0


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
        """Whether the collector gets the whole log within a time."""
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
    return EARLIER + json.dumps(said).encode() + b"}\n"
