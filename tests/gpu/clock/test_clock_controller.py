"""What the controller requests of a GPU, and when."""

from __future__ import annotations

import logging
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace

import pytest
from fake_gpu import FakeGpu, look_until

from envpipe_megatron.gpu.base import GpuError
from envpipe_megatron.gpu.clock import controller as clock_controller
from envpipe_megatron.gpu.clock.completion import Done
from envpipe_megatron.gpu.clock.controller import ClockController, spread
from envpipe_megatron.runtime.clocks.watch import ClockWatch
from envpipe_megatron.runtime.writer import Writer

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
def make(gpu) -> Iterator[Callable[..., ClockController]]:
    """Makes controllers, which are closed at the end."""
    made: list[ClockController] = []

    def make(**options) -> ClockController:
        made.append(ClockController(gpu, **options))
        return made[-1]

    yield make
    gpu.driver.set()
    for controller in made:
        controller.close()


@pytest.fixture
def clock(make) -> ClockController:
    return make()


def ask(clock: ClockController, *frequencies: int) -> None:
    """Request these clocks, each when the one before was served."""
    for frequency in frequencies:
        clock.request(frequency, Done())
        clock.wait_idle()


def ask_while_busy(clock: ClockController, frequency: int) -> Unit:
    """Request a clock behind a unit that runs, for which the thread waits."""
    clock.request(frequency, unit := Unit())
    assert unit.waited_for.wait(WAIT_S)
    return unit


def hang(gpu: FakeGpu, clock: ClockController, frequency: int = 1000) -> None:
    """Let the driver hang while it locks this clock."""
    gpu.driver.clear()
    gpu.in_driver.clear()
    clock.request(frequency, Done())
    assert gpu.in_driver.wait(WAIT_S)


def in_thread(function: Callable[..., object], *args: object) -> threading.Thread:
    thread = threading.Thread(target=function, args=args)
    thread.start()
    return thread


def assert_given_back(gpu: FakeGpu, after: list[int]) -> None:
    """Locked to these clocks, then reset, perhaps more than once."""
    assert gpu.history[: len(after)] == after
    assert set(gpu.history[len(after) :]) == {None}


# --- requests -------------------------------------------------------------------------------------


def test_clock_is_set_when_the_unit_before_has_ended(gpu, clock):
    units = [Unit() for _ in range(3)]
    for unit, frequency in zip(units, (1000, 1200, 1100), strict=True):
        clock.request(frequency, unit)
    for ended, unit in enumerate(units):
        assert unit.waited_for.wait(WAIT_S)
        assert gpu.history == [1000, 1200, 1100][:ended]
        unit.end()
        look_until(lambda: len(gpu.history) > ended)  # noqa: B023 - called at once
    assert gpu.history == [1000, 1200, 1100]


def test_equal_requests_reach_the_driver_once(gpu, clock):
    ask(clock, 1000, 1000, 1000, 1200, 1200, 1000)
    assert gpu.history == [1000, 1200, 1000]
    assert clock.changes == 3


def test_relock_calls_the_driver_at_each_request(gpu, make):
    ask(make(relock=True), 1400, 1400, 1400)
    assert gpu.history == [1400, 1400, 1400]


def test_a_unit_that_has_ended_is_not_waited_for(clock):
    """Waiting gives up the interpreter, and getting it back takes time."""
    unit = Unit()
    unit.end()
    clock.request(1000, unit)
    clock.wait_idle()
    assert clock.changes == 1
    assert not unit.waited_for.is_set()


def test_stale_requests_are_coalesced_and_the_caller_never_waits(gpu, clock):
    """While the driver is slow, units end: only the newest clock is worth setting."""
    hang(gpu, clock)
    for frequency in (1100, 1200, 1300, 1400):
        clock.request(frequency, Done())
    clock.request(1100, unit := Unit())
    assert gpu.history == []  # nobody has let the driver go on
    gpu.driver.set()
    assert unit.waited_for.wait(WAIT_S)
    assert gpu.history == [1000, 1400]
    assert clock.coalesced == 3
    unit.end()
    clock.wait_idle()
    assert gpu.history == [1000, 1400, 1100]


