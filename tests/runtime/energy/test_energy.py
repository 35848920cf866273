"""Meter, log and split of energies."""

from __future__ import annotations

import itertools
import json
import math
import multiprocessing as mp
import os
import resource
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from fake_gpu import FakeGpu

from envpipe_megatron.core.schedule import Kind
from envpipe_megatron.formats.energy import append_line, name_of_run, read_energy_logs
from envpipe_megatron.gpu.base import EnergyReading, GpuError
from envpipe_megatron.runtime.energy import log as energy_log
from envpipe_megatron.runtime.energy import meter as energy_meter
from envpipe_megatron.runtime.energy.log import EnergyLog, PhaseTotals
from envpipe_megatron.runtime.energy.meter import EnergyMeter, MeterError, WindowEnergy
from envpipe_megatron.runtime.energy.split import (
    Measured,
    error_of_sum,
    mean_without_outliers,
    split_energies,
)
from envpipe_megatron.runtime.execution.executor import StageRecord
from envpipe_megatron.runtime.job.reconfigurer import no_bubble_threshold_s


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
        meter._sample()


# Meter ---------------------------------------------------------------------------------------


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
        assert meter.energy_j(start_s, end_s) == pytest.approx(wanted_j, abs=1e-9)
    meter.close()


def test_end_past_the_last_refresh_goes_on_at_the_last_power(gpu, meter):
    at(meter, gpu, 0.1, 0.2, 0.25)
    assert meter.energy_j(0.1, 0.25) == pytest.approx(15)


def test_energy_before_the_meter_began_is_refused(gpu):
    gpu.now_s = 3.05
    meter = EnergyMeter(gpu, poll_s=3600)
    at(meter, gpu, 3.2)
    assert meter.energy_j(3.0, 3.2) == pytest.approx(20)
    with pytest.raises(MeterError, match="began before the meter"):
        meter.energy_j(2.9, 3.2)
    meter.close()


def test_old_samples_are_forgotten(gpu):
    meter = EnergyMeter(gpu, poll_s=3600, horizon_s=3.0)
    for now_s in np.arange(0.1, 10.05, 0.1):
        at(meter, gpu, now_s)
        back_s = min(now_s, 2.8)  # and a refresh
        assert meter.energy_j(now_s - back_s, now_s) == pytest.approx(100 * back_s)
    assert len(meter._times_s) <= 61
    assert len(meter._energies_j) == len(meter._time_uncertainties_s) == len(meter._times_s)
    assert meter.energy_j(9.0, 10.0) == pytest.approx(100)
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
    assert meter._energies_j == pytest.approx([0, 10, 20, 30])


def test_between_two_polls_the_counter_is_read_where_it_is_asked_for_alone(gpu, monkeypatch):
    monkeypatch.setattr(energy_meter, "_LOOK_TIMEOUT_S", 3600)  # a look ends when it was taken
    reads = []
    read_energy = gpu.read_energy
    monkeypatch.setattr(gpu, "read_energy", lambda: (reads.append(1), read_energy())[1])
    meter = EnergyMeter(gpu, poll_s=3600)
    for wanted in range(1, 6):
        assert len(reads) == wanted
        meter.catch_up()
    meter.close()


def test_failing_counter_is_a_named_error(gpu, meter):
    gpu.error = GpuError("the driver is gone")
    meter.catch_up()
    with pytest.raises(MeterError, match="the driver is gone"):
        meter.energy_j(0.0, 1.0)


def test_only_its_own_thread_reads(gpu, tmp_path, monkeypatch):
    """Not at the start, at a window that ends just now, in the log, nor at the end."""
    readers = set()
    read_energy = gpu.read_energy
    monkeypatch.setattr(
        gpu, "read_energy", lambda: (readers.add(threading.current_thread().name), read_energy())[1]
    )
    meter = EnergyMeter(gpu, poll_s=0.001)
    log = EnergyLog(meter, partial(append_line, tmp_path / "log"), {})
    for iteration in range(30):
        gpu.now_s = 0.3 * (iteration + 1)
        log.add("steady", iteration, record(0.3 * iteration, 0.3), RECEIVES)
        meter.catch_up()
        assert meter.energy_j(0.3 * iteration, gpu.now_s) == pytest.approx(30)
    log.close()
    meter.close()
    assert readers == {"envpipe-meter"}
    assert sum(w["energy_j"] for w in read(tmp_path / "log")) == pytest.approx(900)


