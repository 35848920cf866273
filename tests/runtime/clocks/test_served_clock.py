"""The clock of a rank whose guard sets it: real guards, emulated GPUs, and words stored by hand."""

import errno
import multiprocessing
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_gpu import FakeGpu, ServedPage, look_until, pages_go  # noqa: F401 - a fixture
from open_files import MEMORY, open_files

pytest.importorskip("torch")
import torch

from envpipe_megatron.gpu.base import DryRunGpu, GpuError
from envpipe_megatron.gpu.clock import page as clock_page
from envpipe_megatron.gpu.clock.page import BEGUN, DUE, ClockPage
from envpipe_megatron.gpu.emulated.emulated_gpu import EmulatedGpu
from envpipe_megatron.gpu.guard.lease import list_leases
from envpipe_megatron.gpu.guard.lease_file import LEASE_DIR_VARIABLE
from envpipe_megatron.runtime.clocks import rank_clock
from envpipe_megatron.runtime.clocks.rank_clock import RankClock, count_by_stream
from envpipe_megatron.runtime.clocks.watch import ClockWatch
from envpipe_megatron.runtime.writer import Writer

WAIT_S = 20.0


@dataclass
class Job:
    """An emulated GPU whose guard sets its clock, at once."""

    gpu: EmulatedGpu
    clock: RankClock

    def ask(self, *clocks_mhz: int) -> None:
        for mhz in clocks_mhz:
            self.clock.request(mhz)
            self.clock.wait_idle()

    @property
    def set_mhz(self) -> int | None:
        return self.gpu.requested_frequency_mhz


@pytest.fixture
def node(tmp_path, monkeypatch):
    monkeypatch.setenv(LEASE_DIR_VARIABLE, str(tmp_path / "leases"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def job(node) -> Iterator[Job]:
    gpu = EmulatedGpu.create("a100-sxm", 0, node / "emulated")
    clock = RankClock(gpu, guarded=True)
    yield Job(gpu, clock)
    clock.close()
    assert gpu.requested_frequency_mhz is None
    assert list_leases() == []


def test_the_guard_sets_what_the_rank_asks_for(job):
    highest, *_, lowest = job.gpu.supported_frequencies_mhz
    job.ask(lowest)
    assert job.set_mhz == lowest
    job.ask(lowest, highest)
    assert job.set_mhz == highest
    job.clock.close()
    summary = job.clock.summary()
    assert (summary["changes"], summary["coalesced"], summary["error"]) == (2, 0, None)
    assert summary["lock_call_s"]["count"] == 2
    job.ask(lowest)  # after the end
    assert job.set_mhz is None


def test_two_ranks_that_share_a_gpu_may_both_run_dry(node):
    gpu = DryRunGpu(EmulatedGpu.create("a100-sxm", 0, node / "emulated"))
    clocks = [RankClock(gpu) for _ in range(2)]
    assert list_leases() == []
    for clock in clocks:
        for mhz in gpu.supported_frequencies_mhz[:2]:
            clock.request(mhz)
            clock.wait_idle()
        clock.close()
        assert (clock.error, clock.summary()["changes"]) == (None, 2)
    assert list_leases() == []


def test_a_clock_that_waits_behind_a_unit_is_set_when_the_next_one_begins(job):
    highest, *_, lowest = job.gpu.supported_frequencies_mhz
    job.clock.request(lowest)
    begin = job.clock.request(highest, 3600.0)
    look_until(lambda: job.set_mhz == lowest)
    begin()
    job.clock.wait_idle()
    assert job.set_mhz == highest


def test_while_the_job_runs_its_summary_is_the_last_that_came(job):
    job.ask(job.gpu.supported_frequencies_mhz[0])
    assert job.clock.summary()["changes"] == 1
    job.clock.request(job.gpu.supported_frequencies_mhz[1])
    look_until(lambda: job.clock.summary()["changes"] == 2)


@pytest.mark.parametrize("where", [DUE, BEGUN])
def test_a_mark_that_the_driver_refuses_gives_the_clock_back(job, where, caplog):
    highest, *_, lowest = job.gpu.supported_frequencies_mhz
    job.ask(lowest)
    assert job.set_mhz == lowest
    count = job.clock._count

    def refusing(mark: int, number: int) -> None:
        if mark == where:
            raise RuntimeError("cuStreamWriteValue32: CUDA_ERROR_NOT_SUPPORTED")
        count(mark, number)

    job.clock._count = refusing
    job.clock.request(highest, 3600.0)()
    assert "can mark no unit: cuStream" in job.clock.problems()[0]
    look_until(lambda: job.set_mhz is None)
    job.ask(lowest)
    assert job.set_mhz is None


@pytest.fixture
def clock(monkeypatch) -> RankClock:
    """One whose guard does nothing."""
    held = SimpleNamespace(release=lambda: None)
    monkeypatch.setattr(rank_clock, "hold_gpu", lambda *_, **__: held)
    return RankClock(FakeGpu(), guarded=True)


def test_nobody_waits_for_a_page_that_is_over(clock):
    waiting = threading.Thread(target=clock.wait_idle)
    waiting.start()
    clock.page.end()
    waiting.join(WAIT_S)
    assert not waiting.is_alive()
    clock.stop(GpuError("an earlier one"))
    clock.stop(GpuError("a later one"))
    assert str(clock.error) == "an earlier one"


def test_a_child_leaves_its_parents_clock_alone(clock):
    child = os.fork()
    if child == 0:
        clock.summary()
        clock.wait_idle()
        clock.stop(GpuError("in the child"))
        clock.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert not clock.page.is_over
    assert clock.page.request(1) is None  # the parent's next number is free


def test_what_is_half_said_is_no_summary(clock):
    clock.page.guard.summary = b'{"changes": 3, "coal'
    assert clock.summary()["changes"] == 0
    clock.page.guard.summary = b'{"changes": 3}'
    assert clock.summary()["changes"] == 3


def test_requests_that_nobody_takes_end_control_alone(clock, monkeypatch, caplog):
    monkeypatch.setattr(clock_page, "CAPACITY", 3)
    clock.repeats = True
    for _ in range(3):
        assert clock.error is None
        clock.request(1000)
    assert "takes no requests" in str(clock.error)


@pytest.mark.parametrize("call", ["memfd_create", "open", "posix_fallocate"])
def test_without_memory_to_share_no_clock_is_changed(monkeypatch, call):
    """Pythons that were built for old C libraries have no `memfd_create`, but `/dev/shm`."""

    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    files = open_files(*MEMORY)
    monkeypatch.setattr(clock_page.os, call, refuse)
    if call == "open":
        monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(GpuError, match=r"no memory to share with a guard: .*No space left"):
        RankClock(FakeGpu(), guarded=True)
    assert open_files(*MEMORY) <= files
    RankClock(FakeGpu(), guarded=False).close()


def test_what_counts_in_memory_is_a_gpus_stream(monkeypatch):
    page, calls = ClockPage.create(), []

    def counter_in_stream(page: ClockPage) -> Callable[[int, int], None]:
        if refuses:
            raise RuntimeError("cuMemHostRegister: error 800 of CUDA")
        return lambda *call: calls.append(call)

    monkeypatch.setattr(rank_clock, "counter_in_stream", counter_in_stream)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: None)
    )
    refuses = False
    count = count_by_stream(page)
    count(BEGUN, 7)
    assert calls == [(DUE, 0), (BEGUN, 7)]
    refuses = True
    with pytest.raises(GpuError, match="can mark no unit: cuMemHostRegister: error 800"):
        count_by_stream(page)


