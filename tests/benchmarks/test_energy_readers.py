"""The benchmark of readers beside each other: as many as asked see refreshes."""

import csv

import pytest
from click.testing import CliRunner

pytest.importorskip("torch")
from benchmarks.gpu import energy_readers


def test_each_number_of_readers_is_measured_twice(tmp_path):
    options = ["--readers", "0", "--readers", "2", "--seconds", "0.3", "--output", str(tmp_path)]
    ran = CliRunner().invoke(energy_readers.main, options)
    assert ran.exit_code == 0, ran.output
    rows = list(csv.DictReader((tmp_path / "energy_readers.csv").open()))
    assert [row["readers"] for row in rows] == ["0", "2", "2", "0"]
    refreshes = [float(row["refreshes_a_second"]) for row in rows]
    assert refreshes[0] == refreshes[3] == 0  # the others saw one to begin with, or it would fail
    assert all(float(row["call_median_ms"]) > 0 for row in rows)
