"""Aceso's own plans, by its cost model and by our simulator; Sailor's runs."""

import pytest
from on_request import on_request

from benchmarks.evidence import read_rows
from benchmarks.outputs import ROWS_FILE
from benchmarks.search import aceso, sailor
from benchmarks.search.aceso_runs import ARCHIVE, SETTINGS, unpack


@on_request("FIGURES")
@pytest.mark.skipif(not ARCHIVE.exists(), reason=f"{ARCHIVE} is not there")
def test_simulator_and_memory_agree_with_acesos(tmp_path):
    unpack(tmp_path)
    theirs, ours = aceso.compare(tmp_path, SETTINGS["gpt-1.3B"], budget_s=20)
    assert theirs["simulated_ms"] == pytest.approx(theirs["model_ms"], rel=0.01)
    assert theirs["simulated_MiB"] == pytest.approx(theirs["model_MiB"], rel=1e-4)
    assert ours["above_percent"] <= 3


@on_request("FIGURES")
@pytest.mark.skipif(not sailor.ARCHIVE.exists(), reason=f"{sailor.ARCHIVE} is not there")
def test_sailors_runs_are_predicted(tmp_path):
    sailor.main.main(["--output", str(tmp_path)], standalone_mode=False)
    *_, mean = read_rows(tmp_path / ROWS_FILE)
    assert mean.setting["run"] == "mean of absolute errors"
    assert mean.measured["corrected"].value <= 6
