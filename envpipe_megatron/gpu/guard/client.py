"""What a rank does to have its GPU guarded: `hold_gpu` before its first lock, `release` at the end.

The order is: the guard has the GPU on its list and a lease is on disk, then the rank may lock. A
thread of the rank sends heartbeats and hears what the guard says.

When the guard dies, the ranks stand in for it. The thread of each rank notices (its socket ends)
and, in this order:

1. It calls back with LOST. When the callback returns, the rank locks no clock any more.
2. It resets its own GPU and deletes its own lease.
3. It looks after the other leases of its job: where their rank has ended it resets that GPU, once
   more after the GPU's `late_request_s`, and deletes the lease; until none is left.

Which covers, race by race:

- *A rank locks after its guard has died, because it has not noticed yet.* Its lease is still there
  (nobody deletes the lease of a rank that lives), so it undoes the lock itself in step 2.
- *That rank is killed before step 2.* Its lease is still there and names it; any other rank of the
  job finds it dead in step 3.
- *Guard and some ranks are killed at once.* The same.
- *Two ranks undo one lease at once.* They exclude each other by its lock; the second finds none.
- *All are killed.* The leases stay, unlocked. The next job that takes one of these GPUs, `envpipe
  clocks reset` and a batch system's epilogue that calls it reset the GPU and delete them.
- *Somebody undoes a stale lease while its rank lives and has not noticed.* The GPU is reset and the
  lease stays.
- *The guard lives but hangs.* It answers no heartbeat; that is a LOST as well. The lease is still
  the guard's, and the rank resets its GPU. Should the guard come round, it finds a release.
- *A rank is stopped (SIGSTOP) while its guard dies.* It cannot lock while it is stopped. Killed, it
  is a dead rank; continued, it notices.
"""

import enum
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from envpipe_megatron.gpu.base import (
    FORBID_VARIABLE,
    ClockControlForbiddenError,
    GpuAddress,
    GpuError,
    clock_control_forbidden,
)
from envpipe_megatron.gpu.guard.lease import OpenGpu, list_leases, undo_lease
from envpipe_megatron.gpu.guard.lease_record import PATH_BACKENDS, LeaseRecord, lease_name
from envpipe_megatron.gpu.guard.process_identity import wait_for_any_end, wait_readable
from envpipe_megatron.gpu.guard.protocol import (
    GuardError,
    GuardSettings,
    job_key,
    receive,
    refused_error,
    send,
)
from envpipe_megatron.gpu.guard.starting import connect_to_guard
from envpipe_megatron.gpu.opening import open_gpu

_LOG = logging.getLogger(__name__)

_BEATS_PER_HEARTBEAT = 6
_ASK_AGAIN_S = 0.05
_RELEASE_S = 30.0
_FIRST_LOOK_S = 0.02
_LONGEST_LOOK_S = 1.0


class GuardEvent(enum.Enum):
    """What a rank hears of its guard.

    Attributes:
        LOST: the guard is gone. The callback must end clock control: when it returns, this rank
            locks no clock any more. The GPU is reset, and the lease deleted, for it.
        STOP: the job is told to end. The callback, or what it wakes, ends clock control and calls
            `release`.
        WAS_RESET: the clock is at its default, whatever was asked of it: forget that, and go on.
    """

    LOST = "lost"
    STOP = "stop"
    WAS_RESET = "was_reset"


