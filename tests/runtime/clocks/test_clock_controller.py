"""What the controller asks of a GPU, and when."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from fake_gpu import FakeGpu

from envpipe_megatron.gpu.base import GpuError
from envpipe_megatron.gpu.guard.client import GuardEvent
from envpipe_megatron.runtime.clocks import controller as clock_controller
from envpipe_megatron.runtime.clocks import rank_clock
from envpipe_megatron.runtime.clocks.controller import ClockController, spread
from envpipe_megatron.runtime.clocks.rank_clock import RankClock
from envpipe_megatron.runtime.execution.completion import Done

WAIT_S = 10.0


class Unit:
    """A completion that a test makes true."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self.waited_for = threading.Event()

    def end(self) -> None:
        self._done.set()

    def synchronize(self) -> None:
        self.waited_for.set()
        assert self._done.wait(WAIT_S)

    def query(self) -> bool:
        return self._done.is_set()


@pytest.fixture
def gpu() -> FakeGpu:
    return FakeGpu()


@pytest.fixture
def clock(gpu) -> Iterator[ClockController]:
    controller = ClockController(gpu)
    yield controller
    gpu.driver.set()
    controller.close()


def test_clock_is_set_when_the_unit_before_has_ended(gpu, clock):
    units = [Unit() for _ in range(3)]
    for unit, frequency in zip(units, (1000, 1200, 1100), strict=True):
        clock.request(frequency, unit)
    for ended, unit in enumerate(units):
        assert unit.waited_for.wait(WAIT_S)
        assert gpu.history == [1000, 1200, 1100][:ended]
        unit.end()
        wait_for(lambda: len(gpu.history) > ended)  # noqa: B023 - called at once
    assert gpu.history == [1000, 1200, 1100]


def wait_for(condition) -> None:
    """Nothing tells of the fake's history growing, so look often."""
    end = threading.Event()
    for _ in range(int(WAIT_S / 0.001)):
        if condition():
            return
        end.wait(0.001)
    raise AssertionError("waited in vain")


def assert_given_back(gpu: FakeGpu, after: list[int]) -> None:
    """Locked to these clocks, then reset, perhaps more than once."""
    assert gpu.history[: len(after)] == after
    assert set(gpu.history[len(after) :]) == {None}


def test_the_thread_looks_at_events_from_its_caller_s_device(gpu, monkeypatch):
    """Else CUDA opens a context for it on device 0, which is another rank's."""
    told = []

    def set_device(device: int) -> None:
        told.append((device, threading.current_thread() is not threading.main_thread()))

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    seen = []

    class Event(Done):
        def query(self) -> bool:
            seen.extend(told)
            return True

    clock = RankClock(gpu)
    clock.controller.request(1000, Event())
    clock.controller.wait_idle()
    clock.close()
    assert told == [(3, True)]
    assert seen[0] == (3, True)


@pytest.mark.parametrize("ends", ["closed", "told to stop"])
def test_a_guard_is_not_told_of_the_end_while_a_lock_may_still_come(gpu, monkeypatch, ends):
    """What it undoes then would be locked again; the end of the process tells it instead."""
    released, hear = [], []

    def hold_gpu(address, *, on_event):
        hear.append(on_event)
        return SimpleNamespace(release=lambda: released.append(list(gpu.history)))

    monkeypatch.setattr(rank_clock, "hold_gpu", hold_gpu)
    monkeypatch.setattr(clock_controller, "_JOIN_S", 0.05)
    clock = RankClock(gpu, guarded=True)
    gpu.driver.clear()
    clock.controller.request(1000, Done())
    assert gpu.in_driver.wait(WAIT_S)
    if ends == "closed":
        clock.close()
    else:
        hear[0](GuardEvent.STOP)
    assert not released
    gpu.driver.set()
    wait_for(lambda: gpu.history == [1000, None])
    wait_for(lambda: not clock.controller.in_driver)
    clock.close()
    assert released == [[1000, None]]


def test_a_start_that_fails_stops_control(gpu):
    def fail() -> None:
        raise RuntimeError("no such device")

    clock = ClockController(gpu, on_start=fail)
    clock.request(1000, Done())
    clock.wait_idle()
    clock.close()
    assert str(clock.error) == "no such device"
    assert gpu.history == []


def test_equal_requests_reach_the_driver_once(gpu, clock):
    for frequency in (1000, 1000, 1000, 1200, 1200, 1000):
        clock.request(frequency, Done())
        clock.wait_idle()
    assert gpu.history == [1000, 1200, 1000]
    assert clock.changes == 3


