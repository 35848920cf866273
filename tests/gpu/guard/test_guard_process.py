"""A guard in this process, by what it says to its rank and does to a GPU."""

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from fake_gpu import FakeGpu, look_until, pages_go  # noqa: F401 - a fixture
from lease_helpers import dead

from envpipe_megatron.gpu.base import GpuAddress, GpuError
from envpipe_megatron.gpu.clock import controller as clock_controller
from envpipe_megatron.gpu.clock.controller import PageController
from envpipe_megatron.gpu.clock.page import DUE, ClockPage
from envpipe_megatron.gpu.guard import process
from envpipe_megatron.gpu.guard.lease import Lease, list_leases
from envpipe_megatron.gpu.guard.lease_file import LEASE_DIR_VARIABLE
from envpipe_megatron.gpu.guard.messages import GuardSettings, ProcessIdentity, receive, send
from envpipe_megatron.gpu.guard.process import Guard

ONE, OTHER = (GpuAddress("emulated", f"/node#{index}") for index in range(2))


class Gpu:
    """Does something at each reset but the first, in order; then nothing.

    The first is made before the GPU is held. Its requests outlive their process.
    """

    late_request_s = 7.0

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
    """A guard, its rank, and what the two say and wait for."""

    def __init__(self, monkeypatch):
        self.gpu = Gpu()
        self.slept_s = []
        self.opened = []
        self.rank, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.theirs = theirs
        self.signals, self.signalled = os.pipe()
        os.set_blocking(self.signals, False)
        self.process = subprocess.Popen(["sleep", "60"])
        self.settings = {"heartbeat_s": 1000.0, "give_up_s": 1000.0, "stop_s": 1000.0}
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

    def run(self, job="job", page=None, **settings):
        """Run the guard to its end; return what it said but beats."""
        rank = ProcessIdentity.of(self.process.pid)
        settings = GuardSettings(**self.settings | settings)
        if page is None:  # a rank that asks for no clock
            page = ClockPage.create(shared=False)
            page.end()
        self.made = Guard(ONE, job, rank, settings, self.theirs, self.signals, page)
        self.made.run()
        return self.said()

    def said(self):
        heard = []
        with contextlib.suppress(OSError):
            self.rank.setblocking(False)
            while (message := receive(self.rank)) is not None:
                heard.append(message["event"])
        return heard

    def release(self):
        send(self.rank, {"op": "release"})

    def kill(self):
        self.process.kill()
        self.process.wait()

    def close(self):
        self.kill()
        self.made._ending.set()
        if self.made._looking.is_alive():  # of a guard that has failed
            self.made._looking.join()
        self.rank.close()
        self.theirs.close()
        os.close(self.signals)
        os.close(self.signalled)


@pytest.fixture
def guarded(monkeypatch, tmp_path):
    monkeypatch.setenv(LEASE_DIR_VARIABLE, str(tmp_path / "leases"))
    made = Guarded(monkeypatch)
    yield made
    made.close()


def test_a_gpu_that_is_released_is_reset_once(guarded):
    send(guarded.rank, {"op": "beat"})
    guarded.release()
    assert guarded.run() == ["held", "beat", "released"]
    assert (guarded.gpu.resets, guarded.slept_s, list_leases()) == (1, [], [])


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


def test_a_request_that_failed_may_come_late(guarded):
    send(guarded.rank, {"op": "release", "late": True})
    assert guarded.run() == ["held", "released"]
    assert (guarded.gpu.resets, guarded.slept_s, list_leases()) == (2, [7.0], [])


def test_a_dead_ranks_gpu_is_reset_once_more_after_its_late_requests(guarded):
    there = []
    guarded.gpu.at_reset = [lambda: there.append(list_leases())] * 2
    guarded.gpu.at_reset.insert(0, guarded.kill)
    os.write(guarded.signalled, b"\x0f")
    assert guarded.run() == ["held", "stop", "was_reset", "released"]
    assert (guarded.gpu.resets, guarded.slept_s) == (3, [7.0])
    assert [len(records) for records in there] == [1, 1]
    assert list_leases() == []


class Playing(threading.Thread):
    """The rank's side of a guard that serves a page, while that runs in the test's own thread."""

    def __init__(self, guarded, play):
        super().__init__()
        guarded.gpu = self.gpu = FakeGpu()
        self.page = ClockPage.create()
        self.rank, self._play, self._release = guarded.rank, play, guarded.release
        self.error = None
        self.start()

    def run(self):
        try:
            self._play(self)
        except AssertionError as error:
            self.error = error
        finally:
            self._release()

    @property
    def history(self):
        """Since the GPU is held."""
        return self.gpu.history[1:]

    def ask(self, mhz):
        self.page.count(DUE, self.page.ask(mhz))

    def beat(self):
        """Answered when the guard has acted on the one before."""
        self.rank.setblocking(True)
        send(self.rank, {"op": "beat"})
        while receive(self.rank)["event"] != "beat":
            pass

    def guarded_by(self, guarded, **settings):
        guarded.run(page=ClockPage(self.page.descriptor), **settings)
        self.join()
        if self.error is not None:
            raise self.error
        assert guarded.made._controller is None
        assert self.gpu.history[-1] is None