def test_a_driver_that_hangs_holds_nobody_up_for_long(gpu, monkeypatch):
    monkeypatch.setattr(energy_meter, "_LOOK_TIMEOUT_S", 0.01)
    answers = threading.Event()
    read_energy = gpu.read_energy
    monkeypatch.setattr(gpu, "read_energy", lambda: (answers.wait(60), read_energy())[1])
    meter = EnergyMeter(gpu, poll_s=3600)
    assert meter.last_refresh_s == -math.inf
    assert meter._thread.daemon  # nor does it keep the process
    with pytest.raises(MeterError, match="has not refreshed"):
        meter.energy_j(0.0, 0.1)
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
    assert meter.energy_j(1.0, 2.0) == pytest.approx(100)  # seen before
    assert meter.energy_j(1.0, 2.25) == pytest.approx(125)  # the last power holds for a while
    for end_s in (2.35, 4.0, 1e9):
        with pytest.raises(MeterError, match=r"has not refreshed since 2\.0"):
            meter.energy_j(1.0, end_s)
    monkeypatch.setattr(gpu, "read_energy", read_energy)
    at(meter, gpu, 4.1, 4.2)
    assert meter.energy_j(1.0, 4.2) == pytest.approx(320)  # the counter had counted on


def test_a_counter_that_goes_back_spoils_the_windows_across_it_alone(gpu, meter):
    def reloaded_j(time_s):
        return 1000 + 100 * time_s if time_s < 2.05 else 50 * (time_s - 2.0)

    gpu.counter_j = reloaded_j
    meter.close()
    meter = EnergyMeter(gpu, poll_s=3600)
    at(meter, gpu, *np.arange(0.1, 2.15, 0.1))
    assert meter.energy_j(1.0, 2.0) == pytest.approx(100)
    with pytest.raises(MeterError, match="went back"):  # one refresh tells no power yet
        meter.energy_j(2.1, 2.15)
    at(meter, gpu, *np.arange(2.2, 4.05, 0.1))
    for start_s, end_s in [(1.0, 3.0), (1.95, 2.05), (2.0, 2.1), (2.05, 3.0), (0.0, 4.0)]:
        with pytest.raises(MeterError, match="went back"):
            meter.energy_j(start_s, end_s)
    for start_s, end_s, wanted_j in [(0.5, 2.0, 150), (2.1, 3.1, 50), (2.1, 2.15, 2.5)]:
        assert meter.energy_j(start_s, end_s) == pytest.approx(wanted_j)
    meter.close()


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
        meter.energy_j(0.0, 0.3)
    gpu.error = None
    at(meter, gpu, 0.4, 0.5)
    meter.catch_up()
    assert meter.error is None
    assert meter.energy_j(0.0, 0.5) == pytest.approx(50)


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
    powers_w = np.where(np.arange(corners_s.size) % 2, 300.0, 90.0)
    corners_j = np.cumsum(np.diff(corners_s, prepend=0.0) * powers_w)

    def truth_j(time_s):
        return float(np.interp(time_s, [0, *corners_s], [0, *corners_j]))

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


def test_the_uncertainty_of_a_window_by_hand(gpu, monkeypatch):
    """Ten refreshes at 100 W, ten at 300 W, and one whose instant is known to 10 ms."""
    gpu.refresh_s = 0.125
    gpu.counter_j = lambda time_s: 100 * time_s + 200 * max(0.0, time_s - 1.25)
    read_energy = gpu.read_energy

    def some_told_late():
        reading = read_energy()
        return replace(reading, time_uncertainty_s=0.01 if reading.time_s == 0.375 else 0.0)

    monkeypatch.setattr(gpu, "read_energy", some_told_late)
    meter = EnergyMeter(gpu, poll_s=3600)
    assert meter.window(0.0, 0.0) == WindowEnergy(0.0, 0.001)  # nothing is known but this instant
    at(meter, gpu, 0.125)
    # A single power: it may have been anything.
    assert meter.window(0.0, 0.1).uncertainty_j == pytest.approx(math.hypot(12.5, 12.5), rel=1e-6)
    at(meter, gpu, *np.arange(0.25, 1.51, 0.125))

    def spread_w(low: int, high: int) -> float:
        """Of so many powers before the step and after it."""
        return 200 * math.sqrt(low * high) / (low + high)

    past_j = meter.window(0.0, 1.8).uncertainty_j  # 0.3 s past the last refresh
    assert past_j == pytest.approx(spread_w(4, 2) * 0.3, rel=1e-6)
    at(meter, gpu, *np.arange(1.625, 2.51, 0.125))
    for start_s, end_s, wanted_j in [
        (0.0, 0.6, 0.0),  # the five refreshes on each side have the same power
        (0.0, 0.7, spread_w(10, 1) * 0.125),
        (0.0, 1.5, spread_w(4, 7) * 0.125),
        (0.0, 1.8, spread_w(1, 10) * 0.125),
        (0.0, 1.9, 0.0),
        (0.0, 2.6, 0.0),
        (1.5, 1.5, math.sqrt(2) * spread_w(4, 7) * 0.125),
        (0.2, 0.6, 0.0),
        (0.3, 0.6, 100 * 0.01),
        (0.45, 0.6, 100 * 0.01),
        (0.55, 0.6, 0.0),
    ]:
        found_j = meter.window(start_s, end_s).uncertainty_j
        assert found_j == pytest.approx(math.hypot(wanted_j, 0.001), rel=1e-6), (start_s, end_s)
    meter.close()
    assert not meter._thread.is_alive()


