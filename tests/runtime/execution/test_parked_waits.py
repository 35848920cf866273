"""Waits that are spent at a lower clock: which clocks a GPU gets, and when."""

import threading
import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_gpu import FakeGpu, ServedPage
from plain_stages import OtherStages

from envpipe_megatron.core.kinds import WHOLE
from envpipe_megatron.core.orders import builders
from envpipe_megatron.formats.energy import Phase
from envpipe_megatron.gpu.clock import controller as clock_controller
from envpipe_megatron.gpu.clock.page import ClockPage
from envpipe_megatron.gpu.emulated.emulated_gpu import EmulatedGpu
from envpipe_megatron.runtime.clocks import rank_clock
from envpipe_megatron.runtime.clocks.rank_clock import RankClock
from envpipe_megatron.runtime.execution import executor
from envpipe_megatron.runtime.execution.executor import CudaExecutor, EmulatedExecutor, Executor
from envpipe_megatron.runtime.execution.stage_run import IterationOrder, StageRun
from envpipe_megatron.tuning.commands import Parking

#: The units of stage 0 are F0 F1 B0 B1, and the wait before B0 is parked in.
SCHEDULE = builders.one_f_one_b(2, 2)
CLOCKS_MHZ = [1400, 1200, 1300, 1300]
PARK_MHZ, OWN_AFTER_S = 1000, 0.1
WAIT_S = 10.0


def run_of(
    timed: Executor,
    clock: RankClock,
    clocks_mhz: Sequence[int] = CLOCKS_MHZ,
    park: int = PARK_MHZ,
) -> StageRun:
    park_mhz, own_after_s = np.zeros((2, 4), dtype=np.int64), np.zeros((2, 4))
    park_mhz[0, 2], own_after_s[0, 2] = park, OWN_AFTER_S
    clocks = np.array([clocks_mhz, clocks_mhz])
    order = IterationOrder(Phase.STEADY, SCHEDULE, clocks, Parking(park_mhz, own_after_s))
    clock.request(clocks_mhz[0])
    return StageRun(order, 0, timed, clock.request)


# --- a GPU whose host is ahead of it --------------------------------------------------------------


class Cuda:
    """A device that does what it was told when a test lets it, and a host's clock to set."""

    def __init__(self) -> None:
        self.time_s = 100.0
        self.recorded: list[Any] = []
        self.page: Any = None
        cuda = self

        class Event:
            def __init__(self, **options: Any) -> None:
                self.passed = threading.Event()
                self.marks: list[tuple[int, int]] = []

            def record(self, stream: Any) -> None:
                cuda.recorded.append(self)

            def synchronize(self) -> None:
                assert self.passed.wait(WAIT_S)

            def query(self) -> bool:
                return self.passed.is_set()

        self.Event = Event

    def current_stream(self) -> None:
        return None

    def count(self, where: int, number: int) -> None:
        """Have the stream count behind what was recorded last."""
        if self.recorded:
            self.recorded[-1].marks.append((where, number))
        else:
            self.page.count(where, number)

    def reach(self, events: int) -> None:
        """The first of what was recorded have passed: the begin, then start and end of each."""
        for event in self.recorded[:events]:
            event.passed.set()
            while event.marks:
                self.page.count(*event.marks.pop(0))


