"""The energy log of one GPU: which windows it writes, also when counter or disk fail."""

import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_gpu import FakeGpu
from on_request import asked_for

from envpipe_megatron.formats.energy import SHARES, append_line, parse_window
from envpipe_megatron.formats.steps import StepEnergy, mean_steps
from envpipe_megatron.gpu.base import GpuError
from envpipe_megatron.runtime.energy import log as energy_log
from envpipe_megatron.runtime.energy.log import EnergyLog, Window
from envpipe_megatron.runtime.energy.meter import CounterAt, EnergyMeter, WindowEnergy


class Logged:
    """A GPU whose time a test sets, its meter and its log."""

    def __init__(self, path: Path) -> None:
        self.gpu = FakeGpu()
        self.meter = EnergyMeter(self.gpu, poll_s=3600)  # samples when a test asks: `at`
        self.path = path
        self.log = EnergyLog(self.meter, partial(append_line, path), {"rank": 3})

    def at(self, *times_s: float) -> None:
        """Let time come to these instants, and the meter look there."""
        for time_s in times_s:
            self.gpu.now_s = time_s
            self.meter._add(self.meter._gpu.read_energy())

    def step(self, phase: str, iteration: int, begin_s: float, duration_s: float) -> None:
        """A step in which half of the time went to units and a tenth to receives."""
        self.at(*np.arange(begin_s, begin_s + duration_s, 0.05), begin_s + duration_s)
        self.log.add(step(phase, iteration, begin_s, duration_s))

    def run(self, steps: list[tuple[str, float]], start_s: float = 0.0) -> list[dict[str, Any]]:
        """Steps of these phases and lengths one after the other; return the lines."""
        begin_s = start_s
        for iteration, (phase, duration_s) in enumerate(steps):
            self.step(phase, iteration, begin_s, duration_s)
            begin_s += duration_s
        self.at(begin_s + 0.1)
        self.log.close()
        return self.lines()

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text().split("\n")[:-1]]


def step(phase: str, iteration: int, begin_s: float, duration_s: float) -> Window:
    return Window(
        phase,
        iteration,
        iteration,
        begin_s,
        begin_s + duration_s,
        compute_s=duration_s / 2,
        blocking_s=duration_s / 10,
    )


@pytest.fixture
def logged(tmp_path) -> Iterator[Logged]:
    made = Logged(tmp_path / "log")
    yield made
    made.meter.close()


def iterations(lines: list[dict[str, Any]]) -> list[int]:
    return [i for line in lines for i in range(line["first_iteration"], line["last_iteration"] + 1)]


def stall(gpu: FakeGpu, monkeypatch) -> None:
    reading = gpu.read_energy()
    monkeypatch.setattr(gpu, "read_energy", lambda: reading)


def uneven_j(time_s: float) -> float:
    """A counter whose power is never the same."""
    return 100 * time_s + 20 * math.sin(3 * time_s)


@pytest.mark.parametrize("duration_s", [0.03, 0.27, 0.9, 2.4])
def test_windows_add_up_to_the_whole(logged, duration_s):
    """Also where steps are shorter than a refresh; later looks change no figure."""
    logged.gpu.counter_j = uneven_j
    count = int(6 / duration_s) + 1
    lines = logged.run([("steady", duration_s)] * count, start_s=0.5)
    whole_s = count * duration_s
    assert sum(line["duration_s"] for line in lines) == pytest.approx(whole_s)
    total_j = sum(line["energy_j"] for line in lines)
    truth_j = uneven_j(0.5 + whole_s) - uneven_j(0.5)
    assert total_j == pytest.approx(truth_j, rel=0.01)  # its ends lie between two refreshes
    totals = logged.log.totals["steady"]
    assert (totals.energy_j, totals.duration_s) == pytest.approx((total_j, whole_s))
    assert totals.steps == count
    for one, other in itertools.pairwise(lines):
        assert one["begin_s"] + one["duration_s"] == pytest.approx(other["begin_s"])
    corners_s = np.arange(0, 100) * 0.1
    corners_j = [uneven_j(time_s) for time_s in corners_s]
    for line in lines[:-1]:
        ends_s = [line["begin_s"], line["begin_s"] + line["duration_s"]]
        begin_j, end_j = np.interp(ends_s, corners_s, corners_j)
        assert line["energy_j"] == pytest.approx(end_j - begin_j)


