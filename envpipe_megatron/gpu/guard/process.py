"""The guard: a small process beside a rank that sets its GPU's clock, outlives it, and resets it.

`hold.hold_gpu` starts one for each rank. It has the rights of the rank, takes the GPU's lease, says
so, and sets the clocks that the rank asks for by the page that they share, until

- the rank wants no clock any more, or the page says that none can be set;
- the rank has ended, or its process runs another program now. Its socket ends with it, unless a
  child that a library forked keeps that open: so its pid is looked at, too;
- SIGTERM, SIGINT or SIGHUP come: a batch system ends everything.

Then it sets no clock any more, resets the GPU, deletes the lease and ends. Resets that fail are
tried again, further and further apart, for `give_up_s`; then the lease stays and says what to undo.
What it does when

- the rank is silent (stopped, or stuck): reset, and begin anew where it hears from the rank again.
- it fails itself, as without memory: reset, as well as possible, and die. The rank notices.
- the driver hangs: so does the guard, until the rank kills it, or SIGALRM does.
- the right to change clocks is about to end, as of a token: say so, and reset while it may.
- its lease is deleted, as by a clean-up of /tmp: the same, as nobody could reset in its place.

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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import NoReturn

from envpipe_megatron.gpu.base import Gpu, GpuAddress
from envpipe_megatron.gpu.clock.controller import PageController
from envpipe_megatron.gpu.clock.page import ClockPage
from envpipe_megatron.gpu.guard.lease import Lease, undo_stale_leases
from envpipe_megatron.gpu.guard.messages import ProcessIdentity, send
from envpipe_megatron.gpu.presets import override_for, sweep_range
from envpipe_megatron.gpu.registry import open_gpu

_LOG = logging.getLogger(__name__)

#: Python's switch interval: what looks after others is not to hold up a clock, s.
_SWITCH_INTERVAL_S = 1e-4
#: The page is looked at this often, s: the rarer, the longer nothing came, for this share of that.
#: A change of a clock takes longer, and a look takes a core some 10 us.
_SOONEST_S, _LATEST_S, _SHARE = 1e-4, 5e-4, 1 / 40
#: A longer wait is for something else than a unit.
_CALM_S, _CALM_LOOK_S = 2.0, 2e-3
_TICK_S = 0.2
_LOOK_EVERY_S = 1.0
_RETRY_S = 1.0
_FIRST_RETRY_S = 0.05
_LONGEST_RETRY_S = 5.0
_RESERVE_BYTES = 1 << 20
_RIGHT_ENDS = (
    "The right to change clocks ends soon. The clock stays at its default; give a job a token that "
    "outlives it"
)
_NO_LEASE = (
    "The GPU's lease was deleted, so that another job may take it. The clock stays at its default"
)


def main() -> NoReturn:
    """Run a guard: `python -m envpipe_megatron.gpu.guard.process ORDER`, a JSON object.

    It has what `Guard` takes, and of the page the descriptor.
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
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    if len(os.sched_getaffinity(0)) == 1:  # looking, it would take the rank's only CPU from it
        with suppress(OSError):
            os.sched_setaffinity(0, range(os.cpu_count() or 1))
    try:
        Guard(
            GpuAddress(**order["address"]),
            order["job"],
            ProcessIdentity(**order["rank"]),
            order["heartbeat_s"],
            order["give_up_s"],
            socket.socket(fileno=0),  # its standard input
            ClockPage(order["page"]),
            signals,
        ).run()
    except BaseException:
        with suppress(Exception):
            _LOG.exception("the guard has failed")
    os._exit(0)


def _noted_signals() -> list[int]:
    """Return those signals that end a job which have come so far, at each look.

    What the rank ignores or blocks comes with the process, and must not keep it from these.
    """
    signals: list[int] = []
    for number in (signal.SIGALRM, signal.SIGCHLD):  # else a command that fails seems to work
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda came, _: signals.append(came))
    return signals