# Log -----------------------------------------------------------------------------------------


def record(begin_s: float, duration_s: float) -> StageRecord:
    """Two units of a quarter each, a wait of a tenth before each, and a rest."""
    start_s, end_s = np.array([0.1, 0.45]) * duration_s, np.array([0.35, 0.7]) * duration_s
    waits_s = np.array([0.1, 0.1]) * duration_s
    return StageRecord(start_s, end_s, waits_s, begin_s, duration_s, duration_s)


#: The first unit's input is there anyway, the second's is received.
RECEIVES = np.array([False, True])


def read(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run_log(
    gpu: FakeGpu,
    path: Path | None,
    iterations: list[tuple[str, float]],
    gap_s: float = 0.0,
    start_s: float = 0.0,
) -> EnergyLog:
    """Iterations of these phases and lengths one after the other, `gap_s` between them."""
    gpu.now_s = start_s
    meter = EnergyMeter(gpu, poll_s=3600)
    log = EnergyLog(meter, partial(append_line, path) if path else None, {"rank": 3})
    for iteration, (phase, duration_s) in enumerate(iterations):
        begin_s = gpu.now_s
        end_s = begin_s + duration_s
        at(meter, gpu, *np.arange(begin_s, end_s, 0.05), end_s)
        log.add(phase, iteration, record(begin_s, duration_s), RECEIVES)
        at(meter, gpu, end_s + gap_s)
    at(meter, gpu, gpu.now_s + 0.1)
    log.close()
    meter.close()
    return log


def uneven_j(time_s: float) -> float:
    """A counter whose power is never the same."""
    return 100 * time_s + 20 * np.sin(3 * time_s)


def test_windows_keep_phases_apart_and_last_long_enough(gpu, tmp_path):
    phases = ["warm-up"] * 3 + ["profile"] * 7 + ["steady"] * 20
    run_log(gpu, tmp_path / "log", [(phase, 0.27) for phase in phases])
    windows = read(tmp_path / "log")
    iterations: list[int] = []
    for window, after in zip(windows, [*windows[1:], None], strict=True):
        numbers = range(window["first_iteration"], window["last_iteration"] + 1)
        assert {phases[number] for number in numbers} == {window["phase"]}
        # Only the last window of a phase may be short.
        ends_phase = after is None or after["phase"] != window["phase"]
        assert window["duration_s"] >= 1.0 - 1e-9 or ends_phase
        assert window["rank"] == 3
        iterations += numbers
    assert iterations == list(range(30))


@pytest.mark.parametrize("duration_s", [0.03, 0.27, 0.9, 2.4])
@pytest.mark.parametrize("gap_s", [0.0, 0.07])
def test_windows_add_up_to_the_whole(gpu, tmp_path, duration_s, gap_s):
    """Also where iterations are shorter than a refresh, and with an optimizer step between them."""
    gpu.counter_j = uneven_j
    count = int(6 / duration_s) + 1
    log = run_log(gpu, tmp_path / "log", [("steady", duration_s)] * count, gap_s, start_s=0.5)
    windows = read(tmp_path / "log")
    whole_s = count * duration_s + (count - 1) * gap_s
    assert sum(w["duration_s"] for w in windows) == pytest.approx(whole_s)
    total_j = sum(w["energy_j"] for w in windows)
    truth_j = uneven_j(0.5 + whole_s) - uneven_j(0.5)
    assert total_j == pytest.approx(truth_j, rel=0.01)  # its ends lie between two refreshes
    assert log.totals["steady"].energy_j == pytest.approx(total_j)
    assert log.totals["steady"].duration_s == pytest.approx(whole_s)
    assert log.totals["steady"].iterations == count
    # No energy is lost or billed twice where two windows meet.
    for one, other in itertools.pairwise(windows):
        assert one["begin_s"] + one["duration_s"] == pytest.approx(other["begin_s"])


def test_windows_add_up_to_the_bit_of_one_meter(gpu, tmp_path):
    """Each is metered when the counter has passed its end: later looks change no figure."""
    gpu.counter_j = uneven_j
    run_log(gpu, tmp_path / "log", [("steady", 0.03)] * 100)
    windows = read(tmp_path / "log")
    assert len(windows) > 2
    corners_s = np.arange(0, 40) * 0.1
    corners_j = [uneven_j(time_s) for time_s in corners_s]
    for window in windows:
        ends_s = [window["begin_s"], window["begin_s"] + window["duration_s"]]
        begin_j, end_j = np.interp(ends_s, corners_s, corners_j)
        assert window["energy_j"] == pytest.approx(end_j - begin_j)


def test_what_is_not_training_is_not_billed(gpu, tmp_path):
    meter = EnergyMeter(gpu, poll_s=3600)
    log = EnergyLog(meter, partial(append_line, tmp_path / "log"), {})
    log.add("steady", 0, record(0.0, 0.5), RECEIVES)
    log.interrupt()  # an evaluation of one second
    at(meter, gpu, 0.5, 1.5)
    log.add("steady", 1, record(1.5, 0.5), RECEIVES)
    at(meter, gpu, 2.0, 2.1)
    log.close()
    assert [w["duration_s"] for w in read(tmp_path / "log")] == pytest.approx([0.5, 0.5])
    meter.close()


def test_a_bill_begins_with_the_step_not_with_its_first_unit(gpu, meter):
    log = EnergyLog(meter, None, {})
    at(meter, gpu, *np.arange(0.0, 6.0, 0.1))
    assert log.add("warmup", 0, record(1.0, 0.5), RECEIVES, begun_s=0.75) == 0.75
    log.interrupt()
    assert log.add("warmup", 1, record(3.0, 0.5), RECEIVES, begun_s=3.25) == 3.0


def test_failing_counter_stops_the_log_and_not_training(gpu, tmp_path, caplog):
    meter = EnergyMeter(gpu, poll_s=3600)
    log = EnergyLog(meter, partial(append_line, tmp_path / "log"), {})
    for iteration in range(5):
        at(meter, gpu, *np.arange(iteration, iteration + 1.05, 0.1))
        log.add("steady", iteration, record(iteration * 1.0, 1.0), RECEIVES)
    gpu.error = GpuError("the driver is gone")
    meter.catch_up()
    for iteration in range(5, 10):
        log.add("steady", iteration, record(iteration * 1.0, 1.0), RECEIVES)
    log.close()
    meter.close()
    windows = read(tmp_path / "log")
    assert windows[-1]["last_iteration"] == 4  # what the counter had passed
    assert sum(w["energy_j"] for w in windows) == pytest.approx(500)
    assert caplog.text.count("the driver is gone") == 1


def test_log_without_a_file_still_counts(gpu):
    log = run_log(gpu, None, [("steady", 0.5)] * 4)
    assert log.totals["steady"].energy_j == pytest.approx(200)


def test_time_is_shared_out_between_units_receives_and_the_rest(gpu, tmp_path):
    run_log(gpu, tmp_path / "log", [("steady", 0.5)] * 6, gap_s=0.1)
    windows = read(tmp_path / "log")
    assert sum(w["compute_s"] for w in windows) == pytest.approx(6 * 0.25)
    # The first unit of each iteration receives nothing: what it waits for is not a neighbour.
    assert sum(w["blocking_s"] for w in windows) == pytest.approx(6 * 0.05)
    assert windows[0] == {
        "format": "envpipe-energy/1",
        "rank": 3,
        "phase": "steady",
        "first_iteration": 0,
        "last_iteration": 1,
        "begin_s": 0.0,
        "duration_s": pytest.approx(1.1),
        "energy_j": pytest.approx(110),
        "energy_uncertainty_j": pytest.approx(0.001),
        "compute_s": pytest.approx(0.5),
        "blocking_s": pytest.approx(0.1),
        "idle_s": pytest.approx(0.5),
    }
    for window in windows:
        parts_s = window["compute_s"] + window["blocking_s"] + window["idle_s"]
        assert parts_s == pytest.approx(window["duration_s"])
        assert window["format"] == "envpipe-energy/1"
        assert 0 < window["energy_uncertainty_j"] < 0.1  # power is constant


def stall(gpu: FakeGpu, monkeypatch) -> None:
    reading = gpu.read_energy()
    monkeypatch.setattr(gpu, "read_energy", lambda: reading)


def test_a_window_grows_while_the_counter_stands_still(gpu, tmp_path, monkeypatch, caplog):
    meter = EnergyMeter(gpu, poll_s=3600)
    log = EnergyLog(meter, partial(append_line, tmp_path / "log"), {})
    for iteration in range(40):
        if iteration in (10, 28):
            stall(gpu, monkeypatch)
        if iteration in (20, 38):
            monkeypatch.undo()
        begin_s = 0.5 * iteration
        at(meter, gpu, *np.arange(begin_s, begin_s + 0.5, 0.05), begin_s + 0.5)
        log.add("steady", iteration, record(begin_s, 0.5), RECEIVES)
    log.close()
    meter.close()
    windows = read(tmp_path / "log")
    iterations = [i for w in windows for i in range(w["first_iteration"], w["last_iteration"] + 1)]
    assert iterations == list(range(40))  # the counter had counted on: nothing is lost
    assert sum(w["energy_j"] for w in windows) == pytest.approx(2000)
    assert max(w["duration_s"] for w in windows) > 5
    assert caplog.text.count("no refresh of the counter since") == 2  # once each time


def test_a_counter_that_never_comes_back_ends_the_log_at_its_last_refresh(
    gpu, tmp_path, monkeypatch
):
    meter = EnergyMeter(gpu, poll_s=3600)
    log = EnergyLog(meter, partial(append_line, tmp_path / "log"), {})
    for iteration in range(40):
        if iteration == 13:
            stall(gpu, monkeypatch)
        begin_s = 0.5 * iteration
        at(meter, gpu, *np.arange(begin_s, begin_s + 0.5, 0.05), begin_s + 0.5)
        log.add("steady" if iteration < 30 else "other", iteration, record(begin_s, 0.5), RECEIVES)
    log.close()
    meter.close()
    windows = read(tmp_path / "log")
    assert windows[-1]["last_iteration"] == 12
    assert sum(w["energy_j"] for w in windows) == pytest.approx(650)
    assert log.totals.keys() == {"steady"}
    assert log.totals["steady"].iterations == 13


def test_windows_that_wait_in_vain_are_given_up_one_by_one(gpu, meter, monkeypatch, caplog):
    monkeypatch.setattr(energy_log, "_MOST_WAITING", 2)
    log = EnergyLog(meter, None, {})
    at(meter, gpu, *np.arange(0.0, 1.05, 0.1))
    stall(gpu, monkeypatch)
    for iteration in range(5):  # a phase each: four are waiting before the last is counted
        log.add(f"phase {iteration}", iteration, record(iteration + 2.0, 1.0), RECEIVES)
    log.add("phase 5", 5, record(7.0, 1.0), RECEIVES)
    monkeypatch.undo()
    at(meter, gpu, *np.arange(1.1, 8.15, 0.1))
    log.close()
    # The counter had counted on, for those that nobody had given up.
    assert list(log.totals) == ["phase 2", "phase 3", "phase 4", "phase 5"]
    assert [total.energy_j for total in log.totals.values()] == pytest.approx([100] * 4)
    assert caplog.text.count("has a gap") == 1


def test_what_lies_between_phases_and_what_the_framework_runs(gpu, tmp_path):
    gpu.refresh_s, gpu.counter_j = 0.125, lambda time_s: 128 * time_s  # no rounding in these
    meter = EnergyMeter(gpu, poll_s=3600)
    at(meter, gpu, *np.arange(0.0, 3.51, 0.125))
    log = EnergyLog(meter, partial(append_line, tmp_path / "log"), {"rank": 3})
    assert log.add("warm-up", 7, record(0.5, 0.5), RECEIVES, begun_s=0.25) == 0.25
    log.end_step(1.0)  # the optimizer took no time
    assert log.add_between_phases(8, 1.25, 1.5) == 1.0
    assert log.add("steady", 8, record(1.75, 0.5), RECEIVES) == 1.5
    log.end_step(2.0)  # that was of an earlier one
    assert log.add_step_of_framework(9, 2.5, 3.0) == 2.5
    assert log.add_step_of_framework(6, 3.25, 3.5) == 3.0  # a framework may count anew
    assert log.add("steady", 10, record(3.75, 0.5), RECEIVES) == 3.5
    gpu.now_s = 5.0
    log.close()  # looks once more at the counter
    meter.close()

    def line(phase, first, last, begin_s, duration_s, compute_s=0.0, blocking_s=0.0):
        return {
            "format": "envpipe-energy/1",
            "rank": 3,
            "phase": phase,
            "first_iteration": first,
            "last_iteration": last,
            "begin_s": begin_s,
            "duration_s": duration_s,
            "energy_j": 128 * duration_s,
            "energy_uncertainty_j": 0.001,
            "compute_s": pytest.approx(compute_s),
            "blocking_s": pytest.approx(blocking_s),
            "idle_s": pytest.approx(duration_s - compute_s - blocking_s),
        }

    assert read(tmp_path / "log") == [
        line("warm-up", 7, 7, 0.25, 0.75, 0.25, 0.05),
        line("plan", 8, 8, 1.0, 0.5),
        line("steady", 8, 8, 1.5, 0.75, 0.25, 0.05),
        line("framework", 6, 9, 2.5, 1.0),
        line("steady", 10, 10, 3.5, 0.75, 0.25, 0.05),
    ]
    approx = pytest.approx
    assert log.totals == {
        "warm-up": PhaseTotals(96.0, 0.001, 0.75, approx(0.25), approx(0.05), 1),
        "plan": PhaseTotals(64.0, 0.001, 0.5, 0.0, 0.0, 0),
        "steady": PhaseTotals(192.0, approx(0.001 * 2**0.5), 1.5, approx(0.5), approx(0.1), 2),
        "framework": PhaseTotals(128.0, 0.001, 1.0, 0.0, 0.0, 2),
    }


def test_a_counter_that_goes_back_costs_one_window(gpu, tmp_path, caplog):
    gpu.counter_j = lambda time_s: 100 * time_s if time_s < 10.2 else 100 * (time_s - 10.2)
    log = run_log(gpu, tmp_path / "log", [("steady", 0.5)] * 40)
    windows = read(tmp_path / "log")
    assert all(w["energy_j"] == pytest.approx(100 * w["duration_s"]) for w in windows)
    assert 20 - sum(w["duration_s"] for w in windows) == pytest.approx(1.0, abs=0.6)
    assert windows[-1]["last_iteration"] == 39
    assert log.totals["steady"].energy_j == pytest.approx(sum(w["energy_j"] for w in windows))
    assert caplog.text.count("went back") == 1


def test_a_full_disk_ends_the_log_and_not_training(gpu, tmp_path, caplog):
    """A device that is always full: it takes the file's open, and no byte."""
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    log = run_log(gpu, Path("/dev/full"), [("steady", 0.5)] * 20)
    assert log.totals["steady"].energy_j == pytest.approx(1000)  # counted to the end
    assert caplog.text.count("The energy log ends, training goes on") == 1
    assert "No space left on device: '/dev/full'" in caplog.text


def _train_with_room_for(path: Path, most_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))
    log = run_log(FakeGpu(), path, [("steady", 0.5)] * 40)
    assert log.totals["steady"].energy_j == pytest.approx(2000)


