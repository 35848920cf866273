"""A GPU's energy counter: when it was refreshed (`EnergyCounter`), and a process that reads it.

A counter's refresh is found by reads and short sleeps around it, some ninety a second. In a thread
each of them takes Python's interpreter lock from the training thread, by 0.2 ms on two virtual
CPUs: where the host has no lead over the GPU, training is longer by all of that. So another process
reads: `EnergyReader` is a rank's end, `main` the other.
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import astuple

from envpipe_megatron.child import ignore_signals_of_ranks, start_child
from envpipe_megatron.gpu.base import EnergyReading, GpuAddress, GpuError
from envpipe_megatron.gpu.guard.messages import receive, send, wait_readable
from envpipe_megatron.gpu.registry import READ_ONLY, open_gpu

_EXPECTED_PERIOD_S = 0.1
_STEP_S = 0.002
_LEAD_S = 0.009
"""How long before the expected instant, which is uncertain itself, watching begins: a first read
that showed the new value already would miss the refresh."""
FRESH_S = 0.04
"""A reading younger than this is returned again."""
STALL_S = 3.0
"""Thirty refreshes. A GPU that is on draws power, so its counter must have moved."""
_PROCESS = ("-P", "-m", "envpipe_megatron.gpu.energy_counter")  # -P: not the working folder
#: The socket to the rank is its standard input.
_RANK = 0
#: Characters of an error that are sent: in JSON one takes up to 12 bytes, a message holds 16 KiB.
_ERROR_CHARACTERS = 1000
#: How long to wait for its end, s; a driver may hang.
_END_S = 1.0


class EnergyCounter:
    """One GPU's energy counter with the instants of its refreshes. Threads may share it.

    NVML's counter moves every 100 ms, one read takes 3.4 ms (measured on an H200), and it does not
    say when it moved. Dividing by the instants of reading would charge up to 100 ms of energy to
    the wrong side of each end of a window. So the counter is read in short steps around the instant
    at which it is expected to move, two to four reads a refresh. It moved after the last read that
    showed the old value began, and before the first that shows the new one ended: the middle of the
    two is the refresh, and half their distance (4.4 ms on an H200) its uncertainty. A window of 1 s
    at constant power is then wrong by less than 1 %, and one of 10 s by less than 0.1 %.

    The expected instant only decides when to look. A counter with another period is read more
    often; its readings are as exact.
    """

    def __init__(self, read_j: Callable[[], float], name: str) -> None:
        self._read_j = read_j
        self._name = name
        self._lock = threading.Lock()
        self._reading: EnergyReading | None = None

    def read(self) -> EnergyReading:
        """Return the counter at its last refresh, or at the next one if that is due soon.

        A reading younger than 40 ms comes back at once; otherwise the call waits for the next
        refresh, up to 0.1 s. A caller that polls every 50 ms sees each refresh. A counter that went
        back, as where a driver is reloaded, is read as it is. Raises GpuError if it could not be
        read, or has not moved for `STALL_S`; the next call starts again.
        """
        with self._lock:
            last = self._reading
            if last is not None:
                age_s = time.monotonic() - last.time_s
                if age_s < FRESH_S:
                    return last
                time.sleep(-(age_s + _LEAD_S) % _EXPECTED_PERIOD_S)
            # Forgotten until another is found: after an error the next call starts again.
            self._reading = None
            self._reading = self._watch()
            return self._reading

    def _watch(self) -> EnergyReading:
        """Read until the counter moves."""
        first_s = after_s = time.monotonic()
        old_j = self._read_j()
        while True:
            time.sleep(_STEP_S)
            begin_s = time.monotonic()
            energy_j = self._read_j()
            end_s = time.monotonic()
            if energy_j != old_j:
                half_s = (end_s - after_s) / 2
                return EnergyReading(energy_j, after_s + half_s, half_s)
            if end_s - first_s > STALL_S:
                raise GpuError(
                    f"The energy counter of {self._name} has not moved for {STALL_S:g} s",
                    value=energy_j,
                    remedy="Check the GPU with nvidia-smi; its energy is not measured meanwhile",
                )
            after_s = begin_s


class ReaderGoneError(GpuError):
    """The process that reads has ended."""


class EnergyReader:
    """Reads one GPU's counter from the moment it is made until `close`; OSError if it cannot start.

    One thread at a time may call it.

    Args:
        poll_s: from one look at the counter to the next.
    """

    def __init__(self, uid: str, poll_s: float) -> None:
        order = {"uid": uid, "poll_s": poll_s, "parent": os.getpid()}
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
        self._end = select.poll()
        self._end.register(self._connection, 0)  # for the end of its socket, not for messages
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
            self.error = said["error"]
            if said["reading"] is not None:
                yield EnergyReading(*said["reading"])

    def wait(self, timeout_s: float) -> None:
        """Wait until there is something to take, for a time."""
        wait_readable([self._connection.fileno()], timeout_s)

    def wait_for_end(self, timeout_s: float) -> None:
        """Wait until it has ended, for a time."""
        self._end.poll(1000 * timeout_s)

    def close(self) -> None:
        """End it; what it has not said is lost."""
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        self._connection.close()


def main() -> None:
    """Read a counter for a rank, as often as its order says, and send each refresh and error.

    It ends with the rank, which may also kill it.
    """
    order = json.loads(sys.argv[1])
    ignore_signals_of_ranks()
    gpu = open_gpu(GpuAddress(READ_ONLY, order["uid"]))
    # A rank that takes nothing for minutes must not keep this process from looking.
    rank = socket.socket(fileno=_RANK)
    rank.setblocking(False)
    last: EnergyReading | None = None
    said: str | None = None
    while os.getppid() == order["parent"]:  # a child that the rank forked may keep its end open
        reading, error = last, None
        try:
            reading = gpu.read_energy()
        except Exception as failure:  # a driver may fail in any way
            error = str(failure)[:_ERROR_CHARACTERS]
        if (reading, error) != (last, said):
            with suppress(BlockingIOError):  # of a counter, a later refresh says as much
                send(rank, {"error": error, "reading": reading and astuple(reading)})
                last, said = reading, error
        if select.select([_RANK], [], [], order["poll_s"])[0]:
            return  # a rank says nothing: its end has closed


if __name__ == "__main__":
    with suppress(ConnectionError):
        main()
