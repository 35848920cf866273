"""`envpipe import-freqs` and `export-freqs`: a plan out, and back, with the same cost."""

import json

import pytest
from cli_helpers import plan_for, run_well


@pytest.mark.parametrize(("schedule", "name"), [("1f1b", "1f1b"), ("envpipe", "imported")])
def test_a_plan_goes_out_and_comes_back(tmp_path, profile_path, schedule, name):
    first, freqs, second = (tmp_path / n for n in ("a.json", "freqs_pipeline_00012.py", "b.json"))
    plan_for(profile_path, first, "--schedule", schedule, "--policy", "envelope")
    run_well("export-freqs", "--profile", profile_path, "--plan", first, "--output", freqs)
    run_well(
        "import-freqs", "--profile", profile_path, "--freqs", freqs, "--num-microbatches", 8,
        "--output", second, "--blocking-power", 80,
    )  # fmt: skip
    before, after = json.loads(first.read_text()), json.loads(second.read_text())
    assert after["schedule_name"] == name
    assert after["policy"] == "imported"
    assert len({clock for stage in after["frequency_mhz"] for clock in stage}) > 1
    for field in ("schedule", "frequency_mhz", "iteration_time_s", "energy_j", "baseline"):
        assert after[field] == before[field]
