"""The meter of one GPU's energy counter."""

import math
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
from fake_gpu import FakeGpu

from envpipe_megatron.gpu.base import EnergyReading, GpuError
from envpipe_megatron.runtime.energy import meter as energy_meter
from envpipe_megatron.runtime.energy.meter import EnergyMeter, MeterError


@pytest.fixture
def gpu() -> FakeGpu:
    return FakeGpu()


@pytest.fixture
def meter(gpu) -> Iterator[EnergyMeter]:
    made = EnergyMeter(gpu, poll_s=3600)  # samples when a test asks: `at`
    yield made
    made.close()


def at(meter: EnergyMeter, gpu: FakeGpu, *times_s: float) -> None:
    """Let time come to these instants, and the meter look there."""
    for time_s in times_s:
        gpu.now_s = time_s
        meter._add(meter._gpu.read_energy())


def test_windows_of_constant_pieces_are_exact(gpu, meter):
    """Power changes at refreshes alone, so the line between two refreshes is the truth."""
    powers_w = [100, 300, 50, 50, 400, 0, 250]
    corners_s = np.arange(len(powers_w) + 1) * 0.1
    energies_j = np.concatenate(([7.0], 7.0 + np.cumsum(powers_w) * 0.1))
    gpu.counter_j = lambda time_s: float(np.interp(time_s, corners_s, energies_j))
    # Looked at three times between refreshes; the counter stands still meanwhile.
    meter.close()
    meter = EnergyMeter(gpu, poll_s=3600)
    at(meter, gpu, *np.arange(0, 0.7, 0.033), 0.7)
    for start_s, end_s in [(0.0, 0.7), (0.1, 0.3), (0.05, 0.61), (0.42, 0.44), (0.3, 0.3)]:
        wanted_j = np.interp(end_s, corners_s, energies_j) - np.interp(
            start_s, corners_s, energies_j
        )
        assert meter.window(start_s, end_s).energy_j == pytest.approx(wanted_j, abs=1e-9)
    meter.close()


def test_energy_before_the_meter_began_is_refused(gpu):
    gpu.now_s = 3.05
    meter = EnergyMeter(gpu, poll_s=3600)
    at(meter, gpu, 3.2)
    assert meter.window(3.0, 3.2).energy_j == pytest.approx(20)
    with pytest.raises(MeterError, match=r"began before the meter.*known from 3\.0 s"):
        meter.window(2.9, 3.2)
    meter.close()


def test_old_samples_are_forgotten(gpu, monkeypatch):
    monkeypatch.setattr(energy_meter, "_HORIZON_S", 3.0)
    meter = EnergyMeter(gpu, poll_s=3600)
    for now_s in np.arange(0.1, 10.05, 0.1):
        at(meter, gpu, now_s)
        back_s = min(now_s, 2.8)  # and a refresh
        assert meter.window(now_s - back_s, now_s).energy_j == pytest.approx(100 * back_s)
    assert len(meter._times_s) <= 39
    assert len(meter._energies_j) == len(meter._time_uncertainties_s) == len(meter._times_s)
    assert meter.window(9.0, 10.0).energy_j == pytest.approx(100)
    meter.close()


def test_its_thread_sees_refreshes_by_itself(gpu):
    meter = EnergyMeter(gpu, poll_s=0.001)
    for refresh in range(1, 4):
        gpu.now_s = refresh / 10
        for _ in range(10_000):
            if meter.last_refresh_s > gpu.now_s - 1e-9:
                break
            threading.Event().wait(0.001)
    meter.close()
    assert list(meter._energies_j) == pytest.approx([0, 10, 20, 30])


def test_only_its_own_thread_reads(gpu, monkeypatch):
    """Not at the start, nor for a window that ends just now."""
    readers = set()
    read_energy = gpu.read_energy
    monkeypatch.setattr(
        gpu, "read_energy", lambda: (readers.add(threading.current_thread().name), read_energy())[1]
    )
    meter = EnergyMeter(gpu, poll_s=0.001)
    for end_s in (0.3, 0.6, 0.9):
        gpu.now_s = end_s
        meter.catch_up()
        assert meter.window(end_s - 0.3, end_s).energy_j == pytest.approx(30)
    meter.close()
    assert readers == {"envpipe-meter"}


def test_a_driver_that_hangs_holds_nobody_up_for_long(gpu, monkeypatch):
    monkeypatch.setattr(energy_meter, "_LOOK_TIMEOUT_S", 0.01)
    answers = threading.Event()
    read_energy = gpu.read_energy
    monkeypatch.setattr(gpu, "read_energy", lambda: (answers.wait(60), read_energy())[1])
    before = set(threading.enumerate())
    meter = EnergyMeter(gpu, poll_s=3600)
    assert meter.last_refresh_s == -math.inf
    assert meter._thread.daemon  # nor does it keep the process
    for _ in range(3):
        meter.catch_up()
    looks = [t for t in set(threading.enumerate()) - before if t.name == "envpipe-meter"]
    assert len(looks) <= 2, "looks that hang are not piled up"
    with pytest.raises(MeterError, match="has not refreshed"):
        meter.window(0.0, 0.1)
    answers.set()
    meter.catch_up()
    meter.close()


