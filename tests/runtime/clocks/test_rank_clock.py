"""What surrounds the clock of a rank: who is asked, told and given back, in one process."""

from __future__ import annotations

import logging
import threading
import time
from types import SimpleNamespace

import pytest
from fake_gpu import FakeGpu

from envpipe_megatron.gpu.base import GpuAddress, GpuError
from envpipe_megatron.gpu.clock import controller as clock_controller
from envpipe_megatron.gpu.clock.completion import Done
from envpipe_megatron.gpu.control import ChosenControl
from envpipe_megatron.gpu.guard.hold import GuardEvent
from envpipe_megatron.gpu.guard.messages import AGENT_VARIABLE
from envpipe_megatron.runtime.clocks import rank_clock
from envpipe_megatron.runtime.clocks.rank_clock import RankClock, hold_everywhere, open_rank_gpu


class Guard:
    """What a node's guard was asked for, and may tell."""

    def __init__(self) -> None:
        self.held: list[GpuAddress] = []
        self.released = 0
        self.is_released = threading.Event()
        self.error: GpuError | None = None

    def hold_gpu(self, address, *, on_event):
        self.held.append(address)
        self.tell = on_event
        return SimpleNamespace(release=self._release)

    def _release(self, *, late: bool) -> None:
        self.late = late
        self.is_released.set()
        self.released += 1
        if self.error is not None:
            raise self.error


@pytest.fixture
def guard(monkeypatch) -> Guard:
    monkeypatch.delenv(AGENT_VARIABLE, raising=False)
    guard = Guard()
    monkeypatch.setattr(rank_clock, "hold_gpu", guard.hold_gpu)
    return guard


@pytest.fixture
def gpu() -> FakeGpu:
    return FakeGpu()


def ask(clock: RankClock, *frequencies: int) -> None:
    for frequency in frequencies:
        clock.controller.request(frequency, Done())
        clock.controller.wait_idle()


@pytest.mark.parametrize(
    ("real", "backend", "agent", "wish", "held", "watched"),
    [
        (True, "nvml", False, None, True, True),
        (True, "nvml", False, False, False, True),
        (False, "emulated", False, None, False, False),
        (False, "emulated", True, None, True, False),
        (False, "emulated", True, False, False, False),
        (False, "emulated", False, True, True, False),
        (False, "none", True, None, False, True),
        (False, "dry_run", True, None, False, False),
    ],
)
def test_which_gpus_are_held_and_watched(
    guard, gpu, monkeypatch, real, backend, agent, wish, held, watched
):
    monkeypatch.setattr(FakeGpu, "drives_hardware", real)
    monkeypatch.setattr(FakeGpu, "changes_clock", backend in ("nvml", "emulated"))
    monkeypatch.setattr(FakeGpu, "read_only", backend == "none")
    monkeypatch.setattr(FakeGpu, "address", GpuAddress(backend, "one"))
    if agent:
        monkeypatch.setenv(AGENT_VARIABLE, "/somewhere")
    clock = RankClock(gpu, guarded=wish)
    assert guard.held == [gpu.address] * held
    clock.close()
    assert guard.released == held
    summary = clock.summary()
    assert (summary.pop("followed") is not None) == watched
    assert summary == {"backend": backend, "set_by": "rank", **clock.controller.summary()}


def test_the_watch_looks_at_this_gpu_and_tells(guard, gpu, monkeypatch):
    monkeypatch.setattr(FakeGpu, "drives_hardware", True)
    seen = []
    clock = RankClock(gpu, on_sample=lambda time_s, state: seen.append(state))
    gpu.lock_frequency(1200)
    clock.controller.last_change_s = float("-inf")
    clock._watch.sample()
    clock.controller.last_change_s = float("inf")  # a call is under way
    clock._watch.sample()
    assert [state.requested_mhz for state in seen] == [1200, 1200]
    assert clock.summary()["followed"]["judged"] == 1
    clock.close()
    assert not clock._watch._thread.is_alive()


