"""The instants of a counter's refreshes, found by watching one, and a process that reads it."""

import itertools
import json
import math
import multiprocessing
import os
import random
import select
import signal
import site
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_gpu import FakeGpu, look_until

from envpipe_megatron.child import start_child
from envpipe_megatron.gpu import energy_counter
from envpipe_megatron.gpu.base import GpuAddress, GpuError
from envpipe_megatron.gpu.emulated.emulated_gpu import EmulatedGpu
from envpipe_megatron.gpu.energy_counter import STALL_S, EnergyCounter, EnergyReader
from envpipe_megatron.gpu.guard.messages import receive
from envpipe_megatron.gpu.registry import open_gpu
from envpipe_megatron.runtime.energy import meter as energy_meter
from envpipe_megatron.runtime.energy.meter import EnergyMeter

POWER_W = 200.0


@pytest.fixture(autouse=True)
def real_time() -> Iterator[None]:
    yield
    energy_counter.time = time


class Staircase:
    """A counter on a clock of its own: a read takes 3.4 ms and sees the value at some point."""

    def __init__(self, period_s, seed=0, read_s=0.0034):
        self._random = random.Random(seed)
        self._period_s = period_s
        self._phase_s = self._random.random() * period_s
        self._read_s = read_s
        self.now_s = 1e6  # eleven days of uptime
        self.offset_j = 0.0
        self.stalled_at_s = math.inf
        self.reads = 0
        self.refresh_s = {}
        self.fail = False

    def read_j(self):
        self.reads += 1
        if self.fail:
            raise RuntimeError("lost")
        before_s = self._random.random() * self._read_s
        seen_s = min(self.now_s + before_s, self.stalled_at_s)
        self.now_s += self._read_s
        number = math.floor((seen_s - self._phase_s) / self._period_s)
        energy_j = round(number * self._period_s * POWER_W, 3) + self.offset_j
        self.refresh_s[energy_j] = number * self._period_s + self._phase_s
        return energy_j

    def sleep(self, time_s):
        assert time_s >= 0
        self.now_s += time_s + self._random.random() * 1e-4  # sleeps overshoot

    def counter(self):
        """One that is read while this clock is the only one."""
        energy_counter.time = SimpleNamespace(monotonic=lambda: self.now_s, sleep=self.sleep)
        return EnergyCounter(self.read_j, "GPU")


def _poll_until_it_fails(counter, staircase):
    while True:
        counter.read()
        staircase.now_s += 0.05


@pytest.mark.parametrize("period_s", [0.1, 0.1003, 0.0997, 0.02, 0.15])
@pytest.mark.parametrize("poll_s", [0.0, 0.02, 0.0466, 0.05, 0.2, 7.0])
@pytest.mark.parametrize("seed", range(3))
def test_refreshes_are_where_the_reading_says(period_s, poll_s, seed):
    staircase = Staircase(period_s, seed)
    counter = staircase.counter()
    for _ in range(200):
        reading = counter.read()
        error_s = reading.time_s - staircase.refresh_s[reading.energy_j]
        assert abs(error_s) <= reading.time_uncertainty_s
        # Two reads and a step: half of that.
        assert reading.time_uncertainty_s < 0.0045
        staircase.now_s += poll_s


def test_a_poll_of_50_ms_sees_each_refresh_with_few_reads():
    staircase = Staircase(0.1)
    counter = staircase.counter()
    counter.read()
    staircase.reads = 0
    readings = set()
    for _ in range(400):
        readings.add(counter.read())
        staircase.now_s += 0.05
    energies = sorted(reading.energy_j for reading in readings)
    steps = {round(b - a) for a, b in itertools.pairwise(energies)}
    assert steps == {20}  # J in 0.1 s
    assert staircase.reads <= 4 * len(readings)


def test_a_fresh_reading_is_given_again():
    staircase = Staircase(0.1)
    counter = staircase.counter()
    reading = counter.read()
    reads = staircase.reads
    staircase.now_s = reading.time_s + 0.039
    assert counter.read() is reading
    assert staircase.reads == reads
    staircase.now_s = reading.time_s + 0.041
    assert counter.read().energy_j == reading.energy_j + 20.0


def test_a_counter_that_stands_still():
    staircase = Staircase(0.1)
    counter = staircase.counter()
    counter.read()
    staircase.stalled_at_s = staircase.now_s
    begun_s = staircase.now_s
    with pytest.raises(GpuError, match=r"not moved for 3 s.*not measured"):
        _poll_until_it_fails(counter, staircase)
    assert STALL_S < staircase.now_s - begun_s < STALL_S + 0.5
    staircase.stalled_at_s = math.inf
    assert counter.read().energy_j > 0


