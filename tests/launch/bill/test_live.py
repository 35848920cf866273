"""The line of the bill while training goes on."""

from __future__ import annotations

from pathlib import Path

from energy_lines import job, parsed, window

from envpipe_megatron.launch.bill.bill import Bill
from envpipe_megatron.launch.bill.report import BillReport, Tariff


class Live:
    """A bill that grows, and the lines that were told of it."""

    def __init__(self, interval: int) -> None:
        self.bill = Bill()
        self.told: list[str] = []
        self._report = BillReport(Path("nowhere"), Tariff(), interval)
        self._report.tell = self._tell  # type: ignore[method-assign]

    def _tell(self, line: str, bill: Bill) -> None:
        assert bill is self.bill
        self.told.append(line)

    @property
    def iterations(self) -> list[int]:
        return [int(line.split(" iterations")[0]) for line in self.told]

    def add(self, *entries) -> None:
        for line in parsed(entries):
            self.bill.add(line)
        self._report.look(self.bill)


def test_a_line_each_so_many_iterations():
    live = Live(5)
    for iteration in range(23):
        live.add(window(0, iteration))
        live.add()  # a look at what has not changed
        live.add(window(1, iteration, 50.0))
    assert live.iterations == [5, 10, 15, 20]
    assert live.told[1] == (
        "10 iterations: 150.0 J each since the last line, 1500 J in all on 2 GPUs, 37.5 W each"
    )


def test_an_interval_within_a_window_is_not_told_twice():
    live = Live(10)
    for first in range(0, 100, 25):
        live.add(window(0, first, 2500.0, last_iteration=first + 24))
    assert live.iterations == [25, 50, 75, 100]
    assert all("100.0 J each" in line for line in live.told)


def test_gpus_that_tell_at_different_times():
    """The line waits for the last of them, and counts of each what is new."""
    live = Live(4)
    live.add(job(num_gpus=2))
    for first in range(0, 8, 4):
        for iteration in range(first, first + 4):
            live.add(window(0, iteration, 10.0))
        assert len(live.told) == first // 4
        for iteration in range(first, first + 4):
            live.add(window(1, iteration, 30.0))
        assert len(live.told) == first // 4 + 1
    assert live.iterations == [4, 8]
    assert all("40.0 J each" in line for line in live.told)


def test_a_gpu_that_is_lost_does_not_silence_the_line():
    live = Live(5)
    for iteration in range(5):
        live.add(window(0, iteration, 10.0), window(1, iteration, 30.0))
    for iteration in range(5, 40):
        live.add(window(0, iteration, 10.0))
    assert live.iterations == [5, 10, 15, 20, 25, 30]
    assert "40.0 J each" in live.told[0]
    assert all("10.0 J each" in line for line in live.told[1:])


def test_a_gpu_that_joins_late_does_not_silence_it_either():
    live = Live(5)
    for iteration in range(20):
        live.add(window(0, iteration, 10.0))
    for iteration in range(20, 40):
        live.add(window(0, iteration, 10.0), window(1, iteration, 30.0))
    assert live.iterations == [5, 10, 15, 20, 25, 30]
    assert "40.0 J each" in live.told[-1]


def test_what_lies_between_is_no_iteration_and_in_the_total():
    live = Live(2)
    live.add(window(0, 0), window(0, 0, 500.0, phase="between"))
    assert live.told == []
    live.add(window(0, 1))
    (line,) = live.told
    assert "100.0 J each" in line
    assert "700 J in all" in line


def test_a_gpu_that_has_not_trained_yet_is_not_waited_for():
    live = Live(2)
    live.add(window(1, 0, phase="between"))
    live.add(window(0, 0), window(0, 1))
    assert live.iterations == [2]


def test_the_saving_is_told_once_it_is_known():
    baseline = {
        "iterations": 5,
        "time_s": 2.5,
        "time_uncertainty_s": None,
        "energy_j": 125.0,
        "metering_uncertainty_j": None,
    }
    live = Live(1)
    live.add(window(0, 0))
    live.add(window(0, 1, baseline=baseline))
    assert "saved" not in live.told[0]
    assert live.told[1].endswith("; saved 20.00 %, slower -20.00 %")


def test_gpus_whose_lines_are_long_and_come_at_different_times():
    """As those of old jobs: no line is of some GPUs only."""
    live = Live(10)
    live.add(job(num_gpus=2))
    for first in range(0, 300, 60):
        live.add(window(0, first, 600.0, last_iteration=first + 59))
        live.add(window(1, first, 1800.0, last_iteration=first + 59))
    assert live.iterations == [60, 120, 180, 240, 300]
    assert all("40.0 J each" in line for line in live.told)
