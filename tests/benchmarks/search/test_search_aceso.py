"""Aceso's own plans, by its cost model and by our simulator; rows and claims of searches."""

from pathlib import Path

import pytest
from on_request import on_request
from whole_layers import whole_layers

from benchmarks.search import aceso, sailor, scale
from benchmarks.search.aceso_runs import ARCHIVE, SETTINGS, Setting, unpack
from envpipe_megatron.policies.objective import Goal


def test_a_search_at_scale_says_what_it_found(monkeypatch):
    layers = whole_layers(3)
    monkeypatch.setattr(scale, "read_setting", lambda *_: layers)
    monkeypatch.setattr(scale, "fold_blocks", lambda profile: profile)
    setting = Setting("small", "", "gpt", "", 4, 2, 8)
    found = scale.search_at_scale(Path(), setting, setting.job, Goal.TIME)
    row = {"search": "small", "wall_s": 0.5, "at_most_s": 10.0, "within": True, "process_MiB": 9}
    assert "best PP" in scale.claim_of(row | found).claim


@on_request("FIGURES")
@pytest.mark.skipif(not ARCHIVE.exists(), reason=f"{ARCHIVE} is not there")
def test_simulator_and_memory_agree_with_acesos(tmp_path):
    unpack(tmp_path)
    theirs, ours = rows = aceso.compare(tmp_path, SETTINGS["gpt-1.3B"], budget_s=20)
    assert theirs["simulated_ms"] == pytest.approx(theirs["model_ms"], rel=0.01)
    assert theirs["simulated_MiB"] == pytest.approx(theirs["model_MiB"], rel=1e-4)
    (claim,) = aceso.claims_of(rows)
    assert f"{ours['above_percent']:+.1f} %" in claim.claim


@on_request("FIGURES")
@pytest.mark.skipif(not sailor.ARCHIVE.exists(), reason=f"{sailor.ARCHIVE} is not there")
def test_sailors_runs_are_predicted(tmp_path):
    sailor.main.main(["--output", str(tmp_path)], standalone_mode=False)
    assert '"agrees": true' in (tmp_path / "claims.json").read_text()
