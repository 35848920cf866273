"""Has a rank's GPU guarded: `hold_gpu` before its first lock, `release` at the end.

The order is: the rank's guard has a lease on disk, then the rank may lock. A thread of the rank
sends heartbeats and reads what the guard says. When the guard dies, that thread notices (its socket
ends) and stands in for it, in this order:

1. It calls back with LOST. When the callback returns, the rank no longer locks its clock.
2. It resets its GPU and deletes its lease.
3. As guards do, it undoes the leases of ranks of its job that died together with their guards,
   until the job has no other lease.

This covers these races:

- *A rank locks after its guard has died, because it has not noticed yet.* Its lease is still there
  (nobody deletes the lease of a rank that lives), so it undoes the lock itself in step 2.
- *That rank is killed before step 2, or together with its guard.* Its lease is still there and
  names it. The guard of any other rank of the job finds it within a second, or a rank in step 3.
- *Two undo one lease at once.* They exclude each other by its lock; the second finds none.
- *All are killed.* The leases stay, unlocked. The next job that takes one of these GPUs, `envpipe
  clocks reset` and a batch system's epilogue that calls it reset the GPU and delete them.
- *Somebody undoes a stale lease while its rank lives and has not noticed.* The GPU is reset and the
  lease stays.
- *The guard lives but hangs.* It answers no heartbeat; that is a LOST as well. The lease is still
  the guard's, and the rank resets its GPU. Should the guard wake up, it finds a release.
- *A child that another thread forks just now keeps the guard's end of the socket open.* Then the
  missing answers to heartbeats say that the guard has died.
- *The guard dies before it has answered.* Nothing was locked; a lease that it took is deleted.
- *The rank dies before it has its answer.* The guard finds it dead.
- *A rank is stopped (SIGSTOP) while its guard dies.* It cannot lock while it is stopped. Killed, it
  is a dead rank; continued, it notices.

Where the guard sets the clock for the rank, by a page that both share, one process locks and
resets, in order. The rank says in the page that it has given up before its callback for LOST
returns: a guard that hung, and wakes up, locks nothing that it does not reset.
"""

import enum
import logging
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from envpipe_megatron.child import start_child
from envpipe_megatron.gpu.base import (
    FORBID_VARIABLE,
    ClockControlForbiddenError,
    GpuAddress,
    GpuError,
    clock_control_forbidden,
)
from envpipe_megatron.gpu.clock.page import ClockPage
from envpipe_megatron.gpu.devices import open_gpu
from envpipe_megatron.gpu.guard.lease import (
    LeaseHeldError,
    bring_back,
    list_leases,
    undo_dead_ranks,
    undo_lease,
)
from envpipe_megatron.gpu.guard.lease_file import (
    PATH_BACKENDS,
    LeaseRecord,
    lease_name,
    printable,
)
from envpipe_megatron.gpu.guard.messages import (
    GuardError,
    GuardSettings,
    ProcessIdentity,
    receive,
    runtime_folder,
    send,
    wait_readable,
)

_LOG = logging.getLogger(__name__)

_GUARD = ("-P", "-m", "envpipe_megatron.gpu.guard.process")  # -P: nothing of the working folder
_BEATS_PER_HEARTBEAT = 6
_ANSWER_S = 120.0
_RELEASE_S = 60.0
_FIRST_LOOK_S = 0.02
_LONGEST_LOOK_S = 1.0


class GuardEvent(enum.Enum):
    """Events that a guard reports to its rank.

    Attributes:
        LOST: the guard is gone. When the callback returns, this rank no longer locks its clock; its
            GPU is then reset and the lease deleted.
        STOP: the job must end. The callback, or what it wakes, ends clock control and calls
            `release`.
        WAS_RESET: the clock is at its default, whatever was requested: forget that, and go on.
    """

    LOST = "lost"
    STOP = "stop"
    WAS_RESET = "was_reset"


def job_key() -> str:
    """Return the name of this process's job on this node, from what launchers set.

    All ranks that one launcher started on a node get the same one; a process without any launcher
    is a job by itself.
    """
    given, parts = os.environ, []
    if given.get("SLURM_JOB_ID"):
        step = given.get("SLURM_STEP_ID", "")
        parts.append(f"slurm {given['SLURM_JOB_ID']}{'.' + step if step else ''}")
    if given.get("TORCHELASTIC_RUN_ID", "none") != "none":
        parts.append(f"run {given['TORCHELASTIC_RUN_ID']}")
    if given.get("MASTER_PORT"):
        parts.append(f"at {given.get('MASTER_ADDR', '')}:{given['MASTER_PORT']}")
    if not parts:
        return f"process {os.getpid()}"
    # Several 'nodes' may run on one machine.
    node = given.get("GROUP_RANK") or given.get("SLURM_NODEID")
    return ", ".join([*parts, f"node {node}"] if node else parts)


