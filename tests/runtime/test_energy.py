"""Meter, log and split of energies."""

from __future__ import annotations

import itertools
import json
import multiprocessing as mp
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from fake_gpu import FakeGpu

from envpipe_megatron.energy_file import append_window
from envpipe_megatron.gpu.base import GpuError
from envpipe_megatron.runtime.energy_log import EnergyLog
from envpipe_megatron.runtime.energy_meter import EnergyMeter, MeterError
from envpipe_megatron.runtime.energy_split import (
    Measured,
    mean_without_outliers,
    split_energies,
)
from envpipe_megatron.runtime.executor import StageRecord
from envpipe_megatron.runtime.reconfigurer import no_bubble_threshold_s
from envpipe_megatron.schedule import Kind


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
    meter = EnergyMeter(gpu, poll_s=3600, horizon_s=1.0)
    at(meter, gpu, *np.arange(0.1, 10.05, 0.1))
    assert len(meter._times_s) <= 21
    assert meter.energy_j(9.0, 10.0) == pytest.approx(100)
    meter.close()


def test_its_thread_sees_refreshes_by_itself(gpu):
    meter = EnergyMeter(gpu, poll_s=0.001)
    for refresh in range(1, 4):
        gpu.now_s = refresh / 10
        while meter._times_s[-1] < gpu.now_s - 1e-9:
            meter.catch_up()
    meter.close()
    assert meter._energies_j == pytest.approx([0, 10, 20, 30])


def test_failing_counter_is_a_named_error(gpu, meter):
    gpu.error = GpuError("the driver is gone")
    meter.catch_up()
    with pytest.raises(MeterError, match="the driver is gone"):
        meter.energy_j(0.0, 1.0)


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
    log = EnergyLog(meter, path, {"rank": 3})
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
    log = EnergyLog(meter, tmp_path / "log", {})
    log.add("steady", 0, record(0.0, 0.5), RECEIVES)
    log.interrupt()  # an evaluation of one second
    at(meter, gpu, 0.5, 1.5)
    log.add("steady", 1, record(1.5, 0.5), RECEIVES)
    at(meter, gpu, 2.0, 2.1)
    log.close()
    assert [w["duration_s"] for w in read(tmp_path / "log")] == pytest.approx([0.5, 0.5])
    meter.close()


def test_failing_counter_stops_the_log_and_not_training(gpu, tmp_path, caplog):
    meter = EnergyMeter(gpu, poll_s=3600)
    log = EnergyLog(meter, tmp_path / "log", {})
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


def _write_forever(path: Path, rank: int) -> None:
    while True:
        append_window(path, {"rank": rank, "padding": "x" * 5000})


def test_file_is_usable_after_its_writers_were_killed(tmp_path):
    path = tmp_path / "log"
    context = mp.get_context("fork")
    writers = [context.Process(target=_write_forever, args=(path, rank)) for rank in range(2)]
    for writer in writers:
        writer.start()
    while not path.exists() or path.stat().st_size < 200_000:
        writers[0].join(0.005)
        assert writers[0].is_alive()
    for writer in writers:
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
    append_window(path, {"rank": 2})
    lines = path.read_text().splitlines()
    whole = [json.loads(line) for line in lines if line.endswith("}")]
    assert len(whole) >= len(lines) - 2  # each writer may have been in the middle of one
    assert {line["rank"] for line in whole} == {0, 1, 2}


def test_line_that_a_killed_writer_left_spoils_no_other(tmp_path):
    path = tmp_path / "log"
    append_window(path, {"rank": 0})
    with path.open("a") as file:
        file.write('{"rank": 1, "ener')
    for rank in (2, 3):
        append_window(path, {"rank": rank})
    assert path.read_text().splitlines() == [
        '{"rank": 0}',
        '{"rank": 1, "ener',
        '{"rank": 2}',
        '{"rank": 3}',
    ]


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
    rows, change_s = split_energies(clocks, together, apart)
    assert change_s == pytest.approx(max(forward_late_s, backward_late_s), rel=0.01, abs=1e-9)
    for kind in Kind:
        for row in rows[kind]:
            time_s, energy_j = truth(kind, row.frequency_mhz)
            assert row.time_s == pytest.approx(time_s)
            assert row.energy_j == pytest.approx(energy_j, rel=0.01)


def test_split_keeps_the_sum_and_no_energy_below_zero():
    clocks = [1400, 1000]
    together = [Measured(0.1, 0.2, 60.0), Measured(0.13, 0.26, 50.0)]
    apart = [Measured(0.13, 0.2, 5.0)]  # absurd: less than a meter could say
    rows, _ = split_energies(clocks, together, apart)
    for index, pair in enumerate(together):
        energies = [rows[kind][index].energy_j for kind in Kind]
        assert sum(energies) == pytest.approx(pair.pair_j)
        assert min(energies) >= 0


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
