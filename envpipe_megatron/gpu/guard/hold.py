"""Has a rank's GPU guarded: `hold_gpu` before the first clock is asked for, `release` at the end.

The rank never locks a clock: its guard does, as the page says that both share. The guard has a
lease on disk before it answers, and deletes it behind its last reset. So

- the rank ends, however it does, or wants no clock any more: its guard resets and ends.
- the guard ends, however it does: nothing is locked any more, and its lease is stale. The rank
  resets its GPU and deletes the lease, and trains on.
- the guard hangs, and answers no heartbeat: the rank kills it, and goes on as above.
- the rank and its guard are killed: any other guard of the user finds the stale lease within a
  second, and so does any rank that has lost its guard.
- all are killed: the next job that takes the GPU, `envpipe clocks reset` and a batch system's
  epilogue that calls it do the same.

Two that undo one lease at once exclude each other by its lock.
"""

import logging
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from queue import Empty, SimpleQueue

from envpipe_megatron.child import start_child
from envpipe_megatron.gpu.base import GpuAddress, GpuError
from envpipe_megatron.gpu.clock.page import ClockPage
from envpipe_megatron.gpu.guard.lease import list_leases, undo_lease, undo_stale_leases
from envpipe_megatron.gpu.guard.lease_file import lease_name
from envpipe_megatron.gpu.guard.messages import (
    GuardError,
    GuardSettings,
    ProcessIdentity,
    receive,
    runtime_folder,
    send,
    wait_readable,
)
from envpipe_megatron.gpu.registry import open_gpu

_LOG = logging.getLogger(__name__)

_GUARD = ("-P", "-m", "envpipe_megatron.gpu.guard.process")  # -P: nothing of the working folder
_BEATS_PER_HEARTBEAT = 6
_ANSWER_S = 120.0
_RELEASE_S = 60.0
_FIRST_LOOK_S = 0.02
_LONGEST_LOOK_S = 1.0


def job_key() -> str:
    """Return the name of this process's job, from what launchers set, for people to read."""
    given, parts = os.environ, []
    if given.get("SLURM_JOB_ID"):
        step = given.get("SLURM_STEP_ID", "")
        parts.append(f"slurm {given['SLURM_JOB_ID']}{'.' + step if step else ''}")
    if given.get("TORCHELASTIC_RUN_ID", "none") != "none":
        parts.append(f"run {given['TORCHELASTIC_RUN_ID']}")
    return ", ".join(parts) or f"process {os.getpid()}"


def guard_log(address: GpuAddress) -> Path:
    """Return the log of the guards of a GPU."""
    return (runtime_folder() / f"guard-{lease_name(address)}").with_suffix(".log")