def test_a_counter_that_goes_back_is_read_as_it_is():
    staircase = Staircase(0.1)
    counter = staircase.counter()
    first = counter.read()
    staircase.offset_j = -1000.0
    staircase.now_s += 0.05
    after = counter.read()
    assert after.energy_j < first.energy_j
    assert after.time_s > first.time_s
    assert counter.read() == after


def test_a_read_that_fails_leaves_the_next_one_whole():
    staircase = Staircase(0.1)
    counter = staircase.counter()
    counter.read()
    staircase.now_s += 0.05
    staircase.fail = True
    with pytest.raises(RuntimeError, match="lost"):
        counter.read()
    staircase.fail = False
    reading = counter.read()
    assert abs(reading.time_s - staircase.refresh_s[reading.energy_j]) < 0.0045


# --- another process reads ----------------------------------------------------------------------

NEVER_S = 3600.0
POLL_S = 0.01
WAIT_S = 60.0


@pytest.fixture
def gpu(tmp_path) -> EmulatedGpu:
    made = EmulatedGpu.create("h100", 0, tmp_path)
    made.advance_to(1.0)
    made.read_apart = True
    return made


@pytest.fixture
def reader(gpu) -> Iterator[EnergyReader]:
    made = EnergyReader(gpu.address.uid, POLL_S)
    yield made
    made.close()


@pytest.fixture
def meter(gpu) -> Iterator[EnergyMeter]:
    made = EnergyMeter(gpu, poll_s=POLL_S)
    yield made
    made.close()


def test_it_says_each_refresh_once(gpu, reader):
    reader.wait(WAIT_S)
    assert [*reader.take()] == [first := gpu.read_energy()]
    gpu.advance_to(2.05)
    reader.wait(WAIT_S)
    assert [*reader.take()] == [second := gpu.read_energy()]
    assert second.energy_j > first.energy_j
    assert [*reader.take()] == []


def test_nothing_is_kept_of_what_a_full_socket_refuses(monkeypatch):
    """A rank may take nothing for minutes, or for days; the next refresh says all of them."""
    gpu, sent, full = FakeGpu(), [], [True, True, False, False]

    def send(_: socket.socket, message: dict) -> None:
        if full.pop(0):
            raise BlockingIOError
        sent.append(message)

    def wait(*_: object) -> tuple[list[int], ...]:
        gpu.now_s += 0.1
        return ([0] * (gpu.now_s > 0.35),)  # the rank has ended

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    monkeypatch.setattr(energy_counter, "_RANK", theirs.detach())
    monkeypatch.setattr(energy_counter, "open_gpu", lambda address: gpu)
    monkeypatch.setattr(energy_counter, "send", send)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(energy_counter.select, "select", wait)
    order = {"uid": gpu.address.uid, "poll_s": 0.0, "parent": os.getppid()}
    monkeypatch.setattr(sys, "argv", ["", json.dumps(order)])
    energy_counter.main()
    ours.close()
    assert [message["reading"][0] for message in sent] == pytest.approx([20, 30])


def test_a_failure_of_any_length_is_said(monkeypatch):
    def fail() -> None:
        raise RuntimeError("\N{GREEK SMALL LETTER ALPHA}" * 100_000)

    gpu = FakeGpu()
    gpu.read_energy = fail
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.shutdown(socket.SHUT_WR)  # it ends after one look
    monkeypatch.setattr(energy_counter, "_RANK", theirs.detach())
    monkeypatch.setattr(energy_counter, "open_gpu", lambda address: gpu)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    order = {"uid": gpu.address.uid, "poll_s": 0.0, "parent": os.getppid()}
    monkeypatch.setattr(sys, "argv", ["", json.dumps(order)])
    energy_counter.main()
    said = receive(ours)
    ours.close()
    assert set(said["error"]) == {"\N{GREEK SMALL LETTER ALPHA}"}


def test_windows_are_those_of_a_meter_of_this_process(gpu, meter):
    gpu.read_apart = False
    own = EnergyMeter(gpu, poll_s=NEVER_S)
    for end_s in (1.3, 1.6, 2.2, 3.4):
        gpu.advance_to(end_s)
        for each in (own, meter):
            each.catch_up()
    assert meter.window(1.1, 3.2) == own.window(1.1, 3.2)
    assert meter.last_refresh_s == own.last_refresh_s == pytest.approx(gpu.read_energy().time_s)
    own.close()


def test_what_it_sees_in_a_long_step_is_taken_in(gpu, monkeypatch):
    """Its socket holds the refreshes of half a minute, and nobody asks for any in a step."""
    monkeypatch.setattr(energy_meter, "_TAKE_S", 0.01)
    meter = EnergyMeter(gpu, poll_s=POLL_S)
    gpu.advance_to(2.2)
    look_until(lambda: meter._times_s[-1] == gpu.read_energy().time_s)
    meter.close()


