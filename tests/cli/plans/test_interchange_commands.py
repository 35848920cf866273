"""`envpipe import-freqs` and `export-freqs`: a plan out, and back, with the same cost."""

import json

import pytest
from cli_helpers import plan_for, run_badly, run_well


def export(profile, plan, output):
    return run_well("export-freqs", "--profile", profile, "--plan", plan, "--output", output)


def import_options(profile, freqs, output, microbatches=8):
    return (
        "import-freqs", "--profile", profile, "--freqs", freqs, "--num-microbatches", microbatches,
        "--output", output, "--blocking-power", 80,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("schedule", "name"), [("1f1b", "1f1b"), ("gpipe", "imported"), ("envpipe", "imported")]
)
def test_a_plan_goes_out_and_comes_back(tmp_path, profile_path, schedule, name):
    first, freqs, second = (tmp_path / n for n in ("a.json", "freqs_pipeline_00012.py", "b.json"))
    plan_for(profile_path, first, "--schedule", schedule, "--policy", "envelope")
    export(profile_path, first, freqs)
    run_well(*import_options(profile_path, freqs, second))
    before, after = json.loads(first.read_text()), json.loads(second.read_text())
    assert after["schedule_name"] == name
    assert after["policy"] == "imported"
    assert len({clock for stage in after["frequency_mhz"] for clock in stage}) > 1
    for field in ("schedule", "frequency_mhz", "iteration_time_s", "energy_j", "baseline"):
        assert after[field] == before[field]


@pytest.mark.parametrize("command", ["import-freqs", "export-freqs"])
def test_inputs_are_not_overwritten(tmp_path, profile_path, command):
    plan, freqs = tmp_path / "plan.json", tmp_path / "freqs.py"
    plan_for(profile_path, plan)
    export(profile_path, plan, freqs)
    before = {path: path.read_text() for path in (profile_path, plan, freqs)}
    for output in (profile_path, freqs if command == "import-freqs" else plan):
        options = (
            import_options(profile_path, freqs, output)
            if command == "import-freqs"
            else (command, "--profile", profile_path, "--plan", plan, "--output", output)
        )
        assert "overwrite" in run_badly(*options)
    assert before == {path: path.read_text() for path in before}
