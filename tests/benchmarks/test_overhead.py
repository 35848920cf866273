"""The overhead: what is measured is the runtime's own, and rows and claims agree."""

import csv

import pytest
from click.testing import CliRunner
from on_request import on_request

pytest.importorskip("torch")
from benchmarks.outputs import read_claims
from benchmarks.overhead import measures
from benchmarks.overhead import overhead as command
from benchmarks.overhead.measures import Measure

MEASURES = [
    Measure("training thread", "with clocks", "us a unit", 2.0, 9.0, count=100),
    Measure("log line", "sums in trees, 64 ranks", "ms", 100.0, 150.0, count=20),
    Measure("controller", "training thread waits", "us after a unit's end", 90.0, 400.0, count=50),
    Measure("iteration", "1f1b", "of megatron-core's time", 1.01, low=0.99, high=1.03, count=12),
    Measure("logs", "energy.jsonl", "bytes a rank and iteration", 400.0),
    Measure("planning", "optimal on auto", "s", 1.5),
]


def test_a_machine_too_busy_to_answer_leaves_no_latency(monkeypatch):
    def answers(found):
        return lambda device, interval_s, seconds: {"trigger_us": found}

    monkeypatch.setitem(measures.THREADS, "waits", lambda: None)
    monkeypatch.setattr(measures, "measure", answers({"count": 0}))
    assert measures.measure_latency("waits", 1e-4, 1.0) is None
    some = {"median": 5.0, "p99": 7.0, "max": 9.0, "count": 3}
    monkeypatch.setattr(measures, "measure", answers(some))
    assert measures.measure_latency("waits", 1e-4, 1.0) == some


@on_request("FIGURES")
def test_rows_and_claims_are_of_what_was_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "_measured", lambda *_: iter(reversed(MEASURES)))
    result = CliRunner().invoke(command.main, ["--output", str(tmp_path)])
    assert result.exit_code == 0, result.output
    with (tmp_path / "overhead.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["part"], float(row["median"])) for row in rows] == [
        (measure.part, measure.median) for measure in MEASURES
    ]
    assert all(row["basis"].startswith("measured on") for row in rows)
    claims = read_claims(tmp_path)
    assert [claim.figure for claim in claims] == ["overhead"] * len(MEASURES)
    assert "1.010 (0.990 to 1.030)" in claims[3].claim