def test_a_thread_goes_on_where_the_reader_is_killed(gpu, meter):
    os.kill(meter._reader._process.pid, signal.SIGKILL)
    meter._reader._process.wait(WAIT_S)
    gpu.advance_to(2.2)
    meter.catch_up()
    assert meter._reader is None
    assert meter._thread.is_alive()
    assert meter.last_refresh_s == gpu.read_energy().time_s
    assert meter.window(1.1, 2.1).energy_j > 0


def test_a_thread_goes_on_at_once_though_nobody_asks(gpu, monkeypatch):
    monkeypatch.setattr(energy_meter, "_TAKE_S", NEVER_S)
    meter = EnergyMeter(gpu, poll_s=POLL_S)
    os.kill(meter._reader._process.pid, signal.SIGKILL)
    gpu.advance_to(2.2)
    look_until(lambda: meter._times_s[-1] == gpu.read_energy().time_s)
    meter.close()


@pytest.mark.parametrize("why", ["only this process can open it", "no process can be started"])
def test_a_thread_reads_where_no_other_process_can(gpu, monkeypatch, why):
    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError("Resource temporarily unavailable")

    if why == "no process can be started":
        monkeypatch.setattr(subprocess, "Popen", refuse)
    else:
        monkeypatch.setattr(gpu, "address", GpuAddress("emulated", "/nowhere#0"))
    meter = EnergyMeter(gpu, poll_s=NEVER_S)
    assert meter.last_refresh_s == gpu.read_energy().time_s
    assert meter._reader is None
    meter.close()


def test_failures_are_said_and_get_over(gpu, meter, monkeypatch):
    monkeypatch.setattr(energy_meter, "_LOOK_TIMEOUT_S", NEVER_S)
    state = gpu._file.path
    kept = state.read_bytes()
    state.unlink()
    look_until(lambda: meter.last_refresh_s and str(state) in str(meter.error))
    gpu.time_s = lambda: 9.0
    meter.catch_up()  # waits for no refresh: none may come for days
    state.write_bytes(kept)
    gpu.advance_to(3.0)
    look_until(lambda: meter.last_refresh_s == gpu.read_energy().time_s)
    assert meter.error is None


def test_it_outlives_what_is_meant_for_ranks_and_what_python_prints(gpu, tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text("print('of a test')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    meter = EnergyMeter(gpu, poll_s=POLL_S)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        meter._reader._process.send_signal(number)
    gpu.advance_to(2.2)
    meter.catch_up()
    assert meter._reader is not None
    assert meter.last_refresh_s == gpu.read_energy().time_s
    meter.close()


@pytest.mark.parametrize("installed", [False, True])
def test_installed_packages_hide_nothing_of_pythons_own(monkeypatch, installed):
    """`dataclasses` of old Pythons, which lies there at times, ended guards as they started."""
    package = str(Path(energy_counter.__file__).resolve().parents[2])
    monkeypatch.setattr(site, "getsitepackages", lambda: [package] * installed)
    monkeypatch.setenv("PYTHONPATH", "/jobs/own")
    script = "import os; print(os.environ['PYTHONPATH'], end='')"
    process = start_child(("-c", script), None, stdout=subprocess.PIPE)
    said = process.communicate(timeout=WAIT_S)[0].decode()
    assert said == ("/jobs/own" if installed else f"{package}:/jobs/own")


def test_it_ends_with_its_meter(meter):
    process = meter._reader._process
    meter.close()
    assert process.returncode == -signal.SIGKILL
    assert meter.last_refresh_s > 0


@pytest.mark.parametrize("poll_s", [NEVER_S, POLL_S])
def test_it_ends_with_its_rank(gpu, poll_s):
    def run():
        reader = EnergyReader(gpu.address.uid, poll_s)
        reader.wait(WAIT_S)
        tell.send(reader._process.pid)
        signal.pause()

    told, tell = multiprocessing.Pipe(duplex=False)
    rank = multiprocessing.get_context("fork").Process(target=run)
    rank.start()
    descriptor = os.pidfd_open(told.recv())
    rank.kill()
    rank.join(WAIT_S)
    assert select.select([descriptor], [], [], WAIT_S)[0]
    os.close(descriptor)


def test_a_real_gpu_is_read_by_another_process_alone(fake_nvml):
    fake_nvml.use_here()
    meter = EnergyMeter(open_gpu(GpuAddress("dry_run", fake_nvml.uuids[0])))
    assert meter.last_refresh_s > 0
    meter.close()
    reads = {call.pid for call in fake_nvml.history() if "TotalEnergy" in call.function}
    assert os.getpid() not in reads
    assert len(reads) == 1