def test_a_unit_that_has_ended_is_not_waited_for(gpu, clock):
    """Waiting gives up the interpreter, and getting it back takes time."""
    unit = Unit()
    unit.end()
    clock.request(1000, unit)
    clock.wait_idle()
    assert gpu.history == [1000]
    assert not unit.waited_for.is_set()


def test_stale_requests_are_coalesced(gpu, clock):
    """While the driver is slow, units end: only the newest clock is worth setting."""
    gpu.driver.clear()
    clock.request(1000, Done())
    assert gpu.in_driver.wait(WAIT_S)
    for frequency in (1100, 1200, 1300, 1400):
        clock.request(frequency, Done())
    not_yet = Unit()
    clock.request(1100, not_yet)
    gpu.driver.set()
    assert not_yet.waited_for.wait(WAIT_S)
    assert gpu.history == [1000, 1400]
    assert clock.coalesced == 3
    not_yet.end()
    clock.wait_idle()
    assert gpu.history == [1000, 1400, 1100]


def test_the_caller_never_waits_for_the_driver(gpu, clock):
    gpu.driver.clear()
    clock.request(1000, Done())
    assert gpu.in_driver.wait(WAIT_S)
    for _ in range(1000):
        clock.request(1200, Done())  # would hang: nobody lets the driver go on
    assert gpu.history == []


def test_the_caller_never_waits_for_the_time_base(gpu, monkeypatch):
    """What time it is comes from the driver too: while it is asked, requests are still taken."""
    clock = ClockController(gpu, min_dwell_s=1.0)
    clock.request(1000, Done())
    clock.wait_idle()
    calls: list[threading.Thread] = []
    asked, answer = threading.Event(), threading.Event()

    def time_s() -> float:
        calls.append(threading.current_thread())
        if len(calls) == 2:  # the first is to hold the change back, the second to wait for its time
            asked.set()
            assert answer.wait(WAIT_S)
        return 0.5

    monkeypatch.setattr(gpu, "time_s", time_s)
    clock.request(1200, Done())
    assert asked.wait(WAIT_S)
    clock.request(1300, Done())
    answer.set()
    clock.wait_idle()
    clock.close()
    assert threading.current_thread() not in calls
    assert clock.error is None


def test_least_dwell(gpu, monkeypatch):
    """A change that comes too early waits for its time, unless a later one has replaced it."""
    clock = ClockController(gpu, min_dwell_s=1.0)
    looks: list[float] = []
    monkeypatch.setattr(gpu, "time_s", lambda: looks.append(gpu.now_s) or gpu.now_s)
    for now_s, frequency in ((0.0, 1000), (0.5, 1200), (0.9, 1100), (1.0, 1300), (1.5, 1400)):
        gpu.now_s = now_s
        clock.request(frequency, Done())
        clock.wait_idle()
    assert gpu.history == [1000, 1300]
    gpu.now_s = 1.9
    clock.request(1300, Done())  # back to the clock that is set: nothing is left to change
    clock.wait_idle()
    gpu.now_s = 5.0
    clock.request(1300, Done())
    clock.wait_idle()
    assert gpu.history == [1000, 1300]
    clock.close()
    assert len(looks) < 20  # it sleeps until the time has come


def test_a_change_held_back_is_made_when_its_time_has_come(gpu):
    clock = ClockController(gpu, min_dwell_s=0.05)
    clock.request(1000, Done())
    clock.wait_idle()
    gpu.now_s = 0.01
    clock.request(1200, Done())
    clock.wait_idle()
    assert gpu.history == [1000]
    gpu.now_s = 0.05
    wait_for(lambda: clock.changes == 2)  # without a further request
    assert gpu.history == [1000, 1200]
    assert clock.summary()["lock_call_s"]["count"] == 1  # what was held back tells no latency
    clock.close()


def test_a_controller_with_nothing_to_change_sleeps(gpu, clock, monkeypatch):
    """It asks for the time where a change is held back; without an end, that would take a core."""
    looks: list[float] = []
    monkeypatch.setattr(gpu, "time_s", lambda: looks.append(0.0) or 0.0)
    clock.request(1000, Done())
    clock.wait_idle()
    running = Unit()
    clock.request(1200, running)
    clock.request(1000, running)  # what is set already, once the first of both is stale
    running.end()
    clock.wait_idle()
    assert gpu.history == [1000]
    assert not looks


def test_the_first_of_two_errors_is_kept(gpu):
    clock = ClockController(gpu)
    clock.request(1000, Done())
    clock.wait_idle()
    gpu.error, gpu.reset_error = GpuError("no lock"), GpuError("no reset")
    clock.request(1200, Done())
    clock.wait_idle()
    clock.close()
    assert clock.error is gpu.error


