"""What is told of a bill while it grows, and that nobody waits for its readers."""

import errno
import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from energy_lines import parsed, window
from locked_file import locked_file

from envpipe_megatron import console
from envpipe_megatron.formats.bill import Bill
from envpipe_megatron.launch import bill as bill_report
from envpipe_megatron.launch.bill import BillReport, Tariff

LONG_S = 120.0


@pytest.fixture
def bill() -> Bill:
    return Bill(parsed([window()]))


def written(folder: Path) -> Any:
    return json.loads((folder / "bill.json").read_text())


def test_a_bill_that_grows_and_ends(tmp_path, bill, capfd, caplog):
    for node in ("n2", "n1", "n0"):
        (tmp_path / f"energy-{node}.jsonl").touch()
    report = BillReport(tmp_path, Tariff(price_per_kwh=0.2), 1)
    report.look(bill)
    assert not written(tmp_path)["complete"], "the job goes on"
    report.end(bill)
    report.show()
    out, err = capfd.readouterr()
    line = "[envpipe] 1 iterations: 100 J in all on 1 GPUs, 50.0 W each\n"
    assert err == f"{line}[envpipe] the bill is in {tmp_path}/bill.json\n"
    assert "By node and GPU" in out
    assert "; cost 5.556e-06 at 0.2 a kWh; measured" in out
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}/energy-{node}.jsonl is not in this bill; `envpipe energy sum` adds it"
        for node in ("n1", "n2")
    ]
    last = written(tmp_path)
    assert last["complete"]
    assert last["job"]["cost"] == pytest.approx(0.2 * bill.total().energy_j / 3.6e6)


def test_of_two_live_jobs_with_one_folder_each_has_its_bill(tmp_path, bill, capfd, caplog):
    """The second one's is under its node's name, even if the first job has ended by then."""
    report = BillReport(tmp_path, Tariff(), 1, "n/1.a")
    with locked_file(tmp_path / ".bill.lock"):
        report.look(bill)
    (tmp_path / "bill.json").write_text("the first job's")
    report.end(bill)
    report.show()
    names = [".bill.lock", "bill-n_1.a.csv", "bill-n_1.a.json", "bill.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert (tmp_path / "bill.json").read_text() == "the first job's"
    assert caplog.text.count(f"has its bill in {tmp_path}: this job's is bill-n_1.a.json") == 1
    assert f"{tmp_path}/bill-n_1.a.json\n" in capfd.readouterr().err


def test_torn_lines_are_told_of_also_where_no_file_can_be_written(tmp_path, bill, caplog, capfd):
    (tmp_path / "bill.json").mkdir()
    bill.unreadable = 2
    report = BillReport(tmp_path, Tariff())
    report.end(bill)
    report.show()
    assert "2 torn or foreign lines" in caplog.text
    assert "bill.json is not written" in caplog.text
    out, err = capfd.readouterr()
    assert "INCOMPLETE: 2 lines cannot be read" in out
    assert "the bill is in" not in err


def test_nothing_is_said_where_nobody_listens(monkeypatch):
    def echo(*arguments: object, **options: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(console.click, "echo", echo)
    console.say_as_launcher("the job has ended")


class Live:
    """A bill that grows, and the lines that were told of it."""

    def __init__(self, interval: int) -> None:
        self.bill = Bill()
        self.told: list[str] = []
        self._report = BillReport(Path("nowhere"), Tariff(), interval)
        self._report._write = lambda path, facts: None  # type: ignore[method-assign]

    @property
    def iterations(self) -> list[int]:
        return [int(line.split(" iterations")[0]) for line in self.told]

    def add(self, *entries) -> None:
        for line in parsed(entries):
            self.bill.add(line)
        with patch.object(bill_report, "say_as_launcher", self.told.append):
            self._report.look(self.bill)


def test_a_line_each_so_many_iterations():
    live = Live(5)
    for iteration in range(23):
        live.add(window(0, iteration))
        live.add()  # a look at what has not changed
        live.add(window(1, iteration, 50.0))
    assert live.iterations == [5, 10, 15, 20]
    assert live.told[1] == "10 iterations: 1450 J in all on 2 GPUs, 38.2 W each"
    long = Live(10)
    for first in range(0, 100, 25):
        long.add(window(0, first, 2500.0, last_iteration=first + 24))
    assert long.iterations == [25, 50, 75, 100]
    never = Live(0)
    never.add(window())
    assert never.told == []


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
    assert "baseline" not in live.told[0]
    said = "; against the job's own baseline 20.00 % less time, 20.00 % less energy"
    assert live.told[1].endswith(said)
