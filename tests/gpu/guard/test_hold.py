"""What a rank does with each answer, silence or nonsense of its guard, which is played here."""

import json
import os
import queue
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
from envpipe_megatron.gpu.guard.messages import (
    GuardError,
    GuardSettings,
    ProcessIdentity,
    receive,
    send,
)

ADDRESS = GpuAddress("emulated", "/node#0")
DEADLINE_S = 20.0


class Played:
    """The guard's end of the socket."""

    def __init__(self, monkeypatch):
        self.events = queue.SimpleQueue()
        self.gpu = FakeGpu()
        self.calls = []
        monkeypatch.setattr(hold_module.subprocess, "Popen", self._start)
        monkeypatch.setattr(hold_module, "open_gpu", lambda _: self.gpu)

    def _start(self, command, **how):
        self.command, self.how = command, how
        descriptor, _ = how["pass_fds"]
        self.end = socket.socket(fileno=os.dup(descriptor))
        self.end.settimeout(DEADLINE_S)
        self.answer()
        return SimpleNamespace(
            kill=lambda: self.calls.append("kill"), wait=lambda: self.calls.append("wait")
        )

    def answer(self):
        self.say("held", guard_pid=os.getpid())

    def hold(self, heartbeat_s=1000.0, on_end=None, **named):
        named.setdefault("settings", GuardSettings(heartbeat_s))
        self.page = ClockPage.create()
        on_end = on_end or (lambda: self.events.put("ended"))
        try:
            return hold_gpu(ADDRESS, "job", on_end=on_end, page=self.page, **named)
        finally:
            self.page.close_file()

    def say(self, event, **more):
        send(self.end, {"event": event, **more})

    def event(self):
        return self.events.get(timeout=DEADLINE_S)


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
    hold = guard.hold(settings=GuardSettings(1.0, 2.0))
    *module, order = guard.command[1:]
    assert module == ["-P", "-m", "envpipe_megatron.gpu.guard.process"]
    order = json.loads(order)
    assert order["address"] == {"backend": "emulated", "uid": "/node#0"}
    assert (order["rank"]["pid"], order["page"]) == (os.getpid(), guard.page.descriptor)
    assert order["settings"] == {"heartbeat_s": 1.0, "give_up_s": 2.0}
    environment = guard.how["env"]
    assert "ENVPIPE_TORCHRUN" not in environment  # the launcher must not end it
    package, mine = environment["PYTHONPATH"].split(":")
    assert (hold_module.__file__.startswith(package), mine) == (True, "mine")
    assert guard.how["start_new_session"] is True
    assert guard.how["stdin"] == subprocess.DEVNULL
    assert guard.how["stdout"] is guard.how["stderr"]
    assert (guard_log(ADDRESS).stat().st_mode & 0o777, guard.calls) == (0o600, ["kill", "wait"])
    assert (hold.address, order["job"], hold.guard_pid) == (ADDRESS, "job", os.getpid())
    guard.end.close()
    hold.release()


def test_a_guard_that_does_not_answer_finds_that_nobody_waits(guard):
    guard.answer = lambda: None
    with pytest.raises(GuardError, match=r"could not be started: timed out.*See its log"):
        guard.hold(timeout_s=0.01)
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
        ("subprocess.Popen", BlockingIOError(11, "Resource temporarily unavailable")),
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


def test_a_release_waits_until_the_guard_has_ended(guard):
    """Then the lease is gone; nobody is called back."""
    hold = guard.hold()
    with pytest.raises(GuardError, match=r"not confirmed.*/node#0.*clocks reset"):
        hold.release(timeout_s=0.001)
    assert guard.page.is_over
    assert receive(guard.end) == {"op": "beat"}
    guard.end.close()
    hold.release()
    hold.release()  # nobody is there, and nothing is awaited
    assert guard.events.empty()
    assert guard.gpu.history == []


def test_two_threads_that_release_are_both_free_when_the_clock_is_back(guard):
    """As where the right to a clock ends just as the job does."""
    hold, heard = guard.hold(), []

    def release():
        hold.release()
        heard.append(1)

    threads = [threading.Thread(target=release, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
        assert receive(guard.end) == {"op": "beat"}  # it waits, or is about to
    guard.end.close()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert heard == [1, 1]


class Clock:
    """Time that passes while a rank waits for its guard, who hears `hears` beats of it."""

    def __init__(self, monkeypatch, hears):
        self.now_s, self.hears, self.beats_s = 0.0, hears, []
        monkeypatch.setattr(hold_module, "wait_readable", self.wait_readable)
        monkeypatch.setattr(hold_module, "send", self.send)

    def wait_readable(self, descriptors, wait_s):
        if select.select(descriptors, [], [], 0.0)[0]:
            return True
        self.now_s += wait_s
        return False

    def send(self, connection, message):
        if not self.beats_s or self.beats_s[-1] < self.now_s:  # else of the release
            self.beats_s.append(self.now_s)
            self.hears(self)


def answer_two(guard):
    def hears(clock):
        if len(clock.beats_s) in (6, 12):
            guard.say("beat")

    return hears


def fail_with(error):
    def hears(clock):
        raise error

    return hears


@pytest.mark.parametrize(
    ("hears", "beats"),
    [
        pytest.param(lambda guard: lambda clock: None, 7, id="no answer for a heartbeat"),
        pytest.param(answer_two, 12 + 7, id="silence counts from the last answer"),
        pytest.param(lambda guard: fail_with(BlockingIOError()), 7, id="it does not even read"),
    ],
)
def test_a_guard_that_hangs_is_killed(guard, monkeypatch, hears, beats):
    pid = os.posix_spawnp("sleep", ["sleep", "60"], os.environ)
    guard.answer = lambda: guard.say("held", guard_pid=pid)
    clock = Clock(monkeypatch, hears(guard))
    hold = guard.hold(heartbeat_s=6.0)
    assert guard.event() == "ended"
    assert clock.beats_s == [float(second) for second in range(1, beats + 1)]
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    hold.release()


# --- in place of a guard that is gone ------------------------------------------------------------


@pytest.mark.parametrize("nonsense", [False, True])
def test_what_a_guard_leaves_is_undone_by_its_rank(guard, nonsense):
    """Whatever the callback does."""

    def fail():
        assert guard.page.is_over
        assert guard.gpu.history == []
        hold.release()  # waits for nothing here
        guard.events.put("ended")
        raise RuntimeError("control has not ended")

    hold = guard.hold(on_end=fail)
    left_by(guard)
    guard.end.send(b"nonsense") if nonsense else guard.end.close()
    assert guard.event() == "ended"
    hold.release()
    assert list_leases() == []
    assert guard.gpu.history == [None]


def test_a_rank_without_a_guard_looks_for_leases_until_it_is_released(guard):
    """Where all guards of a job have died, and a rank dies then."""
    hold = guard.hold()
    guard.end.close()
    assert guard.event() == "ended"
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
    with pytest.raises(GuardError, match="not confirmed"):
        hold.release(timeout_s=0.01)
    go_on.set()
    hold.release()
