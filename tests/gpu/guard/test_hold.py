"""What a rank does with each answer, silence or nonsense of its guard, which is played here."""

import json
import math
import os
import select
import signal
import socket
import subprocess
import threading
from types import SimpleNamespace
from unittest.mock import Mock, patch

import pytest
from fake_gpu import FakeGpu, look_until, pages_go  # noqa: F401 - a fixture

from envpipe_megatron.gpu.base import GpuAddress
from envpipe_megatron.gpu.clock.page import ClockPage
from envpipe_megatron.gpu.guard import hold as hold_module
from envpipe_megatron.gpu.guard.hold import guard_log, hold_gpu, job_key
from envpipe_megatron.gpu.guard.lease import Lease, list_leases
from envpipe_megatron.gpu.guard.lease_file import LEASE_DIR_VARIABLE
from envpipe_megatron.gpu.guard.messages import GuardError, ProcessIdentity, receive, send

ADDRESS = GpuAddress("emulated", "/node#0")
DEADLINE_S = 20.0


class Played:
    """The guard's end of the socket."""

    def __init__(self, monkeypatch):
        self.gpu = FakeGpu()
        self.calls = []
        monkeypatch.setattr(subprocess, "Popen", self._start)
        monkeypatch.setattr(hold_module, "job_key", lambda: "job")
        monkeypatch.setattr(hold_module, "open_gpu", lambda _: self.gpu)

    def _start(self, command, **how):
        self.command, self.how = command, how
        self.end = socket.socket(fileno=os.dup(how["stdin"].fileno()))
        self.end.settimeout(DEADLINE_S)
        self.answer()
        return SimpleNamespace(
            kill=lambda: self.calls.append("kill"), wait=lambda: self.calls.append("wait")
        )

    def answer(self):
        self.say_held(os.getpid())

    def hold(self):
        self.page = ClockPage.create()
        try:
            return hold_gpu(ADDRESS, self.page)
        finally:
            self.page.close_file()

    def say_held(self, pid):
        send(self.end, {"guard_pid": pid, "patience_s": 36.0})

    def look_for_its_end(self):
        look_until(lambda: self.page.failure)
        assert self.page.failure.startswith("The guard of this GPU's clock has ended")