def test_after_forget_an_equal_request_is_applied(gpu, clock):
    ask(clock, 1000, 1000)
    clock.forget()
    ask(clock, 1000, 1000)
    assert gpu.history == [1000, 1000]
    # The other one's reset may have come after a lock that is under way: that does not count.
    hang(gpu, clock, 1200)
    clock.forget()
    gpu.driver.set()
    ask(clock, 1200)
    assert gpu.history == [1000, 1000, 1200, 1200]


# --- the least time between two changes -----------------------------------------------------------


def test_least_dwell(gpu, make, monkeypatch):
    """A change that comes too early waits for its time, unless a later one has replaced it."""
    clock = make(min_dwell_s=1.0)
    looks: list[threading.Thread] = []
    monkeypatch.setattr(
        gpu, "time_s", lambda: looks.append(threading.current_thread()) or gpu.now_s
    )
    for now_s, frequency in ((0.0, 1000), (0.5, 1200), (0.9, 1100), (1.0, 1300), (1.5, 1400)):
        gpu.now_s = now_s
        ask(clock, frequency)
    assert gpu.history == [1000, 1300]
    gpu.now_s = 1.9
    ask(clock, 1300)  # back to the clock that is set: nothing is left to change
    gpu.now_s = 5.0
    ask(clock, 1300)
    assert gpu.history == [1000, 1300]
    assert len(looks) < 20  # it sleeps until the time has come
    assert threading.current_thread() not in looks  # what time it is comes from the driver too


def test_a_change_held_back_is_made_when_its_time_has_come(gpu, make):
    clock = make(min_dwell_s=0.05)
    ask(clock, 1000)
    gpu.now_s = 0.01
    ask(clock, 1200)
    assert gpu.history == [1000]
    gpu.now_s = 0.05
    look_until(lambda: clock.changes == 2)  # without a further request
    assert gpu.history == [1000, 1200]
    assert clock.summary()["lock_call_s"]["count"] == 1  # what was held back has no latency


def test_a_controller_with_nothing_to_change_sleeps(gpu, clock, monkeypatch):
    """It asks for the time where a change is held back; without an end, that would take a core."""
    looks: list[float] = []
    monkeypatch.setattr(gpu, "time_s", lambda: looks.append(0.0) or 0.0)
    ask(clock, 1000)
    clock.request(1200, running := Unit())
    clock.request(1000, running)  # what is set already, once the first of both is stale
    running.end()
    clock.wait_idle()
    assert gpu.history == [1000]
    assert not looks


# --- what fails -----------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [GpuError("driver"), OSError("gone")])
def test_failing_driver_stops_control_and_not_training(gpu, clock, caplog, error):
    ask(clock, 1000)
    gpu.error = error
    ask(clock, 1200)
    gpu.error = None
    ask(clock, 1300)
    clock.close()
    assert clock.error is error
    assert clock.summary()["error"] == str(error)
    assert_given_back(gpu, after=[1000])
    assert [record.getMessage() for record in caplog.records] == [
        f"Clock control of fake stops, training goes on: {error}"
    ]


@pytest.mark.parametrize("call", [1, 2])
def test_failing_time_base_stops_control_and_not_training(gpu, make, monkeypatch, call):
    clock = make(min_dwell_s=1.0)
    ask(clock, 1000)
    times_s = iter([0.5] * (call - 1))
    monkeypatch.setattr(gpu, "time_s", lambda: next(times_s))
    clock.request(1200, Done())
    look_until(lambda: clock.error)
    clock.wait_idle()
    assert isinstance(clock.error, StopIteration)
    clock.close()
    assert_given_back(gpu, after=[1000])


def test_a_start_that_fails_stops_control(gpu, make):
    clock = make(on_start=lambda: next(iter([])))
    ask(clock, 1000)
    clock.close()
    assert isinstance(clock.error, StopIteration)
    assert gpu.history == []


@pytest.mark.parametrize("earlier", [None, GpuError("no lock")])
def test_refused_reset_is_logged_and_hides_no_earlier_error(gpu, clock, caplog, earlier):
    ask(clock, 1000)
    gpu.error, gpu.reset_error = earlier, GpuError("no reset")
    ask(clock, 1200)
    clock.close()
    assert clock.error is (earlier or gpu.reset_error)
    assert "no reset" in caplog.text
    gpu.reset_error = None
    clock.close()
    assert gpu.history[-1] is None


