"""What is said of a clock that was asked for and did or did not come."""

import math
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from fake_gpu import FakeGpu

from envpipe_megatron.formats.energy import IDLE
from envpipe_megatron.gpu.backends.nvml import THROTTLE_REASONS
from envpipe_megatron.gpu.base import ClockState, GpuAddress, GpuError
from envpipe_megatron.gpu.clock.controller import PageController
from envpipe_megatron.gpu.clock.page import DUE, ClockPage
from envpipe_megatron.gpu.registry import open_gpu
from envpipe_megatron.runtime.clocks import watch as clock_watch
from envpipe_megatron.runtime.clocks.watch import ClockWatch

NEVER_S = 1e6


@dataclass
class Page:
    """Stands in for the page of a fake GPU's clock, whose requests this process makes."""

    gpu: FakeGpu
    last_change_s: float = -math.inf

    @property
    def set_mhz(self) -> int | None:
        return getattr(self.gpu, "requested_frequency_mhz", None)  # of one that may be locked


@pytest.fixture(autouse=True)
def looks(monkeypatch) -> None:
    """Nobody looks but a test."""
    monkeypatch.setattr(clock_watch, "_PERIOD_S", NEVER_S)


class Watched:
    """A fake GPU, whose clock was changed when a test says so, and its watch."""

    def __init__(self, gpu: FakeGpu | None = None, **options: Any) -> None:
        self.gpu = gpu or FakeGpu()
        self.page = Page(self.gpu)
        self.watch = ClockWatch(self.gpu, self.page, **options)

    def look(self, times: int = 1) -> None:
        for _ in range(times):
            self.watch.sample()


@pytest.fixture
def watched() -> Iterator[Watched]:
    watched = Watched()
    yield watched
    watched.watch.close()


def test_clock_that_follows(watched):
    for frequency in (1000, 1200):
        watched.gpu.lock_frequency(frequency)
        watched.look(10)
    watched.gpu.observed_mhz = 1215  # one step of the table is no deviation
    watched.look(10)
    summary = watched.watch.summary()
    assert (summary["judged"], summary["above_share"], summary["below_share"]) == (30, 0, 0)
    assert summary["warning"] is None
    assert summary["clocks_mhz"] == [
        {"requested": 1200, "samples": 20, "mean": 1207.5, "min": 1200, "max": 1215},
        {"requested": 1000, "samples": 10, "mean": 1000, "min": 1000, "max": 1000},
    ]


def test_capped_clock_with_its_reasons(watched):
    gpu = watched.gpu
    gpu.lock_frequency(1400)
    gpu.throttle_reasons = ("sync boost",)  # holds nothing back
    watched.look(10)
    gpu.observed_mhz, gpu.throttle_reasons = 1250, ("power cap",)
    watched.look(6)
    gpu.throttle_reasons = ("power cap", "hot")
    watched.look(4)
    summary = watched.watch.summary()
    assert (summary["above_share"], summary["below_share"]) == (0, 0.5)
    assert summary["throttle_reasons"] == {"sync boost": 10, "power cap": 10, "hot": 4}
    assert "below it in 50% (power cap 50%, hot 20%)" in summary["warning"]


@pytest.mark.parametrize(
    ("followed", "above", "below", "warned"),
    [
        (0, 9, 0, False),  # too few to judge
        (0, 10, 0, True),
        (95, 5, 0, True),
        (95, 0, 5, True),
        (96, 4, 0, False),
        (92, 4, 4, False),  # neither is frequent
        (80, 12, 8, True),
    ],
)
def test_when_a_clock_is_said_not_to_have_followed(watched, followed, above, below, warned):
    watched.gpu.lock_frequency(1200)
    for observed_mhz, times in ((1185, followed), (1216, above), (1184, below)):
        watched.gpu.observed_mhz = observed_mhz
        watched.look(times)
    summary = watched.watch.summary()
    judged = followed + above + below
    told = summary["judged"], summary["above_share"], summary["below_share"]
    assert told == (judged, above / judged, below / judged)
    parts = []
    said = f"The clock of fake did not follow in all of {judged} samples: it was "
    if above:
        parts.append(
            f"above the one requested in {above / judged:.0%} (the lock had no effect: something "
            "else sets or resets clocks, or the GPU ignores locks)"
        )
    if below:
        parts.append(f"below it in {below / judged:.0%} (no reason reported)")
    assert summary["warning"] == (said + " and ".join(parts) if warned else None)