@pytest.mark.parametrize("error", [GpuError("driver"), OSError("gone")])
def test_failing_driver_stops_control_and_not_training(gpu, clock, error):
    clock.request(1000, Done())
    clock.wait_idle()
    gpu.error = error
    clock.request(1200, Done())
    clock.wait_idle()
    gpu.error = None
    clock.request(1300, Done())
    clock.wait_idle()
    assert clock.error is error
    clock.close()
    assert_given_back(gpu, after=[1000])


@pytest.mark.parametrize("call", [1, 2])
def test_failing_time_base_stops_control_and_not_training(gpu, monkeypatch, call):
    clock = ClockController(gpu, min_dwell_s=1.0)
    clock.request(1000, Done())
    clock.wait_idle()
    times_s = iter([0.5] * (call - 1))
    calls: list[int] = []

    def time_s() -> float:
        calls.append(1)
        for now_s in times_s:
            return now_s
        raise GpuError("no time")

    monkeypatch.setattr(gpu, "time_s", time_s)
    clock.request(1200, Done())
    wait_for(lambda: clock.error)
    clock.wait_idle()
    assert isinstance(clock.error, GpuError)
    clock.close()
    assert_given_back(gpu, after=[1000])
    assert len(calls) == call  # once given up, it is not asked again


def test_close_resets_and_drops_what_is_pending(gpu):
    clock = ClockController(gpu)
    clock.request(1000, Done())
    clock.wait_idle()
    clock.request(1100, unit := Unit())
    clock.request(1200, Done())
    assert unit.waited_for.wait(WAIT_S)
    closing = threading.Thread(target=clock.close)
    closing.start()
    unit.end()
    closing.join(WAIT_S)
    assert_given_back(gpu, after=[1000])
    clock.request(1300, Done())  # nobody is left to do it
    clock.close()
    assert_given_back(gpu, after=[1000])


def test_close_resets_though_a_unit_never_ends(gpu, monkeypatch):
    """As after a peer's death, when a unit stands behind a transfer that never completes."""
    monkeypatch.setattr(clock_controller, "_JOIN_S", 0.05)
    clock = ClockController(gpu)
    clock.request(1000, Done())
    clock.wait_idle()
    clock.request(1200, unit := Unit())
    assert unit.waited_for.wait(WAIT_S)
    clock.close()
    assert gpu.history == [1000, None]
    unit.end()
    clock._thread.join(WAIT_S)
    assert gpu.history == [1000, None]  # no lock outlives the reset


def test_close_does_not_wait_for_a_driver_that_hangs(gpu, monkeypatch):
    """When the driver comes back after all, the clock does not stay locked."""
    monkeypatch.setattr(clock_controller, "_JOIN_S", 0.05)
    clock = ClockController(gpu)
    gpu.driver.clear()
    clock.request(1000, Done())
    assert gpu.in_driver.wait(WAIT_S)
    clock.close()
    assert gpu.history == []
    assert isinstance(clock.error, GpuError)
    gpu.driver.set()
    clock._resetter.join(WAIT_S)
    assert_given_back(gpu, after=[1000])


def test_refused_reset_is_told_and_does_not_hide_an_earlier_error(gpu, caplog):
    clock = ClockController(gpu)
    clock.request(1000, Done())
    clock.wait_idle()
    gpu.reset_error = GpuError("no reset")
    clock.close()
    assert clock.error is gpu.reset_error
    assert "no reset" in caplog.text
    gpu.reset_error = None
    clock.close()
    assert gpu.history == [1000, None]


def test_stop_gives_up_control(gpu, clock, caplog):
    """As when the guard is lost: from another thread, while requests keep coming."""
    clock.request(1000, Done())
    clock.wait_idle()
    clock.request(1100, unit := Unit())
    assert unit.waited_for.wait(WAIT_S)
    error = GpuError("guard lost")
    stopping = threading.Thread(target=clock.stop, args=(error,))
    stopping.start()
    stopping.join(WAIT_S)
    assert gpu.history == [1000, None]
    unit.end()
    clock.request(1200, Done())
    clock.wait_idle()
    clock.stop(GpuError("once more"))
    clock.close()
    assert gpu.history == [1000, None]
    assert clock.error is error
    assert clock.summary()["error"] == "guard lost"
    assert [r.levelno for r in caplog.records] == [logging.ERROR]