def test_a_refused_reset_is_tried_again_whatever_the_rank_does(gpu, clock, monkeypatch):
    """The last clock may be a low one, at which training would go on."""
    monkeypatch.setattr(clock_controller, "_RETRY_RESET_S", 0.01)
    ask(clock, 1000)
    gpu.error = gpu.reset_error = GpuError("the daemon restarts")
    ask(clock, 1200)
    assert gpu.history == [1000]
    gpu.reset_error = None
    clock._resetter.join(WAIT_S)
    assert gpu.history == [1000, None]
    clock.close()
    assert gpu.history == [1000, None]


# --- the end --------------------------------------------------------------------------------------


def test_close_resets_and_drops_what_is_pending(gpu, clock):
    ask(clock, 1000)
    unit = ask_while_busy(clock, 1100)
    clock.request(1200, Done())
    closing = in_thread(clock.close)
    unit.end()
    closing.join(WAIT_S)
    assert_given_back(gpu, after=[1000])
    ask(clock, 1300)  # nobody is left to do it
    clock.close()
    assert_given_back(gpu, after=[1000])


def test_close_resets_though_a_unit_never_ends(gpu, clock, monkeypatch):
    """As after a peer's death, when a unit stands behind a transfer that never completes."""
    monkeypatch.setattr(clock_controller, "_JOIN_S", 0.05)
    ask(clock, 1000)
    unit = ask_while_busy(clock, 1200)
    clock.close()
    assert gpu.history == [1000, None]
    unit.end()
    clock._thread.join(WAIT_S)
    assert gpu.history == [1000, None]  # no lock outlives the reset


def test_close_does_not_wait_for_a_driver_that_hangs(gpu, clock, monkeypatch):
    """When the driver comes back after all, the clock does not stay locked."""
    monkeypatch.setattr(clock_controller, "_JOIN_S", 0.05)
    hang(gpu, clock)
    clock.close()
    assert gpu.history == []
    assert isinstance(clock.error, GpuError)
    gpu.driver.set()
    clock._resetter.join(WAIT_S)
    assert_given_back(gpu, after=[1000])


def test_close_does_not_wait_for_a_reset_that_hangs(gpu, clock, monkeypatch):
    monkeypatch.setattr(clock_controller, "_JOIN_S", 0.05)
    returns = threading.Event()
    monkeypatch.setattr(FakeGpu, "_reset", lambda self: returns.wait(WAIT_S))
    ask(clock, 1000)
    clock.close()
    assert "does not return" in str(clock.error)
    assert clock.in_driver  # so that the guard is left to reset the clock
    returns.set()


def test_stop_gives_up_control(gpu, clock, caplog):
    """As when the guard is lost: from another thread, while requests keep coming."""
    ask(clock, 1000)
    unit = ask_while_busy(clock, 1100)
    waiting = in_thread(clock.wait_idle)
    error = GpuError("guard lost")
    in_thread(clock.stop, error).join(WAIT_S)
    assert gpu.history == [1000, None]
    waiting.join(WAIT_S)
    assert not waiting.is_alive()
    clock.request(1200, Done())
    closing = in_thread(clock.close)
    unit.end()
    closing.join(WAIT_S)
    assert not clock._thread.is_alive()
    clock.stop(GpuError("once more"))
    assert gpu.history == [1000, None]
    assert clock.error is error
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


def test_stop_while_the_driver_locks(gpu, clock):
    """The lock that is under way is undone, whoever comes first."""
    hang(gpu, clock)
    stopping = in_thread(clock.stop, GpuError("guard lost"))
    gpu.driver.set()
    stopping.join(WAIT_S)
    assert gpu.history == [1000, None]


def test_stop_and_close_leave_a_gpu_alone_that_was_never_locked(gpu, clock):
    clock.stop(GpuError("guard lost"))
    clock.close()
    assert gpu.history == []


