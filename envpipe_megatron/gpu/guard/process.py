"""The guard: a small process beside a rank that sets its GPU's clock, outlives it, and resets it.

`hold.hold_gpu` starts one for each rank. It has the rights of the rank, takes the GPU's lease, says
"held", and sets the clocks that the rank asks for by the page that they share, until

- the rank wants no clock any more, or the page says that none can be set;
- the rank has ended, or its process runs another program now. The kernel says when a process has
  ended; the end of its socket does not, for a child that it forked may keep that open;
- SIGTERM, SIGINT or SIGHUP come: a batch system ends everything.

Then it sets no clock any more, resets the GPU, deletes the lease and ends. Resets that fail are
tried again, further and further apart, for `give_up_s`; then the lease stays and says what to undo.
What it does when

- the rank is silent (stopped, or stuck): reset, and begin anew where it hears from the rank again.
- it fails itself, as without memory: reset, as well as possible, and die. The rank notices.
- the driver hangs: set no clock any more, and die by SIGALRM. The rank notices.

About once a second, and at its end, it also undoes other leases of its user whose guards have died.
"""

import json
import logging
import math
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from envpipe_megatron.gpu.base import Gpu, GpuAddress
from envpipe_megatron.gpu.clock.controller import SWITCH_INTERVAL_S, PageController
from envpipe_megatron.gpu.clock.page import ClockPage
from envpipe_megatron.gpu.guard.lease import Lease, undo_stale_leases
from envpipe_megatron.gpu.guard.messages import (
    GuardError,
    GuardSettings,
    ProcessIdentity,
    receive,
    send,
)
from envpipe_megatron.gpu.presets import override_for, sweep_range
from envpipe_megatron.gpu.registry import open_gpu

_LOG = logging.getLogger(__name__)

_TICK_S = 0.2
_LOOK_EVERY_S = 1.0
_RETRY_S = 1.0
_FIRST_RETRY_S = 0.05
_LONGEST_RETRY_S = 5.0
_RESERVE_BYTES = 1 << 20


def main() -> NoReturn:
    """Run a guard: `python -m envpipe_megatron.gpu.guard.process ORDER`, a JSON object.

    It has `address`, `job`, `rank` and `settings` as in `Guard`, and the descriptors of `socket`,
    to the rank, and of the `page`.
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
            ClockPage(order["page"]),
            signals,
        ).run()
    except BaseException:
        with suppress(Exception):
            _LOG.exception("the guard has failed")
    os._exit(0)


def _noted_signals() -> int:
    """Note the signals that end a job; return a descriptor that can be read when one has come.

    What the rank ignores or blocks comes with the process, and must not keep it from these.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
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