@pytest.mark.parametrize("most_bytes", [0, 100, 1000, 1500])
def test_what_was_flushed_before_the_disk_was_full_stays_readable(tmp_path, most_bytes):
    path = tmp_path / "log"
    process = mp.get_context("fork").Process(target=_train_with_room_for, args=(path, most_bytes))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert path.stat().st_size <= most_bytes
    whole = path.read_bytes().split(b"\n")[:-1]
    assert len(whole) == most_bytes // 300  # a line takes that much
    if whole:
        logs = read_energy_logs([path])
        assert len(logs.windows) == len(whole)
        assert len(logs.unreadable) <= 1  # the line that did not fit


def _write_forever(path: Path, rank: int) -> None:
    while True:
        append_line(path, {"rank": rank, "padding": "x" * 5000})


def _whole(line: str) -> dict[str, object] | None:
    try:
        return json.loads(line)
    except ValueError:
        return None


def test_file_is_usable_after_its_writers_were_killed(tmp_path):
    path = tmp_path / "log"
    context = mp.get_context("fork")
    writers = [context.Process(target=_write_forever, args=(path, rank)) for rank in range(2)]
    for writer in writers:
        writer.start()
    ready = [b'"rank": %d' % rank for rank in range(2)]  # a busy machine may start one late
    while not path.exists() or not all(mark in path.read_bytes() for mark in ready):
        writers[0].join(0.005)
        assert writers[0].is_alive()
    while path.stat().st_size < 200_000:
        writers[0].join(0.005)
    for writer in writers:
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
    append_line(path, {"rank": 2})
    lines = [line for line in path.read_text().splitlines() if line]
    whole = [entry for entry in map(_whole, lines) if entry]
    assert len(whole) >= len(lines) - 2  # each writer may have been in the middle of one
    assert {line["rank"] for line in whole} == {0, 1, 2}


