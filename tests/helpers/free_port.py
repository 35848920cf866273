"""A port for a job of a test."""

import socket


def free_port() -> int:
    """One that nobody has on this machine."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])
