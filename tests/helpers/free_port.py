"""A port for a job of a test."""

import secrets
import socket
from pathlib import Path

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """Return a port of this machine that nobody has, and that no other socket is given meanwhile.

    A job listens seconds after it was asked for: the kernel gives each port of its own range that
    is free to the next socket that asks for any.
    """
    first, lowest = 20_000, int(RANGE.read_text().split()[0])
    while True:
        port = first + secrets.randbelow(max(lowest, 32_768) - first)
        with socket.socket() as bound:
            try:
                bound.bind(("127.0.0.1", port))
            except OSError:  # a job of another test has it
                continue
        return port
