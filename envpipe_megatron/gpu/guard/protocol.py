"""How ranks and their guard find and talk to each other.

They meet at a Unix socket in a folder that only their user can enter, named after the job. It keeps
message boundaries (SOCK_SEQPACKET), so a message is one JSON object, whole or not there. One
connection holds one GPU:

    rank  -> guard   {"op": "hold", "backend": ..., "uid": ...}     answered by held or refused
    rank  -> guard   {"op": "beat"}                                 answered by beat
    rank  -> guard   {"op": "release"}                              answered by released
    guard -> rank    {"event": "held", "job": ..., "guard_pid": ..., "heartbeat_s": ...}
    guard -> rank    {"event": "refused", "error": ..., "what": ..., "remedy": ...}
    guard -> rank    {"event": "stop"}           end clock control, reset, release: the job ends
    guard -> rank    {"event": "was_reset"}      the clock is at its default, whatever was asked

No message asks the guard to lock a clock: it cannot be made to.
"""

import contextlib
import errno
import hashlib
import json
import os
import socket
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.gpu.base import ClockControlForbiddenError, GpuError, GpuPermissionError
from envpipe_megatron.gpu.guard.lease import LeaseHeldError
from envpipe_megatron.gpu.guard.lease_folder import LeaseFolderError
from envpipe_megatron.gpu.guard.lease_record import LeaseFileError

SOCKET_VARIABLE = "ENVPIPE_GUARD_SOCKET"
MAX_MESSAGE_BYTES = 16 * 1024
_MAX_SOCKET_PATH = 107


class GuardError(GpuError):
    """The guard, without which no clock is locked, is missing or refuses."""


class GuardProtocolError(GuardError):
    """What came over the socket is not a message."""


@dataclass(frozen=True, slots=True)
class GuardSettings:
    """How patient a guard is.

    Attributes:
        heartbeat_s: a rank that is silent for so long has its GPU reset, s. Long, because a rank
            may hold Python's interpreter lock for many seconds without being ill.
        give_up_s: for how long to go on resetting a GPU whose rank is gone and whose resets fail
            or hang, s. The lease stays then, and says what to undo.
        stop_s: for how long ranks may take to end clock control when the guard is told to end, s.
            Less than batch systems wait between SIGTERM and SIGKILL.
    """

    heartbeat_s: float = 30.0
    give_up_s: float = 600.0
    stop_s: float = 10.0


Message = Mapping[str, Any]

_TOLD: dict[str, type[GpuError]] = {
    kind.__name__: kind
    for kind in (
        ClockControlForbiddenError,
        GpuPermissionError,
        LeaseFileError,
        LeaseFolderError,
    )
}


def send(connection: socket.socket, message: Message) -> None:
    """Send a message.

    Raises:
        OSError: it is longer than who receives it would read, or cannot be sent.
    """
    data = json.dumps(message).encode()
    if len(data) > MAX_MESSAGE_BYTES:
        raise OSError(errno.EMSGSIZE, os.strerror(errno.EMSGSIZE))
    connection.send(data)


def receive(connection: socket.socket) -> dict[str, Any] | None:
    """Return the next message, None where the other side is gone.

    Raises:
        GuardProtocolError: it is not a message.
        BlockingIOError: there is none yet, on a socket that does not block.
        TimeoutError: none came in time.
    """
    try:
        data = connection.recv(MAX_MESSAGE_BYTES)
    except ConnectionError:
        return None
    if not data:
        return None
    try:
        message = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise GuardProtocolError("Not a message of ranks and guards", value=data[:80]) from error
    if not isinstance(message, dict):
        raise GuardProtocolError("Not a message of ranks and guards", value=data[:80])
    return message


def refusal(error: BaseException) -> Message:
    """Return the message that tells a rank why its GPU is not held."""
    message = {"event": "refused", "error": type(error).__name__, "what": str(error), "remedy": ""}
    if isinstance(error, EnvPipeError):
        message["what"] = str(error).removesuffix(f". {error.remedy}")
        message["remedy"] = error.remedy
    if isinstance(error, LeaseHeldError):
        return {**message, "what": error.what, "job": error.job, "pid": error.pid, "uid": error.uid}
    return message


def refused_error(message: Message) -> GpuError:
    """Return the error that a refusal tells of."""
    what, remedy = str(message.get("what")), str(message.get("remedy", ""))
    if message.get("error") == LeaseHeldError.__name__:
        return LeaseHeldError(
            what,
            job=str(message.get("job")),
            pid=int(message.get("pid", 0)),
            uid=int(message.get("uid", -1)),
            remedy=remedy,
        )
    return _TOLD.get(str(message.get("error")), GuardError)(what, remedy=remedy)


def job_key(environ: Mapping[str, str] | None = None) -> str:
    """Return the name of this process's job on this node, from what launchers set.

    All ranks that one launcher started on a node get the same one. A process without any launcher
    is a job of its own.
    """
    given = os.environ if environ is None else environ
    parts = []
    if given.get("SLURM_JOB_ID"):
        step = given.get("SLURM_STEP_ID", "")
        parts.append(f"slurm {given['SLURM_JOB_ID']}{'.' + step if step else ''}")
    if given.get("TORCHELASTIC_RUN_ID", "none") != "none":
        parts.append(f"run {given['TORCHELASTIC_RUN_ID']}")
    if given.get("MASTER_PORT"):
        parts.append(f"at {given.get('MASTER_ADDR', '')}:{given['MASTER_PORT']}")
    if not parts:
        return f"process {os.getpid()}"
    # So that several 'nodes' on one machine are told apart.
    node = given.get("GROUP_RANK") or given.get("SLURM_NODEID")
    return ", ".join([*parts, f"node {node}"] if node else parts)


def runtime_folder() -> Path:
    """Return the folder of this user's sockets and guards' logs; make it where it is missing.

    Raises:
        GuardError: somebody else could enter it, or it cannot be made.
    """
    path = Path(f"/tmp/envpipe-{os.geteuid()}")
    given = os.environ.get("XDG_RUNTIME_DIR")
    with contextlib.suppress(OSError):  # it may have gone with the login that it was made for
        if given and Path(given).stat().st_uid == os.geteuid() and Path(given).is_dir():
            path = Path(given) / "envpipe"
    try:
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        status = path.lstat()
    except OSError as error:
        raise GuardError(
            f"The folder for the guard's socket cannot be made: {error.strerror}",
            value=str(path),
            remedy="Set XDG_RUNTIME_DIR to a folder of your own on this machine",
        ) from error
    private = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077
    if not private or status.st_uid != os.geteuid():
        raise GuardError(
            "The folder for the guard's socket is not this user's alone",
            value=f"{path}, {stat.filemode(status.st_mode)}, uid {status.st_uid}",
            remedy="Delete it or give it mode 700, or set XDG_RUNTIME_DIR to a folder of your own",
        )
    return path


def socket_path(job: str) -> Path:
    """Return where the guard of a job listens.

    Raises:
        GuardError: the folder is unsafe, or its path too long for a socket.
    """
    return check_socket_path(
        runtime_folder() / f"{hashlib.sha256(job.encode()).hexdigest()[:16]}.sock"
    )


def check_socket_path(path: Path) -> Path:
    """Return the path of a socket to be.

    Raises:
        GuardError: it is too long for a socket.
    """
    if len(os.fsencode(path)) > _MAX_SOCKET_PATH:
        raise GuardError(
            "The path is too long for a socket",
            value=str(path),
            remedy="Set XDG_RUNTIME_DIR to a folder with a shorter path",
        )
    return path