def test_the_controller_does_as_wished(guard):
    dwelling, relocking = RankClock(FakeGpu(), 1.0), RankClock(FakeGpu(), relock=True)
    plain = RankClock(FakeGpu())
    for clock in (dwelling, relocking, plain):
        ask(clock, 1000, 1000, 1200)
        clock.close()
    assert dwelling._gpu.history == [1000, None]
    assert relocking._gpu.history == [1000, 1000, 1200, None]
    assert plain._gpu.history == [1000, 1200, None]


def test_what_a_guard_tells(guard, gpu, caplog):
    clock = RankClock(gpu, guarded=True)
    ask(clock, 1000)
    guard.tell(GuardEvent.WAS_RESET)
    ask(clock, 1000)
    assert gpu.history == [1000, 1000]
    guard.tell(GuardEvent.LOST)
    assert gpu.history == [1000, 1000, None]
    assert "The guard of this GPU's clock is gone. The clock is at" in str(clock.controller.error)
    assert guard.released == 0
    clock.close()
    clock.close()
    assert guard.released == 2  # a hold that is released does nothing
    other = RankClock(gpu, guarded=True)
    guard.tell(GuardEvent.STOP)
    assert "was told to end the job" in str(other.controller.error)
    assert guard.released == 3
    other.close()


@pytest.mark.parametrize("fails", [False, True])
def test_a_guard_is_told_whether_a_request_may_come_late(guard, gpu, fails):
    clock = RankClock(gpu, guarded=True)
    gpu.error = GpuError("no answer in time") if fails else None
    ask(clock, 1000)
    clock.close()
    assert guard.late is fails


def test_control_ends_before_the_right_to_it(guard, gpu, monkeypatch):
    """Behind a token's end nothing could be reset; training goes on."""
    ends_s = [time.time() + 1000.0, time.time()]
    monkeypatch.setattr(FakeGpu, "control_ends_s", lambda self: ends_s.pop(0))
    clock = RankClock(gpu, guarded=True)
    ask(clock, 1000)
    clock.close()
    assert clock.controller.error is None
    assert clock._ending.finished.is_set()
    guard.is_released.clear()
    clock = RankClock(gpu, guarded=True)
    assert guard.is_released.wait(10)
    ask(clock, 1100)
    assert "The right to change clocks ends soon" in str(clock.controller.error)
    assert gpu.history == [1000, None]
    clock.close()


@pytest.mark.parametrize("earlier", [None, GpuError("no lock")])
def test_a_guard_that_does_not_let_go_is_an_error_of_the_clock(guard, gpu, caplog, earlier):
    clock = RankClock(gpu, guarded=True)
    if earlier is not None:
        clock.controller.stop(earlier)
    guard.error = GpuError("the clock is still locked")
    clock.close()
    assert clock.controller.error is (earlier or guard.error)
    assert "the clock is still locked" in caplog.text


def test_the_thread_looks_at_events_from_its_callers_device(gpu, monkeypatch):
    """Else CUDA opens a context for it on device 0, which is another rank's."""
    seen = []
    monkeypatch.setattr(
        rank_clock, "same_device", lambda: lambda: seen.append(threading.current_thread())
    )

    class Event(Done):
        def query(self) -> bool:
            seen.append("event")
            return True

    clock = RankClock(gpu)
    clock.controller.request(1000, Event())
    clock.controller.wait_idle()
    clock.close()
    assert seen == [clock.controller._thread, "event"]


@pytest.mark.parametrize("ends", ["closed", "told to stop"])
def test_a_guard_is_not_told_of_the_end_while_a_lock_may_still_come(guard, gpu, monkeypatch, ends):
    """What it undoes then would be locked again; the end of the process tells it instead."""
    monkeypatch.setattr(clock_controller, "_JOIN_S", 0.05)
    clock = RankClock(gpu, guarded=True)
    gpu.driver.clear()
    clock.controller.request(1000, Done())
    assert gpu.in_driver.wait(10)
    if ends == "closed":
        clock.close()
    else:
        guard.tell(GuardEvent.STOP)
    assert guard.released == 0
    gpu.driver.set()
    clock.controller._resetter.join(10)
    assert gpu.history == [1000, None]
    clock.close()
    assert guard.released == 1


def test_a_clock_that_cannot_be_watched_is_given_back(guard, gpu, monkeypatch):
    monkeypatch.setattr(rank_clock, "ClockWatch", None)  # as where no thread can be started
    monkeypatch.setattr(FakeGpu, "drives_hardware", True)
    with pytest.raises(TypeError):
        RankClock(gpu)
    assert guard.released == 1