def test_a_request_that_something_undid_is_known_by_looks_in_a_row(watched):
    gpu, watch = watched.gpu, watched.watch
    gpu.lock_frequency(1000)
    for observed_mhz, times in ((1400, 2), (1015, 1), (1400, 2)):
        gpu.observed_mhz = observed_mhz
        watched.look(times)
    assert not watch.was_undone()
    watched.look()
    assert (watch.was_undone(), watch.was_undone()) == (True, False)


def test_nothing_seen_and_each_look_told():
    seen = []
    watched = Watched(on_sample=lambda *look: seen.append(look))
    gpu, watch = watched.gpu, watched.watch
    nothing = {
        "judged": 0,
        "above_share": 0.0,
        "below_share": 0.0,
        "throttle_reasons": {},
        "clocks_mhz": [],
        "power_profiles": [],
        "error": None,
        "warning": None,
    }
    assert watch.summary() == nothing
    before_s = time.monotonic()
    watch.sample()
    ((look_s, state),) = seen
    assert before_s <= look_s <= time.monotonic()
    assert state == ClockState(None, 1400)
    for name in ("first", "second"):
        gpu.error = GpuError(name)
        watch.sample()
    assert len(seen) == 1
    summary = watch.summary()
    (power,) = summary.pop("power_profiles")
    assert power["text"] == "no power profile enforced, power limit not known"
    del nothing["power_profiles"]
    assert summary == {**nothing, "error": "first"}
    watch.close()
    assert not watch._thread.is_alive()


@pytest.mark.parametrize(("passed_s", "judged"), [(0.5, 1), (0.4375, 0)])
def test_a_change_settles_for_so_long(monkeypatch, passed_s, judged):
    gpu = FakeGpu()
    gpu.lock_frequency(1200)
    monkeypatch.setattr(clock_watch, "_SETTLING_S", 0.5)
    watch = ClockWatch(gpu, Page(gpu, 8.0))
    monkeypatch.setattr(clock_watch, "time", SimpleNamespace(monotonic=lambda: 8.0 + passed_s))
    watch.sample()
    assert watch.summary()["judged"] == judged
    watch.close()


def test_what_is_not_judged(watched):
    gpu = watched.gpu
    gpu.observed_mhz = 1100
    watched.look(2)  # nothing was requested
    gpu.lock_frequency(1400)
    watched.page.last_change_s = float("inf")  # a call is under way
    watched.look(3)
    watched.page.last_change_s = time.monotonic() + 100  # not settled
    watched.look(4)
    watched.page.last_change_s = time.monotonic() - 0.04
    gpu.throttle_reasons = ("idle",)
    watched.look(5)
    gpu.error = GpuError("lost")
    watched.look(6)
    summary = watched.watch.summary()
    assert summary["judged"] == 0
    assert summary["throttle_reasons"] == {}
    assert summary["error"] == "lost"
    assert summary["warning"] is None
    gpu.error, gpu.throttle_reasons = None, ()
    watched.look(1)
    assert watched.watch.summary()["judged"] == 1


def test_clock_that_changes_during_the_look_is_not_judged(watched, monkeypatch):
    watched.gpu.lock_frequency(1000)
    state = watched.gpu.clock_state

    def change_meanwhile():
        watched.page.last_change_s = time.monotonic()
        return state()

    monkeypatch.setattr(watched.gpu, "clock_state", change_meanwhile)
    watched.look()
    assert watched.watch.summary()["judged"] == 0


def test_learns_of_changes_from_the_page(monkeypatch):
    """Neither the instants around a change are judged, nor those while the driver is called."""
    monkeypatch.setattr(clock_watch, "_SETTLING_S", NEVER_S)
    gpu, page = FakeGpu(), ClockPage.create(shared=False)
    controller = PageController(gpu, page)
    watch = ClockWatch(gpu, page)

    def change(mhz: int) -> None:
        page.count(DUE, page.ask(mhz))
        controller.serve()

    page.guard.set_mhz, page.guard.returned_s = 1100, -math.inf  # long ago
    watch.sample()
    gpu.driver.clear()
    changing = threading.Thread(target=change, args=(1000,))
    changing.start()
    assert gpu.in_driver.wait(10)
    watch.sample()
    gpu.driver.set()
    changing.join()
    watch.sample()
    assert watch.summary()["judged"] == 1
    watch.close()