def test_a_guard_sets_clocks_until_a_rank_is_silent_and_again_when_it_is_heard(guarded):
    def play(rank):
        rank.ask(1000)
        look_until(lambda: rank.history[:2] == [1000, None])  # silent
        look_until(lambda: 1000 in rank.history[2:] or rank.beat())

    Playing(guarded, play).guarded_by(guarded, heartbeat_s=0.05)


@pytest.mark.parametrize("how", ["ended", "failed"])
def test_a_page_that_is_over_is_reset_once_and_not_taken_up_again(guarded, how):
    def play(rank):
        rank.ask(1000)
        look_until(lambda: rank.history == [1000])
        rank.page.end() if how == "ended" else rank.page.fail("no right to set a clock")
        look_until(lambda: None in rank.history)
        rank.beat()
        opened = len(guarded.opened)
        for _ in range(3):
            rank.beat()
        assert len(guarded.opened) == opened
        rank.ask(1100)
        rank.beat()
        assert not {1000, 1100} & set(rank.history[1:])

    Playing(guarded, play).guarded_by(guarded)


def test_a_gpu_that_cannot_be_opened_for_clocks_is_guarded_all_the_same(guarded, monkeypatch):
    def play(rank):
        look_until(lambda: rank.page.failure is not None)
        assert "the driver was reloaded" in rank.page.failure

    playing, opened = Playing(guarded, play), []

    def open_gpu(address):
        opened.append(address)
        if len(opened) == 2:
            raise GpuError("the driver was reloaded")
        return playing.gpu

    monkeypatch.setattr(process, "open_gpu", open_gpu)
    playing.guarded_by(guarded)
    assert list_leases() == []


def test_a_call_that_does_not_return_keeps_the_lease_until_it_does(guarded, monkeypatch, caplog):
    monkeypatch.setattr(clock_controller, "_JOIN_S", 0.01)

    def play(rank):
        rank.gpu.driver.clear()
        rank.ask(1000)
        assert rank.gpu.in_driver.wait(10)
        guarded.release()
        tried = lambda: caplog.text.count("does not return")  # noqa: E731
        look_until(lambda: tried() > 12)  # after it would have given up
        assert len(list_leases()) == 1
        rank.gpu.driver.set()

    Playing(guarded, play).guarded_by(guarded, give_up_s=20.0)
    assert list_leases() == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_rank_learns_that_the_thread_that_sets_clocks_has_died(guarded, monkeypatch):
    def play(rank):
        rank.ask(1000)
        look_until(lambda: rank.history == [1000])
        monkeypatch.setattr(PageController, "serve", sys.exit)
        rank.ask(1100)
        look_until(lambda: rank.page.failure is not None)
        look_until(lambda: None in rank.history)

    Playing(guarded, play).guarded_by(guarded)


def test_a_rank_that_ended_before_it_was_watched_is_found(guarded, monkeypatch):
    identity = ProcessIdentity.of(guarded.process.pid)
    guarded.kill()
    monkeypatch.setattr(process.ProcessIdentity, "of", lambda pid: identity)
    guarded.run()
    assert (guarded.gpu.resets, guarded.slept_s, list_leases()) == (2, [7.0], [])


def test_resets_that_fail_are_tried_again_further_and_further_apart(guarded):
    guarded.gpu.at_reset = [fail] * 9
    guarded.release()
    assert guarded.run() == ["held", "released"]
    assert guarded.slept_s == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    assert len(guarded.opened) == 10  # by each anew: the driver may have been reloaded


def test_what_cannot_be_reset_is_given_up_and_its_lease_stays(guarded, caplog):
    guarded.gpu.at_reset = [fail] * 10
    guarded.release()
    assert guarded.run(give_up_s=3.0) == ["held"]
    assert sum(guarded.slept_s) < 3.0
    assert "/node#0: given up" in caplog.text
    assert [record.live for record in list_leases()] == [False]


def test_a_silent_rank_is_reset_and_told_again_and_again(guarded):
    guarded.gpu.at_reset = [lambda: None, fail, lambda: None, guarded.release]
    assert guarded.run(heartbeat_s=0.0) == ["held", *["was_reset"] * 3, "released"]
    assert guarded.gpu.resets == 5
    assert list_leases() == []