def test_what_a_line_says(logged):
    lines = logged.run([("steady", 0.5)] * 6)
    assert lines[0] == {
        "format": "envpipe-energy/1",
        "rank": 3,
        "phase": "steady",
        "first_iteration": 0,
        "last_iteration": 1,
        "begin_s": 0.0,
        "duration_s": pytest.approx(1.0),
        "energy_j": pytest.approx(100),
        "energy_uncertainty_j": pytest.approx(0.001),
        "compute_s": pytest.approx(0.5),
        "blocking_s": pytest.approx(0.1),
        "idle_s": pytest.approx(0.4),
    }
    (total,) = logged.log.totals.values()
    assert (total.energy_j, total.energy_uncertainty_j) == pytest.approx((300, 0.001 * 3**0.5))
    assert (total.windows, total.steps, total.duration_s) == (3, 6, pytest.approx(3))
    assert total.shares_s == pytest.approx((1.5, 0.3, 1.2))


def test_a_window_that_waits_for_the_counter_keeps_its_baseline(logged):
    """Short steps, and a counter that is seen late: it is written when another is in force."""
    earlier, later = (StepEnergy(9, time_s, 0.01, 100 * time_s, 0.5) for time_s in (0.5, 0.6))
    logged.log.compare_with("steady", earlier)
    logged.step("steady", 0, 0.0, 1.0)
    for iteration, phase in enumerate(["steady", "baseline", "steady"], start=1):
        logged.log.add(step(phase, iteration, 0.5 + 0.5 * iteration, 0.5))
    logged.log.compare_with("steady", later)
    logged.log.add(step("steady", 4, 2.5, 0.5))
    logged.at(2.0, 3.2)
    so_far = logged.log.sums("steady")
    logged.log.close()
    lines = [line.get("baseline") for line in logged.lines()]
    assert lines == [asdict(earlier), asdict(earlier), None, asdict(later)]
    whole = logged.log.sums("steady")
    assert so_far.compared.sums == pytest.approx(whole.compared.sums), "also what is not written"
    assert mean_steps(whole.compared.sums)[1].time_s == pytest.approx((2 * 0.5 + 2 * 0.6) / 4)


def test_lines_for_an_agent_say_where_the_counter_stood(logged):
    lines: list[dict[str, Any]] = []
    log = EnergyLog(logged.meter, lines.append, {}, with_counter=True)
    logged.gpu.counter_j = lambda time_s: 7000 + 100 * time_s
    logged.at(*np.arange(0.1, 3.05, 0.1))
    log.add(step("steady", 0, 1.05, 1.5))
    log.close()
    (line,) = lines
    assert line["begin_counter"] == pytest.approx((7105, 0.0), abs=1e-9)
    assert line["end_counter"] == pytest.approx((7255, 0.0), abs=1e-9)
    assert "begin_counter" not in logged.run([("steady", 1.0)], 3.0)[0]


def test_a_framework_may_count_anew_and_skip(logged):
    """A line has as many steps as ran: those of a range are counted by its ends."""
    numbers = [9, 6, 6, 7, 10, 11]
    for place, iteration in enumerate(numbers):
        logged.step("steady", iteration, 0.3 * place, 0.3)
    logged.log.close()
    assert iterations(logged.lines()) == numbers
    assert logged.log.totals["steady"].steps == len(numbers)


# A counter that fails ------------------------------------------------------------------------


def test_a_failing_counter_stops_the_log_and_not_training(logged, caplog):
    for iteration in range(5):
        logged.step("steady", iteration, iteration, 1.0)
    logged.gpu.error = GpuError("the driver is gone")
    logged.meter.catch_up()
    for iteration in range(5, 10):
        logged.log.add(step("steady", iteration, iteration, 1.0))
    logged.log.close()
    lines = logged.lines()
    assert lines[-1]["last_iteration"] == 4  # what the counter had passed
    assert sum(line["energy_j"] for line in lines) == pytest.approx(500)
    assert caplog.text.count("the driver is gone") == 1


def test_a_window_grows_while_the_counter_stands_still(logged, monkeypatch, caplog):
    for iteration in range(40):
        if iteration in (10, 28):
            stall(logged.gpu, monkeypatch)
        if iteration in (20, 38):
            monkeypatch.undo()
        logged.step("steady", iteration, 0.5 * iteration, 0.5)
    logged.log.close()
    lines = logged.lines()
    assert iterations(lines) == list(range(40))  # the counter had counted on: nothing is lost
    assert sum(line["energy_j"] for line in lines) == pytest.approx(2000)
    assert max(line["duration_s"] for line in lines) > 5
    assert caplog.text.count("no refresh of the counter for") == 2  # once each time