def test_line_that_was_joined_to_a_torn_one_is_written_again(tmp_path, monkeypatch):
    """The other writer is killed between this one's look at the file and its write."""
    path = tmp_path / "log"
    append_line(path, {"rank": 0})
    write, torn = os.write, [b'{"rank": 1, "ener']

    def write_after_a_torn_one(descriptor: int, data: bytes) -> int:
        if torn:
            write(descriptor, torn.pop())
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", write_after_a_torn_one)
    append_line(path, {"rank": 2})
    first, joined, last = path.read_text().splitlines()
    assert (first, last) == ('{"rank": 0}', '{"rank": 2}')
    assert joined == '{"rank": 1, "ener{"rank": 2}'


def test_line_that_a_killed_writer_left_spoils_no_other(tmp_path):
    path = tmp_path / "log"
    append_line(path, {"rank": 0})
    with path.open("a") as file:
        file.write('{"rank": 1, "ener')
    for rank in (2, 3):
        append_line(path, {"rank": rank})
    assert path.read_text().splitlines() == [
        '{"rank": 0}',
        '{"rank": 1, "ener',
        '{"rank": 2}',
        '{"rank": 3}',
    ]


def test_a_line_that_lacks_its_end_alone_is_written(tmp_path, monkeypatch):
    """The disk was full by one byte. An error would have its energy in the next line, too."""
    path = tmp_path / "log"
    write = os.write
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:-1]))
        append_line(path, {"energy_j": 100.0, "duration_s": 1.0})
        full.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:-2]))
        with pytest.raises(OSError, match="No space"):
            append_line(path, {"energy_j": 150.0, "duration_s": 1.5})
    append_line(path, {"energy_j": 150.0, "duration_s": 1.5})
    logs = read_energy_logs([path])
    assert [window.energy_j for window in logs.windows] == [100.0, 150.0]
    assert logs.unreadable == (f"{path}:2",)


