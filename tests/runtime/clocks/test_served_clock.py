"""The clock of a rank whose guard sets it: real guards, emulated GPUs, and words stored by hand."""

from __future__ import annotations

import errno
import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
from fake_gpu import FakeGpu, look_until, pages_go  # noqa: F401 - a fixture

pytest.importorskip("torch")
import torch

from envpipe_megatron.gpu.base import GpuAddress, GpuError
from envpipe_megatron.gpu.clock import page as clock_page
from envpipe_megatron.gpu.clock.completion import Done, Later
from envpipe_megatron.gpu.clock.page import BEGUN, DUE, ClockPage
from envpipe_megatron.gpu.emulated.emulated_gpu import EmulatedGpu
from envpipe_megatron.gpu.guard import hold
from envpipe_megatron.gpu.guard.lease import LeaseHeldError, list_leases
from envpipe_megatron.gpu.guard.lease_file import LEASE_DIR_VARIABLE
from envpipe_megatron.gpu.guard.messages import GuardSettings
from envpipe_megatron.runtime.clocks import rank_clock, served
from envpipe_megatron.runtime.clocks.rank_clock import RankClock
from envpipe_megatron.runtime.clocks.served import ServedClock, count_by_stream

WAIT_S = 20.0


@dataclass
class Job:
    """An emulated GPU whose guard sets its clock, at once."""

    gpu: EmulatedGpu
    clock: RankClock

    def ask(self, *clocks_mhz: int) -> None:
        for mhz in clocks_mhz:
            self.clock.controller.request(mhz, Done())
            self.clock.controller.wait_idle()

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
    clock = RankClock(gpu, guarded=True, count_by=lambda page: page.count)
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
    assert summary["set_by"] == "guard"
    assert summary["lock_call_s"]["count"] == 2
    job.ask(lowest)  # after the end
    assert job.set_mhz is None


def test_a_clock_that_waits_behind_a_unit_is_set_when_the_next_one_begins(job):
    highest, *_, lowest = job.gpu.supported_frequencies_mhz
    later = Later(Done(), 3600.0)
    job.clock.controller.request(lowest, Done())
    job.clock.controller.request(highest, later)
    look_until(lambda: job.set_mhz == lowest)
    later.begins(Done())
    job.clock.controller.wait_idle()
    assert job.set_mhz == highest


def test_while_the_job_runs_its_summary_is_the_last_that_came(job):
    job.ask(job.gpu.supported_frequencies_mhz[0])
    assert job.clock.summary()["changes"] == 1
    job.clock.controller.request(job.gpu.supported_frequencies_mhz[1], Done())
    look_until(lambda: job.clock.summary()["changes"] == 2)


def test_a_guard_that_dies_ends_control_alone(job, caplog):
    job.ask(job.gpu.supported_frequencies_mhz[-1])
    os.kill(job.clock._hold.guard_pid, signal.SIGKILL)
    look_until(lambda: job.clock.controller.error is not None)
    assert "The guard of this GPU's clock has ended" in job.clock.problems()[0]
    look_until(lambda: job.set_mhz is None)
    job.ask(job.gpu.supported_frequencies_mhz[-1])  # is not heard, nor waited for
    assert job.set_mhz is None


def test_a_clock_that_cannot_be_set_ends_control_alone(job, caplog):
    job.ask(job.gpu.supported_frequencies_mhz[-1], 1)
    assert "cannot run at this SM clock" in job.clock.problems()[0]
    assert "Clock control of" in caplog.text
    look_until(lambda: job.set_mhz is None)


def test_a_guard_begins_anew_with_a_rank_that_was_silent(node, monkeypatch):
    gpu = EmulatedGpu.create("a100-sxm", 0, node / "emulated")
    start = hold._start

    def start_impatient(address, job, settings, *more):  # the rank stays patient
        return start(address, job, GuardSettings(heartbeat_s=0.4), *more)

    monkeypatch.setattr(hold, "_start", start_impatient)
    clock = RankClock(gpu, guarded=True, count_by=lambda page: page.count)
    try:
        lowest = gpu.supported_frequencies_mhz[-1]
        clock.controller.request(lowest, Done())
        look_until(lambda: gpu.requested_frequency_mhz == lowest)
        look_until(lambda: gpu.requested_frequency_mhz is None)
        clock._hold._beat()
        look_until(lambda: gpu.requested_frequency_mhz == lowest)
        assert clock.controller.error is None
    finally:
        clock.close()


@pytest.mark.parametrize("where", [DUE, BEGUN])
def test_a_mark_that_the_driver_refuses_gives_the_clock_back(node, where, caplog):
    gpu = EmulatedGpu.create("a100-sxm", 0, node / "emulated")
    refuses = False

    def count_by(page):
        def count(mark, number):
            if refuses and mark == where:
                raise RuntimeError("cuStreamWriteValue32: CUDA_ERROR_NOT_SUPPORTED")
            page.count(mark, number)

        return count

    clock = RankClock(gpu, guarded=True, count_by=count_by)
    try:
        lowest, later = gpu.supported_frequencies_mhz[-1], Later(Done(), 3600.0)
        clock.controller.request(lowest, Done())
        clock.controller.wait_idle()
        assert gpu.requested_frequency_mhz == lowest
        refuses = True
        clock.controller.request(gpu.supported_frequencies_mhz[0], later)
        later.begins(Done())
        assert "can mark no unit: cuStream" in clock.problems()[0]
        look_until(lambda: gpu.requested_frequency_mhz is None)
        clock.controller.request(lowest, Done())
        clock.controller.wait_idle()
        assert gpu.requested_frequency_mhz is None
    finally:
        clock.close()
    assert list_leases() == []


