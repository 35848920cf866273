"""A guard in this process, by what it says to its rank and does to a GPU."""

import math
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress

import pytest
from fake_gpu import pages_go  # noqa: F401 - a fixture

from envpipe_megatron.gpu.base import GpuAddress, GpuError
from envpipe_megatron.gpu.clock.page import DUE, ClockPage
from envpipe_megatron.gpu.guard import process
from envpipe_megatron.gpu.guard.lease import list_leases
from envpipe_megatron.gpu.guard.lease_file import LEASE_DIR_VARIABLE
from envpipe_megatron.gpu.guard.messages import ProcessIdentity, receive
from envpipe_megatron.gpu.guard.process import Guard

ONE = GpuAddress("emulated", "/node#0")


class Gpu:
    """Does something at each reset but the first, in order; then nothing.

    The first is made before the GPU is held. Its requests outlive their process.
    """

    late_request_s, ends_s = 7.0, math.inf
    supported_frequencies_mhz = (1410, 210)
    changes_clock, name = True, "fake"

    def __init__(self):
        self.resets = 0
        self.at_first = lambda: None
        self.at_reset = []
        self.locked_mhz = []

    def control_ends_s(self):
        return self.ends_s

    def lock_frequency(self, frequency_mhz):
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 0, "no limit of a driver that may hang"
        self.locked_mhz.append(frequency_mhz)

    def reset_frequency(self):
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 0, "no limit of a driver that may hang"
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
        self.signals = []
        self.process = subprocess.Popen(["sleep", "60"])
        monkeypatch.setattr(process, "open_gpu", self._open)
        monkeypatch.setattr(process, "_TICK_S", 0.001)
        monkeypatch.setattr(process, "_RETRY_S", 0.0)
        monkeypatch.setattr(process, "time", self)

    def monotonic(self):
        return time.monotonic() + sum(self.slept_s)

    def time(self):
        return 1_000_000.0

    def sleep(self, time_s):
        # A guard that is stopped for longer than its limit, with its whole job, is to go on later.
        assert signal.getitimer(signal.ITIMER_REAL)[0] == 0, "a limit while nothing is called"
        if time_s < 0.01:  # between two looks at the page
            time.sleep(time_s)
        else:
            self.slept_s.append(time_s)

    def _open(self, address):
        self.opened.append(address)
        return self.gpu

    def run(self, heartbeat_s=1000.0, give_up_s=1000.0):
        """Run the guard to its end; return whether it held the GPU."""
        rank = ProcessIdentity.of(self.process.pid)
        page = ClockPage(self.page.descriptor)
        times_s = heartbeat_s, give_up_s
        self.made = Guard(ONE, "job", rank, *times_s, self.theirs, page, self.signals)
        self.made.run()
        said = receive(self.rank)
        assert "what" in said or said == {"guard_pid": os.getpid(), "patience_s": 7.0 + heartbeat_s}
        return "what" not in said

    def kill(self):
        self.process.kill()
        self.process.wait()

    def signal(self):
        self.signals.append(signal.SIGTERM)

    def close(self):
        self.kill()
        self.made._ending.set()
        if self.made._looking.is_alive():  # of a guard that has failed
            self.made._looking.join()
        self.rank.close()
        self.theirs.close()
        self.page.close_file()


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
    "its rank has hung up": lambda guarded: guarded.rank.shutdown(socket.SHUT_WR),
    "its rank says something": lambda guarded: guarded.rank.send(b"nothing that a rank says"),
    "a signal": Guarded.signal,
}


@pytest.mark.parametrize("how", ENDS)
def test_whatever_ends_a_guard_the_clock_is_reset_before_the_lease_goes(guarded, monkeypatch, how):
    there = []
    guarded.gpu.at_reset = [lambda: there.extend(list_leases())]
    say = Guard._say

    def say_and_end(guard, **said):
        say(guard, **said)
        ENDS[how](guarded)

    monkeypatch.setattr(Guard, "_say", say_and_end)
    assert guarded.run()
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
    assert not guarded.run()
    assert len(there) == 1, "another job waits meanwhile"
    assert (guarded.gpu.resets, list_leases()) == (0, [])


def test_a_dry_run_takes_no_lease(guarded, monkeypatch):
    """There is nothing to undo, and ranks may share a GPU."""
    monkeypatch.setattr(Gpu, "changes_clock", False)
    there = []
    guarded.gpu.at_reset = [lambda: there.extend(list_leases())]
    guarded.signal()
    assert guarded.run()
    assert (there, guarded.gpu.resets) == ([], 1)


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


