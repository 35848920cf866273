"""What surrounds the clock of a rank: who is asked, told and given back, in one process."""

import logging
import math
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_gpu import FakeGpu, ServedPage, pages_go  # noqa: F401 - a fixture

from envpipe_megatron.formats.energy import IDLE
from envpipe_megatron.gpu import control
from envpipe_megatron.gpu.base import GpuAddress, GpuError
from envpipe_megatron.gpu.control import Control
from envpipe_megatron.gpu.guard.messages import AGENT_VARIABLE
from envpipe_megatron.runtime.clocks import rank_clock, watch
from envpipe_megatron.runtime.clocks.rank_clock import (
    RankClock,
    hold_everywhere,
    open_rank_gpu,
)


class Guard:
    """A guard in this process: what it was asked for, and may tell."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.held: list[GpuAddress] = []
        self.released = 0
        self.error: GpuError | None = None
        self._gpu = gpu

    def hold_gpu(self, address, page):
        self.held.append(address)
        self.page = page
        self.serving = ServedPage(self._gpu, page)
        return SimpleNamespace(release=self._release)

    def reset(self) -> None:
        self.serving.close()
        self._gpu.reset_frequency()

    def _release(self) -> None:
        self.reset()
        self.released += 1
        if self.error is not None:
            raise self.error


@pytest.fixture
def gpu() -> FakeGpu:
    return FakeGpu()


@pytest.fixture
def guard(monkeypatch, gpu) -> Guard:
    monkeypatch.delenv(AGENT_VARIABLE, raising=False)
    guard = Guard(gpu)
    monkeypatch.setattr(rank_clock, "hold_gpu", guard.hold_gpu)
    return guard


def ask(clock: RankClock, *frequencies: int) -> None:
    for frequency in frequencies:
        clock.request(frequency)
        clock.wait_idle()


@pytest.mark.parametrize(("on_stream", "waits"), [(True, False), (False, True)])
def test_units_of_a_gpu_that_is_only_read_are_waited_for_where_time_is_emulated(
    guard, gpu, monkeypatch, on_stream, waits
):
    """Else each unit of a job without rights would be timed for weeks, and nobody looks."""
    monkeypatch.setattr(FakeGpu, "read_only", True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_stream)
    clock = RankClock(gpu)
    assert clock.waits == waits
    clock.request(1000)
    clock.close()
    assert gpu.history == []


@pytest.mark.parametrize(
    ("real", "backend", "agent", "held", "watched"),
    [
        (True, "nvml", False, True, True),
        (False, "emulated", False, False, False),
        (False, "emulated", True, True, False),
        (False, "none", True, False, True),
        (False, "dry_run", False, True, False),
    ],
)
def test_which_gpus_are_held_and_watched(
    guard, gpu, monkeypatch, real, backend, agent, held, watched
):
    monkeypatch.setattr(FakeGpu, "drives_hardware", real)
    monkeypatch.setattr(FakeGpu, "read_only", backend == "none")
    monkeypatch.setattr(FakeGpu, "address", GpuAddress(backend, "one"))
    if agent:
        monkeypatch.setenv(AGENT_VARIABLE, "/somewhere")
    clock = RankClock(gpu)
    ask(clock, 1000)
    assert guard.held == [gpu.address] * held
    assert gpu.history == [1000] * (not gpu.read_only)
    clock.close()
    assert guard.released == held
    assert gpu.history == ([] if gpu.read_only else [1000, None])
    summary = clock.summary()
    assert (summary.pop("followed") is not None) == watched
    assert summary == {
        "backend": backend,
        "changes": not gpu.read_only,
        "coalesced": 0,
        "wake_to_lock_s": summary["wake_to_lock_s"],
        "lock_call_s": summary["lock_call_s"],
        "error": None,
    }


def test_the_watch_looks_at_this_gpu_and_tells(guard, gpu, monkeypatch):
    monkeypatch.setattr(FakeGpu, "drives_hardware", True)
    seen = []
    clock = RankClock(gpu, guarded=True, on_sample=lambda time_s, state: seen.append(state))
    words = guard.page.guard
    words.set_mhz, words.returned_s = 1200, -math.inf  # requested in the guard
    gpu.observed_mhz = 1200
    clock._watch.sample()
    words.called_s = 0.0  # a call is under way
    clock._watch.sample()
    assert [state.requested_mhz for state in seen] == [1200, 1200]
    assert clock.summary()["followed"]["judged"] == 1
    clock.close()
    assert not clock._watch._thread.is_alive()


def test_a_clock_that_something_else_gave_back_is_asked_for_again(guard, gpu, monkeypatch):
    """As by `nvidia-smi -rgc` where a whole job has one clock."""
    monkeypatch.setattr(FakeGpu, "drives_hardware", True)
    monkeypatch.setattr(watch, "_SETTLING_S", 0.0)
    clock = RankClock(gpu, guarded=True)
    ask(clock, 1000, 1000)
    assert gpu.history == [1000]
    gpu.observed_mhz = 1400
    for _ in range(3):
        clock._watch.sample()
    gpu.observed_mhz = None
    ask(clock, 1000, 1000)
    assert gpu.history == [1000, 1000]
    clock.close()


@pytest.fixture
def real_clock(monkeypatch) -> Callable[..., RankClock]:
    """Makes the clock of a GPU that counts as a real one, without a guard and a watch."""

    def make(**gpu: Any) -> RankClock:
        clock = RankClock(FakeGpu(**gpu), guarded=False)
        monkeypatch.setattr(clock._gpu, "drives_hardware", True)
        return clock

    return make


def test_a_clock_that_comes_late_is_waited_for_and_one_that_is_held_back_not_for_long(
    real_clock, monkeypatch, caplog
):
    monkeypatch.setattr(rank_clock, "_SETTLES_S", 10)
    seen = iter([1000, 1000, 1399])
    monkeypatch.setattr(FakeGpu, "observed_frequency_mhz", property(lambda gpu: next(seen)))
    late = real_clock()
    late.confirm()  # nothing was asked for
    ask(late, 1400)
    late.confirm()
    late.confirm()  # is not looked at again
    late.given_back = True
    ask(late, 1400)
    late.confirm()
    assert (list(seen), caplog.messages) == ([], [])

    monkeypatch.setattr(rank_clock, "_SETTLES_S", 0.02)
    monkeypatch.setattr(FakeGpu, "observed_frequency_mhz", property(lambda gpu: 1100))
    idle = real_clock(throttle_reasons=(IDLE,))
    ask(idle, 1400)
    idle.confirm()
    assert caplog.messages == []

    held = real_clock(throttle_reasons=("sw_power_cap",))
    for settles_s, clock_mhz in ((1.0, 1400), (0.02, 1300), (0.02, 1400)):
        monkeypatch.setattr(rank_clock, "_SETTLES_S", settles_s)
        ask(held, clock_mhz)
        held.confirm()
    monkeypatch.setattr(rank_clock, "_SETTLES_S", 1e9)
    held.confirm()  # as each batch of an evaluation does
    (said,) = caplog.messages
    assert "not at 1400 MHz between" in said
    assert "sw_power_cap" in said
    held._gpu.error = GpuError("the driver fails")
    held.request(1000)  # its control has ended, and the GPU is at its default
    held.confirm()
    assert held.error is not None


def test_a_driver_that_hangs_holds_up_no_training(real_clock, monkeypatch, caplog):
    comes_back, hangs = threading.Event(), threading.Event()

    def hang(gpu: FakeGpu) -> int:
        hangs.set()
        comes_back.wait(60)
        return 1000

    monkeypatch.setattr(FakeGpu, "observed_frequency_mhz", property(hang))
    clock = real_clock()
    for settles_s, mhz in ((0.05, 1400), (1.0, 1000), (20.0, 1400)):  # a busy host may need more
        monkeypatch.setattr(rank_clock, "_SETTLES_S", settles_s)
        ask(clock, mhz)
        if not hangs.is_set():
            clock.confirm()
    assert (hangs.is_set(), comes_back.is_set()) == (True, False)
    comes_back.set()
    assert caplog.messages == []  # of a clock that was not read, nothing is said


def test_a_clock_that_is_held_back_for_the_dwell_time_is_waited_for(guard, monkeypatch, caplog):
    monkeypatch.setattr(rank_clock, "_SETTLES_S", 20.0)
    gpu = guard._gpu
    clock = RankClock(gpu, 0.4, guarded=True)
    ask(clock, 1000, 1400)
    assert gpu.history == [1000]
    monkeypatch.setattr(gpu, "drives_hardware", True)
    dwelt = threading.Timer(0.05, setattr, (gpu, "now_s", 1.0))
    dwelt.start()
    clock.confirm()
    dwelt.join()
    assert (gpu.history, caplog.messages) == ([1000, 1400], [])
    clock.close()


@pytest.mark.parametrize("error", [GpuError("no reset"), OSError("no reset")])
def test_a_rank_that_serves_its_page_tries_a_reset_again(gpu, caplog, error):
    untouched = RankClock(gpu, guarded=False)
    untouched.close()
    assert gpu.history == []
    clock = RankClock(gpu, guarded=False)
    ask(clock, 1000)
    gpu.reset_error = error
    clock.close()
    assert clock.error is error
    assert "no reset" in caplog.text
    gpu.reset_error = None
    clock.close()
    assert gpu.history == [1000, None]


@pytest.mark.parametrize("earlier", [None, GpuError("no lock")])
def test_a_guard_that_does_not_let_go_is_an_error_of_the_clock(guard, gpu, caplog, earlier):
    clock = RankClock(gpu, guarded=True)
    if earlier is not None:
        clock.stop(earlier)
    guard.error = GpuError("the clock is still locked")
    clock.close()
    assert clock.error is (earlier or guard.error)
    assert "the clock is still locked" in caplog.text


def test_a_clock_that_cannot_be_watched_is_given_back(guard, gpu, monkeypatch):
    monkeypatch.setattr(rank_clock, "ClockWatch", None)  # as where no thread can be started
    monkeypatch.setattr(FakeGpu, "drives_hardware", True)
    with pytest.raises(TypeError):
        RankClock(gpu, guarded=True)
    assert guard.released == 1


def test_a_clock_on_every_rank_or_on_none(guard, gpu):
    alone = SimpleNamespace(everywhere=lambda make: make())

    def make(gpu):
        return RankClock(gpu, guarded=not gpu.read_only)

    clock, held, why = hold_everywhere(gpu, alone, make, required=False)
    ask(clock, 1000)
    clock.close()
    assert gpu.history == [1000, None]
    assert (held, why) == (gpu, "")

    def refused(make):
        make()
        raise GpuError("another rank was refused")

    others = SimpleNamespace(everywhere=refused)
    with pytest.raises(GpuError, match="another rank"):
        hold_everywhere(gpu, others, make, required=True)
    assert guard.released == 2

    answers = [refused, alone.everywhere]
    others.everywhere = lambda make: answers.pop(0)(make)
    clock, read, why = hold_everywhere(gpu, others, make, required=False)
    clock.close()
    assert (read.read_only, why) == (True, "another rank was refused")
    assert guard.released == 3


@pytest.mark.parametrize("wanted", ["auto", "nvml", "dry_run"])
def test_a_site_that_cannot_be_used_costs_control_and_no_job(monkeypatch, wanted):
    def wrong():
        raise GpuError("The site is wrong", remedy="Correct it")

    monkeypatch.setattr(control, "read_site", wrong)
    monkeypatch.setattr(rank_clock, "open_controlled", lambda uid, chosen: chosen.backend)
    collectives = SimpleNamespace(
        is_planner=True,
        everywhere=lambda make: make(),
        to_planner=lambda mine, merge: [merge([mine])],
        first=lambda without: without and (0, without),
    )
    opened, chosen = open_rank_gpu("GPU-1", collectives, wanted)
    assert (opened, chosen.backend, chosen.why) == (None, None, "The site is wrong")
    with pytest.raises(GpuError, match=r"required, but The site is wrong\. Correct it"):
        open_rank_gpu("GPU-1", collectives, wanted, require=True)


# --- which back end ------------------------------------------------------------------------------

CONTROLLED = Control("auto", "nvml", "this process has the right")
READS = Control("auto", None, "nobody may", "Ask for the right")


@pytest.mark.parametrize("planner", [True, False])
@pytest.mark.parametrize(
    ("first", "said"),
    [
        (None, ["clocks are controlled by nvml, zeusd: this process has the right"]),
        ((2, READS), [READS.warning]),
        ((0, Control("none", None, "as wished")), []),
    ],
)
def test_the_planner_says_what_all_ranks_open(monkeypatch, caplog, planner, first, said):
    caplog.set_level(logging.INFO)
    collectives = SimpleNamespace(
        is_planner=planner,
        everywhere=lambda make: make(),
        to_planner=lambda mine, merge: [merge([mine, {"zeusd"}]), mine] if planner else [],
        first=lambda without: first,
    )
    monkeypatch.setattr(rank_clock, "choose_for", lambda *asked, **how: CONTROLLED)
    monkeypatch.setattr(rank_clock, "open_controlled", lambda *opening: opening)
    opened = first[1] if first else CONTROLLED
    found = open_rank_gpu("GPU-1", collectives, "auto", one_clock=True)
    assert found == (("GPU-1", opened), opened)
    assert [record.getMessage() for record in caplog.records] == said * planner