def test_nobody_waits_for_a_page_that_is_over():
    page = ClockPage.create()
    clock = ServedClock(FakeGpu(), page, page.count)
    waiting = threading.Thread(target=clock.wait_idle)
    waiting.start()
    page.end()
    waiting.join(WAIT_S)
    assert not waiting.is_alive()
    clock.error = GpuError("an earlier one")
    clock.stop(GpuError("a later one"))
    assert str(clock.error) == "an earlier one"


def test_a_child_leaves_its_parents_clock_alone():
    page = ClockPage.create()
    clock = ServedClock(FakeGpu(), page, page.count)
    child = os.fork()
    if child == 0:
        clock.stop(GpuError("in the child"))
        clock.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert not page.is_over


def test_what_is_half_said_is_no_summary():
    page = ClockPage.create()
    clock = ServedClock(FakeGpu(), page, page.count)
    page.summarize('{"changes": 3, "coal')
    assert clock.summary()["changes"] == 0
    page.summarize('{"changes": 3}')
    assert clock.summary()["changes"] == 3


def test_requests_that_nobody_takes_end_control_alone(monkeypatch, caplog):
    monkeypatch.setattr(clock_page, "CAPACITY", 3)
    clock = ServedClock(FakeGpu(), ClockPage.create(relock=True), lambda where, number: None)
    for _ in range(3):
        assert clock.error is None
        clock.request(1000, Done())
    assert "takes no requests" in str(clock.error)


def test_equal_clocks_are_asked_for_once_unless_somebody_has_reset():
    page = ClockPage.create()
    clock = ServedClock(FakeGpu(), page, page.count)
    for _ in range(2):
        clock.request(1000, Done())
    assert (page.counted(DUE, 1), page.counted(DUE, 2)) == (True, False)
    clock.forget()
    clock.request(1000, Done())
    assert page.counted(DUE, 2)


class DryGpu(FakeGpu):
    """Sets nothing."""

    address: ClassVar[GpuAddress] = GpuAddress("dry_run", "one")


@pytest.mark.parametrize("call", ["open", "posix_fallocate"])
def test_without_memory_to_share_a_thread_sets_the_clock(monkeypatch, call):
    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    gc.collect()  # pages of other tests go, and their files
    files = len([*Path("/proc/self/fd").iterdir()])
    with monkeypatch.context() as patched:
        patched.setattr(clock_page.os, call, refuse)
        clock = RankClock(DryGpu(), count_by=lambda page: page.count)
    assert clock.summary()["set_by"] == "rank"
    assert len([*Path("/proc/self/fd").iterdir()]) == files
    clock.close()


@pytest.mark.parametrize("held", [False, True])
def test_a_dry_run_is_served_if_nobody_holds_its_gpu(monkeypatch, held):
    asked = []

    def hold_gpu(address, *, on_end, page):
        asked.append(page)
        if held:
            raise LeaseHeldError("held")
        return SimpleNamespace(release=lambda: asked.append("released"))

    monkeypatch.setattr(rank_clock, "hold_gpu", hold_gpu)
    clock = RankClock(DryGpu(), 0.5, relock=True, count_by=lambda page: page.count)
    assert isinstance(clock.controller, ServedClock) is not held
    assert (asked[0].min_dwell_s, asked[0].relock) == (0.5, True)
    monkeypatch.setattr(served, "_LAST_ANSWER_S", 0.0)  # nobody answers
    clock.close()
    assert asked[1:] == ["released"] * (not held)


def test_a_real_gpu_that_is_held_is_refused(monkeypatch):
    def hold_gpu(address, **_):
        raise LeaseHeldError("held")

    monkeypatch.setattr(rank_clock, "hold_gpu", hold_gpu)
    monkeypatch.setattr(served, "_LAST_ANSWER_S", 0.0)
    with pytest.raises(LeaseHeldError):
        RankClock(FakeGpu(), guarded=True, count_by=lambda page: page.count)


def test_the_watch_judges_by_what_the_guard_requested(monkeypatch):
    monkeypatch.setattr(FakeGpu, "drives_hardware", True)
    monkeypatch.setattr(
        rank_clock, "hold_gpu", lambda *_, **__: SimpleNamespace(release=lambda: None)
    )
    monkeypatch.setattr(served, "_LAST_ANSWER_S", 0.0)
    seen = []
    clock = RankClock(
        FakeGpu(),
        count_by=lambda page: page.count,
        on_sample=lambda time_s, state: seen.append(state),
    )
    clock.controller.page.change(1200, float("-inf"))
    clock._watch.sample()
    assert seen[0].requested_mhz == 1200
    assert clock.summary()["followed"]["judged"] == 1
    clock.close()


def test_what_counts_in_memory_is_a_gpus_stream(monkeypatch):
    page, calls = ClockPage.create(), []
    assert count_by_stream(page) is None  # no GPU

    def counter_in_stream(page: ClockPage) -> Callable[[int, int], None]:
        if refuses:
            raise RuntimeError("cuMemHostRegister: CUDA_ERROR_NOT_PERMITTED")
        return lambda *call: calls.append(call)

    monkeypatch.setattr(served, "counter_in_stream", counter_in_stream)
    monkeypatch.setattr(served, "no_driver", lambda: None)
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")  # of other GPUs' memory
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: None)
    )
    refuses = False
    count = count_by_stream(page)
    assert count is not None
    count(BEGUN, 7)
    assert calls == [(DUE, 0), (BEGUN, 7)]
    refuses = True
    assert count_by_stream(page) is None
