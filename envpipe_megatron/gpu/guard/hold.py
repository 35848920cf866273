"""Has a rank's GPU guarded: `hold_gpu` before the first clock is asked for, `release` at the end.

The rank never locks a clock: its guard does, as the page says that both share. The guard has a
lease on disk before it answers, and deletes it after its last reset. So

- the rank ends, however it does, or wants no clock any more: its guard resets and ends.
- the guard ends, however it does: nothing is locked any more, and its lease is stale. The rank
  resets its GPU and deletes the lease, and trains on.
- the guard hangs, as in the driver, and has no heartbeat: the rank kills it, and goes on as above.
- the rank and its guard are killed: any other guard of the user finds the stale lease within a
  second, and so does any rank that has lost its guard.
- all are killed: the next job that takes the GPU, `envpipe clocks reset` and a batch system's
  epilogue that calls it do the same.

Two that undo one lease at once exclude each other by its lock.
"""

import logging
import math
import os
import signal
import socket
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from envpipe_megatron.child import start_child
from envpipe_megatron.gpu.base import GpuAddress, GpuError
from envpipe_megatron.gpu.clock.page import ClockPage
from envpipe_megatron.gpu.guard.lease import list_leases, undo_lease, undo_stale_leases
from envpipe_megatron.gpu.guard.lease_file import lease_name
from envpipe_megatron.gpu.guard.messages import (
    GuardError,
    ProcessIdentity,
    receive,
    runtime_folder,
    wait_readable,
)
from envpipe_megatron.gpu.registry import open_gpu

_LOG = logging.getLogger(__name__)

_GUARD = ("-P", "-m", "envpipe_megatron.gpu.guard.process")  # -P: nothing of the working folder
#: A rank's GPU is reset after this much silence, s. Long, because a healthy rank may hold Python's
#: interpreter lock for many seconds.
HEARTBEAT_S = 30.0
_BEATS_PER_HEARTBEAT = 6
#: How long resets of a GPU may fail or hang, s; see `process.Guard`.
GIVE_UP_S = 600.0
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


def hold_gpu(address: GpuAddress, page: ClockPage) -> "Hold":
    """Start a guard for a GPU, which sets the clocks that a page asks for from here on.

    The page's file may be closed afterwards. If the guard ends before the page is over, as by a
    signal that a batch system sends, the page fails.

    Raises GuardError if the guard could not be started or refused: another job or another rank
    holds the GPU, or it cannot be opened or reset.
    """
    log = guard_log(address)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
    try:
        with theirs, os.fdopen(os.open(log, flags, 0o600), "wb") as output:
            order = {
                "address": asdict(address),
                "job": job_key(),
                "rank": asdict(ProcessIdentity.own()),
                "heartbeat_s": HEARTBEAT_S,
                "give_up_s": GIVE_UP_S,
                "page": page.descriptor,
            }
            # The socket is its standard input.
            process = start_child(
                _GUARD, order, (page.descriptor,), stdin=theirs, stdout=output, stderr=output
            )
        try:
            ours.settimeout(_ANSWER_S)
            answer = receive(ours) or {"what": f"The guard ended before it held the GPU: see {log}"}
        finally:
            process.kill()  # the guard has detached, or could not start
            process.wait()
        if "guard_pid" not in answer:
            raise GuardError(answer["what"])
        return Hold(ours, address, page, answer["guard_pid"], answer["patience_s"])
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
        guard_pid: int,
        patience_s: float,
    ) -> None:
        self.address = address
        self.guard_pid = guard_pid
        self._guard = ProcessIdentity.of(guard_pid)
        self._page = page
        self._beat_every_s = HEARTBEAT_S / _BEATS_PER_HEARTBEAT
        self._patience_s = patience_s
        self._connection = connection
        self._pid = os.getpid()
        self._over = False
        self._is_back = False
        # Else a process that runs another program looks alive while a child of it lives.
        os.register_at_fork(after_in_child=connection.close)
        self._thread = threading.Thread(target=self._watch, name="envpipe-guard", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """End clock control: the guard resets the GPU once more, deletes the lease and ends.

        A second call returns at once, or waits for what a signal kept the first from waiting for.
        Raises GuardError if the guard, or this process in its place, did not finish in time.
        """
        if os.getpid() != self._pid:
            return
        self._over = True
        self._page.end()
        # The driver may hang, and must not keep this thread, too. Not by Thread.join: where a
        # signal's handler has raised in one, Python takes the thread for ended from then on.
        until_s = time.monotonic() + _RELEASE_S
        while not self._is_back and time.monotonic() < until_s:
            time.sleep(_FIRST_LOOK_S)
        if not self._is_back:
            raise GuardError(
                "The clock was not confirmed to be back in time",
                value=self.address.uid,
                remedy=f"The guard (process {self.guard_pid}), or this rank if that has died, goes "
                "on trying: see their logs. `envpipe clocks reset` tries again later",
            )

    # --- the watching thread --------------------------------------------------------------------

    def _watch(self) -> None:
        ended = self._listen()
        self._connection.close()
        if not self._page.is_over:
            self._page.fail(
                f"The guard of this GPU's clock has ended{ended}. The clock is at its default from "
                "here on; see the guard's log"
            )
        self._bring_back()

    def _listen(self) -> str:
        """Beat until the guard has ended, and say why; kill one without a beat for `patience_s`."""
        heard, silent_s = self._page.guard.beats, 0.0
        while silent_s <= self._patience_s:
            self._page.rank.beats += 1
            if wait_readable([self._connection.fileno()], self._beat_every_s):
                return ""  # it has nothing to say any more
            # By waits, since this process may be stopped for as long.
            silent_s = silent_s + self._beat_every_s if heard == self._page.guard.beats else 0.0
            heard = self._page.guard.beats
        where = " in the driver" if self._page.last_change_s == math.inf else ""
        _LOG.error("the guard of %s hangs%s", self.address.uid, where)
        if self._guard is not None and self._guard.is_alive():
            with suppress(ProcessLookupError):
                os.kill(self.guard_pid, signal.SIGKILL)
        return f", since it hung{where} and was killed"

    def _bring_back(self) -> None:
        """Undo leases without a guard, this rank's first, until it has none and is released."""
        wait_s, said = _FIRST_LOOK_S, set[str]()
        while True:
            with suppress(GpuError, OSError):
                leases = [(record.address, record.guard.pid) for record in list_leases()]
                self._is_back = self._is_back or (self.address, self.guard_pid) not in leases
            if self._is_back and self._over:
                return
            undo_stale_leases(self.address, open_gpu, said)
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_LOOK_S)
