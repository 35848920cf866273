"""The guard: a small process beside a rank that outlives it and brings its GPU's clock back.

`hold.hold_gpu` starts one for each rank. It has the rights of the rank, takes the GPU's lease, says
"held", and watches. If the rank shares a page with it, it also sets the clocks that the rank stores
there; before each reset it ends that, and begins anew when it hears from a rank that was silent. A
reset beside a call that does not return counts as failed. What it does when

- the rank releases the GPU: reset, delete the lease, say "released".
- the rank has ended without that, or its process runs another program now: reset, once more after
  the GPU's `late_request_s` (a request may still be under way), then delete the lease. The kernel
  says when a process has ended; the end of its socket does not, for a child that the rank forked
  keeps that open. Resets that fail are tried again, further and further apart, for `give_up_s`;
  then the lease stays and says what to undo.
- the rank is silent (stopped, or stuck), or has closed its socket and lives: reset, again and
  again, and say "was_reset" so that the rank forgets what it thinks is set.
- SIGTERM, SIGINT, SIGHUP come (a batch system ends everything): say "stop", reset, wait `stop_s`
  for the rank to release or end, reset again, and leave the lease to a rank that lives.
- it fails itself, as without memory: reset, as well as possible, and die. The rank notices.
- the driver hangs: die by SIGALRM. The rank notices.

About once a second, and at its end, it also undoes the leases of ranks of its job that have died
together with their guards.
"""

import json
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from envpipe_megatron.gpu.base import Gpu, GpuAddress, GpuError
from envpipe_megatron.gpu.clock.controller import SWITCH_INTERVAL_S
from envpipe_megatron.gpu.clock.page import ClockPage, PageController
from envpipe_megatron.gpu.devices import open_gpu
from envpipe_megatron.gpu.guard.lease import Lease, undo_dead_ranks
from envpipe_megatron.gpu.guard.messages import (
    GuardError,
    GuardSettings,
    ProcessIdentity,
    program_of,
    receive,
    send,
)

_LOG = logging.getLogger(__name__)

_TICK_S = 0.2
_LOOK_EVERY_S = 1.0
_RETRY_S = 1.0
_FIRST_RETRY_S = 0.05
_LONGEST_RETRY_S = 5.0
_RESERVE_BYTES = 1 << 20


def main() -> NoReturn:
    """Run a guard: `python -m envpipe_megatron.gpu.guard.process ORDER`, a JSON object.

    It has `address`, `job`, `rank` and `settings` as in `Guard`; `socket`, the descriptor of the
    socket to the rank; and `page`, that of a page's file, or null.
    """
    order = json.loads(sys.argv[1])
    # Batch systems send these to all of a job's processes to have its ranks write a checkpoint.
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    signals = _noted_signals()
    if os.fork() > 0:
        # The rank waits for this process, so that no zombie stays, and launchers that kill whole
        # trees of processes do not find the guard among the rank's descendants.
        os._exit(0)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    if order["page"] is not None:
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        if len(os.sched_getaffinity(0)) == 1:  # looking, it would take the rank's only CPU from it
            with suppress(OSError):
                os.sched_setaffinity(0, range(os.cpu_count() or 1))
    try:
        Guard(
            GpuAddress(**order["address"]),
            order["job"],
            ProcessIdentity(**order["rank"]),
            GuardSettings(**order["settings"]),
            socket.socket(fileno=order["socket"]),
            signals,
            None if order["page"] is None else ClockPage(order["page"]),
        ).run()
    except BaseException:
        with suppress(Exception):
            _LOG.exception("the guard has failed")
    os._exit(0)


def _noted_signals() -> int:
    """Note the signals that end a job; return the descriptor from which they are read."""
    reader, writer = os.pipe()
    for end in (reader, writer):
        os.set_blocking(end, False)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    return reader


@contextmanager
def _time_limit(limit_s: float) -> Iterator[None]:
    """End this process if the driver hangs: SIGALRM does by default, and leaves the lease."""
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


