"""The ablation: one ingredient is switched and nothing else, and claims say what the rows say."""

import csv
import json
from dataclasses import replace

import pytest
from click.testing import CliRunner
from presets import preset_profile

from benchmarks import outputs
from benchmarks.ablation import ablation as command
from benchmarks.ablation.findings import ablation_claims
from benchmarks.ablation.rows import Ablation, Checked, Start, ablate
from benchmarks.outputs import read_claims
from benchmarks.planner.workloads import Workload
from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.core.plan import Cost

pytestmark = pytest.mark.xdist_group("ablation")  # its rows are made once

STAGES, MICROBATCHES = 3, 5
PROFILE = preset_profile(
    "a100-sxm", STAGES, {Kind.FORWARD: 0.05, Kind.BACKWARD: 0.1}, (1305, 1200, 1095, 990, 885)
)
WORKLOAD = Workload("made-up", "model", "GPU", True, PROFILE, MICROBATCHES, 80.0)


@pytest.fixture(scope="module")
def rows():
    return ablate(WORKLOAD)


def of(rows, ablation, start=Start.FULL):
    return {row.setting: row for row in rows if (row.ablation, row.start) == (ablation, start)}


def test_one_ingredient_is_switched_and_the_others_stay(rows):
    full = of(rows, Ablation.ORDER)["auto"].plan
    for ablation in (Ablation.POLICY, Ablation.DWELL, Ablation.CHANGE, Ablation.WAITING):
        for row in of(rows, ablation).values():
            assert row.plan.schedule == full.schedule
    for ablation in (Ablation.ORDER, Ablation.POLICY, Ablation.MEMORY, Ablation.DWELL):
        for row in of(rows, ablation).values():
            assert row.plan.conditions == full.conditions
    for row in of(rows, Ablation.POLICY, Start.BASELINE).values():
        assert not any(row.plan.schedule.extra_forwards)
    highest = full.baseline.frequency_mhz.max()
    for row in of(rows, Ablation.ORDER, Start.BASELINE).values():
        assert (row.plan.frequency_mhz == highest).all()


def test_claims_follow_the_rows(rows):
    def verdict(changed):
        (claim,) = (c for c in ablation_claims(changed, "b") if "less than 1 %" in c.paper)
        return claim.agrees

    assert verdict(rows) is True
    slow = [
        replace(row, plan=of(rows, Ablation.POLICY)["uniform"].plan)
        if (row.ablation, row.setting) == (Ablation.POLICY, "envelope, balanced")
        else row
        for row in rows
    ]
    assert verdict(slow) is False


def test_without_measured_profiles_a_preset_stands_in(rows, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(outputs, "PERSEUS_DATA", tmp_path / "nowhere")
    monkeypatch.setattr(command, "ablate", lambda workload: asked.append(workload) or rows)
    run = Checked("a plan", Cost(1.01, 99.0), Cost(1.0, 100.0))
    monkeypatch.setattr(command, "_checked", lambda console: [run])
    result = CliRunner().invoke(command.main, ["--output", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert [workload.key for workload in asked] == ["a100-sxm"]
    with (tmp_path / "ablation.csv").open(newline="") as file:
        written = list(csv.DictReader(file))
    claims = read_claims(tmp_path)
    assert all("emulated" in claim.basis and claim.figure == "ablation" for claim in claims)
    assert json.loads((tmp_path / "claims.json").read_text())[0]["command"].startswith("python ")
    assert "1.00 % in time and 1.00 % in energy" in claims[-1].claim
    assert len(written) == len(rows)