def leave_at_random_instants(folder: Path) -> None:
    """Train and close in 100 jobs, out of which a SIGTERM handler raises."""
    left: list[bool] = []

    def leave(*_: object) -> None:
        left.append(True)
        sys.exit(1)

    signal.signal(signal.SIGALRM, leave)
    randomness = random.Random(19)
    for number in range(100):
        left.clear()
        gpu = FakeGpu()
        emulated = EmulatedGpu.create("a100-sxm", number, folder)
        guards: list[ServedPage] = []

        def hold_gpu(address, page, gpu=gpu, guards=guards):
            guards.append(ServedPage(gpu, page))
            return SimpleNamespace(release=lambda: None)

        rank_clock.hold_gpu = hold_gpu
        clock, here = RankClock(gpu, guarded=True), RankClock(emulated, guarded=False)
        writer, lines = Writer(), []
        watch = ClockWatch(gpu, clock.page)
        parts = (here, clock, watch, writer)
        try:
            signal.setitimer(signal.ITIMER_REAL, randomness.uniform(1e-6, 4e-3))
            for step in range(10):
                clock.request(gpu.supported_frequencies_mhz[step % 5])
                here.request(emulated.supported_frequencies_mhz[step % 5])
                writer.put("lines", partial(lines.append, step))
            clock.wait_idle()
            while not left:  # Python drops what is raised in a destructor
                for part in parts:
                    part.close()
        except SystemExit as error:
            kept = error  # noqa: F841 - and with it the frames that it left
        for part in parts:
            part.close()
        assert clock.page.is_over
        guards[0].close()
        assert emulated.requested_frequency_mhz is None
        assert not watch._thread.is_alive()
        assert lines == list(range(len(lines)))
        assert not any(writer._waiting.values())


def test_wherever_a_signal_takes_the_main_thread_the_way_out_is_free(tmp_path):
    """At a random instant of a job or of its close.

    Nothing that the first way left may make the second one wait, and the clock comes back.
    """
    context = multiprocessing.get_context("fork")
    child = context.Process(target=leave_at_random_instants, args=(tmp_path,))
    child.start()
    child.join(300)
    child.kill()
    assert child.exitcode == 0