def test_a_silent_rank_that_is_heard_again_is_served_again(guarded):
    """From what came due last."""

    def hear():
        guarded.page.rank.beats += 1
        guarded.page.count(DUE, [guarded.page.ask(mhz) for mhz in (1410, 210)][-1])

    guarded.gpu.at_reset = [hear, guarded.page.end]
    assert guarded.run(heartbeat_s=0.05)
    assert (guarded.gpu.locked_mhz, guarded.gpu.resets, list_leases()) == ([210], 3, [])


def test_a_silent_rank_is_served_no_sooner_than_a_reset_has_worked(guarded):
    seen = []

    def ask_and_fail():
        guarded.page.rank.beats += 1
        guarded.page.count(DUE, guarded.page.ask(1410))
        fail()

    guarded.gpu.at_reset = [
        ask_and_fail,
        lambda: seen.append(list(guarded.gpu.locked_mhz)),
        guarded.page.end,
    ]
    assert guarded.run(heartbeat_s=0.05)
    assert (seen, guarded.gpu.locked_mhz, guarded.gpu.resets) == ([[]], [1410], 4)


def test_control_ends_before_the_right_to_it(guarded):
    """Behind a token's end nothing could be reset; training goes on."""
    guarded.gpu.ends_s = guarded.time()
    assert guarded.run()
    assert guarded.page.failure.startswith("The right to change clocks ends soon.")
    assert (guarded.gpu.resets, list_leases()) == (2, [])


# --- bringing the clock back ---------------------------------------------------------------------


def test_a_lease_is_kept_young_and_control_ends_where_it_is_deleted(guarded, monkeypatch):
    """As by a clean-up of /tmp: nobody would know what a guard that is killed leaves locked."""
    say = Guard._say

    def say_and_age(guard, **said):
        say(guard, **said)
        (record,) = list_leases()
        os.utime(record.path, (0, 0))

        def delete_if_young(process):
            with suppress(FileNotFoundError):
                if record.path.stat().st_mtime > 0:
                    record.path.unlink()
            return True

        monkeypatch.setattr(ProcessIdentity, "is_alive", delete_if_young)

    monkeypatch.setattr(Guard, "_say", say_and_age)
    assert guarded.run()
    assert "lease was deleted" in guarded.page.failure
    assert guarded.gpu.resets == 2, "as behind each failure"


def test_resets_that_fail_are_tried_again_further_and_further_apart(guarded, caplog):
    guarded.gpu.at_reset = [fail] * 9
    guarded.signal()
    assert guarded.run()
    assert guarded.slept_s == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    assert len(guarded.opened) == 10  # by each anew: the driver may have been reloaded
    assert list_leases() == []


def test_what_cannot_be_reset_is_given_up_and_its_lease_stays(guarded, caplog):
    guarded.gpu.at_reset = [fail] * 10
    guarded.signal()
    assert guarded.run(give_up_s=3.0)
    assert sum(guarded.slept_s) < 3.0
    assert "/node#0: given up" in caplog.text
    assert [record.live for record in list_leases()] == [False]


def test_a_gpu_that_cannot_be_opened_is_refused(guarded):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "open_gpu", lambda address: fail())
        assert not guarded.run()
    assert list_leases() == []


def test_a_failure_of_its_own_resets_the_gpu_and_leaves_the_lease(guarded, monkeypatch):
    def fail_itself(waited_s):
        raise MemoryError

    monkeypatch.setattr(process, "_pause_s", fail_itself)
    with pytest.raises(MemoryError):
        guarded.run()
    assert (guarded.gpu.resets, guarded.made._reserve) == (1, None)
    assert [record.address for record in list_leases()] == [ONE]


def test_signals_that_a_rank_ignores_or_blocks_reach_its_guard():
    """Those that end a job are noted; that of a driver that hangs ends the guard.

    Where SIGCHLD is ignored, nobody learns that a site's command has failed.
    """
    code = (
        "import os, signal, subprocess, time\n"
        "signal.signal(signal.SIGALRM, signal.SIG_IGN)\n"
        "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM, signal.SIGTERM})\n"
        "from envpipe_megatron.gpu.guard.process import Guard, _noted_signals\n"
        "signals = _noted_signals()\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "assert signals == [signal.SIGTERM]\n"
        "assert subprocess.call(['false']) == 1\n"
        "guard = Guard(None, '', None, 0.0, 0.01, None, None, signals)\n"
        "with guard._time_limit():\n"
        "    time.sleep(20)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], timeout=60)
    assert ended.returncode == -signal.SIGALRM
