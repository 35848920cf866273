"""Rows of modelled energy at equal time, and of searches at their largest."""

import os
from pathlib import Path
from typing import Any

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
def candidate() -> Candidate:
    """Stages of a small model with joules, uneven as random layers are."""
    profile, job = whole_layers(3, clocks=4), Job(4, 4, 16)
    space = MegatronSpace(profile, job, Space())
    cut = space.best_cut(next(shape for shape in space.shapes if shape.num_stages > 1))
    assert cut is not None
    return Candidate(cut.configuration, profile, job)


def test_a_stretched_plan_takes_no_longer_and_less(candidate: Candidate) -> None:
    time_s = candidate.iteration_time_s
    plan, later = (energy.stretched(candidate, WAIT_W, x * time_s) for x in (1.0, 1.2))
    assert plan.cost.iteration_time_s <= time_s * (1 + 1e-9)
    assert plan.cost.energy_j <= plan.baseline.cost.energy_j
    assert time_s < later.cost.iteration_time_s <= 1.2 * time_s * (1 + 1e-9)
    assert later.cost.energy_j < plan.cost.energy_j


def test_busy_and_idle_seconds_are_all_of_an_iteration(candidate: Candidate) -> None:
    plan = energy.stretched(candidate, WAIT_W, candidate.iteration_time_s)
    row = energy.figures_of(plan.baseline, candidate.iteration_time_s, plan)
    gpus = sum(stage.num_gpus for stage in candidate.configuration.stages)
    gpu_s = gpus * candidate.iteration_time_s
    assert row["busy_GPU_s"] + row["idle_GPU_s"] == pytest.approx(gpu_s)
    losses = candidate.losses
    assert row["busy_GPU_s"] / gpu_s == pytest.approx(losses.computed + losses.recomputed)
    assert row["saved_percent"] <= 0 == row["late_percent"]


def _row(way: str, saved_percent: float, late_percent: float = 0.0) -> dict[str, Any]:
    return {
        "way": way,
        "saved_percent": saved_percent,
        "late_percent": late_percent,
        "modelled_by": "a40",
    }


def test_claims_say_what_is_late_and_whether_the_rival_is_beaten() -> None:
    rows = [
        _row(energy.FULL, -2),
        _row(energy.DIVIDED, 1.5),
        _row(energy.DIVIDED, 2.5),
        _row(energy.MEGATRON, -1, 1.2),
        _row(energy.SHARED, 0.5),
    ]
    claim = energy.claim_of(rows, "gpt")
    assert "1.5 to 2.5 % of modelled" in claim.claim
    assert "-1.0 % (1.2 % later), with the distributed optimizer 0.5 %;" in claim.claim
    assert claim.agrees
    assert energy.claim_of([*rows, _row(energy.DIVIDED, -0.1)], "gpt").agrees is False


def test_a_search_at_scale_says_what_it_found(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = whole_layers(3)
    monkeypatch.setattr(searches, "read_setting", lambda *_: layers)
    monkeypatch.setattr(searches, "fold_blocks", lambda profile: profile)
    setting = Setting("small", "", "gpt", "", 4, 2, 8)
    found = searches.search_at_scale(Path(), setting, setting.job, Goal.TIME)
    row = {"search": "small", "wall_s": 0.5, "at_most_s": 10.0, "within": True, "process_MiB": 9}
    assert "best PP" in scale.claim_of(row | found).claim


def test_a_call_in_a_process_of_its_own_says_what_it_took() -> None:
    ran = searches.alone(os.path.join, "a", "b")
    assert ran.found == "a/b"
    assert min(ran.wall_s, ran.cpu_s, ran.memory_mib) > 0


@on_request("FIGURES")
@pytest.mark.skipif(not ARCHIVE.exists() or not sailor.ARCHIVE.exists(), reason="no data")
def test_simulator_and_memory_agree_with_acesos(tmp_path: Path) -> None:
    unpack(tmp_path)
    energy.unpack_neo(tmp_path)
    found = energy.find(tmp_path, energy.NEO, budget_s=20)
    row = energy.check(found, energy.NEO)
    assert row["simulated_ms"] == pytest.approx(row["Aceso_ms"], rel=0.01)
    assert row["our_MiB"] == pytest.approx(row["Aceso_MiB"], rel=1e-4)
    (full, rival, *_) = energy.rows_of(found, energy.NEO, load_preset("a100-sxm"))
    assert rival["modelled_kJ"] < full["modelled_kJ"]
