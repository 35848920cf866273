"""How long a change of clock is said to take, against GPUs of which it is known."""

from __future__ import annotations

import itertools
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_gpu import look_until
from presets import write_changed_preset

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.gpu.base import GpuError
from envpipe_megatron.gpu.clock.controller import spread
from envpipe_megatron.gpu.emulated.emulated_gpu import EmulatedGpu
from envpipe_megatron.gpu.guard.lease import list_leases
from envpipe_megatron.gpu.guard.lease_file import LEASE_DIR_VARIABLE
from envpipe_megatron.gpu.guard.messages import AGENT_VARIABLE
from envpipe_megatron.runtime.clocks import latency as clock_latency
from envpipe_megatron.runtime.clocks import rank_clock
from envpipe_megatron.runtime.clocks.latency import (
    KERNELS,
    LEAD,
    CudaKernelTimer,
    EmulatedKernelTimer,
    Trace,
    analyse,
    measure_latency,
    summarise,
)

KERNEL_S = 1e-3


@pytest.fixture(autouse=True)
def long_kernels(monkeypatch) -> None:
    monkeypatch.setattr(EmulatedKernelTimer, "_KERNEL_S", KERNEL_S)


@pytest.fixture
def gpu(tmp_path) -> EmulatedGpu:
    return emulated(tmp_path, 0.0)


def emulated(folder: Path, frequency_change_s: float) -> EmulatedGpu:
    """An H200 whose clock takes this long to change."""
    changes = {"frequency_change_s": frequency_change_s}
    preset = write_changed_preset(folder / "preset.toml", changes, "h200")
    return EmulatedGpu.create(str(preset), 0, folder / "node")


@pytest.mark.parametrize("frequency_change_s", [0.0, 0.004, 0.06])
def test_finds_what_the_preset_says(tmp_path, frequency_change_s):
    gpu = emulated(tmp_path, frequency_change_s)
    found = measure_latency(gpu, [1980, 1200], repeats=1)
    new_s = gpu.preset.unit_time_s("forward", 1200, KERNEL_S)
    for row in found["changes"]:
        late_s = row["settling_s"]["max"] - frequency_change_s
        assert -1e-9 <= late_s <= new_s + 1e-9
    assert 0 <= found["frequency_change_s"] - frequency_change_s + 1e-9 <= new_s + 2e-9
    assert gpu.requested_frequency_mhz is None


def test_every_two_clocks_both_ways(gpu, monkeypatch):
    locks: list[int] = []
    lock = EmulatedGpu._lock
    monkeypatch.setattr(EmulatedGpu, "_lock", lambda gpu, mhz: locks.append(mhz) or lock(gpu, mhz))
    monkeypatch.setattr(clock_latency, "KERNELS", 20)
    said: list[str] = []
    found = measure_latency(gpu, [1200, 1980, 990, 1980], 2, said.append)
    pairs = [(row["from_mhz"], row["to_mhz"]) for row in found["changes"]]
    assert sorted(pairs) == sorted(itertools.permutations((1980, 1200, 990), 2))
    assert {row["call_s"]["count"] for row in found["changes"]} == {2}
    assert said == [f"between {a} and {b} MHz" for a, b in ((1980, 1200), (1980, 990), (1200, 990))]
    assert locks == [
        *(1200, 1980) * 3,
        *(990, 1980) * 3,
        *(990, 1200) * 3,
    ]


@pytest.mark.parametrize(
    ("differs", "traces"),
    [(True, 2), (False, 4)],
)
def test_a_change_is_watched_until_it_was_seen_and_not_for_ever(gpu, monkeypatch, differs, traces):
    """Every three quarters of a second a trace, of slow kernels where the change `differs`."""
    counts: list[int] = []

    class Timer:
        now_s = 0.0

        def trace(self, call):
            before_mhz, called_s = gpu.requested_frequency_mhz, self.now_s
            call()
            changed = gpu.requested_frequency_mhz != before_mhz
            lead = [called_s - 0.0625, called_s] if changed else [called_s]
            counts.extend([0] * changed)
            counts[-1] += 1
            kernel_s = 0.125 if differs and gpu.requested_frequency_mhz == 1200 else 0.0625
            ends_s = [*lead, *(called_s + kernel_s * number for number in range(1, 7))]
            self.now_s += 0.75
            return Trace(called_s, called_s, list(itertools.pairwise(ends_s)))

    monkeypatch.setattr(clock_latency, "EmulatedKernelTimer", lambda gpu: Timer())
    measure_latency(gpu, [1980, 1200], 1)
    assert counts[2] == traces  # down again


