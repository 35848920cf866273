"""An energy counter that another process reads: `EnergyReader` is a rank's end, `main` the other.

A counter's refresh is found by reads and short sleeps around it, some ninety a second. In a thread
each of them takes Python's interpreter lock from the training thread, by 0.2 ms on two virtual
CPUs: where the host has no lead over the GPU, training is longer by all of that.
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, astuple
from typing import Any

from envpipe_megatron.child import ignore_signals_of_ranks, start_child
from envpipe_megatron.gpu.base import EnergyReading, GpuAddress, GpuError
from envpipe_megatron.gpu.guard.messages import receive, send, wait_readable
from envpipe_megatron.gpu.registry import open_reader

_PROCESS = ("-P", "-m", "envpipe_megatron.gpu.energy_reader")  # -P: not the working folder
#: The socket to the rank is its standard input.
_RANK = 0
#: Said of an error: in JSON a character takes up to 12 bytes, a message holds 16 KiB.
_ERROR_CHARACTERS = 1000
#: How long to wait for its end, s; a driver may hang.
_END_S = 1.0


class ReaderGoneError(GpuError):
    """The process that reads has ended."""


class EnergyReader:
    """Reads one GPU's counter from the moment it is made until `close`; OSError if it cannot start.

    One thread at a time may call it.

    Args:
        poll_s: from one look at the counter to the next.
    """

    def __init__(self, address: GpuAddress, poll_s: float) -> None:
        order = {"address": asdict(address), "poll_s": poll_s, "parent": os.getpid()}
        nothing = subprocess.DEVNULL  # what starts with Python may print
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                self._process = start_child(
                    _PROCESS, order, stdin=theirs, stdout=nothing, stderr=nothing
                )
            except OSError:
                self._connection.close()
                raise
        self._connection.setblocking(False)
        self._asked = self._answered = 0
        #: Why its last look failed; None when it went well.
        self.error: str | None = None

    def take(self) -> Iterator[EnergyReading]:
        """Yield the refreshes that were seen since the last call. Raises ReaderGoneError."""
        while True:
            try:
                said = receive(self._connection)
            except BlockingIOError:
                return
            if said is None:
                raise ReaderGoneError(
                    "The process that reads the energy counter has ended",
                    value=self._process.poll(),
                )
            self._answered, self.error = said["looks"], said["error"]
            if "reading" in said:
                yield EnergyReading(*said["reading"])

    def look(self, timeout_s: float) -> Iterator[EnergyReading]:
        """Have it look now; yield what it has seen by then, or in time. Raises ReaderGoneError."""
        until_s = time.monotonic() + timeout_s
        with suppress(OSError):  # what it said before it ended is there to take
            send(self._connection, {"op": "look"})
        self._asked += 1
        while True:
            yield from self.take()
            left_s = until_s - time.monotonic()
            if self._answered >= self._asked or left_s <= 0:
                return
            wait_readable([self._connection.fileno()], left_s)

    def close(self) -> None:
        """End it; what it has not said is lost."""
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        self._connection.close()


def main() -> None:
    """Read a counter for a rank, and send a message for each refresh, answer and error.

    Looks as often as its order says, and when a message comes in. It ends with the rank, which may
    also kill it.
    """
    order = json.loads(sys.argv[1])
    ignore_signals_of_ranks()
    gpu = open_reader(GpuAddress(**order["address"]))
    # A rank that takes nothing for minutes must not keep this process from looking.
    rank = socket.socket(fileno=_RANK)
    rank.setblocking(False)
    waiting, looks = deque[dict[str, Any]](), 0
    last: EnergyReading | None = None
    said: dict[str, Any] = {}
    while os.getppid() == order["parent"]:  # a child that the rank forked may keep its end open
        saying: dict[str, Any] = {"looks": looks, "error": None}
        reading = last
        try:
            reading = gpu.read_energy()
        except Exception as error:  # a driver may fail in any way
            saying["error"] = str(error)[:_ERROR_CHARACTERS]
        news = {} if reading is None or reading == last else {"reading": astuple(reading)}
        if news or saying != said:
            last, said = reading, saying
            waiting.append({**saying, **news})
        with suppress(BlockingIOError):
            while waiting:
                send(rank, waiting[0])
                waiting.popleft()
        if select.select([_RANK], [], [], order["poll_s"])[0]:
            with suppress(BlockingIOError):
                while receive(rank):
                    looks += 1
                return


if __name__ == "__main__":
    with suppress(ConnectionError):
        main()