@pytest.mark.parametrize("nonsense", [None, b"nonsense"])
def test_a_rank_that_hangs_up_and_lives_may_still_lock(guarded, nonsense):
    """Its lease stays until it has ended."""
    if nonsense:
        guarded.rank.send(nonsense)
    else:
        guarded.rank.close()
    there = []
    guarded.gpu.at_reset = [lambda: there.extend(list_leases()), guarded.kill]
    guarded.run(heartbeat_s=0.01)
    assert [record.live for record in there] == [True]
    assert (guarded.gpu.resets, list_leases()) == (4, [])


def test_a_process_that_runs_another_program_is_no_rank_any_more(guarded):
    """It may hold its GPU anew, as one that starts itself again does."""
    guarded.kill()
    command = ["sh", "-c", "echo; read go; exec sleep 60"]
    guarded.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    guarded.process.stdout.readline()  # before, the kernel may not have drawn its stack
    started = []

    def start_again():
        started.append(list_leases()[0].live)
        guarded.process.stdin.write(b"\n")
        guarded.process.stdin.flush()

    guarded.gpu.at_reset = [start_again]
    assert guarded.run(heartbeat_s=0.05)[-1] == "released"
    assert (started, list_leases(), guarded.slept_s) == ([True], [], [7.0])
    assert guarded.process.poll() is None


@pytest.mark.parametrize("known", [False, True])
def test_a_rank_whose_program_cannot_be_told_stays_one(guarded, monkeypatch, known):
    told = iter([5 if known else None])
    monkeypatch.setattr(process, "program_of", lambda pid: next(told, None if known else 5))
    guarded.gpu.at_reset = [guarded.release]
    assert guarded.run(heartbeat_s=0.02) == ["held", "was_reset", "released"]
    assert guarded.slept_s == []


def test_a_rank_that_does_not_stop_in_time_keeps_its_lease(guarded):
    os.write(guarded.signalled, b"\x0f")
    assert guarded.run(stop_s=0.05) == ["held", "stop", "was_reset"]
    assert guarded.gpu.resets == 2
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


def test_what_others_of_its_job_left_is_undone(guarded):
    """Where rank and guard have died; not what another job left, nor where the rank lives."""
    identity, me = dead(), ProcessIdentity.own()
    others = [GpuAddress("emulated", f"/node#{index}") for index in (1, 2, 3)]
    whose = [("job", identity), ("other", identity), ("job", me)]
    for address, (job, rank) in zip(others, whose, strict=True):
        Lease.take(address, job, rank=rank, open_gpu=lambda _: Gpu()).abandon()
    guarded.gpu.late_request_s = 0.0
    guarded.release()
    guarded.run()
    assert {record.address for record in list_leases()} == set(others[1:])
    assert guarded.gpu.resets == 1 + 1


@pytest.mark.parametrize("ends", [False, True])
def test_how_long_a_reset_may_take(guarded, monkeypatch, ends):
    """Short while the rank could do it itself; long when nobody else is left."""
    limits_s = []

    @contextlib.contextmanager
    def time_limit(limit_s):
        limits_s.append(limit_s)
        yield

    monkeypatch.setattr(process, "_time_limit", time_limit)
    if ends:
        guarded.gpu.at_reset = [guarded.kill]
    os.write(guarded.signalled, b"\x0f")
    guarded.run(stop_s=0.1 if not ends else 20.0, give_up_s=500.0)
    assert limits_s == ([500.0, 20.0, 500.0, 500.0] if ends else [500.0, 0.1, 0.1])


def test_a_driver_that_hangs_ends_the_guard():
    code = (
        "import time\n"
        "from envpipe_megatron.gpu.guard.process import _time_limit\n"
        "with _time_limit(100.0):\n    pass\n"
        "with _time_limit(0.01):\n    time.sleep(60)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], timeout=60)
    assert ended.returncode == -signal.SIGALRM


def test_what_cannot_be_seen_of_other_leases_is_said_once(monkeypatch, caplog):
    """A guard that says it at each look would fill a disk."""
    failures = iter([OSError("no folder"), OSError("no folder"), None, OSError("no folder")])
    looks = iter([False, False, False, True])

    def undo(job, open_gpu):
        if (failure := next(failures)) is not None:
            raise failure

    monkeypatch.setattr(process, "undo_dead_ranks", undo)
    ending = SimpleNamespace(wait=lambda timeout_s: next(looks))
    guard = SimpleNamespace(_ending=ending, _job="j")
    with caplog.at_level(logging.ERROR):
        Guard._look_after_others(guard)
    assert len(caplog.records) == 2
