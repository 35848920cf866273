"""Which process it is, although the kernel may give its number to another one later."""

import os
import select
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process of this machine, for as long as the machine runs.

    `start_ticks` counts clock ticks since boot; `pid_namespace` is the inode of the PID namespace
    in which the process was looked at, and has this pid.
    """

    pid: int
    start_ticks: int
    pid_namespace: int

    @classmethod
    def of(cls, pid: int) -> Self | None:
        """Return the identity of a process, None if there is none (any more)."""
        fields = _stat_fields(pid)
        return None if fields is None else cls(pid, int(fields[19]), _own_namespace())

    @classmethod
    def own(cls) -> Self:
        """Return the identity of this process."""
        own = cls.of(os.getpid())
        assert own is not None, "/proc shows this process"
        return own

    def is_alive(self) -> bool | None:
        """Return whether it lives; None if that cannot be told from this PID namespace.

        A zombie is dead unless one of its threads is still at work, for example in the driver.
        """
        if self.pid_namespace != _own_namespace():
            return None
        fields = _stat_fields(self.pid)
        if fields is None:
            return _number_in_use(self.pid)
        if int(fields[19]) != self.start_ticks:
            return False
        return fields[0] not in "ZX" or int(fields[17]) > 1


def program_of(pid: int) -> int | None:
    """What tells the program that a process runs from one that it runs after an execve.

    That is where its stack begins, which the kernel draws anew. None if that cannot be told.
    """
    fields = _stat_fields(pid)
    return None if fields is None else int(fields[25]) or None


def _stat_fields(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the state on; the name before it may hold anything."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()


def _number_in_use(pid: int) -> bool:
    # /proc may be mounted so that it hides other users' processes; the kernel still tells.
    try:
        os.kill(pid, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)
    return True


def _own_namespace() -> int:
    return Path("/proc/self/ns/pid").stat().st_ino


def peer_uid_and_pid(connection: socket.socket) -> tuple[int, int]:
    """Return who connected a Unix socket, as the kernel says.

    The pid is 0 if the peer lives outside this PID namespace.
    """
    size = struct.calcsize("3i")
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    pid, uid, _ = struct.unpack("3i", credentials)
    return uid, pid


def wait_readable(descriptors: Sequence[int], timeout_s: float) -> bool:
    """Wait until a descriptor can be read, or the time is over; return whether one can.

    Unlike `select.select` also for the high numbers of a process with many files.
    """
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(max(0.0, 1000 * timeout_s)))