def test_wherever_a_signal_takes_the_main_thread_the_way_out_is_free():
    """A SIGTERM handler that raises, at a random instant of a job or of its close.

    Nothing that the first way left may make the second one wait, and the clock comes back.
    """
    code = """
import random, signal, sys
from fake_gpu import FakeGpu
from envpipe_megatron.gpu.base import ClockState
from envpipe_megatron.runtime.clocks.controller import ClockController
from envpipe_megatron.runtime.clocks.watch import ClockWatch
from envpipe_megatron.runtime.execution.completion import Done
from envpipe_megatron.runtime.energy.timeline_log import TimelineLog

def leave(*_):
    left.append(True)
    sys.exit(1)

signal.signal(signal.SIGALRM, leave)
randomness = random.Random(19)
for _ in range(200):
    left = []
    gpu = FakeGpu()
    clock, log = ClockController(gpu), TimelineLog(lambda line: None, {})
    watch = ClockWatch(gpu, lambda: clock.last_change_s)
    parts = (clock, watch, log)
    try:
        signal.setitimer(signal.ITIMER_REAL, randomness.uniform(1e-6, 2e-3))
        for number in range(10):
            clock.request(gpu.supported_frequencies_mhz[number % 5], Done())
            log._put({})
        clock.wait_idle()
        while not left:  # Python drops what is raised in a destructor
            for part in parts:
                part.close()
    except SystemExit as error:
        kept = error
    for part in parts:
        part.close()
    assert gpu.requested_frequency_mhz is None, gpu.history
    assert not any(part._thread.is_alive() for part in parts)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300, env=environment)


def test_the_main_thread_never_enters_the_driver(gpu, clock, monkeypatch):
    """Where a signal handler raises out of it, the driver's library may keep its locks taken."""
    entered = []
    monkeypatch.setattr(FakeGpu, "_reset", lambda self: entered.append(threading.current_thread()))
    clock.request(1000, Done())
    clock.wait_idle()
    clock.close()
    assert entered
    assert threading.current_thread() not in entered


def test_close_does_not_wait_for_a_reset_that_hangs(gpu, monkeypatch):
    monkeypatch.setattr(clock_controller, "_JOIN_S", 0.05)
    returns = threading.Event()
    monkeypatch.setattr(FakeGpu, "_reset", lambda self: returns.wait(WAIT_S))
    clock = ClockController(gpu)
    clock.request(1000, Done())
    clock.wait_idle()
    clock.close()
    assert "does not return" in str(clock.error)
    assert clock.in_driver  # so that the guard is left to bring the clock back
    returns.set()


def test_stop_while_the_driver_locks(gpu, clock):
    """The lock that is under way is undone, whoever comes first."""
    gpu.driver.clear()
    clock.request(1000, Done())
    assert gpu.in_driver.wait(WAIT_S)
    stopping = threading.Thread(target=clock.stop, args=(GpuError("guard lost"),))
    stopping.start()
    gpu.driver.set()
    stopping.join(WAIT_S)
    assert gpu.history == [1000, None]


def test_stop_and_close_leave_a_gpu_alone_that_was_never_locked(gpu, clock):
    clock.stop(GpuError("guard lost"))
    clock.close()
    assert gpu.history == []


def test_error_of_the_driver_is_logged_once(gpu, clock, caplog):
    gpu.error = GpuError("driver")
    for frequency in (1000, 1100, 1200):
        clock.request(frequency, Done())
        clock.wait_idle()
    clock.close()
    assert [r.getMessage() for r in caplog.records] == [
        "Clock control of fake stops, training goes on: driver"
    ]
    assert clock.summary()["error"] == "driver"


def test_after_forget_an_equal_request_is_applied(gpu, clock):
    for _ in range(2):
        clock.request(1000, Done())
        clock.wait_idle()
    clock.forget()
    for _ in range(2):
        clock.request(1000, Done())
        clock.wait_idle()
    assert gpu.history == [1000, 1000]


def test_forget_while_the_driver_locks(gpu, clock):
    """The reset of the other one may have come after this lock: it does not count."""
    gpu.driver.clear()
    clock.request(1000, Done())
    assert gpu.in_driver.wait(WAIT_S)
    clock.forget()
    gpu.driver.set()
    clock.request(1000, Done())
    clock.wait_idle()
    assert gpu.history == [1000, 1000]


def test_relock_calls_the_driver_at_each_request(gpu):
    clock = ClockController(gpu, relock=True)
    for _ in range(3):
        clock.request(1400, Done())
        clock.wait_idle()
    clock.close()
    assert gpu.history == [1400, 1400, 1400, None]


def test_waiting_ends_when_nobody_serves(gpu):
    clock = ClockController(gpu)
    clock.close()
    clock.request(1000, Done())
    clock.wait_idle()
    assert gpu.history == []