def hold_gpu(
    address: GpuAddress,
    job: str | None = None,
    *,
    on_event: Callable[[GuardEvent], None],
    settings: GuardSettings | None = None,
    log: Path | None = None,
    timeout_s: float = 120.0,
    open_gpu: OpenGpu = open_gpu,
) -> "Hold":
    """Have a GPU guarded: from when this returns the rank may lock its clock.

    Any number of ranks of a job may call it at once; the first one starts the guard.

    Args:
        address: the GPU.
        job: the job's name on this node, by default from the launcher's variables (`job_key`).
        on_event: called on a thread of its own with what the guard says; see `GuardEvent`.
        settings: how patient a guard is that is started here.
        log: its log, by default beside its socket.
        timeout_s: when to give up, s.
        open_gpu: opens a GPU by its address, for when this rank stands in for the guard.

    Raises:
        LeaseHeldError: another job, or another rank of this one, holds the GPU.
        ClockControlForbiddenError: a real GPU while the environment forbids clock control.
        GuardError: no guard could be reached or started, or it refuses.
        GpuError: the GPU cannot be opened, or a lock that somebody left on it not be undone.
    """
    if address.backend not in PATH_BACKENDS and clock_control_forbidden():
        raise ClockControlForbiddenError(
            "A GPU whose clock may not be changed needs no guard",
            value=os.environ[FORBID_VARIABLE],
            remedy=f"Unset {FORBID_VARIABLE}, or use the dry_run or emulated back end",
        )
    job = job_key() if job is None else job
    until_s = time.monotonic() + timeout_s
    while True:
        connection = connect_to_guard(job, settings or GuardSettings(), log, until_s)
        try:
            answer = _ask(connection, address, until_s)
        except BaseException:
            connection.close()
            raise
        if answer is not None and answer.get("event") == "held":
            return Hold(connection, address, answer, on_event, open_gpu)
        connection.close()
        if answer is not None:
            raise refused_error(answer)
        # The guard ended in this moment, as its last rank had gone: it takes another one.
        if time.monotonic() > until_s:
            raise GuardError("The guard ended again and again", value=job, remedy="See its log")
        time.sleep(_ASK_AGAIN_S)


def _ask(connection: socket.socket, address: GpuAddress, until_s: float) -> dict[str, Any] | None:
    """Ask to hold a GPU; return the answer, None where the guard has gone."""
    connection.settimeout(max(0.01, until_s - time.monotonic()))
    try:
        send(connection, {"op": "hold", "backend": address.backend, "uid": address.uid})
        return receive(connection)
    except TimeoutError as error:
        raise GuardError(
            "The guard did not answer in time",
            value=address.uid,
            remedy="See its log: the driver may hang",
        ) from error
    except ConnectionError:
        return None