def test_a_clock_on_every_rank_or_on_none(guard):
    gpus = [FakeGpu(), FakeGpu()]
    alone = SimpleNamespace(everywhere=lambda make: make())

    def make(gpu):
        return RankClock(gpu, guarded=not gpu.read_only)

    clock, held, why = hold_everywhere(gpus[0], alone, make, required=False)
    ask(clock, 1000)
    clock.close()
    assert gpus[0].history == [1000, None]
    assert (held, why) == (gpus[0], "")

    def refused(make):
        make()
        raise GpuError("another rank was refused")

    others = SimpleNamespace(everywhere=refused)
    with pytest.raises(GpuError, match="another rank"):
        hold_everywhere(gpus[1], others, make, required=True)
    assert guard.released == 2

    answers = [refused, alone.everywhere]
    others.everywhere = lambda make: answers.pop(0)(make)
    clock, read, why = hold_everywhere(gpus[1], others, make, required=False)
    clock.close()
    assert (read.read_only, why) == (True, "another rank was refused")
    assert guard.released == 3


@pytest.mark.parametrize("wanted", ["auto", "nvml", "dry_run"])
def test_a_site_that_cannot_be_used_costs_control_and_no_job(monkeypatch, wanted):
    def wrong():
        raise GpuError("The site is wrong", remedy="Correct it")

    monkeypatch.setattr(rank_clock, "read_site", wrong)
    monkeypatch.setattr(rank_clock, "open_controlled", lambda uid, chosen, site: chosen.backend)
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

CONTROLLED = ChosenControl("auto", "nvml", "this process has the right")
READS = ChosenControl("auto", None, "nobody may", ("Ask for the right.",))


@pytest.mark.parametrize("planner", [True, False])
@pytest.mark.parametrize(
    ("own", "first", "opened"),
    [
        (CONTROLLED, None, CONTROLLED),
        (CONTROLLED, (2, READS), READS),
        (READS, (0, READS), READS),
        (ChosenControl("none", None, "as wished"), (0, ChosenControl("none", None, "so")), None),
    ],
)
def test_all_ranks_open_as_the_first_that_has_no_control(
    monkeypatch, caplog, planner, own, first, opened
):
    caplog.set_level(logging.INFO)
    told = []
    collectives = SimpleNamespace(
        is_planner=planner,
        everywhere=lambda make: make(),
        to_planner=lambda mine, merge: [merge([mine, {"zeusd"}]), mine] if planner else [],
        first=lambda without: told.append(without) or first,
    )
    monkeypatch.setattr(rank_clock, "read_site", lambda: "the site")
    monkeypatch.setattr(
        rank_clock, "choose_control", lambda *wish, require: told.append((*wish, require)) or own
    )
    monkeypatch.setattr(
        rank_clock,
        "beside_power_profiles",
        lambda chosen, uid, site, *, require: told.append((uid, site, require)) or chosen,
    )
    undone = []
    monkeypatch.setattr(
        rank_clock,
        "that_can_be_undone",
        lambda chosen, uid, site, *, require: undone.append((uid, site, require)) or chosen,
    )
    monkeypatch.setattr(rank_clock, "open_controlled", lambda *opening: opening)
    opened = opened or first[1]
    found = open_rank_gpu("GPU-1", collectives, "auto", **({"require": True} if planner else {}))
    assert found == (("GPU-1", opened, "the site"), opened)
    looked = "GPU-1", "the site", planner
    without = None if own.backend else own
    asked = [without] * (1 if first else 2)
    assert told == [("auto", "the site", planner), looked, *asked]
    # Nothing is reset where one of the ranks may not lock.
    assert undone == ([] if first else [looked])
    del told[:]
    open_rank_gpu("GPU-1", collectives, "auto", one_clock=True)
    assert told == [("auto", "the site", False), *asked]
    said = []
    if planner and opened.backend:
        said = ["clocks are controlled by nvml, zeusd: this process has the right"]
    elif planner and opened.warning:
        said = [READS.warning]
    assert [record.getMessage() for record in caplog.records] == 2 * said
