"""Connects a rank to its job's guard, and starts the guard where there is none yet."""

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import envpipe_megatron
from envpipe_megatron.gpu.guard.process_identity import peer_uid_and_pid, wait_readable
from envpipe_megatron.gpu.guard.protocol import (
    SOCKET_VARIABLE,
    GuardError,
    GuardSettings,
    socket_path,
)
from envpipe_megatron.gpu.guard.socket import StartLock

_STARTING = threading.Lock()
_MAX_ANSWER_BYTES = 4096


def connect_to_guard(
    job: str, settings: GuardSettings, log: Path | None, until_s: float
) -> socket.socket:
    """Return a connection to the job's guard, starting that where nobody has.

    A node agent's guard, named by ENVPIPE_GUARD_SOCKET, is never started here.

    Args:
        job: the job's name, the same in all its ranks on this node.
        settings: for a guard that is started.
        log: file for the log of a guard that is started; by default beside its socket.
        until_s: instant of the monotonic clock at which to give up, s.

    Raises:
        GuardError: there is none, and none could be started in time.
    """
    given = os.environ.get(SOCKET_VARIABLE)
    if given:
        connection = _connect(Path(given), until_s)
        if connection is None:
            raise GuardError(
                "The node's guard does not answer",
                value=given,
                remedy=f"Start it, or unset {SOCKET_VARIABLE} so that the job starts its own",
            )
        return connection
    path = socket_path(job)
    log = (path.with_suffix(".log") if log is None else log).absolute()
    while True:
        connection = _connect(path, until_s)
        if connection is not None:
            return connection
        _start_unless_started(path, job, settings, log, until_s)
        if time.monotonic() > until_s:
            raise _not_in_time(path)


def _connect(path: Path, until_s: float) -> socket.socket | None:
    """Return a connection, None where nobody listens."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(max(0.01, until_s - time.monotonic()))
        connection.connect(str(path))
    except (FileNotFoundError, ConnectionError):
        connection.close()
        return None
    except OSError as error:
        connection.close()
        raise GuardError(f"The guard cannot be reached: {error}", value=str(path)) from error
    uid, _ = peer_uid_and_pid(connection)
    if uid != os.geteuid():  # a guard serves its own user alone, root's too
        connection.close()
        raise GuardError(
            "The guard's socket belongs to a stranger",
            value=f"{path}, uid {uid}",
            remedy=f"Correct {SOCKET_VARIABLE}",
        )
    return connection


def _start_unless_started(
    path: Path, job: str, settings: GuardSettings, log: Path, until_s: float
) -> None:
    with _STARTING:
        lock = StartLock(path)
        try:
            if not lock.acquire(until_s):
                raise _not_in_time(path)
        except OSError as error:
            raise GuardError(f"The guard cannot be started: {error}", value=str(path)) from error
        try:
            connection = _connect(path, until_s)  # another rank may have been faster
            if connection is not None:
                connection.close()
                return
            _start(path, job, settings, log, until_s)
        finally:
            lock.release()


def _start(path: Path, job: str, settings: GuardSettings, log: Path, until_s: float) -> None:
    ready, said = os.pipe()
    command = [sys.executable, "-P", "-m", "envpipe_megatron.gpu.guard.process"]
    command += ["--socket", str(path), "--job", job, "--log", str(log), "--ready-fd", str(said)]
    command += ["--heartbeat-s", repr(settings.heartbeat_s)]
    command += ["--give-up-s", repr(settings.give_up_s), "--stop-s", repr(settings.stop_s)]
    # Found again where this process found it, and (-P) nothing in its folder taken for a module.
    package = str(Path(envpipe_megatron.__file__).resolve().parents[1])
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    try:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(said,),
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                start_new_session=True,  # Ctrl-C and the end of a process group do not reach it
            )
        finally:
            os.close(said)
        in_time = wait_readable([ready], until_s - time.monotonic())
        answer = os.read(ready, _MAX_ANSWER_BYTES) if in_time else None
    except OSError as error:
        raise GuardError(f"The guard could not be started: {error}") from error
    finally:
        os.close(ready)
    if answer is None:
        process.kill()
    process.wait()  # it has detached, or failed
    if answer is None:
        raise _not_in_time(path)
    if answer != b"ready":
        raise GuardError(
            f"The guard could not start: {answer.decode(errors='replace') or 'it was killed'}",
            value=str(log),
            remedy="No clock is locked without a guard",
        )


def _not_in_time(path: Path) -> GuardError:
    return GuardError(
        "The guard did not start in time",
        value=str(path),
        remedy="See its log beside the socket; is the machine overloaded?",
    )