@dataclass
class Guard:
    """The guard of one rank. A thread beside looks after others.

    Args:
        heartbeat_s: the GPU is reset after this much silence of the rank's.
        give_up_s: how long resets may fail or hang. Then the guard ends, and the lease says what to
            undo.
        connection: to the rank, which says nothing there; its end is the rank's.
        page: by which the rank asks for clocks.
        signals: those to end that have come.
    """

    address: GpuAddress
    job: str
    rank: ProcessIdentity
    heartbeat_s: float
    give_up_s: float
    connection: socket.socket
    page: ClockPage
    signals: Sequence[int]

    def __post_init__(self) -> None:
        self._controller: PageController | None = None
        self._gpu: Gpu | None = None
        # Given back when memory runs out, so that the last reset has some.
        self._reserve: bytearray | None = bytearray(_RESERVE_BYTES)
        self._ending = threading.Event()
        self._looking = threading.Thread(target=self._look_after_others, daemon=True)

    def run(self) -> None:
        """Take the lease, serve the rank, and bring the clock back."""
        lease: Lease | None = None
        try:
            with self._time_limit():
                gpu = self._opened()
                ends_s, late_s = gpu.control_ends_s(), gpu.late_request_s
                clocks = gpu.supported_frequencies_mhz
                usual = sweep_range(clocks or (0,), override_for(gpu.name), 0.0)
                if gpu.changes_clock:  # a dry run leaves nothing to undo
                    lease = Lease.take(
                        self.address,
                        self.job,
                        rank=self.rank,
                        open_gpu=open_gpu,
                        clocks_mhz=(*clocks[:1], usual[-1]),
                    )
                # Permission to lock does not imply permission to reset, as with sudo rules: what
                # cannot be undone shows before a clock is locked.
                try:
                    gpu.reset_frequency()
                except BaseException:
                    if lease is not None:
                        lease.release()
                    raise
        except Exception as error:
            _LOG.warning("%s: not held: %s", self.address.uid, error)
            self._say(what=str(error))
            return
        _LOG.info("%s: held for %s", self.address.uid, self.rank)
        try:
            self._looking.start()
            self._controller = PageController(gpu, self.page)
            self._say(guard_pid=os.getpid(), patience_s=self.heartbeat_s + late_s)
            _LOG.info("%s: %s", self.address.uid, self._watch(ends_s, lease))
            is_back = self._bring_back(late_s)
            if lease is not None:
                if is_back:
                    lease.release()
                else:
                    lease.close()
        except BaseException:
            self._reserve = None
            self._reset()
            raise
        self.connection.close()
        self._ending.set()
        self._looking.join(self.give_up_s)

    def _opened(self) -> Gpu:
        if self._gpu is None:
            self._gpu = open_gpu(self.address)
        return self._gpu

    @contextmanager
    def _time_limit(self) -> Iterator[None]:
        """End this process if the driver hangs: SIGALRM does by default, and leaves the lease.

        Not while it waits: a guard that is stopped with its whole job goes on later.
        """
        signal.setitimer(signal.ITIMER_REAL, self.give_up_s)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _say(self, **message: object) -> None:
        # A rank that does not read misses this; its end is noticed all the same.
        with suppress(OSError):
            send(self.connection, message)

    # --- while clocks are set -------------------------------------------------------------------

    def _watch(self, ends_s: float, lease: Lease | None) -> str:
        """Serve the rank as long as it wants clocks, and may have them; return why that has ended.

        Args:
            ends_s: when the right to change clocks ends, s since 1970.
            lease: without it, nobody would reset after a guard that is killed.
        """
        poll = select.poll()
        poll.register(self.connection, select.POLLIN)
        heard, served_s, tick_s = 0, time.monotonic(), -math.inf
        silent_s = served_s + self.heartbeat_s
        while True:
            now_s = time.monotonic()
            if self._controller is not None:
                with self._time_limit():
                    served_s = now_s if self._controller.serve() else served_s
            if self.page.is_over:
                return "no clock is wanted any more"
            self.page.guard.beats += 1
            # A rank that is heard while resets still fail is served when one has worked.
            if self.page.rank.beats != heard and (self._controller or silent_s == math.inf):
                heard, silent_s = self.page.rank.beats, now_s + self.heartbeat_s
                if self._controller is None:  # what came due last comes first
                    self._controller = PageController(self._opened(), self.page)
            elif now_s >= silent_s:
                _LOG.warning("%s: %s is silent", self.address.uid, self.rank)
                silent_s = math.inf if self._reset() else now_s + _RETRY_S
            if now_s >= tick_s + _TICK_S:
                tick_s = now_s
                if self.rank.is_alive() is False:
                    return "the rank has ended"
                if time.time() >= ends_s:
                    self.page.fail(_RIGHT_ENDS)
                with suppress(OSError):  # what cannot be seen is taken to be there
                    if lease is not None and not lease.keep():
                        self.page.fail(_NO_LEASE)
            if self.signals:
                return f"received signal {self.signals[0]} to end"
            if poll.poll(0):
                return "the rank has ended"
            time.sleep(_pause_s(now_s - served_s))

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
        until_s, wait_s = time.monotonic() + self.give_up_s, _FIRST_RETRY_S
        while not self._reset():
            if time.monotonic() + wait_s > until_s:
                _LOG.error("%s: given up; its lease says what to undo", self.address.uid)
                return False
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_RETRY_S)
        return True

    def _reset(self) -> bool:
        """Set no clock any more, and reset it once; return whether that worked."""
        controller, self._controller = self._controller, None
        try:
            if controller is not None:
                with suppress(Exception):  # as without memory: its clock is reset all the same
                    controller.close()
            with self._time_limit():
                self._opened().reset_frequency()
        except Exception as error:
            # Logged each time: retries are rare, and an administrator wants to see them.
            _LOG.error("%s: reset failed: %s", self.address.uid, error)
            self._gpu = None  # a driver that was reloaded needs to be opened again
            return False
        _LOG.info("%s: reset", self.address.uid)
        return True

    def _look_after_others(self) -> None:
        last, said = False, set[str]()
        while not last:
            last = self._ending.wait(_LOOK_EVERY_S)
            undo_stale_leases(self.address, open_gpu, said)


def _pause_s(waited_s: float) -> float:
    """Return for how long not to look at a page on which nothing has come for a while, s."""
    if waited_s >= _CALM_S:
        return _CALM_LOOK_S
    return min(max(_SOONEST_S, _SHARE * waited_s), _LATEST_S)


if __name__ == "__main__":
    main()
