"""A guard in this process, by what it says to its rank and does to a GPU."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from fake_gpu import pages_go  # noqa: F401 - a fixture

from envpipe_megatron.gpu.base import GpuAddress, GpuError
from envpipe_megatron.gpu.clock.controller import PageController
from envpipe_megatron.gpu.clock.page import ClockPage
from envpipe_megatron.gpu.guard import process
from envpipe_megatron.gpu.guard.lease import list_leases
from envpipe_megatron.gpu.guard.lease_file import LEASE_DIR_VARIABLE
from envpipe_megatron.gpu.guard.messages import GuardSettings, ProcessIdentity, receive, send
from envpipe_megatron.gpu.guard.process import Guard

ONE = GpuAddress("emulated", "/node#0")


class Gpu:
    """Does something at each reset but the first, in order; then nothing.

    The first is made before the GPU is held. Its requests outlive their process.
    """

    late_request_s = 7.0
    supported_frequencies_mhz = (1410, 210)
    changes_clock, name = True, "fake"

    def __init__(self):
        self.resets = 0
        self.at_first = lambda: None
        self.at_reset = []

    def reset_frequency(self):
        if (at_first := self.at_first) is not None:
            self.at_first = None
            at_first()
            return
        self.resets += 1
        if self.at_reset:
            self.at_reset.pop(0)()


def fail():
    raise GpuError("the driver is busy")


class Guarded:
    """A guard, its rank, the page between them, and what the guard waits for."""

    def __init__(self, monkeypatch):
        self.gpu = Gpu()
        self.slept_s = []
        self.opened = []
        self.page = ClockPage.create()
        self.rank, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.theirs = theirs
        self.signals, self.signalled = os.pipe()
        self.process = subprocess.Popen(["sleep", "60"])
        self.settings = {"heartbeat_s": 1000.0, "give_up_s": 1000.0}
        monkeypatch.setattr(process, "open_gpu", self._open)
        monkeypatch.setattr(process, "_TICK_S", 0.001)
        monkeypatch.setattr(process, "_RETRY_S", 0.0)
        monkeypatch.setattr(process, "time", self)

    def monotonic(self):
        return time.monotonic() + sum(self.slept_s)

    def sleep(self, time_s):
        self.slept_s.append(time_s)

    def _open(self, address):
        self.opened.append(address)
        return self.gpu

    def run(self, **settings):
        """Run the guard to its end; return what it said."""
        rank = ProcessIdentity.of(self.process.pid)
        settings = GuardSettings(**self.settings | settings)
        page = ClockPage(self.page.descriptor)
        self.made = Guard(ONE, "job", rank, settings, self.theirs, page, self.signals)
        self.made.run()
        heard = []
        with contextlib.suppress(OSError):
            self.rank.setblocking(False)
            while (message := receive(self.rank)) is not None:
                heard.append(message["event"])
        return heard

    def kill(self):
        self.process.kill()
        self.process.wait()

    def signal(self):
        os.write(self.signalled, b"\x0f")

    def close(self):
        self.kill()
        self.made._ending.set()
        if self.made._looking.is_alive():  # of a guard that has failed
            self.made._looking.join()
        self.rank.close()
        self.theirs.close()
        self.page.close_file()
        os.close(self.signals)
        os.close(self.signalled)


@pytest.fixture
def guarded(monkeypatch, tmp_path):
    monkeypatch.setenv(LEASE_DIR_VARIABLE, str(tmp_path / "leases"))
    made = Guarded(monkeypatch)
    yield made
    made.close()


# --- what ends a guard ---------------------------------------------------------------------------

ENDS = {
    "no clock is wanted": lambda guarded: guarded.page.end(),
    "none can be set": lambda guarded: guarded.page.fail("no right"),
    "its rank has ended": Guarded.kill,
    "its rank has hung up": lambda guarded: guarded.rank.close(),
    "its rank says nonsense": lambda guarded: guarded.rank.send(b"nonsense"),
    "a signal": Guarded.signal,
}


@pytest.mark.parametrize("how", ENDS)
def test_whatever_ends_a_guard_the_clock_is_reset_before_the_lease_goes(guarded, monkeypatch, how):
    there = []
    guarded.gpu.at_reset = [lambda: there.extend(list_leases())]
    monkeypatch.setattr(process.Guard, "_serve", lambda guard: ENDS[how](guarded))
    said = guarded.run()
    assert said == ([] if how == "its rank has hung up" else ["held"])
    assert ([record.live for record in there], list_leases()) == ([True], [])
    late = how == "none can be set"  # a request that failed may still take effect
    assert (guarded.gpu.resets, guarded.slept_s) == (1 + late, [7.0] * late)


def test_a_gpu_that_cannot_be_reset_is_not_held(guarded):
    """Who may lock need not be allowed to reset, and what was locked would stay so."""
    there = []

    def fail_with_a_lease():
        there.extend(list_leases())
        fail()

    guarded.gpu.at_first = fail_with_a_lease
    assert guarded.run() == ["refused"]
    assert len(there) == 1, "another job waits meanwhile"
    assert (guarded.gpu.resets, list_leases()) == (0, [])


def test_a_rank_that_ended_before_it_was_watched_is_found(guarded, monkeypatch):
    identity = ProcessIdentity.of(guarded.process.pid)
    guarded.kill()
    monkeypatch.setattr(process.ProcessIdentity, "of", lambda pid: identity)
    guarded.run()
    assert (guarded.gpu.resets, list_leases()) == (1, [])


# --- while clocks are set ------------------------------------------------------------------------


def test_a_silent_ranks_reset_that_fails_is_tried_again(guarded, caplog):
    tried = []

    def fail_and_count():
        tried.append(time.monotonic())
        fail()

    guarded.gpu.at_reset = [fail_and_count, fail_and_count, guarded.page.end]
    guarded.run(heartbeat_s=0.0)
    assert (len(tried), guarded.gpu.resets, list_leases()) == (2, 4, [])
    assert "is silent" in caplog.text


def test_a_silent_rank_that_is_heard_again_is_served_again(guarded, monkeypatch):
    served = []

    def start(controller):
        served.append(controller)
        if len(served) == 2:
            guarded.page.end()

    monkeypatch.setattr(PageController, "start", start)
    monkeypatch.setattr(PageController, "has_ended", lambda controller: False)
    guarded.gpu.at_reset = [lambda: send(guarded.rank, {"op": "beat"})]
    assert guarded.run(heartbeat_s=0.0) == ["held", "beat"]
    assert (len(served), guarded.gpu.resets, list_leases()) == (2, 2, [])


def test_a_gpu_that_cannot_be_opened_for_clocks_is_given_back(guarded, monkeypatch):
    opened = []

    def open_gpu(address):
        opened.append(address)
        return fail() if len(opened) == 2 else guarded.gpu

    monkeypatch.setattr(process, "open_gpu", open_gpu)
    assert guarded.run() == ["held"]
    assert "the driver is busy" in guarded.page.failure
    assert list_leases() == []


def test_a_call_that_does_not_return_keeps_the_lease_until_it_does(guarded, monkeypatch):
    leased = []

    def close(controller):
        leased.append(len(list_leases()))
        return len(leased) == 4

    monkeypatch.setattr(PageController, "start", lambda controller: guarded.page.end())
    monkeypatch.setattr(PageController, "close", close)
    assert guarded.run() == ["held"]
    assert (leased, guarded.gpu.resets, list_leases()) == ([1] * 4, 1, [])


def test_a_rank_learns_that_the_thread_that_sets_clocks_has_died(guarded, monkeypatch):
    monkeypatch.setattr(PageController, "start", lambda controller: None)
    guarded.gpu.late_request_s = 0.0
    guarded.run()
    assert guarded.page.failure == "The thread that sets clocks has ended"
    assert (guarded.gpu.resets, list_leases()) == (1, [])


# --- bringing the clock back ---------------------------------------------------------------------


def test_resets_that_fail_are_tried_again_further_and_further_apart(guarded, caplog):
    guarded.gpu.at_reset = [fail] * 9
    guarded.signal()
    assert guarded.run() == ["held"]
    assert guarded.slept_s == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    assert len(guarded.opened) == 11  # by each anew: the driver may have been reloaded
    assert list_leases() == []


def test_what_cannot_be_reset_is_given_up_and_its_lease_stays(guarded, caplog):
    guarded.gpu.at_reset = [fail] * 10
    guarded.signal()
    assert guarded.run(give_up_s=3.0) == ["held"]
    assert sum(guarded.slept_s) < 3.0
    assert "/node#0: given up" in caplog.text
    assert [record.live for record in list_leases()] == [False]


def test_a_gpu_that_cannot_be_opened_is_refused(guarded):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "open_gpu", lambda address: fail())
        assert guarded.run() == ["refused"]
    assert list_leases() == []


def test_a_failure_of_its_own_resets_the_gpu_and_leaves_the_lease(guarded, monkeypatch):
    def fail_itself(self):
        raise MemoryError

    monkeypatch.setattr(Guard, "_hear", fail_itself)
    with pytest.raises(MemoryError):
        guarded.run()
    assert (guarded.gpu.resets, guarded.made._reserve) == (1, None)
    assert [record.address for record in list_leases()] == [ONE]


def test_signals_that_a_rank_ignores_or_blocks_reach_its_guard():
    """Those that end a job are noted; that of a driver that hangs ends the guard."""
    code = (
        "import os, select, signal, time\n"
        "signal.signal(signal.SIGALRM, signal.SIG_IGN)\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM, signal.SIGTERM})\n"
        "from envpipe_megatron.gpu.guard.process import _noted_signals, _time_limit\n"
        "signals = _noted_signals()\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "assert select.select([signals], [], [], 20.0)[0]\n"
        "with _time_limit(100.0):\n    pass\n"
        "with _time_limit(0.01):\n    time.sleep(20)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], timeout=60)
    assert ended.returncode == -signal.SIGALRM
