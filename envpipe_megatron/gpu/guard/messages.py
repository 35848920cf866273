"""How a rank talks with its guard, and with its node's agent: JSON objects over a Unix socket.

The sockets keep message boundaries (SOCK_SEQPACKET): a message comes whole or not at all. Between
a rank and its guard there is one, of two kinds:

    guard -> rank    {"guard_pid": ..., "patience_s": ...}    it holds the GPU, and sets clocks
    guard -> rank    {"what": ...}                            it is refused

All else is in the page that they share (`gpu.clock.page`): which clocks the rank wants, that it
wants none any more, and that either lives. The end of the socket is that of the other.

A `ProcessIdentity` says which process one is, although the kernel may give its number to another.
"""

import contextlib
import errno
import json
import os
import select
import socket
import stat
import struct
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from envpipe_megatron.gpu.base import GpuError

AGENT_VARIABLE = "ENVPIPE_AGENT_SOCKET"
"""Names the socket of the node's agent; see `runtime.energy.agent_link`."""

_MAX_MESSAGE_BYTES = 16 * 1024


class GuardError(GpuError):
    """The guard could not be started, or refused; no clock is locked without one."""


def send(connection: socket.socket, message: Mapping[str, Any]) -> None:
    """Send a message; OSError if it is longer than a receiver reads, or cannot be sent."""
    data = json.dumps(message).encode()
    if len(data) > _MAX_MESSAGE_BYTES:
        raise OSError(errno.EMSGSIZE, os.strerror(errno.EMSGSIZE))
    connection.send(data)


def receive(connection: socket.socket) -> dict[str, Any] | None:
    """Return the next message, None if the other side is gone.

    Raises GuardError if it is not a message, BlockingIOError if a non-blocking socket has none yet,
    TimeoutError if none came in time.
    """
    data = b""
    for _ in range(2):
        # If the other side left something unread, an error comes first, then its last message.
        with contextlib.suppress(ConnectionError):
            data = connection.recv(_MAX_MESSAGE_BYTES)
            break
    if not data:
        return None
    try:
        message = json.loads(data)
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict):
        raise GuardError("Not a message of ranks, guards and agents", value=data[:80])
    return message


def runtime_folder() -> Path:
    """Return the folder of this user's guards' logs; make it if it is missing.

    In XDG_RUNTIME_DIR, else in /tmp, or where that cannot be written in TMPDIR. Raises GuardError
    if somebody else could enter it, or it cannot be made.
    """
    path = Path("/tmp", f"envpipe-{os.geteuid()}")
    if not os.access("/tmp", os.W_OK):  # a container's, read-only
        with contextlib.suppress(FileNotFoundError):
            path = Path(tempfile.gettempdir(), path.name)
    given = os.environ.get("XDG_RUNTIME_DIR")
    with contextlib.suppress(OSError):  # it may have gone with the login that it was made for
        if given and Path(given).stat().st_uid == os.geteuid() and Path(given).is_dir():
            path = Path(given) / "envpipe"
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        status = path.lstat()
        private = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077
        why = "" if private and status.st_uid == os.geteuid() else "is not only this user's"
    except OSError as error:
        why = f"cannot be made: {error.strerror}"
    if why:
        raise GuardError(
            f"The folder for guards' logs {why}",
            value=str(path),
            remedy="Delete it, or set XDG_RUNTIME_DIR to a folder of your own on this machine",
        )
    return path


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
        """Return whether it lives; None if this PID namespace does not show it.

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


def _stat_fields(pid: int) -> list[str] | None:
    """Return what /proc/PID/stat says from the state on; the name before may hold anything."""
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