@pytest.mark.parametrize("stalled", ["energy and time", "time alone"])
def test_a_counter_that_stands_still_is_not_extrapolated_for_ever(gpu, meter, monkeypatch, stalled):
    at(meter, gpu, *np.arange(0.1, 2.05, 0.1))
    reading = gpu.read_energy()

    def standing_still():
        moves_j = 0 if stalled == "energy and time" else 100 * gpu.now_s
        return EnergyReading(reading.energy_j + moves_j, reading.time_s)

    read_energy = gpu.read_energy
    monkeypatch.setattr(gpu, "read_energy", standing_still)
    at(meter, gpu, *np.arange(2.1, 4.05, 0.1))
    assert meter.window(1.0, 2.0).energy_j == pytest.approx(100)  # seen before
    assert meter.window(1.0, 2.25).energy_j == pytest.approx(125)  # the last power holds
    for end_s in (2.35, 4.0, 1e9):
        with pytest.raises(MeterError, match=r"has not refreshed since 2\.0"):
            meter.window(1.0, end_s)
    monkeypatch.setattr(gpu, "read_energy", read_energy)
    at(meter, gpu, 4.1, 4.2)
    assert meter.window(1.0, 4.2).energy_j == pytest.approx(320)  # the counter had counted on


def test_a_counter_that_goes_back_begins_anew(gpu, meter):
    def reloaded_j(time_s):
        return 1000 + 100 * time_s if time_s < 2.05 else 50 * (time_s - 2.0)

    gpu.counter_j = reloaded_j
    meter.close()
    meter = EnergyMeter(gpu, poll_s=3600)
    at(meter, gpu, *np.arange(0.1, 2.05, 0.1))
    assert meter.window(1.0, 2.0).energy_j == pytest.approx(100)
    at(meter, gpu, 2.1)
    with pytest.raises(MeterError, match=r"has not refreshed"):  # one tells no power yet
        meter.window(2.1, 2.15)
    at(meter, gpu, *np.arange(2.2, 4.05, 0.1))
    for start_s, end_s in [(1.0, 3.0), (1.95, 2.05), (2.0, 2.1), (2.05, 3.0), (0.0, 4.0)]:
        with pytest.raises(MeterError, match=r"went back.*known from 2\.1"):
            meter.window(start_s, end_s)
    for start_s, end_s, wanted_j in [(2.1, 3.1, 50), (2.1, 2.15, 2.5)]:
        assert meter.window(start_s, end_s).energy_j == pytest.approx(wanted_j)
    assert meter.refreshes(0.0)[0][0] == pytest.approx(2.1)
    meter.close()


@pytest.mark.parametrize("wrong_j", [0.0, 1e9])
def test_a_single_wrong_reading_is_in_no_window(gpu, meter, wrong_j):
    gpu.counter_j = lambda time_s: 1e6 + 100 * time_s
    at(meter, gpu, *np.arange(0.1, 1.95, 0.1))
    gpu.counter_j = lambda time_s: wrong_j
    at(meter, gpu, 2.0)
    gpu.counter_j = lambda time_s: 1e6 + 100 * time_s
    at(meter, gpu, *np.arange(2.1, 4.05, 0.1))
    for start_s, end_s in [(1.0, 3.0), (1.9, 2.0), (2.0, 3.0)]:
        with pytest.raises(MeterError, match=r"leapt.*known from 2\.1"):
            meter.window(start_s, end_s)
    assert meter.window(2.1, 3.1).energy_j == pytest.approx(100)


def test_a_counter_that_goes_back_while_a_window_is_looked_at_spoils_it(gpu, meter):
    """One call of `window` reads from the process that reads the counter more than once."""
    at(meter, gpu, *np.arange(0.1, 2.05, 0.1))
    heard = iter([[], [EnergyReading(energy_j=1.0, time_s=2.1)]])
    reader = SimpleNamespace(error=None, take=lambda: iter(next(heard, [])), close=lambda: None)
    meter._reader = reader
    with pytest.raises(MeterError, match="went back"):
        meter.window(1.0, 2.0)


def test_no_energy_is_ever_negative_whatever_the_counter_does(gpu):
    """Stalls, resets, errors and lost refreshes at random: a window is right or refused."""
    rng = np.random.default_rng(5)
    gpu.counter_j = lambda time_s: 200 * time_s
    metered = refused = 0
    offset_j = 0.0
    for _ in range(20):
        meter = EnergyMeter(gpu, poll_s=3600)
        start_s = gpu.now_s
        for _ in range(200):
            event = rng.random()
            if event < 0.02:
                offset_j -= 10_000
                gpu.counter_j = lambda time_s, o=offset_j: 200 * time_s + o
            gpu.now_s += 0.1 if event < 0.9 else rng.uniform(0.1, 2.0)
            gpu.error = GpuError("lost") if 0.1 < event < 0.2 else None
            meter._try_sample()
            begin_s = rng.uniform(start_s + 0.1, gpu.now_s)
            end_s = rng.uniform(begin_s, gpu.now_s)
            try:
                energy = meter.window(begin_s, end_s)
            except MeterError:
                refused += 1
            else:
                metered += 1
                assert energy.energy_j == pytest.approx(200 * (end_s - begin_s), abs=1e-6)
                assert energy.uncertainty_j >= 0
        gpu.error = None
        meter.close()
    assert metered > 500
    assert refused > 100