# Split ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("forward_late_s", "backward_late_s"), [(0, 0), (0.01, 0.01), (0.004, 0.015)]
)
def test_split_finds_the_energies_behind_late_clocks(forward_late_s, backward_late_s):
    """Units that start at the clock of the unit before them for some milliseconds."""
    clocks = [1400, 1300, 1200, 1100, 1000, 900]

    def truth(kind: Kind, clock: int) -> tuple[float, float]:
        memory, power_w = (0.1, 300) if kind is Kind.FORWARD else (0.3, 300)
        time_s = (0.06 if kind is Kind.FORWARD else 0.11) * (memory + (1 - memory) * 1400 / clock)
        return time_s, time_s * (60 + (power_w - 60) * (clock / 1400) ** 2.2)

    def mixed(kind: Kind, early: int, late: int, late_s: float) -> tuple[float, float]:
        """A unit whose first `late_s` run at the clock `early`, and the rest at `late`."""
        early_time_s, early_j = truth(kind, early)
        late_time_s, late_j = truth(kind, late)
        share = late_s / early_time_s
        return late_s + (1 - share) * late_time_s, share * early_j + (1 - share) * late_j

    together, apart = [], []
    for clock in clocks:
        forward_s, forward_j = truth(Kind.FORWARD, clock)
        backward_s, backward_j = truth(Kind.BACKWARD, clock)
        together.append(Measured(forward_s, backward_s, forward_j + backward_j))
        if clock != clocks[0]:
            forward_s, forward_j = mixed(Kind.FORWARD, clocks[0], clock, forward_late_s)
            backward_s, backward_j = mixed(Kind.BACKWARD, clock, clocks[0], backward_late_s)
            apart.append(Measured(forward_s, backward_s, forward_j + backward_j))
    split = split_energies(clocks, together, apart)
    assert split.told_apart
    assert split.late_s == pytest.approx(max(forward_late_s, backward_late_s), rel=0.01, abs=1e-9)
    for kind in Kind:
        for row in split.rows[kind]:
            time_s, energy_j = truth(kind, row.frequency_mhz)
            assert row.time_s == pytest.approx(time_s)
            assert row.energy_j == pytest.approx(energy_j, rel=0.01)