def leave_at_random_instants() -> None:
    """Train and close in 200 jobs, out of which a SIGTERM handler raises."""
    left: list[bool] = []

    def leave(*_: object) -> None:
        left.append(True)
        sys.exit(1)

    signal.signal(signal.SIGALRM, leave)
    randomness = random.Random(19)
    for _ in range(200):
        left.clear()
        gpu = FakeGpu()
        clock, writer, lines = ClockController(gpu), Writer(), []
        watch = ClockWatch(gpu, lambda clock=clock: clock.last_change_s)
        parts = (clock, watch, writer)
        try:
            signal.setitimer(signal.ITIMER_REAL, randomness.uniform(1e-6, 2e-3))
            for number in range(10):
                clock.request(gpu.supported_frequencies_mhz[number % 5], Done())
                writer.put("lines", partial(lines.append, number))
            clock.wait_idle()
            while not left:  # Python drops what is raised in a destructor
                for part in parts:
                    part.close()
        except SystemExit as error:
            kept = error  # noqa: F841 - and with it the frames that it left
        for part in parts:
            part.close()
        assert gpu.requested_frequency_mhz is None, gpu.history
        assert not any(part._thread.is_alive() for part in (clock, watch))
        assert lines == list(range(len(lines)))
        assert not any(writer._waiting.values())


def test_wherever_a_signal_takes_the_main_thread_the_way_out_is_free():
    """At a random instant of a job or of its close.

    Nothing that the first way left may make the second one wait, and the clock comes back.
    """
    child = multiprocessing.get_context("fork").Process(target=leave_at_random_instants)
    child.start()
    child.join(300)
    child.kill()
    assert child.exitcode == 0


def test_the_main_thread_never_enters_the_driver(clock, monkeypatch):
    """Where a signal handler raises out of it, the driver's library may keep its locks taken."""
    entered = []
    monkeypatch.setattr(FakeGpu, "_reset", lambda self: entered.append(threading.current_thread()))
    ask(clock, 1000)
    clock.close()
    assert entered
    assert threading.current_thread() not in entered


def test_a_forked_child_closes_nothing(gpu, clock, monkeypatch):
    ask(clock, 1000)
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: -1)
        clock.close()
    assert gpu.history == [1000]
    ask(clock, 1200)
    assert gpu.history == [1000, 1200]


@pytest.mark.parametrize("before_s", [0.005, 1e-5])
def test_switch_interval_is_short_from_the_first_request_on(make, monkeypatch, before_s):
    interval_s = {"now": before_s}
    monkeypatch.setattr(sys, "getswitchinterval", lambda: interval_s["now"])
    monkeypatch.setattr(sys, "setswitchinterval", lambda s: interval_s.update(now=s))
    clock = make()
    assert interval_s["now"] == before_s
    ask(clock, 1000)
    assert interval_s["now"] == min(before_s, 1e-4)
    clock.close()
    assert interval_s["now"] == before_s
    interval_s["now"] = 1.0
    clock.request(1200, Done())
    clock.close()
    assert interval_s["now"] == 1.0
    unused = make()
    interval_s["now"] = 2.0
    unused.close()
    unused.request(1200, Done())
    assert interval_s["now"] == 2.0


# --- its summary ----------------------------------------------------------------------------------


def test_how_fast_a_request_was_served(make, monkeypatch):
    """Of each: known at 10 s, in the driver at 10.25 s, back at 11 s; then 0.5 and 2 s."""
    instants_s = iter([10.0, 10.25, 11.0, 20.0, 20.5, 22.5, 30.0, 30.0, 31.0])
    monkeypatch.setattr(
        clock_controller, "time", SimpleNamespace(monotonic=lambda: next(instants_s, 40.0))
    )
    clock = make(relock=True)
    changed_s = [clock.last_change_s]
    for frequency in (1000, 1200, 1200):
        ask(clock, frequency)
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
    worst = {"median": 101.0, "p99": 199.0, "max": 201.0, "count": 201}
    assert spread(reversed(values_s)) == worst
    assert spread([7.0]) == {"median": 7.0, "p99": 7.0, "max": 7.0, "count": 1}
    assert spread([]) == {"count": 0}


def test_needs_no_torch():
    """Processes without torch (small ranks of tests, tools) use controller and watch too."""
    modules = "envpipe_megatron.gpu.clock.controller, envpipe_megatron.runtime.clocks.watch"
    code = f"import sys, {modules}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
