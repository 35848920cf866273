"""Rows of modelled energy at equal time, and of searches at their largest."""

from pathlib import Path

import pytest
from on_request import on_request
from whole_layers import whole_layers

from benchmarks.search import energy, sailor, scale, searches
from benchmarks.search.aceso_runs import ARCHIVE, Setting, unpack
from envpipe_megatron.gpu.presets import load_preset
from envpipe_megatron.policies.objective import Goal
from envpipe_megatron.search.candidates import Candidate
from envpipe_megatron.search.configuration import Job
from envpipe_megatron.search.space import MegatronSpace, Space

WAIT_W = 80.0


@pytest.fixture(scope="module")
def candidate():
    """Stages of a small model with joules, uneven as random layers are."""
    profile, job = whole_layers(3, clocks=4), Job(4, 4, 16)
    space = MegatronSpace(profile, job, Space())
    cut = space.best_cut(next(shape for shape in space.shapes if shape.num_stages > 1))
    assert cut is not None
    return Candidate(cut.configuration, profile, job)


def test_a_stretched_plan_takes_no_longer_and_less(candidate):
    time_s = candidate.iteration_time_s
    plan, later = (energy.stretched(candidate, WAIT_W, x * time_s) for x in (1.0, 1.2))
    assert plan.cost.iteration_time_s <= time_s * (1 + 1e-9)
    assert plan.cost.energy_j <= plan.baseline.cost.energy_j
    assert time_s < later.cost.iteration_time_s <= 1.2 * time_s * (1 + 1e-9)
    assert later.cost.energy_j < plan.cost.energy_j


def test_a_search_at_scale_says_what_it_found(monkeypatch):
    layers = whole_layers(3)
    monkeypatch.setattr(searches, "read_setting", lambda *_: layers)
    monkeypatch.setattr(searches, "fold_blocks", lambda profile: profile)
    setting = Setting("small", "", "gpt", "", 4, 2, 8)
    found = searches.search_at_scale(Path(), setting, setting.job, Goal.TIME)
    row = {"search": "small", "wall_s": 0.5, "at_most_s": 10.0, "within": True, "process_MiB": 9}
    assert "best PP" in scale.claim_of(row | found).claim


@on_request("FIGURES")
@pytest.mark.skipif(not ARCHIVE.exists() or not sailor.ARCHIVE.exists(), reason="no data")
def test_simulator_and_memory_agree_with_acesos(tmp_path):
    unpack(tmp_path)
    energy.unpack_neo(tmp_path)
    found = energy.find(tmp_path, energy.NEO, budget_s=20)
    row = energy.check(found, energy.NEO)
    assert row["simulated_ms"] == pytest.approx(row["Aceso_ms"], rel=0.01)
    assert row["our_MiB"] == pytest.approx(row["Aceso_MiB"], rel=1e-4)
    (full, rival, *_) = energy.rows_of(found, energy.NEO, load_preset("a100-sxm"))
    assert rival["modelled_kJ"] < full["modelled_kJ"]
