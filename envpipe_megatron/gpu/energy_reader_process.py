"""Reads an energy counter for a rank, and writes what it sees into a socket: `energy_reader`.

Looks as often as it was told, and when a byte comes in; a line of JSON goes out for each refresh,
each answer and each error. It ends with the rank, which may also kill it.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
from contextlib import suppress
from dataclasses import astuple
from typing import Any

from envpipe_megatron.gpu.base import EnergyReading, GpuAddress
from envpipe_megatron.gpu.opening import open_reader

#: The socket to the rank is its standard input.
_RANK = 0


def main() -> None:
    """Read until nobody wants to know."""
    order = json.loads(sys.argv[1])
    # Batch systems send these to all of a job's processes, and mean its ranks.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    gpu = open_reader(GpuAddress(**order["address"]))
    # A rank that takes nothing for minutes must not keep this process from looking.
    os.set_blocking(_RANK, False)
    waiting, looks = b"", 0
    last: EnergyReading | None = None
    said: dict[str, Any] = {}
    while os.getppid() == order["parent"]:  # a child that the rank forked may keep its end open
        saying: dict[str, Any] = {"looks": looks, "error": None}
        reading = last
        try:
            reading = gpu.read_energy()
        except Exception as error:  # a driver may fail in any way
            saying["error"] = str(error)
        news = {} if reading is None or reading == last else {"reading": astuple(reading)}
        if news or saying != said:
            last, said = reading, saying
            waiting += json.dumps({**saying, **news}).encode() + b"\n"
        with suppress(BlockingIOError):
            waiting = waiting[os.write(_RANK, waiting) :]
        if select.select([_RANK], [], [], order["poll_s"])[0]:
            asked = os.read(_RANK, 1 << 10)
            if not asked:
                return
            looks += len(asked)


if __name__ == "__main__":
    with suppress(ConnectionError):
        main()