def test_a_read_that_fails_once_spoils_nothing(gpu, meter):
    at(meter, gpu, 0.1, 0.2)
    gpu.error = GpuError("busy")
    gpu.now_s = 0.3
    meter.catch_up()
    with pytest.raises(MeterError, match="busy"):
        meter.window(0.0, 0.3)
    gpu.error = None
    at(meter, gpu, 0.4, 0.5)
    meter.catch_up()
    assert meter.error is None
    assert meter.window(0.0, 0.5).energy_j == pytest.approx(50)


@pytest.mark.parametrize("odd_j", [math.nan, math.inf])
def test_a_counter_that_says_no_number_has_said_nothing(gpu, meter, odd_j):
    usual_j = gpu.counter_j
    at(meter, gpu, 0.1, 0.2)
    gpu.counter_j = lambda time_s: odd_j
    at(meter, gpu, 0.3)
    gpu.counter_j = usual_j
    at(meter, gpu, 0.4)
    assert np.isfinite(meter.refreshes(0.0)[1]).all()
    assert meter.window(0.1, 0.4).energy_j == pytest.approx(30)


def test_the_least_window_is_ten_refreshes_as_seen(gpu, meter):
    assert meter.min_window_s == pytest.approx(1.0)  # NVML's, before any was seen
    meter.close()
    gpu.refresh_s = 0.02
    meter = EnergyMeter(gpu, poll_s=3600)
    at(meter, gpu, *np.arange(0.02, 1.01, 0.01), 1.3)  # and some were missed
    assert meter.min_window_s == pytest.approx(0.2)
    gpu.refresh_s = 0.1
    at(meter, gpu, *np.arange(1.4, 4.05, 0.1))
    assert meter.min_window_s == pytest.approx(1.0)  # lately
    meter.close()


@pytest.mark.parametrize("alternate_s", [0.007, 0.03, 0.13, 0.7])
@pytest.mark.parametrize("time_off_s", [0.0, 0.02])
def test_windows_are_as_uncertain_as_they_say(gpu, monkeypatch, alternate_s, time_off_s):
    """Work and waits of random lengths, also shorter than a refresh, and instants told wrongly."""
    rng = np.random.default_rng(int(1000 * alternate_s))
    corners_s = np.cumsum(rng.uniform(0.5, 1.5, int(120 / alternate_s)) * alternate_s)
    corners_s = np.concatenate(([0.0], corners_s))
    powers_w = np.where(np.arange(corners_s.size - 1) % 2, 300.0, 90.0)
    corners_j = np.concatenate(([0.0], np.cumsum(np.diff(corners_s) * powers_w)))

    def truth_j(time_s):
        return float(np.interp(time_s, corners_s, corners_j))

    gpu.counter_j = truth_j
    read_energy = gpu.read_energy

    def told_late():
        reading = read_energy()
        off_s = rng.uniform(-time_off_s, time_off_s)
        return EnergyReading(reading.energy_j, reading.time_s + off_s, time_off_s)

    monkeypatch.setattr(gpu, "read_energy", told_late)
    gpu.now_s = 1.0
    meter = EnergyMeter(gpu, poll_s=3600)
    at(meter, gpu, *np.arange(1.1, 100, 0.1))
    errors, uncertainties = [], []
    for _ in range(400):
        start_s = rng.uniform(2, 95)
        end_s = start_s + rng.uniform(1, 4)
        energy = meter.window(start_s, end_s)
        errors.append(abs(energy.energy_j - (truth_j(end_s) - truth_j(start_s))))
        uncertainties.append(energy.uncertainty_j)
    meter.close()
    assert np.mean(np.array(errors) <= 2 * np.array(uncertainties)) >= 0.95
    # Nor is it a figure that any error would keep within.
    assert 0.05 < np.linalg.norm(errors) / np.linalg.norm(uncertainties) < 1


def test_a_refresh_that_was_missed_makes_an_end_less_certain(gpu, meter):
    gpu.refresh_s = 0.125
    gpu.counter_j = lambda time_s: 100 * time_s + 200 * min(max(0.0, time_s - 0.25), 0.25)
    at(meter, gpu, 0.125, 0.25, 0.5, 0.625)
    spread_w = np.std([100, 100, 300, 100])
    wanted_j = spread_w * math.hypot(0.125, 0.25)
    assert meter.window(0.0, 0.4).uncertainty_j == pytest.approx(wanted_j, rel=1e-6)
