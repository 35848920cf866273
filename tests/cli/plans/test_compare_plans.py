"""`envpipe compare`: plans of one job, priced by one profile under the same conditions."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cli_helpers import plan_for, rows_of, simulate_json
from commands import run_badly, run_well

from envpipe_megatron.core.plan import read_plan
from envpipe_megatron.core.profile import read_profile

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def plans(profile_path, tmp_path):
    """Plans in 1F1B, in EnvPipe's order and in Megatron's interleaved one."""
    made = {
        "a": ("--schedule", "1f1b"),
        "b": ("--schedule", "envpipe", "--policy", "envelope", "--reconfigure", "balanced"),
        "c": ("--schedule", "interleaved", "--num-chunks", 2),
    }
    for name, options in made.items():
        plan_for(profile_path, tmp_path / f"{name}.json", *options)
    return [tmp_path / f"{name}.json" for name in made]


def test_figures_are_those_of_the_evaluator(profile_path, plans):
    facts = json.loads(run_well("compare", *plans, "--json").stdout)
    assert [each["plan"] for each in facts] == list(map(str, plans))
    assert [each["schedule"] for each in facts] == ["1f1b", "envpipe", "interleaved"]
    baseline = simulate_json(profile_path, plans[0])["baseline"]
    for path, each in zip(plans, facts, strict=True):
        alone = simulate_json(profile_path, path)
        for name in ("policy", "iteration_time_s", "energy_j", "peak_in_flight"):
            assert each[name] == alone[name]
        assert each["mean_power_w"] * each["iteration_time_s"] == pytest.approx(each["energy_j"])
        # Of one baseline, the first plan's, also where a plan's own is another.
        saved = 100 * (1 - each["energy_j"] / baseline["energy_j"])
        slower = 100 * (each["iteration_time_s"] / baseline["iteration_time_s"] - 1)
        assert each["saving_percent"] == pytest.approx(saved)
        assert each["slowdown_percent"] == pytest.approx(slower, abs=1e-9)
        plan = read_plan(path, read_profile(profile_path))
        rows = plan.frequency_mhz.tolist()
        changes = [sum(a != b for a, b in zip(r, r[1:] + r[:1], strict=True)) for r in rows]
        assert each["clock_changes"] == changes
    assert facts[2]["saving_percent"] > facts[1]["saving_percent"] > 0


def test_the_table_has_a_column_for_each(monkeypatch, tmp_path, plans):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    shown = run_well("compare", "a.json", "b.json", "c.json").stdout
    assert "Against 1f1b at the highest clocks" in shown
    assert "Note" not in shown
    facts = json.loads(run_well("compare", *plans, "--json").stdout)
    rows = rows_of(shown)
    assert rows["energy (J)"] == [f"{each['energy_j']:.1f}" for each in facts]
    assert rows["order"] == ["1f1b", "envpipe", "interleaved"]
    assert all(name in shown for name in ("a.json", "b.json", "c.json"))


def test_conditions_of_the_first_are_those_of_all(profile_path, tmp_path, plans):
    other = tmp_path / "other.json"
    plan_for(profile_path, other, "--schedule", "1f1b", power=120)
    shown = run_well("compare", plans[0], other)
    assert f"Note: {other} was made for other conditions" in shown.stdout
    first, second = json.loads(run_well("compare", plans[0], other, "--json").stdout)
    clocks = [json.loads(path.read_text())["frequency_mhz"] for path in (plans[0], other)]
    assert (first["energy_j"] == second["energy_j"]) == (clocks[0] == clocks[1])
    back = json.loads(run_well("compare", other, plans[0], "--json").stdout)
    assert back[0]["energy_j"] > second["energy_j"]  # waiting is dearer


def test_a_plan_that_parks_comes_first(tmp_path):
    profile = ROOT / "configs" / "profiles" / "quickstart.csv"
    parked, plain = tmp_path / "parked.json", tmp_path / "plain.json"
    plan_for(profile, plain, "--schedule", "1f1b", microbatches=6)
    plan_for(profile, parked, "--schedule", "1f1b", "--use", "wait-power", microbatches=6)
    plan = read_plan(parked, read_profile(profile))
    long = plan.timeline.wait_s > 0.1
    replace(plan, park_mhz=np.where(long, 210, 0)).write(parked)  # jobs write such plans
    run_well("compare", parked, plain, "--profile", profile)
    said = run_badly("compare", plain, parked, "--profile", profile)
    assert f"{parked} cannot run under the conditions of {plain}: 'park_mhz'" in said


def test_what_cannot_be_compared(profile_path, tmp_path, plans):
    more = tmp_path / "more.json"
    plan_for(profile_path, more, "--schedule", "1f1b", microbatches=6)
    assert "another number of microbatches" in run_badly("compare", plans[0], more)
    moved = tmp_path / "alone"
    moved.mkdir()
    plans[0].rename(moved / "a.json")
    assert "--profile" in run_badly("compare", moved / "a.json")
    run_well("compare", moved / "a.json", "--profile", profile_path)
    more.write_text("{}")
    assert "field 'format'" in run_badly("compare", more)


def test_names_of_files_and_plans_are_shown_as_they_are(monkeypatch, profile_path, plans):
    # Rich reads tags in brackets as styles, and `:a:` as an emoji.
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(plans[0].parent)
    Path("of[").mkdir()
    for name in ("of[red]:a:.json", "of[/b].json"):
        Path(name).write_bytes(plans[0].read_bytes())
        assert name in run_well("compare", "a.json", name, "--profile", profile_path).stdout
    plan = json.loads(plans[0].read_text()) | {"policy": "of [/b]"}
    Path("a.json").write_text(json.dumps(plan))
    words = ["simulate", "--profile", profile_path, "--plan", "a.json"]
    assert "of [/b] on" in run_well(*words).stdout