@pytest.mark.parametrize("good_locks", [0, 1, 3])
def test_clock_is_reset_whatever_fails(gpu, monkeypatch, good_locks):
    lock, locks = gpu._lock, []

    def failing(self, frequency_mhz: int) -> None:
        if len(locks) == good_locks:
            raise GpuError("driver")
        locks.append(frequency_mhz)
        lock(frequency_mhz)

    monkeypatch.setattr(EmulatedGpu, "_lock", failing)
    with pytest.raises(EnvPipeError, match="driver"):
        measure_latency(gpu, [1980, 1200], repeats=2)
    assert len(locks) == good_locks
    assert gpu.requested_frequency_mhz is None


@pytest.mark.parametrize("clocks", [[1200, 1200], [1200, 1201]])
def test_impossible_clocks_are_refused_before_a_guard_is_started(gpu, monkeypatch, clocks):
    monkeypatch.setattr(rank_clock, "RankClock", None)
    with pytest.raises((EnvPipeError, GpuError), match=r"120[01]"):
        measure_latency(gpu, clocks, repeats=1)


@pytest.mark.parametrize("dies", [False, True])
def test_guarded_measurement_leaves_no_lease_and_no_lock(gpu, tmp_path, monkeypatch, dies):
    monkeypatch.setenv(LEASE_DIR_VARIABLE, str(tmp_path / "leases"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv(AGENT_VARIABLE, "")  # of a node with guards
    held: list[str] = []

    class Timer(EmulatedKernelTimer):
        def trace(self, call):
            leases = [lease for lease in list_leases() if lease.live]
            held.extend(lease.address.uid for lease in leases)
            if dies and leases and len(held) == 2:
                os.kill(leases[0].guard.pid, signal.SIGKILL)
                look_until(lambda: not list_leases())
            return super().trace(call)

    monkeypatch.setattr(clock_latency, "EmulatedKernelTimer", Timer)
    ends = pytest.raises(EnvPipeError, match="guard of this GPU's clock has ended")
    with ends if dies else nullcontext():
        measure_latency(gpu, [1980, 1200], 1)
    assert set(held) == {gpu.address.uid}
    assert list_leases() == []
    assert gpu.requested_frequency_mhz is None


# --- what a trace says ---------------------------------------------------------------------------


def traced(*times_ms: float, call_after: int = 10) -> list[Trace]:
    """Kernels that take these times, a call after some of them; then a trace of the last time."""
    ends = list(itertools.accumulate((time_ms / 1e3 for time_ms in times_ms), initial=0.0))
    called_s = ends[call_after]
    after = [ends[-1] + number * times_ms[-1] / 1e3 for number in range(21)]
    return [
        Trace(called_s, called_s + 0.5e-3, list(itertools.pairwise(ends))),
        Trace(after[0], after[0], list(itertools.pairwise(after))),
    ]


@pytest.mark.parametrize(
    ("after_ms", "settled_ms"),
    [
        ([1.0] * 5 + [2.0] * 10, 5.0),
        ([1.2, 1.4, 1.6, 1.8] + [2.0] * 10, 4.2),  # a ramp settles near its end
        ([2.0, 2.0, 1.0, 1.0] + [2.0] * 10, 6.0),  # some that happen to fit
        ([2.0] * 4 + [1.0] + [2.0] * 10, 9.0),  # four are too few
        ([2.0] * 5 + [1.0] + [2.0] * 10, 0.0),
        ([1.74] + [2.0] * 10, 1.74),  # further than a quarter of the difference
        ([1.76] + [2.0] * 10, 0.0),
        ([2.24] + [2.0] * 10, 0.0),
        ([1.02, 1.0255] + [1.035] * 10, 1.02),  # of small differences, one percent is close
        ([1.02] * 10, None),  # no difference, as above a power cap
    ],
)
def test_when_the_clock_has_settled(after_ms, settled_ms):
    change = analyse(traced(*[1.0] * 10, *after_ms))
    assert change["call_s"] == pytest.approx(0.5e-3)
    assert change["settling_s"] == (settled_ms and pytest.approx(settled_ms / 1e3, abs=1e-9))


def test_a_clock_that_settled_within_a_running_kernel_took_no_time():
    """And where nothing ran before the call, nobody knows what changed."""
    kernels = [(0.0, 1.0), (1.0, 2.0), *((2.0 * n, 2.0 * n + 2) for n in range(1, 9))]
    assert analyse([Trace(3.0, 3.5, kernels)])["settling_s"] == 0.0
    assert analyse([Trace(0.5, 0.75, kernels)])["settling_s"] is None


def test_one_slow_kernel_before_the_call_hides_nothing():
    change = analyse(traced(*[1.0] * 8, 5.0, 1.0, *[1.0] * 5, *[2.0] * 10))
    assert change["settling_s"] == pytest.approx(5e-3)


def test_summary_says_what_was_not_seen():
    unseen = analyse(traced(*[1.0] * 25))
    seen = analyse(traced(*[1.0] * 15, *[2.0] * 10))
    later = {**seen, "settling_s": 8e-3}
    found = summarise(
        "H200", {(1980, 900): [unseen], (1980, 1200): [seen, unseen], (1200, 1980): [later] * 3}
    )
    assert found["gpu"] == "H200"
    assert found["frequency_change_s"] == 8e-3
    assert [row["settling_s"]["count"] for row in found["changes"]] == [0, 1, 3]
    assert found["changes"][2] == {
        "from_mhz": 1200,
        "to_mhz": 1980,
        **{name: spread([value] * 3) for name, value in later.items()},
    }
    assert summarise("H200", {(1980, 900): [unseen]})["frequency_change_s"] is None


# --- CUDA ----------------------------------------------------------------------------------------


class SimulatedCuda:
    """A stream of kernels that spin for cycles, on a host whose time passes in its calls alone.

    The GPU's clock shows another time than the host's.
    """

    MHZ, SKEW_S = 2000, 1234.5

    def __init__(self) -> None:
        self.host_s, self.free_s = 50.0, 0.0
        self.beside = False
        cuda = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                cuda._sleep(0)
                self.end_s = cuda.free_s

            def query(self) -> bool:
                cuda.monotonic()
                return self.end_s <= cuda.host_s

            def synchronize(self) -> None:
                cuda.host_s = max(cuda.host_s, self.end_s)

            def elapsed_time(self, other: Event) -> float:
                return 1e3 * ((other.end_s + cuda.SKEW_S) - (self.end_s + cuda.SKEW_S))

        self.Event = Event

    def Stream(self) -> None:  # noqa: N802  # torch's name
        return None

    @contextmanager
    def stream(self, beside: None) -> Iterator[None]:
        self.beside = True
        yield
        self.beside = False

    def monotonic(self) -> float:
        self.host_s += 1e-6
        return self.host_s

    def _sleep(self, cycles: int) -> None:
        self.free_s = max(self.free_s, self.monotonic()) + cycles / (self.MHZ * 1e6)

    def synchronize(self) -> None:
        self.host_s = max(self.host_s, self.free_s)


def test_cuda_events_are_brought_to_the_hosts_clock(monkeypatch):
    cuda = SimulatedCuda()
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(clock_latency, "time", SimpleNamespace(monotonic=cuda.monotonic))
    called_s = []

    def call() -> tuple[float, float]:
        assert cuda.beside  # else it would come behind all kernels
        called_s.append(cuda.host_s)
        return cuda.host_s, cuda.monotonic()

    trace = CudaKernelTimer().trace(call)
    assert called_s == [trace.called_s]
    assert trace.returned_s == pytest.approx(trace.called_s + 1e-6)
    kernel_s = CudaKernelTimer._CYCLES / (cuda.MHZ * 1e6)
    assert len(trace.kernels_s) == KERNELS
    for (start_s, end_s), (next_s, _) in itertools.pairwise(trace.kernels_s):
        assert (end_s - start_s, end_s) == (pytest.approx(kernel_s, abs=1e-5), next_s)
    # The call is made when the kernels that lead have ended.
    assert trace.kernels_s[LEAD][0] == pytest.approx(trace.called_s, abs=2e-5)