def guard_log(address: GpuAddress) -> Path:
    """Return the log of the guards of a GPU."""
    return (runtime_folder() / f"guard-{lease_name(address)}").with_suffix(".log")


def hold_gpu(
    address: GpuAddress,
    job: str | None = None,
    *,
    on_event: Callable[[GuardEvent], None],
    settings: GuardSettings | None = None,
    page: ClockPage | None = None,
    timeout_s: float = _ANSWER_S,
) -> "Hold":
    """Start a guard for a GPU; once this returns, the rank may lock its clock.

    Args:
        job: the job's name on this node, by default `job_key()`.
        on_event: called on its own thread with what the guard reports.
        page: what the guard is to set the clock by; by default the rank sets it.

    Raises ClockControlForbiddenError for a real GPU while the environment forbids clock control,
    LeaseHeldError if another job or another rank holds the GPU, GuardError if the guard could not
    be started or refused: it cannot open the GPU, or undo a lock that somebody left on it.
    """
    if address.backend not in PATH_BACKENDS and clock_control_forbidden():
        raise ClockControlForbiddenError(
            "A GPU whose clock may not be changed needs no guard",
            value=os.environ[FORBID_VARIABLE],
            remedy=f"Unset {FORBID_VARIABLE}, or use the dry_run or emulated back end",
        )
    job = job_key() if job is None else job
    settings = settings or GuardSettings()
    log = guard_log(address)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with theirs:
            process = _start(address, job, settings, page, log, theirs)
        try:
            ours.settimeout(timeout_s)
            answer = receive(ours)
        finally:
            process.kill()  # the guard has detached, or could not start
            process.wait()
        return Hold(ours, address, job, settings, _accepted(answer, log), on_event)
    except BaseException as error:
        with suppress(OSError):  # in case the guard still starts: nobody waits for it
            send(ours, {"op": "release"})
        ours.close()
        with suppress(Exception):
            _undo_unanswered(address)
        if not isinstance(error, OSError):
            raise
        raise GuardError(
            f"The guard could not be started: {error}",
            value=str(log),
            remedy="See its log: the driver may hang, or the machine be overloaded. No clock is "
            "locked without a guard",
        ) from error


def _start(
    address: GpuAddress,
    job: str,
    settings: GuardSettings,
    page: ClockPage | None,
    log: Path,
    theirs: socket.socket,
) -> subprocess.Popen[bytes]:
    order = {
        "address": asdict(address),
        "job": job,
        "rank": asdict(ProcessIdentity.own()),
        "settings": asdict(settings),
        "page": None if page is None else page.descriptor,
        "socket": theirs.fileno(),
    }
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
    with os.fdopen(os.open(log, flags, 0o600), "wb") as output:
        return start_child(
            _GUARD,
            order,
            (theirs.fileno(), *([page.descriptor] if page else [])),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )


def _accepted(answer: dict[str, Any] | None, log: Path) -> int:
    """Return the guard's pid from its answer; raise its refusal as an error."""
    if answer is None:
        raise GuardError(
            "The guard ended before it held the GPU",
            value=str(log),
            remedy="See its log. No clock is locked without a guard",
        )
    if answer.get("event") == "held":
        return int(answer["guard_pid"])
    kind = LeaseHeldError if answer.get("error") == LeaseHeldError.__name__ else GuardError
    raise kind(str(answer.get("what")))


def _undo_unanswered(address: GpuAddress) -> None:
    """Undo the lease of a guard that died before it answered this process."""
    for record in list_leases():
        if (record.address, record.rank) == (address, ProcessIdentity.own()):
            # Unless a live guard has it. Nothing was asked for before the answer.
            undo_lease(record, open_gpu, gave_up=True, late=False)