class Hold:
    """A GPU that is guarded for this process. Made by `hold_gpu`.

    A child that is forked has no part in it.

    Attributes:
        address: the GPU.
        job: the job's name on this node, as its leases say it.
        guard_pid: the guard's pid, as the guard sees it.
    """

    def __init__(
        self,
        connection: socket.socket,
        address: GpuAddress,
        answer: dict[str, Any],
        on_event: Callable[[GuardEvent], None],
        open_gpu: OpenGpu,
    ) -> None:
        self.address = address
        self.job = str(answer["job"])
        self.guard_pid = int(answer["guard_pid"])
        self._heartbeat_s = float(answer["heartbeat_s"])
        self._connection = connection
        self._on_event = on_event
        self._open_gpu = open_gpu
        self._pid = os.getpid()
        self._gave_up = False
        self._lost = False
        self._undone: bool | None = None  # by the guard
        self._is_back = False
        self._settled = False
        #: Wakes who waits in `release`. An event's lock stays taken where a signal handler raises.
        self._settling: SimpleQueue[None] = SimpleQueue()
        connection.setblocking(False)
        self._thread = threading.Thread(target=self._watch, name="envpipe-guard", daemon=True)
        self._thread.start()

    def release(self, timeout_s: float = _RELEASE_S) -> None:
        """End it: the guard resets the GPU once more and deletes the lease.

        To be called when this process locks no clock any more and has no request under way. Any
        thread may call it, also in a callback; in that for LOST it does not wait. Nothing happens
        the second time, or in a child.

        Args:
            timeout_s: for how long to wait, s.

        Raises:
            GuardError: the guard, or this process in its place, was not done in time, or the guard
                could not undo the lease.
        """
        if os.getpid() != self._pid or self._settled:
            return
        self._gave_up = True
        self._send_release()
        if threading.current_thread() is self._thread:
            self._listen(time.monotonic() + timeout_s)
            if self._lost:  # this thread cleans up as soon as the callback has returned
                return
        else:
            # The driver may hang, and must not keep this thread as well.
            with suppress(Empty):
                self._settling.get(timeout=timeout_s)
        if self._lost:
            if self._settled:
                return
            raise GuardError(
                "The guard has died or hangs, and what it held is not undone yet",
                value=self.address.uid,
                remedy=f"See this rank's log; end process {self.guard_pid} if it still runs",
            )
        if self._undone is None:
            raise GuardError(
                "The guard did not confirm in time that the clock is back",
                value=self.address.uid,
                remedy="It goes on trying; see its log, and `envpipe clocks show`",
            )
        if not self._undone:
            raise GuardError(
                "The guard could not undo its lease",
                value=self.address.uid,
                remedy="See its log; `envpipe clocks reset` tries again",
            )

    def _send_release(self) -> None:
        try:
            send(self._connection, {"op": "release"})
        except OSError:
            _LOG.debug("the guard has gone before the release")

    # --- the watching thread --------------------------------------------------------------------

    def _watch(self) -> None:
        self._listen(None)
        if self._lost:
            self._stand_in()
            self._connection.close()

    def _listen(self, until_s: float | None) -> None:
        """Send heartbeats and hear the guard, until the GPU is released or the guard is gone."""
        beat_every_s = self._heartbeat_s / _BEATS_PER_HEARTBEAT
        next_beat_s = time.monotonic() + beat_every_s
        unanswered_since_s: float | None = None
        while not (self._settled or self._lost):
            now_s = time.monotonic()
            if until_s is not None and now_s >= until_s:
                return
            wait_s = min(next_beat_s, until_s or next_beat_s) - now_s
            if wait_readable([self._connection.fileno()], wait_s):
                unanswered_since_s = None
                self._hear()
                continue
            now_s = time.monotonic()
            if unanswered_since_s is not None and now_s > unanswered_since_s + self._heartbeat_s:
                _LOG.error("the guard of %s does not answer", self.address.uid)
                self._lost = True
            elif now_s >= next_beat_s:
                next_beat_s = now_s + beat_every_s
                unanswered_since_s = unanswered_since_s or now_s
                try:
                    send(self._connection, {"op": "beat"})
                except BlockingIOError:
                    pass  # it does not read: that counts as no answer
                except OSError:
                    self._lost = True

    def _hear(self) -> None:
        try:
            message = receive(self._connection)
        except BlockingIOError:
            return
        except (GpuError, OSError):
            _LOG.exception("what the guard of %s says is not understood", self.address.uid)
            message = None
        event = None if message is None else message.get("event")
        if message is None:
            self._lost = True
        elif event == "released":
            self._undone = bool(message.get("undone"))
            self._connection.close()
            self._settle()
        elif event == "stop":
            self._tell(GuardEvent.STOP)
        elif event == "was_reset" and not self._gave_up:
            self._tell(GuardEvent.WAS_RESET)

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
            self._send_release()  # should it only hang: it undoes the lease when it comes round
        wait_s = _FIRST_LOOK_S
        while True:
            others: list[LeaseRecord] = []
            try:
                self._clean_own()
                others = self._others()
                for record in others:
                    if not record.live and not record.rank_is_alive():
                        undo_lease(record, self._open_gpu)
                if self._settled and not others:
                    return
            except Exception:
                _LOG.exception("clocks of job %s may still be locked", self.job)
            alive = [r.rank for r in others if r.rank is not None and r.rank_is_alive()]
            wait_for_any_end(alive, wait_s)
            wait_s = min(2 * wait_s, _LONGEST_LOOK_S)

    def _others(self) -> list[LeaseRecord]:
        """Return the leases of this job's other ranks.

        Also those that seem to be looked after: a guard's socket ends a moment before its locks do.
        """
        return [
            record
            for record in list_leases()
            if record.job == self.job
            and record.uid == os.geteuid()
            and record.address != self.address
        ]

    def _clean_own(self) -> None:
        """Reset this rank's GPU; when this rank locks no more, delete its lease and be done."""
        if self._settled:
            return
        gave_up = self._gave_up
        name = lease_name(self.address)
        there = [record for record in list_leases() if record.path.name == name]
        own = [record for record in there if self._is_own(record)]
        left = [record for record in own if not self._undo_own(record, gave_up)]
        # What a guard that hangs still holds, or somebody undid before this rank locked for the
        # last time. Another job's GPU, or one that this job holds anew, is left alone.
        if own == left and own == there and not self._is_back:
            self._open_gpu(self.address).reset_frequency()
            self._is_back = gave_up
        if gave_up and not left:
            self._settle()

    def _is_own(self, record: LeaseRecord) -> bool:
        ours = record.job == self.job and record.uid == os.geteuid()
        return ours and record.guard.pid == self.guard_pid

    def _undo_own(self, record: LeaseRecord, gave_up: bool) -> bool:
        return not record.live and undo_lease(record, self._open_gpu, gave_up=gave_up)