def test_an_idle_gpu_is_known_by_nvmls_word():
    assert IDLE in THROTTLE_REASONS.values()


def test_a_driver_that_hangs_does_not_keep_the_watch_open(monkeypatch):
    monkeypatch.setattr(clock_watch, "_JOIN_S", 0.05)
    monkeypatch.setattr(clock_watch, "_PERIOD_S", 0.001)
    hanging, come_back = threading.Event(), threading.Event()

    class Hanging(FakeGpu):
        def clock_state(self) -> ClockState:
            hanging.set()
            come_back.wait(60)
            return super().clock_state()

    watch = Watched(Hanging()).watch
    assert hanging.wait(10)
    closing = threading.Thread(target=watch.close, daemon=True)
    closing.start()
    closing.join(10)
    assert not closing.is_alive()
    come_back.set()


def test_without_a_thread_nobody_looks_and_training_goes_on(monkeypatch):
    start = Mock(side_effect=RuntimeError("can't start new thread"))
    monkeypatch.setattr(threading.Thread, "start", start)
    watch = Watched().watch
    watch.close()
    assert watch.summary()["judged"] == 0


def test_what_held_the_clock_back_lately(watched):
    gpu = watched.gpu
    gpu.lock_frequency(1400)
    watched.look(2)
    assert watched.watch.held_back() == ""
    gpu.observed_mhz, gpu.throttle_reasons = 1250, ("power cap",)
    watched.look(3)
    gpu.observed_mhz = 1400
    watched.look(1)
    told = watched.watch.held_back()
    assert told == "the clock was held below its request in 3 of 4 looks (power cap)"
    assert watched.watch.held_back() == ""


def test_profiles_and_limits_that_change_while_the_job_runs(fake_nvml_node, monkeypatch):
    monkeypatch.setattr(clock_watch, "_POWER_PERIOD_S", 0.0)
    node = fake_nvml_node("b200")
    node.use_here()
    (uid,) = node.uuids
    gpu = open_gpu(GpuAddress("none", uid))
    watch = Watched(gpu).watch
    for _ in range(2):
        watch.sample()
    assert (len(watch.summary()["power_profiles"]), watch.summary()["warning"]) == (1, None)
    assert watch.held_back() == ""
    node.set_fault(uid, "requested_profiles", 1 << 1)
    node.set_fault(uid, "enforced_profiles", 1 << 1)
    watch.sample()
    changed = "max-Q enforced, power limit 1000 W"
    assert watch.held_back() == f"power profiles or limits changed: {changed}"
    assert watch.held_back() == ""
    node.set_fault(uid, "power_limit_w", 700)
    watch.sample()
    summary = watch.summary()
    first, second, third = summary["power_profiles"]
    assert 0 <= first["after_s"] <= second["after_s"] <= third["after_s"]
    assert (first["enforced_profiles"], first["power_limit_w"]) == ((), 1000)
    assert (second["enforced_profiles"], second["requested_profiles"]) == (("max-Q",),) * 2
    assert (third["power_limit_w"], third["default_power_limit_w"]) == (700, 1000)
    before = "no power profile enforced, power limit 1000 W"
    capped = "max-Q enforced, power limit 700 W (1000 W by default)"
    said = "Power profiles or limits of NVIDIA B200 changed while the job ran: "
    assert summary["warning"] == f"{said}{before}, then {changed}, then {capped}"
    for limit_w in range(600, 700):
        node.set_fault(uid, "power_limit_w", limit_w)
        watch.sample()
    assert len(watch.summary()["power_profiles"]) == 50
    assert watch.summary()["warning"].endswith(f"{capped}, and 47 more")
    node.set_fault(uid, "lost")
    watch.sample()
    watch.close()
    assert "lost" in watch.summary()["error"]
    assert node.changes() == []


def test_power_is_read_more_rarely_than_the_clock(monkeypatch):
    read, gpu = [], FakeGpu()
    now = SimpleNamespace(s=100.0)
    monkeypatch.setattr(clock_watch, "time", SimpleNamespace(monotonic=lambda: now.s))
    monkeypatch.setattr(FakeGpu, "power_state", lambda gpu: read.append(now.s) or fail())
    watch = Watched(gpu).watch
    for look in range(50):
        now.s = 100.0 + 0.5 * look
        watch.sample()
    watch.close()
    assert read == [100.0, 110.0, 120.0]
    assert watch.summary()["error"] == "not told"


def fail() -> None:
    raise GpuError("not told")