def test_windows_that_wait_in_vain_are_given_up_one_by_one(logged, monkeypatch, caplog):
    monkeypatch.setattr(energy_log, "_MOST_WAITING", 2)
    logged.at(*np.arange(0.0, 1.05, 0.1))
    stall(logged.gpu, monkeypatch)
    for iteration in range(6):  # a phase each: four are waiting before the last is counted
        logged.log.add(step(f"phase {iteration}", iteration, iteration + 2.0, 1.0))
    monkeypatch.undo()
    logged.at(*np.arange(1.1, 8.15, 0.1))
    logged.log.close()
    # The counter had counted on, for those that nobody had given up.
    totals = logged.log.totals
    assert list(totals) == ["phase 3", "phase 4", "phase 5"]
    assert [total.energy_j for total in totals.values()] == pytest.approx([100] * 3)
    assert caplog.text.count("has a gap") == 1


# A job of weeks --------------------------------------------------------------------------------

#: Labels as long as they get.
LABELS = {
    "run": "2026-11-28T14:59:01.123+00:00", "node": "gpu-node-0042.cluster.local",
    "gpu": "NVIDIA H100 80GB HBM3", "gpu_uid": "GPU-5b7c2f7e-1a2b-3c4d-5e6f-778899aabbcc",
    "clock_backend": "zeusd", "rank": 337, "num_ranks": 1024, "stage": 5,
}  # fmt: skip


class Weeks:
    """A counter that is always seen, in place of a meter that looks ten times a second."""

    min_window_s, last_refresh_s, error = 1.0, math.inf, None

    def window(self, start_s: float, end_s: float) -> WindowEnergy:
        ends = (CounterAt(at_s, uneven_j(at_s), 0.1234567891234) for at_s in (start_s, end_s))
        return WindowEnergy(*ends)

    def catch_up(self) -> None:
        pass


def weeks(step_s: float, days: float, lines: list[dict[str, Any]], **how: Any) -> EnergyLog:
    """A closed loop's steps: of each 500, four run at the highest clock, between two plans."""
    log = EnergyLog(Weeks(), lines.append, LABELS, **how)  # type: ignore[arg-type]
    begin_s = 812345.123456789
    for iteration in range(int(days * 86400 / step_s)):
        place = iteration % 500
        if place == 0:
            known = StepEnergy(9, step_s + iteration / 7e9, 0.0123456789, 351.2345678, 0.61234567)
            log.compare_with("steady", known)
        if place in (496, 0) and iteration:
            log.add(Window("plan", iteration, iteration, begin_s, begin_s + 0.031, 0))
            begin_s += 0.031
        log.add(step("baseline" if place >= 496 else "steady", iteration, begin_s, step_s))
        begin_s += step_s
    log.close()
    return log


@pytest.mark.parametrize("step_s", [1.0, 8.0])
def test_three_weeks_leave_less_than_8_mb_of_a_gpu_and_lack_nothing(step_s):
    """So 256 GPUs leave less than 2 GB."""
    lines: list[dict[str, Any]] = []
    days = 21 if asked_for("LOGS") else 1.3  # a day old, it writes as seldom as it ever does
    log = weeks(step_s, days, lines)
    sizes = [len(json.dumps(line)) + 1 for line in lines]
    late = sum(size for size, line in zip(sizes, lines, strict=True) if at_s(line) > 86400)
    assert sum(sizes) + late / (days - 1) * (21 - days) < 8e6
    for phase, total in log.totals.items():
        own = [line for line in lines if line["phase"] == phase]
        added = dict(zip(SHARES, total.shares_s, strict=True))
        added |= {"energy_j": total.energy_j, "duration_s": total.duration_s}
        for name, amount in added.items():
            assert sum(line[name] for line in own) == pytest.approx(amount, rel=1e-7)
        assert sum(parse_window(line).steps for line in own) == total.steps
    assert iterations([line for line in lines if line["phase"] != "plan"]) == list(
        range(int(days * 86400 / step_s))
    )
    # Neither ten minutes nor a hundredth of what it ran is lost if the rank is killed.
    for line, after in itertools.pairwise(lines):
        assert after["begin_s"] == pytest.approx(line["begin_s"] + line["duration_s"], abs=1e-3)
        assert line["duration_s"] <= min(600, 0.01 * at_s(line)) + 1.1 * step_s


def at_s(line: dict[str, Any]) -> float:
    """The end of a line, after the job's begin."""
    return float(line["begin_s"] + line["duration_s"] - 812345.123456789)