def hold_gpu(
    address: GpuAddress,
    job: str | None = None,
    *,
    on_end: Callable[[], None],
    settings: GuardSettings | None = None,
    page: ClockPage,
    timeout_s: float = _ANSWER_S,
) -> "Hold":
    """Start a guard for a GPU, which sets the clocks that a page asks for from here on.

    Args:
        job: the job's name, by default `job_key()`.
        page: its file may be closed afterwards.
        on_end: called on its own thread when the guard has ended before the page was over, as by
            a signal that a batch system sends; it is over then.

    Raises GuardError if the guard could not be started or refused: another job or another rank
    holds the GPU, or it cannot be opened or reset.
    """
    settings = settings or GuardSettings()
    log = guard_log(address)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
    try:
        with theirs, os.fdopen(os.open(log, flags, 0o600), "wb") as output:
            order = {
                "address": asdict(address),
                "job": job or job_key(),
                "rank": asdict(ProcessIdentity.own()),
                "settings": asdict(settings),
                "page": page.descriptor,
                "socket": theirs.fileno(),
            }
            process = start_child(
                _GUARD,
                order,
                (theirs.fileno(), page.descriptor),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        try:
            ours.settimeout(timeout_s)
            answer = receive(ours) or {"what": f"The guard ended before it held the GPU: see {log}"}
        finally:
            process.kill()  # the guard has detached, or could not start
            process.wait()
        if "guard_pid" not in answer:
            raise GuardError(answer["what"])
        return Hold(ours, address, page, settings.heartbeat_s, answer["guard_pid"], on_end)
    except BaseException as error:
        page.end()  # in case the guard still starts
        ours.close()
        with suppress(Exception):  # in case it had a lease
            for record in list_leases():
                if (record.address, record.rank) == (address, ProcessIdentity.own()):
                    undo_lease(record, open_gpu)
        if not isinstance(error, OSError):
            raise
        raise GuardError(
            f"The guard could not be started: {error}",
            value=str(log),
            remedy="See its log: the driver may hang, or the machine be overloaded. No clock is "
            "locked without a guard",
        ) from error


class Hold:
    """A GPU guarded for this process; `hold_gpu` makes it. Does nothing in a forked child."""

    def __init__(
        self,
        connection: socket.socket,
        address: GpuAddress,
        page: ClockPage,
        heartbeat_s: float,
        guard_pid: int,
        on_end: Callable[[], None],
    ) -> None:
        self.address = address
        self.guard_pid = guard_pid
        self._guard = ProcessIdentity.of(guard_pid)
        self._page = page
        self._beat_every_s = heartbeat_s / _BEATS_PER_HEARTBEAT
        self._connection = connection
        self._on_end = on_end
        self._pid = os.getpid()
        self._over = False
        self._is_back = False
        #: Wakes the thread in `release`. An Event's lock stays taken if a signal handler raises.
        self._back: SimpleQueue[None] = SimpleQueue()
        # Else a process that runs another program looks alive while a child of it lives.
        os.register_at_fork(after_in_child=connection.close)
        connection.setblocking(False)
        self._thread = threading.Thread(target=self._watch, name="envpipe-guard", daemon=True)
        self._thread.start()

    def release(self, timeout_s: float = _RELEASE_S) -> None:
        """End clock control: the guard resets the GPU once more, deletes the lease and ends.

        Any thread may call it; in the callback it does not wait. The second call does nothing.
        Raises GuardError if the guard, or this process in its place, did not finish in time.
        """
        if os.getpid() != self._pid:
            return
        self._over = True
        self._page.end()
        self._beat()  # wakes it
        if threading.current_thread() is self._thread or self._is_back:
            return
        # The driver may hang, and must not keep this thread as well.
        with suppress(Empty):
            self._back.get(timeout=timeout_s)
            self._back.put(None)  # another thread may wait, too
        if not self._is_back:
            raise GuardError(
                "The clock was not confirmed to be back in time",
                value=self.address.uid,
                remedy=f"The guard (process {self.guard_pid}), or this rank if that has died, goes "
                "on trying: see their logs. `envpipe clocks reset` tries again later",
            )

    def _beat(self) -> None:
        # A guard that is gone, or does not read, does not answer.
        with suppress(OSError):
            send(self._connection, {"op": "beat"})

    # --- the watching thread --------------------------------------------------------------------

    def _watch(self) -> None:
        self._listen()
        self._connection.close()
        if not self._page.is_over:
            _LOG.error("the guard of %s has ended: so does clock control", self.address.uid)
            self._page.end()
            try:
                self._on_end()
            except Exception:
                _LOG.exception("the callback for the end of a guard failed")
        self._bring_back()

    def _listen(self) -> None:
        """Send heartbeats until the guard has ended; kill one that does not answer them."""
        unanswered = 0
        while unanswered <= _BEATS_PER_HEARTBEAT:
            if not wait_readable([self._connection.fileno()], self._beat_every_s):
                self._beat()
                unanswered += 1
                continue
            try:
                if receive(self._connection) is None:
                    return
            except (GpuError, OSError):
                _LOG.exception("what the guard of %s says is not understood", self.address.uid)
                return
            unanswered = 0
        _LOG.error("the guard of %s does not answer", self.address.uid)
        if self._guard is not None and self._guard.is_alive():
            with suppress(ProcessLookupError):
                os.kill(self.guard_pid, signal.SIGKILL)

    def _bring_back(self) -> None:
        """Undo leases without a guard, this rank's first, until it has none and is released."""
        wait_s, said = _FIRST_LOOK_S, set[str]()
        while True:
            with suppress(GpuError, OSError):
                leases = [(record.address, record.guard.pid) for record in list_leases()]
                if not self._is_back and (self.address, self.guard_pid) not in leases:
                    self._is_back = True
                    self._back.put(None)
            if self._is_back and self._over:
                return
            undo_stale_leases(self.address, open_gpu, said)
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_LOOK_S)
