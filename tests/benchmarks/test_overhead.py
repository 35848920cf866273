"""The overhead: what is measured is the runtime's own, and rows and claims agree."""

from itertools import pairwise

import pytest
from click.testing import CliRunner
from on_request import on_request

pytest.importorskip("torch")
from benchmarks.evidence import read_rows
from benchmarks.outputs import ROWS_FILE, read_claims
from benchmarks.overhead import host
from benchmarks.overhead import overhead as command
from benchmarks.overhead.overhead import Measure

MEASURES = [
    Measure("training thread", "with clocks", "us a unit", 2.0, 9.0, count=100),
    Measure("iteration", "1f1b", "of megatron-core's time", 1.01, low=0.99, high=1.03, count=12),
    Measure("logs", "energy.jsonl", "bytes a rank and iteration", 400.0),
    Measure("planning", "optimal on auto", "s", 1.5),
]


def test_every_unit_asks_for_a_clock(monkeypatch):
    asked, request = [], host.RankClock.request

    def noting(self, frequency_mhz, later):
        asked.append(frequency_mhz)
        request(self, frequency_mhz, later)

    monkeypatch.setattr(host.RankClock, "request", noting)
    costs_ns = host.thread_costs_ns(0.05, clocks=True)
    assert len(costs_ns) % (2 * host.MICROBATCHES) == 0
    assert min(costs_ns) > 0
    assert len(asked) >= len(costs_ns)
    assert all(one != following for one, following in pairwise(asked))
    asked.clear()
    assert host.thread_costs_ns(0.01, clocks=False)
    assert not asked


@on_request("FIGURES")
def test_rows_and_claims_are_of_what_was_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "_measured", lambda *_: iter(reversed(MEASURES)))
    result = CliRunner().invoke(command.main, ["--output", str(tmp_path)])
    assert result.exit_code == 0, result.output
    rows = read_rows(tmp_path / ROWS_FILE)
    assert [(row.setting["part"], float(row.measured["median"].value)) for row in rows] == [
        (measure.part, measure.median) for measure in MEASURES
    ]
    assert all(row.measured["basis"].startswith("measured on") for row in rows)
    claims = read_claims(tmp_path)
    assert [claim.figure for claim in claims] == ["overhead"] * len(MEASURES)
    assert "1.010 (0.990 to 1.030)" in claims[1].claim