@pytest.fixture
def cuda(monkeypatch) -> Cuda:
    cuda = Cuda()
    clock = SimpleNamespace(monotonic=lambda: cuda.time_s, sleep=lambda time_s: time.sleep(1e-4))
    monkeypatch.setattr(executor, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(executor, "time", clock)
    monkeypatch.setattr(clock_controller, "time", clock)
    return cuda


@pytest.fixture
def guarded(cuda, monkeypatch) -> Iterator[tuple[FakeGpu, RankClock, ServedPage]]:
    """A GPU, whose clock a guard's controller sets, and the rank's end."""
    gpu, held = FakeGpu(), []

    def hold_gpu(address: Any, page: ClockPage) -> Any:
        held.append(ServedPage(gpu, page))
        return SimpleNamespace(release=lambda: None)

    monkeypatch.setattr(rank_clock, "hold_gpu", hold_gpu)
    clock = RankClock(gpu, guarded=True)
    cuda.page, clock._count = clock.page, cuda.count
    yield gpu, clock, held[0]
    gpu.driver.set()
    held[0].close()


def assert_comes_to(gpu: FakeGpu, history: list[int]) -> None:
    until_s = time.monotonic() + WAIT_S
    while gpu.history != history and time.monotonic() < until_s:
        time.sleep(1e-3)
    time.sleep(0.02)  # nothing else comes
    assert gpu.history == history


@pytest.mark.parametrize("early", [False, True])
def test_a_wait_is_parked_in_until_the_unit_after_needs_its_clock(cuda, guarded, early):
    gpu, clock, _ = guarded
    run = run_of(CudaExecutor(), clock)
    run.begin()
    for _ in CLOCKS_MHZ:  # the host waits for nothing
        run.begin_unit()
        run.end_unit()
    assert_comes_to(gpu, [1400])
    cuda.reach(3)
    assert_comes_to(gpu, [1400, 1200])
    cuda.reach(5)
    assert_comes_to(gpu, [1400, 1200, PARK_MHZ])
    cuda.time_s += 0.9 * OWN_AFTER_S
    assert_comes_to(gpu, [1400, 1200, PARK_MHZ])
    if early:
        cuda.reach(6)  # B0 begins
    else:
        cuda.time_s += 0.2 * OWN_AFTER_S
    assert_comes_to(gpu, [1400, 1200, PARK_MHZ, 1300])
    cuda.reach(9)
    assert_comes_to(gpu, [1400, 1200, PARK_MHZ, 1300, 1400])


def test_a_guard_that_is_behind_does_not_park_in_what_is_over(cuda, guarded):
    gpu, clock, _ = guarded
    gpu.driver.clear()  # the first change takes the driver long
    run = run_of(CudaExecutor(), clock)
    run.begin()
    for _ in CLOCKS_MHZ:
        run.begin_unit()
        run.end_unit()
    assert gpu.in_driver.wait(WAIT_S)
    cuda.reach(6)
    gpu.driver.set()
    assert_comes_to(gpu, [1400, 1300])


def test_the_end_of_a_job_does_not_wait_for_a_wait_to_end(cuda, guarded):
    gpu, clock, controller = guarded
    run = run_of(CudaExecutor(), clock)
    run.begin()
    for _ in range(2):
        run.begin_unit()
        run.end_unit()
    assert_comes_to(gpu, [1400])
    cuda.reach(5)
    assert_comes_to(gpu, [1400, PARK_MHZ])  # F1's clock was overtaken
    controller.close()
    assert gpu.history == [1400, PARK_MHZ]


# --- an emulated GPU ------------------------------------------------------------------------------


@pytest.mark.parametrize("wait_s", [0.2, 0.05, 0.0])
def test_emulated_time_has_parked_waits_too(tmp_path, wait_s):
    gpu, stages = EmulatedGpu.create("a100-sxm", 0, tmp_path), OtherStages()
    clock = RankClock(gpu, guarded=False)
    timed = EmulatedExecutor(gpu, dict.fromkeys(WHOLE, 0.03), stages, clock.wait_idle)  # type: ignore[arg-type]
    run = run_of(timed, clock, [1410, 1200, 1305, 1305], 1005)
    run.begin()
    while run.next_unit is not None:
        if len(run.executed) == 2:
            f1_s = gpu.committed_end_s()
            stages.inputs_s = [f1_s + wait_s, 0.0]
        run.begin_unit()
        run.end_unit()
    until_s: dict[int, float] = {}
    for segment in gpu._file.read().segments:
        if segment.start_s > f1_s - 1e-9:
            until_s[segment.frequency_mhz] = segment.end_s - f1_s
    # A change takes 10 ms from when it is asked for: an input that comes early finds the lower one.
    parked = {1005: min(OWN_AFTER_S, wait_s) + 0.01} if wait_s else {}
    end_s = gpu.committed_end_s() - f1_s
    assert until_s == pytest.approx({1200: 0.01, **parked, 1305: end_s})
    assert run.end().receive_wait_s[2] == pytest.approx(wait_s)