class Guard:
    """The guard of one rank; `signals` is the descriptor from which signals are read.

    Args:
        page: by which the rank asks for clocks; None if it sets its clock itself.
    """

    def __init__(
        self,
        address: GpuAddress,
        job: str,
        rank: ProcessIdentity,
        settings: GuardSettings,
        connection: socket.socket,
        signals: int,
        page: ClockPage | None = None,
    ) -> None:
        self._page = page
        self._controller: PageController | None = None
        self._address = address
        self._job = job
        self._rank = rank
        self._program = program_of(rank.pid)
        self._settings = settings
        self._connection = connection
        self._signals = signals
        self._connected = True
        #: Whether a request that failed may still take effect, as the rank said.
        self._late = False
        self._gpu: Gpu | None = None
        self._stop_at_s: float | None = None
        # Given back when memory runs out, so that the last reset has some.
        self._reserve: bytearray | None = bytearray(_RESERVE_BYTES)
        self._ending = threading.Event()
        self._looking = threading.Thread(target=self._look_after_others, daemon=True)

    def run(self) -> None:
        """Take the lease, watch the rank, and bring the clock back."""
        try:
            # Now and not when it is needed: what cannot be undone shows before a clock is locked.
            # Who may lock need not be allowed to reset, as with a sudo rule for one of the two.
            with _time_limit(self._settings.give_up_s):
                self._gpu = open_gpu(self._address)
                late_s = self._gpu.late_request_s
                lease = Lease.take(self._address, self._job, rank=self._rank, open_gpu=open_gpu)
                try:
                    self._gpu.reset_frequency()
                except BaseException:
                    lease.release()
                    raise
        except Exception as error:
            _LOG.warning("%s: not held: %s", self._address.uid, error)
            self._say("refused", error=type(error).__name__, what=str(error))
            return
        _LOG.info("%s: held for %s", self._address.uid, self._rank)
        try:
            self._looking.start()
            self._connection.setblocking(False)
            self._serve()
            self._say("held", guard_pid=os.getpid())
            if self._bring_back(self._watch(), late_s):
                lease.release()
                self._say("released")
            elif self._controller is None:
                lease.abandon()
            else:
                # A call that sets the clock does not return. Lease and socket tell others that it
                # has when this process is gone, not before.
                return
        except BaseException:
            self._reserve = None
            self._reset(self._settings.stop_s)
            raise
        self._connection.close()
        self._ending.set()
        self._looking.join(self._settings.give_up_s)

    # --- while the rank may lock ----------------------------------------------------------------

    def _watch(self) -> str:
        """Watch the rank, and return how that ended.

        "released": the rank released the GPU; "ended": it ended without a release; "left": it did
        neither within `stop_s` after a signal to end, and still lives.
        """
        settings, heard_s, retry_at_s = self._settings, time.monotonic(), float("inf")
        poll = select.poll()
        poll.register(self._signals, select.POLLIN)
        poll.register(self._connection, select.POLLIN)
        with suppress(OSError, AttributeError):  # before Linux 5.3 its pid must do
            poll.register(os.pidfd_open(self._rank.pid), select.POLLIN)
        while True:
            poll.poll(1000 * _TICK_S)
            now_s = time.monotonic()
            reset = now_s >= retry_at_s
            if self._was_told_to_stop() and self._stop_at_s is None:
                _LOG.warning("received a signal to stop")
                self._stop_at_s = now_s + settings.stop_s
                self._say("stop")
                reset = True
            heard = self._hear()
            if heard == "release":
                return "released"
            if self._rank_has_ended():
                _LOG.warning("%s has ended without a release", self._rank)
                return "ended"
            if self._stop_at_s is not None and now_s >= self._stop_at_s:
                _LOG.error("%s has neither released its GPU nor ended", self._rank)
                return "left"
            if heard == "end" and self._connected:
                _LOG.warning("%s has closed its socket", self._rank)
                self._connected = False
                poll.unregister(self._connection)
                reset = True
            elif heard:
                heard_s = now_s
                if self._stop_at_s is None and retry_at_s == float("inf"):
                    self._serve()
            if now_s >= heard_s + settings.heartbeat_s:
                _LOG.warning("%s is silent", self._rank)
                heard_s = now_s  # wait as long again before the next reset
                reset = True
            if self._controller is not None and self._controller.has_ended():
                reset = reset or retry_at_s == float("inf")
            if reset and self._reset(settings.stop_s if self._stop_at_s else settings.give_up_s):
                retry_at_s = float("inf")
                self._say("was_reset")
            elif reset:
                retry_at_s = now_s + _RETRY_S

    def _rank_has_ended(self) -> bool:
        """Or its process runs another program, in which no thread is left that could lock."""
        if self._rank.is_alive() is False:
            return True
        program = program_of(self._rank.pid)
        return None not in (program, self._program) and program != self._program

    def _was_told_to_stop(self) -> bool:
        try:
            return bool(os.read(self._signals, 100))
        except BlockingIOError:
            return False

    def _hear(self) -> str:
        """Return what the rank said: "release", "beat", "end" if its socket ended, or ""."""
        heard = ""
        while self._connected:
            try:
                message = receive(self._connection)
            except BlockingIOError:
                break
            except (GuardError, OSError) as error:
                _LOG.error("%s: %s", self._rank, error)
                message = None
            if message is None:
                return "end"
            heard = str(message.get("op"))
            if heard == "release":
                self._late = bool(message.get("late"))
                break
            self._say("beat")
        return heard

    def _say(self, event: str, **more: Any) -> None:
        # A rank that does not read misses this; its end is noticed all the same.
        with suppress(OSError):
            send(self._connection, {"event": event, **more})

    def _serve(self) -> None:
        """Set the clocks that the rank asks for by its page, if there is one, from here on."""
        page = self._page
        if page is None or page.is_over or self._controller is not None:
            return
        try:
            with _time_limit(self._settings.give_up_s):
                # An object of its own: the guard's is opened again where a reset has failed.
                gpu = open_gpu(self._address)
            self._controller = PageController(gpu, page)
        except Exception as error:  # the rank goes on without
            _LOG.error("%s: cannot be set: %s", self._address.uid, error)
            page.fail(str(error))

    def _serve_no_more(self) -> bool:
        """Set none of them from here on; False while a call that sets one does not return."""
        if self._controller is not None:
            with suppress(Exception):  # as without memory: its clock is reset all the same
                self._controller.close()
            if self._controller.in_driver:
                return False
            self._controller = None
        return True

    # --- bringing the clock back ----------------------------------------------------------------

    def _bring_back(self, how: str, late_s: float) -> bool:
        """Reset the clock after the watch; return whether it is back for good."""
        if how == "left":
            self._reset(self._settings.stop_s)
            return False
        if not self._reset_surely():
            return False
        if late_s == 0 or (how == "released" and not self._late):
            return True
        time.sleep(late_s)
        return self._reset_surely()

    def _reset_surely(self) -> bool:
        """Reset until it works; return False if it did not within `give_up_s`."""
        until_s, wait_s = time.monotonic() + self._settings.give_up_s, _FIRST_RETRY_S
        while not self._reset(self._settings.give_up_s):
            # While a call that sets the clock does not return, nobody else could undo it.
            if time.monotonic() + wait_s > until_s and self._controller is None:
                _LOG.error("%s: given up; its lease says what to undo", self._address.uid)
                return False
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_RETRY_S)
        return True

    def _reset(self, limit_s: float) -> bool:
        try:
            with _time_limit(limit_s):
                returned = self._serve_no_more()
                if self._gpu is None:
                    self._gpu = open_gpu(self._address)
                self._gpu.reset_frequency()
                if not returned:
                    raise GpuError("A call that sets the clock does not return")
        except Exception as error:
            # Logged each time: retries are rare, and an administrator wants to see them.
            _LOG.error("%s: reset failed: %s", self._address.uid, error)
            self._gpu = None  # a driver that was reloaded needs to be opened again
            return False
        _LOG.info("%s: reset", self._address.uid)
        return True

    def _look_after_others(self) -> None:
        last, told = False, ""
        while not last:
            last = self._ending.wait(_LOOK_EVERY_S)
            try:
                undo_dead_ranks(self._job, open_gpu)
                told = ""
            except Exception as error:
                if (text := repr(error)) != told:  # said each time, it would fill a disk
                    _LOG.exception("leases of job %s cannot be seen", self._job)
                told = text


if __name__ == "__main__":
    main()