class Hold:
    """A GPU guarded for this process; `hold_gpu` makes it. Does nothing in a forked child."""

    def __init__(
        self,
        connection: socket.socket,
        address: GpuAddress,
        job: str,
        settings: GuardSettings,
        guard_pid: int,
        on_event: Callable[[GuardEvent], None],
    ) -> None:
        self.address = address
        self.job = printable(job)
        self.guard_pid = guard_pid
        self._heartbeat_s = settings.heartbeat_s
        self._connection = connection
        self._on_event = on_event
        self._pid = os.getpid()
        self._gave_up = False
        self._is_back = False
        self._settled = False
        #: Wakes the thread in `release`. An Event's lock stays taken if a signal handler raises.
        self._settling: SimpleQueue[None] = SimpleQueue()
        connection.setblocking(False)
        self._thread = threading.Thread(target=self._watch, name="envpipe-guard", daemon=True)
        self._thread.start()

    def release(self, timeout_s: float = _RELEASE_S, *, late: bool = False) -> None:
        """End clock control: the guard resets the GPU once more and deletes the lease.

        Call it when this process no longer locks the clock and has no request under way; with
        `late`, one that failed may still take effect, as a command that could not be stopped, and
        the guard resets again behind that. Any thread may call it; in the callback it does not
        wait. The second call does nothing. Raises GuardError if the guard, or this process in its
        place, did not finish in time.
        """
        if os.getpid() != self._pid or self._settled:
            return
        self._gave_up = True
        self._say("release", **({"late": True} if late else {}))
        if threading.current_thread() is self._thread:
            return
        # The driver may hang, and must not keep this thread as well.
        with suppress(Empty):
            self._settling.get(timeout=timeout_s)
        if not self._settled:
            raise GuardError(
                "The clock was not confirmed to be back in time",
                value=self.address.uid,
                remedy=f"The guard (process {self.guard_pid}), or this rank if that has died, goes "
                "on trying: see their logs. `envpipe clocks reset` tries again later",
            )

    def _say(self, operation: str, **more: bool) -> None:
        # A guard that is gone, or does not read, does not answer.
        with suppress(OSError):
            send(self._connection, {"op": operation, **more})

    # --- the watching thread --------------------------------------------------------------------

    def _watch(self) -> None:
        self._listen()
        if not self._settled:
            self._stand_in()
        self._connection.close()

    def _listen(self) -> None:
        """Send heartbeats and read messages until the GPU is released or the guard is gone."""
        beat_every_s = self._heartbeat_s / _BEATS_PER_HEARTBEAT
        next_beat_s = time.monotonic() + beat_every_s
        unanswered_since_s: float | None = None
        while not self._settled:
            if wait_readable([self._connection.fileno()], next_beat_s - time.monotonic()):
                unanswered_since_s = None
                if not self._hear():
                    return
                continue
            now_s = time.monotonic()
            if unanswered_since_s is not None and now_s > unanswered_since_s + self._heartbeat_s:
                _LOG.error("the guard of %s does not answer", self.address.uid)
                return
            if now_s >= next_beat_s:
                next_beat_s = now_s + beat_every_s
                unanswered_since_s = unanswered_since_s or now_s
                self._say("beat")

    def _hear(self) -> bool:
        """Act on the guard's next message; return False if the guard is gone."""
        try:
            message = receive(self._connection)
        except (GpuError, OSError):
            _LOG.exception("what the guard of %s says is not understood", self.address.uid)
            return False
        if message is None:
            return False
        event = message.get("event")
        if event == "released":
            self._settle()
        elif event == "stop":
            self._tell(GuardEvent.STOP)
        elif event == "was_reset" and not self._gave_up:
            self._tell(GuardEvent.WAS_RESET)
        return True

    def _settle(self) -> None:
        self._settled = True
        self._settling.put(None)

    def _tell(self, event: GuardEvent) -> bool:
        """Call back; return whether that went well."""
        try:
            self._on_event(event)
        except Exception:
            _LOG.exception("the callback for %s failed", event)
            return False
        return True

    # --- in place of a guard that is gone -------------------------------------------------------

    def _stand_in(self) -> None:
        _LOG.error("the guard of %s is gone: clock control ends", self.address.uid)
        # Only ever set: another thread may call `release` while a callback fails.
        if not self._gave_up and self._tell(GuardEvent.LOST):
            self._gave_up = True
        if self._gave_up:
            self._say("release")  # a guard that only hangs undoes the lease when it wakes up
        wait_s, failure = _FIRST_LOOK_S, ""
        while True:
            try:
                if not self._settled:
                    self._undo_own()
                if not undo_dead_ranks(self.job, open_gpu) and self._settled:
                    return
            except Exception as error:
                if str(error) != failure:
                    _LOG.exception("the clock of %s may still be locked", self.address.uid)
                failure = str(error)
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_LOOK_S)

    def _undo_own(self) -> None:
        """Reset this rank's GPU; once this rank no longer locks, delete its lease and finish."""
        gave_up = self._gave_up
        name = lease_name(self.address)
        there = [record for record in list_leases() if record.path.name == name]
        own = [record for record in there if self._is_own(record)]
        left = [r for r in own if r.live or not undo_lease(r, open_gpu, gave_up=gave_up)]
        # A guard that hangs still holds the lease, or somebody undid it before this rank's last
        # lock. Another job's GPU, or one that this rank holds again, is left alone.
        if own == left and own == there and not self._is_back:
            bring_back(self.address, open_gpu, late=gave_up)
            self._is_back = gave_up
        if gave_up and not left:
            self._settle()

    def _is_own(self, record: LeaseRecord) -> bool:
        ours = record.job == self.job and record.uid == os.geteuid()
        return ours and record.guard.pid == self.guard_pid
