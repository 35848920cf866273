"""A guard's socket, from its making to its deletion, with one guard at most at a path."""

import contextlib
import fcntl
import os
import selectors
import socket
import time
from pathlib import Path

from envpipe_megatron.gpu.guard.protocol import GuardError

_BACKLOG = 256
_POLL_S = 0.01
_LEAVE_S = 5.0


def listen_at(path: str) -> socket.socket:
    """Return a socket that listens at a path, also where a guard that was killed left its own.

    Raises:
        GuardError: a guard listens there.
        OSError: there can be no socket.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(path)
    except OSError:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
            if other.connect_ex(path) == 0:
                raise GuardError("A guard listens there already", value=path) from None
        Path(path).unlink()
        listener.bind(path)
    listener.listen(_BACKLOG)
    return listener


def close_unless_wanted(listener: socket.socket, inode: int, *, anyway: bool) -> bool:
    """Close and delete a guard's socket unless somebody has connected; return whether it is closed.

    Args:
        listener: the socket.
        inode: of its file; another guard's at that path is left alone.
        anyway: also where somebody has connected.
    """
    path = Path(listener.getsockname())
    lock = StartLock(path)
    # Under the lock nobody starts another guard, whose socket would be deleted here.
    locked = False
    with contextlib.suppress(OSError):  # a folder that vanished, as at the end of a login
        locked = lock.acquire(time.monotonic() + _LEAVE_S)
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ)
            if not anyway and selector.select(0):
                return False
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_ino == inode:
                path.unlink()
        listener.close()
        return True
    finally:
        if locked:
            lock.release(delete=listener.fileno() < 0)


class StartLock:
    """Lets one process at a time start or end the guard of a socket.

    A record lock and not a `flock`: children that a rank forks meanwhile must not keep it. Such
    locks do not exclude threads of a process, so a process asks for it under a lock of its own.

    Args:
        path: the socket.
    """

    def __init__(self, path: Path) -> None:
        self._path = Path(f"{path}.lock")
        self._descriptor = -1

    def acquire(self, until_s: float) -> bool:
        """Take it, at the latest at an instant of the monotonic clock; return whether it is taken.

        May raise OSError.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        while True:
            descriptor = os.open(self._path, flags, 0o600)
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Its last holder deletes it: this may be the deleted one.
                if os.path.samestat(os.fstat(descriptor), self._path.lstat()):
                    self._descriptor = descriptor
                    return True
            except (BlockingIOError, PermissionError):
                if time.monotonic() > until_s:
                    os.close(descriptor)
                    return False
                time.sleep(_POLL_S)
            except FileNotFoundError:
                pass
            os.close(descriptor)

    def release(self, *, delete: bool = False) -> None:
        """Give it back, and delete its file where no guard is left."""
        if delete:
            self._path.unlink(missing_ok=True)
        os.close(self._descriptor)