@pytest.mark.parametrize(
    "apart",
    [
        Measured(0.13, 0.2, 5.0),  # absurd: less than a meter could say
        Measured(0.13, 0.2, 90.0),  # more than both together
        Measured(0.13, 0.2, 42.0, 4.0),  # 2 J of a forward, known to 5
        Measured(0.11, 0.2, 55.0),  # most of each forward still ran at the highest clock
        Measured(0.13, 0.25, 55.0),  # most of each backward ran at the forward's
    ],
)
def test_energies_that_are_not_told_apart_are_shared_by_time(apart):
    clocks = [1400, 1000]
    together = [Measured(0.1, 0.2, 60.0, 3.0), Measured(0.13, 0.26, 50.0)]
    split = split_energies(clocks, together, [apart])
    assert not split.told_apart
    for index, pair in enumerate(together):
        forward, backward = (split.rows[kind][index] for kind in Kind)
        assert forward.energy_j == pytest.approx(pair.pair_j / 3)
        assert backward.energy_j == pytest.approx(pair.pair_j * 2 / 3)
        assert forward.energy_uncertainty_j == pytest.approx(pair.pair_uncertainty_j / 3)


def test_split_carries_uncertainty_to_each_kind():
    """Each of the three energies that a row stands on moves it; together, by its uncertainty."""
    clocks = [1400, 1200, 1000]
    together = [
        Measured(0.10, 0.20, 60.0, 0.3),
        Measured(0.117, 0.233, 54.0, 0.2),
        Measured(0.14, 0.28, 51.0, 0.25),
    ]
    apart = [Measured(0.116, 0.203, 57.8, 0.15), Measured(0.138, 0.206, 56.9, 0.35)]
    split = split_energies(clocks, together, apart)
    assert split.told_apart
    moved = {kind: np.zeros((5, 3)) for kind in Kind}
    for index, pair in enumerate([*together, *apart]):
        pairs = [*together, *apart]
        pairs[index] = replace(pair, pair_j=pair.pair_j + pair.pair_uncertainty_j)
        other = split_energies(clocks, pairs[:3], pairs[3:])
        for kind, rows in split.rows.items():
            moved[kind][index] = [
                b.energy_j - a.energy_j for a, b in zip(rows, other.rows[kind], strict=True)
            ]
    for kind, rows in split.rows.items():
        assert [row.frequency_mhz for row in rows] == clocks
        stated_j = [row.energy_uncertainty_j for row in rows]
        assert stated_j == pytest.approx(np.linalg.norm(moved[kind], axis=0))
        assert min(stated_j) > 0.05


