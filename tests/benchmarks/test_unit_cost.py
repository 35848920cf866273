"""The benchmark of a unit's cost: every way runs, and only requests reach what sets clocks."""

from itertools import pairwise

import pytest
from click.testing import CliRunner

pytest.importorskip("torch")
from benchmarks.evidence import read_rows
from benchmarks.gpu import unit_cost
from benchmarks.outputs import ROWS_FILE
from envpipe_megatron.runtime.clocks.rank_clock import RankClock


def test_each_way_is_compared_with_units_alone(tmp_path, monkeypatch):
    asked, request = [], RankClock.request

    def noting(self, frequency_mhz, later):
        asked.append(frequency_mhz)
        request(self, frequency_mhz, later)

    monkeypatch.setattr(RankClock, "request", noting)
    monkeypatch.setattr(unit_cost, "UNITS", 8)
    monkeypatch.setattr(unit_cost, "_COUNTED_TURNS", 2)
    options = ["--rounds", "2", "--turn-iterations", "1", "--output", str(tmp_path)]
    ran = CliRunner().invoke(unit_cost.main, options)
    assert ran.exit_code == 0, ran.output
    rows = read_rows(tmp_path / ROWS_FILE)
    ways = [tuple(row.setting.values()) for row in rows]
    assert len(set(ways)) == len(ways) == 3 * 2 * (len(unit_cost.MODES) - 1)
    assert all(row.measured["alone_ms"].value > 0 for row in rows)
    assert all(row.measured["calls_us"].value > 0 for row in rows)
    # Of each kind of units, some ways request, in a turn to begin with and in two that count; turns
    # in which the counter is read are longer.
    counted = len(unit_cost.COUNTED) * unit_cost._COUNTED_TURNS
    assert len(asked) == 3 * 2 * (1 + counted) * 3 * unit_cost.UNITS
    assert all(one != following for one, following in pairwise(asked))