@dataclass
class Guard:
    """The guard of one rank.

    Args:
        page: by which the rank asks for clocks.
        signals: a descriptor that can be read when a signal to end has come.
    """

    address: GpuAddress
    job: str
    rank: ProcessIdentity
    settings: GuardSettings
    connection: socket.socket
    page: ClockPage
    signals: int

    def __post_init__(self) -> None:
        self._controller: PageController | None = None
        self._gpu: Gpu | None = None
        # Given back when memory runs out, so that the last reset has some.
        self._reserve: bytearray | None = bytearray(_RESERVE_BYTES)
        self._ending = threading.Event()
        self._looking = threading.Thread(target=self._look_after_others, daemon=True)

    def run(self) -> None:
        """Take the lease, serve the rank, and bring the clock back."""
        try:
            with _time_limit(self.settings.give_up_s):
                self._gpu = open_gpu(self.address)
                late_s = self._gpu.late_request_s
                clocks = self._gpu.supported_frequencies_mhz
                usual = sweep_range(clocks or (0,), override_for(self._gpu.name), 0.0)
                lease = Lease.take(
                    self.address,
                    self.job,
                    rank=self.rank,
                    open_gpu=open_gpu,
                    clocks_mhz=(*clocks[:1], usual[-1]) if self._gpu.changes_clock else (),
                )
                # Permission to lock does not imply permission to reset, as with sudo rules: what
                # cannot be undone shows before a clock is locked.
                try:
                    self._gpu.reset_frequency()
                except BaseException:
                    lease.release()
                    raise
        except Exception as error:
            _LOG.warning("%s: not held: %s", self.address.uid, error)
            self._say("refused", what=str(error))
            return
        _LOG.info("%s: held for %s", self.address.uid, self.rank)
        try:
            self._looking.start()
            self.connection.setblocking(False)
            self._serve()
            self._say("held", guard_pid=os.getpid())
            _LOG.info("%s: %s", self.address.uid, self._watch())
            if self._bring_back(late_s):
                lease.release()
            else:
                lease.close()
        except BaseException:
            self._reserve = None
            self._reset()
            raise
        self.connection.close()
        self._ending.set()
        self._looking.join(self.settings.give_up_s)

    # --- while clocks are set -------------------------------------------------------------------

    def _watch(self) -> str:
        """Serve the rank as long as it wants clocks; return why that has ended."""
        heard_s = time.monotonic()
        poll = select.poll()
        poll.register(self.signals, select.POLLIN)
        poll.register(self.connection, select.POLLIN)
        with suppress(OSError, AttributeError):  # before Linux 5.3 its pid must do
            poll.register(os.pidfd_open(self.rank.pid), select.POLLIN)
        while True:
            ready = dict(poll.poll(1000 * _TICK_S))
            now_s = time.monotonic()
            if self.signals in ready:
                return "received a signal to end"
            heard = self._hear()
            if heard == "end" or self.rank.is_alive() is False:
                return "the rank has ended"
            if (self._controller is not None and self._controller.has_ended()) or (
                self.page.is_over
            ):
                return "no clock is wanted any more"
            if heard:
                heard_s = now_s
                self._serve()
            elif now_s >= heard_s + self.settings.heartbeat_s:
                _LOG.warning("%s: %s is silent", self.address.uid, self.rank)
                again_s = now_s + _RETRY_S - self.settings.heartbeat_s
                heard_s = math.inf if self._reset() else again_s

    def _hear(self) -> str:
        """Return what the rank said: "beat", "end" if its socket ended, or ""."""
        heard = ""
        with suppress(BlockingIOError):
            while True:
                try:
                    message = receive(self.connection)
                except GuardError as error:
                    _LOG.error("%s: %s", self.rank, error)
                    message = None
                if message is None:
                    return "end"
                heard = "beat"
                self._say("beat")
        return heard

    def _say(self, event: str, **more: Any) -> None:
        # A rank that does not read misses this; its end is noticed all the same.
        with suppress(OSError):
            send(self.connection, {"event": event, **more})

    def _serve(self) -> None:
        """Set the clocks that the page asks for from here on, the last that came due first."""
        if self.page.is_over or self._controller is not None:
            return
        try:
            with _time_limit(self.settings.give_up_s):
                # An object of its own: the guard's is opened again where a reset has failed.
                gpu = open_gpu(self.address)
            self._controller = PageController(gpu, self.page)
            self._controller.start()
        except Exception as error:  # the rank goes on without
            _LOG.error("%s: cannot be set: %s", self.address.uid, error)
            self.page.fail(str(error))

    # --- bringing the clock back ----------------------------------------------------------------

    def _bring_back(self, late_s: float) -> bool:
        """Reset the clock for good; return False if that did not work within `give_up_s`."""
        if not self._reset_surely():
            return False
        if late_s == 0 or self.page.failure is None:
            return True
        time.sleep(late_s)  # a request that failed may still take effect
        return self._reset_surely()

    def _reset_surely(self) -> bool:
        until_s, wait_s = time.monotonic() + self.settings.give_up_s, _FIRST_RETRY_S
        while not self._reset():
            if time.monotonic() + wait_s > until_s:
                _LOG.error("%s: given up; its lease says what to undo", self.address.uid)
                return False
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_RETRY_S)
        return True

    def _reset(self) -> bool:
        """Set no clock any more, and reset it once; return whether that worked."""
        try:
            with _time_limit(self.settings.give_up_s):
                self._serve_no_more()
                if self._gpu is None:
                    self._gpu = open_gpu(self.address)
                self._gpu.reset_frequency()
        except Exception as error:
            # Logged each time: retries are rare, and an administrator wants to see them.
            _LOG.error("%s: reset failed: %s", self.address.uid, error)
            self._gpu = None  # a driver that was reloaded needs to be opened again
            return False
        _LOG.info("%s: reset", self.address.uid)
        return True

    def _serve_no_more(self) -> None:
        """Return when nothing is set any more; a call that does not return ends this process."""
        while self._controller is not None:
            closed = True
            with suppress(Exception):  # as without memory: its clock is reset all the same
                closed = self._controller.close()
            if closed:
                self._controller = None

    def _look_after_others(self) -> None:
        last, said = False, set[str]()
        while not last:
            last = self._ending.wait(_LOOK_EVERY_S)
            undo_stale_leases(self.address, open_gpu, said)


if __name__ == "__main__":
    main()