@pytest.fixture
def guard(monkeypatch, tmp_path):
    monkeypatch.setenv(LEASE_DIR_VARIABLE, str(tmp_path / "leases"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    played = Played(monkeypatch)
    yield played
    played.end.close()
    for thread in threading.enumerate():
        if thread.name == "envpipe-guard":
            thread.join(DEADLINE_S)
            assert not thread.is_alive()


def left_by(guard, job="job"):
    """A lease of this process that nobody looks after."""
    me = ProcessIdentity.own()
    Lease.take(ADDRESS, job, rank=me, open_gpu=lambda _: guard.gpu).close()


# --- starting ------------------------------------------------------------------------------------


def test_a_guard_is_started_with_all_that_it_needs_and_nothing_of_its_rank(guard, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "mine")
    monkeypatch.setenv("ENVPIPE_TORCHRUN", "a mark")
    hold = guard.hold()
    *module, order = guard.command[1:]
    assert module == ["-P", "-m", "envpipe_megatron.gpu.guard.process"]
    order = json.loads(order)
    assert order["address"] == {"backend": "emulated", "uid": "/node#0"}
    assert (order["rank"]["pid"], order["page"]) == (os.getpid(), guard.page.descriptor)
    assert (order["heartbeat_s"], order["give_up_s"]) == (30.0, 600.0)
    environment = guard.how["env"]
    assert "ENVPIPE_TORCHRUN" not in environment  # the launcher must not end it
    package, mine = environment["PYTHONPATH"].split(":")
    assert (hold_module.__file__.startswith(package), mine) == (True, "mine")
    assert guard.how["start_new_session"] is True
    assert guard.how["stdout"] is guard.how["stderr"]
    assert (guard_log(ADDRESS).stat().st_mode & 0o777, guard.calls) == (0o600, ["kill", "wait"])
    assert (hold.address, order["job"], hold.guard_pid) == (ADDRESS, "job", os.getpid())
    guard.end.close()
    hold.release()


def test_a_guard_that_does_not_answer_finds_that_nobody_waits(guard, monkeypatch):
    guard.answer = lambda: None
    monkeypatch.setattr(hold_module, "_ANSWER_S", 0.01)
    with pytest.raises(GuardError, match=r"could not be started: timed out.*See its log"):
        guard.hold()
    assert guard.page.is_over
    assert receive(guard.end) is None
    assert guard.calls == ["kill", "wait"]


def test_a_guard_that_ends_before_it_answers_leaves_no_lease(guard):
    def end():
        left_by(guard)
        guard.end.close()

    guard.answer = end
    with pytest.raises(GuardError, match=r"ended before it held.*guard-emulated"):
        guard.hold()
    assert list_leases() == []
    assert guard.gpu.history == [None]


@pytest.mark.parametrize(
    ("place", "error"),
    [
        ("start_child", BlockingIOError(11, "Resource temporarily unavailable")),
        # As where /proc is not mounted.
        ("ProcessIdentity.own", FileNotFoundError(2, "No such file", "/proc/self/ns/pid")),
    ],
)
def test_a_rank_that_can_start_no_guard_is_told_why(guard, monkeypatch, place, error):
    guard.end = SimpleNamespace(close=lambda: None)
    monkeypatch.setattr(f"{hold_module.__name__}.{place}", Mock(side_effect=error))
    with pytest.raises(
        GuardError, match=rf"could not be started.*{error.filename or error.strerror}"
    ):
        guard.hold()
    assert guard.page.is_over


def test_a_log_that_is_a_link_is_not_written(guard, tmp_path):
    guard.end = SimpleNamespace(close=lambda: None)
    guard_log(ADDRESS).symlink_to(tmp_path / "precious")
    with pytest.raises(GuardError, match=r"could not be started.*symbolic links"):
        guard.hold()
    assert not (tmp_path / "precious").exists()


@pytest.mark.parametrize(
    ("environ", "key"),
    [
        ({}, None),
        ({"TORCHELASTIC_RUN_ID": "none"}, None),
        ({"SLURM_JOB_ID": "7"}, "slurm 7"),
        ({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}, "slurm 7.0"),
        ({"SLURM_JOB_ID": "7", "TORCHELASTIC_RUN_ID": "x"}, "slurm 7, run x"),
    ],
)
def test_a_jobs_name_is_what_its_launchers_said(environ, key):
    with patch.dict(os.environ, environ, clear=True):
        assert job_key() == (key or f"process {os.getpid()}")


# --- while it is held ----------------------------------------------------------------------------


def test_a_release_waits_until_the_guard_has_ended(guard, monkeypatch):
    """Then the lease is gone; nothing has failed."""
    hold = guard.hold()
    with monkeypatch.context() as hurry:
        hurry.setattr(hold_module, "_RELEASE_S", 0.001)
        with pytest.raises(GuardError, match=r"not confirmed.*/node#0.*clocks reset"):
            hold.release()
    assert guard.page.is_over
    guard.end.close()
    hold.release()
    hold.release()  # nobody is there, and nothing is awaited
    assert guard.page.failure is None
    assert guard.gpu.history == []


def test_a_release_that_a_signal_interrupts_is_waited_for_by_the_next(guard):
    """As a SIGTERM in a session's end, whose second call is the last before the process ends."""

    def interrupt(*_):
        raise KeyboardInterrupt

    hold = guard.hold()
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            hold.release()
    finally:
        signal.signal(signal.SIGALRM, before)
    threading.Timer(0.1, guard.end.close).start()
    hold.release()
    assert hold._is_back


class Clock:
    """Time that passes while a rank waits for its guard, which beats at some of the rank's."""

    def __init__(self, monkeypatch, beats_at):
        self.rank_beats, self.beats_at, self.guard = [], beats_at, None
        monkeypatch.setattr(hold_module, "wait_readable", self.wait_readable)

    def wait_readable(self, descriptors, wait_s):
        if select.select(descriptors, [], [], 0.0)[0]:
            return True
        page = self.guard.page
        self.rank_beats.append(page.rank.beats)
        page.guard.beats += page.rank.beats in self.beats_at
        assert wait_s == 5.0
        return False


@pytest.mark.parametrize("beats_at", [(), (6, 12)], ids=["never", "silence counts from the last"])
@pytest.mark.parametrize("in_driver", [False, True])
def test_a_guard_that_hangs_is_killed(guard, monkeypatch, caplog, beats_at, in_driver):
    pid = os.posix_spawnp("sleep", ["sleep", "60"], os.environ)
    clock = Clock(monkeypatch, beats_at)

    def answer():
        clock.guard = guard
        guard.page.guard.called_s = 1.0 if in_driver else -math.inf
        guard.say_held(pid)

    guard.answer = answer
    hold = guard.hold()
    guard.look_for_its_end()
    assert clock.rank_beats == list(range(1, max(beats_at, default=0) + 8 + 1))
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    hold.release()
    where = " in the driver" * in_driver
    assert f"hangs{where}\n" in caplog.text
    assert f"has ended, since it hung{where} and was killed. " in guard.page.failure


# --- in place of a guard that is gone ------------------------------------------------------------


@pytest.mark.parametrize("speaks", [False, True])
def test_what_a_guard_leaves_is_undone_by_its_rank(guard, speaks):
    hold = guard.hold()
    left_by(guard)
    guard.end.send(b"nothing that a guard says") if speaks else guard.end.close()
    guard.look_for_its_end()
    hold.release()
    assert list_leases() == []
    assert guard.gpu.history == [None]


def test_a_rank_without_a_guard_looks_for_leases_until_it_is_released(guard):
    """Where all guards of a job have died, and a rank dies then."""
    hold = guard.hold()
    guard.end.close()
    guard.look_for_its_end()
    look_until(lambda: hold._is_back)
    left_by(guard, "another rank's")
    look_until(lambda: list_leases() == [])
    assert guard.gpu.history == [None]
    hold.release()


def test_a_driver_that_hangs_does_not_keep_the_rank_that_stands_in(guard, monkeypatch):
    hanging, go_on = threading.Event(), threading.Event()

    def hang(gpu):
        hanging.set()
        assert go_on.wait(DEADLINE_S)

    monkeypatch.setattr(FakeGpu, "_reset", hang)
    hold = guard.hold()
    left_by(guard)
    guard.end.close()
    assert hanging.wait(DEADLINE_S)
    with monkeypatch.context() as hurry:
        hurry.setattr(hold_module, "_RELEASE_S", 0.01)
        with pytest.raises(GuardError, match="not confirmed"):
            hold.release()
    go_on.set()
    hold.release()