def test_a_split_without_lower_clocks_or_with_early_ones():
    alone = split_energies([1400], [Measured(0.1, 0.3, 60.0)], [])
    assert (alone.told_apart, alone.late_s) == (True, 0.0)
    assert [alone.rows[kind][0].energy_j for kind in Kind] == pytest.approx([15, 45])
    # Shorter than at its own clock: noise, since no unit runs at a clock before it was asked for.
    together = [Measured(0.1, 0.2, 60.0), Measured(0.13, 0.26, 50.0)]
    early = split_energies([1400, 1000], together, [Measured(0.131, 0.199, 55.0)])
    assert (early.told_apart, early.late_s) == (True, 0.0)
    assert early.rows[Kind.FORWARD][1].energy_j == pytest.approx(20 - 5)


@pytest.mark.parametrize("duration_s", [0.11, 0.3, 1.0])
def test_error_of_a_sum_from_its_parts(duration_s):
    """Whatever the length of the iterations, the error is that of the sum."""
    rng = np.random.default_rng(4)
    count = 24
    errors_j = [
        error_of_sum(rng.normal(50, 2, count).tolist(), [duration_s] * count, block_s=0.5)
        for _ in range(500)
    ]
    assert np.sqrt(np.mean(np.square(errors_j))) == pytest.approx(2 * np.sqrt(count), rel=0.1)


def test_what_the_meter_puts_into_the_next_iteration_is_no_scatter():
    """Short iterations see the counter's steps: one has too much, the next too little."""
    swing_j = [10.0 + (1 if i % 2 else -1) * 3 for i in range(40)]
    assert error_of_sum(swing_j, [0.05] * 40, block_s=0.5) == pytest.approx(0, abs=1e-9)
    assert error_of_sum(swing_j, [0.05] * 40, block_s=0.05) > 15
    assert error_of_sum([50.0] * 3, [0.1] * 3, block_s=0.5) == 0  # one block tells nothing


def test_iterations_that_fill_no_block_count_with_the_one_before():
    # Of 0.2 s in blocks of 0.3 s: two, two, and one that is too short to stand alone.
    # 4 and 21 J, where 10 and 15 J would be the same power.
    assert error_of_sum([1.0, 3.0, 5.0, 7.0, 9.0], [0.2] * 5, block_s=0.3) == pytest.approx(12)
    assert error_of_sum([1.0, 3.0, 9.0], [0.2] * 3, block_s=0.3) == 0  # one block alone


def test_mean_without_outliers():
    assert mean_without_outliers([1.0, 1.0, 1.0, 1.0, 9.0]) == 1.0
    assert mean_without_outliers([3.0, 3.0]) == 3.0
    assert mean_without_outliers([1.0, 2.0]) == 1.5


# Threshold -----------------------------------------------------------------------------------


def test_threshold_lies_above_overhead_and_below_bubbles():
    rng = np.random.default_rng(1)
    waits_s = [
        np.concatenate([0.0005 + rng.normal(0, 5e-5, 12), 0.02 + rng.normal(0, 1e-3, 6)])
        for _ in range(10)
    ]
    threshold_s = no_bubble_threshold_s(waits_s, shortest_unit_s=0.001)
    # At most a handful of overheads, of 120, may look like bubbles.
    overheads = np.array(waits_s)[:, :12]
    assert (overheads > threshold_s).mean() < 0.05
    assert threshold_s < 0.002


def test_threshold_without_any_wait_is_a_share_of_a_unit():
    assert no_bubble_threshold_s([np.zeros(4)] * 3, shortest_unit_s=0.05) == pytest.approx(0.0005)


@pytest.mark.parametrize(
    ("label", "name"),
    [
        ("", ""),
        ("baseline", "baseline"),
        ("2026-05-04T10:11:12.345+00:00", ""),
        ("second try 2026-05-04T10:11:12.345+00:00", "second try"),
    ],
)
def test_all_starts_of_a_run_have_its_name(label, name):
    assert name_of_run(label) == name