def test_waiting_ends_when_control_is_given_up(gpu, clock):
    clock.request(1000, unit := Unit())
    assert unit.waited_for.wait(WAIT_S)
    waiting = threading.Thread(target=clock.wait_idle)
    waiting.start()
    clock.stop(GpuError("guard lost"))
    waiting.join(WAIT_S)
    assert not waiting.is_alive()
    unit.end()


@pytest.mark.parametrize("before_s", [0.005, 1e-5])
def test_switch_interval_is_short_while_a_controller_lives(gpu, monkeypatch, before_s):
    interval_s = {"now": before_s}
    monkeypatch.setattr(sys, "getswitchinterval", lambda: interval_s["now"])
    monkeypatch.setattr(sys, "setswitchinterval", lambda s: interval_s.update(now=s))
    clock = ClockController(gpu)
    assert interval_s["now"] == min(before_s, 1e-4)
    clock.close()
    assert interval_s["now"] == before_s
    interval_s["now"] = 1.0
    clock.close()
    assert interval_s["now"] == 1.0


def test_summary_counts_what_reached_the_driver(gpu, clock):
    for frequency in (1000, 1000, 1100):
        clock.request(frequency, Done())
        clock.wait_idle()
    summary = clock.summary()
    assert summary["changes"] == 2
    assert summary["error"] is None
    for name in ("wake_to_lock_s", "lock_call_s"):
        assert summary[name]["count"] == 2
        assert 0 <= summary[name]["median"] <= summary[name]["p99"] <= summary[name]["max"]


def test_how_fast_a_request_was_served(gpu, monkeypatch):
    """Of each: known at 10 s, in the driver at 10.25 s, back at 11 s; then 0.5 and 2 s."""
    told_s = iter([10.0, 10.25, 11.0, 20.0, 20.5, 22.5, 30.0, 30.0, 31.0])
    monkeypatch.setattr(
        clock_controller, "time", SimpleNamespace(monotonic=lambda: next(told_s, 40.0))
    )
    clock = ClockController(gpu, relock=True)
    changed_s = [clock.last_change_s]
    for frequency in (1000, 1200, 1200):
        clock.request(frequency, Done())
        clock.wait_idle()
        changed_s.append(clock.last_change_s)
    clock.close()
    # The third locked what was locked: the clock runs as it did.
    assert changed_s == [float("-inf"), 11.0, 22.5, 22.5]
    assert clock.summary() == {
        "changes": 3,
        "coalesced": 0,
        "error": None,
        "wake_to_lock_s": {"median": 0.25, "p99": 0.5, "max": 0.5, "count": 3},
        "lock_call_s": {"median": 1.0, "p99": 2.0, "max": 2.0, "count": 3},
    }


def test_median_and_the_worst_of_many():
    values_s = [float(value) for value in range(1, 202)]
    told = {"median": 101.0, "p99": 199.0, "max": 201.0, "count": 201}
    assert spread(reversed(values_s)) == told
    assert spread([7.0]) == {"median": 7.0, "p99": 7.0, "max": 7.0, "count": 1}
    assert spread([]) == {"count": 0}


def test_a_forked_child_closes_nothing(gpu, clock, monkeypatch):
    clock.request(1000, Done())
    clock.wait_idle()
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: -1)
        clock.close()
    assert gpu.history == [1000]
    clock.request(1200, Done())
    clock.wait_idle()
    assert gpu.history == [1000, 1200]


def test_needs_no_torch():
    """Processes without torch (small ranks of tests, tools) use the controller too."""
    code = (
        "import sys, envpipe_megatron.runtime.clocks.controller; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_thread_ends_when_it_is_closed_after_control_was_given_up(gpu, clock):
    """Both while a unit runs: what the thread finds when it ends must not make it wait for ever."""
    unit = Unit()
    clock.request(1200, unit)
    assert unit.waited_for.wait(WAIT_S)
    clock.stop(GpuError("the guard is gone"))
    closing = threading.Thread(target=clock.close)
    closing.start()
    wait_for(lambda: clock._queue.qsize() == 1)
    unit.end()
    closing.join(WAIT_S)
    assert not clock._thread.is_alive()
    assert gpu.history == []


def test_a_clock_that_cannot_be_watched_is_given_back(gpu, monkeypatch):
    released = []
    hold = SimpleNamespace(release=lambda: released.append(True))
    monkeypatch.setattr(rank_clock, "hold_gpu", lambda address, *, on_event: hold)
    monkeypatch.setattr(rank_clock, "ClockWatch", None)  # as where no thread can be started
    monkeypatch.setattr(gpu, "drives_hardware", True, raising=False)
    with pytest.raises(TypeError):
        RankClock(gpu)
    assert released == [True]
