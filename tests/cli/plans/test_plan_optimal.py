"""`envpipe plan --policy optimal`: what the file and the table say, and what is refused."""

import json
import re

import pytest
from cli_helpers import plan_badly, plan_for, simulate_json, write_sidecar
from commands import run_well

from envpipe_megatron.core.plan import read_plan
from envpipe_megatron.core.profile import read_profile
from envpipe_megatron.core.schedule import Placement
from envpipe_megatron.policies.schedules import SCHEDULES

OPTIMAL = ("--policy", "optimal")


def plan_of(profile, output, *options, **job):
    """Return what the file has, and what was printed."""
    result = plan_for(profile, output, *OPTIMAL, *options, **job)
    return json.loads(output.read_text()), result.stdout


def row(printed, name):
    """The first number of a row of the table."""
    (line,) = [line for line in printed.splitlines() if name in line]
    return float(re.findall(r"-?\d+\.\d+", line.partition(name)[2])[0])


# Combined units need rows of their own in a profile: tests/policies/test_combined_units.py.
@pytest.mark.parametrize("schedule", [s for s in SCHEDULES if "combined" not in s and s != "ours"])
def test_every_schedule_with_its_bound_and_gap(profile_path, tmp_path, schedule):
    chunks = ("--num-chunks", 2) if schedule in ("interleaved", "zb-v") else ()
    if schedule.startswith("zb"):
        chunks += ("--split-overhead", 0.05)
    path = tmp_path / "plan.json"
    plan, printed = plan_of(profile_path, path, "--schedule", schedule, *chunks)
    baseline = plan["baseline"]
    assert plan["policy"] == "optimal"
    assert 0 < plan["energy_lower_bound_j"] <= plan["energy_j"] < baseline["energy_j"]
    assert plan["iteration_time_s"] <= baseline["iteration_time_s"] * (1 + 1e-9)
    gap = 100 * (plan["energy_j"] / plan["energy_lower_bound_j"] - 1)
    assert row(printed, "gap to the lower bound (%)") == pytest.approx(gap, abs=6e-4)
    saving = 100 * (1 - plan["energy_j"] / baseline["energy_j"])
    assert row(printed, "saving (%)") == pytest.approx(saving, abs=6e-3)
    facts = simulate_json(profile_path, path)
    assert facts["energy_j"] == plan["energy_j"]
    assert facts["policy"] == "optimal"
    assert ("No order of whole backwards can save more than" in printed) == (schedule == "auto")


def test_runnable_orders_are_those_of_training_jobs(profile_path, tmp_path):
    path = tmp_path / "plan.json"
    plan_of(
        profile_path, path, "--schedule", "auto", "--num-chunks", 2, "--runnable", microbatches=12
    )
    order = read_plan(path, read_profile(profile_path)).schedule
    assert (order.num_chunks, order.placement, order.split) == (2, Placement.LOOPED, False)
    told = plan_badly(profile_path, tmp_path, "--schedule", "1f1b", "--runnable")
    assert "--runnable goes with --schedule auto" in told


def test_memory_by_the_sidecar(profile_path, tmp_path):
    wanted = (*OPTIMAL, "--schedule", "auto", "--max-in-flight", "memory")
    message = plan_badly(profile_path, tmp_path, *wanted)
    assert "has no activation_bytes and free_bytes" in message
    assert "as a number of microbatches" in message
    write_sidecar(profile_path, activation_bytes=[10] * 4, free_bytes=[45, 20, 20, 0])
    plan, _ = plan_of(
        profile_path, tmp_path / "plan.json", "--schedule", "auto", "--max-in-flight", "memory"
    )
    assert plan["peak_in_flight"][0] == 5
    assert all(
        peak <= most for peak, most in zip(plan["peak_in_flight"], [5, 3, 3, 1], strict=True)
    )


def test_a_power_cap_of_all_windows_is_kept_and_stands_in_the_plan(profile_path, tmp_path):
    path = tmp_path / "plan.json"
    free, printed = plan_of(profile_path, path, "--schedule", "1f1b")
    mean_w = free["energy_j"] / free["iteration_time_s"]
    assert row(printed, "mean power (W)") == pytest.approx(mean_w, abs=0.06)
    capped, _ = plan_of(
        profile_path, path, "--schedule", "1f1b", "--objective", "time", "--power-cap",
        0.9 * mean_w, "--power-window", 1e6,
    )  # fmt: skip
    assert capped["energy_j"] / capped["iteration_time_s"] <= 0.9 * mean_w * (1 + 1e-6)
    assert capped["iteration_time_s"] > free["iteration_time_s"]
    assert capped["objective"]["power_window_s"] == 1e6


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--objective", "cost"), "needs a price above 0"),
        (("--objective", "time", "--power-cap", 1), "The nearest takes"),
        (("--power-cap", "nan"), "is not a number"),
        (("--power-window", 1), "go with a power cap"),
    ],
)
def test_objectives_that_cannot_be(profile_path, tmp_path, options, said):
    assert said in plan_badly(profile_path, tmp_path, *OPTIMAL, *options)


def test_help_shows_the_range_of_a_number():
    ranges = re.findall(r"\[(x>=?[^\]]*)\]", run_well("plan", "--help").stdout)
    assert {"x>0", "x>=0"} <= set(ranges)
    assert not any("." in each for each in ranges)


def test_the_saving_is_as_sure_as_the_profile(profile_path, tmp_path):
    header, *lines = profile_path.read_text().splitlines()
    path, plan = tmp_path / "known.csv", tmp_path / "plan.json"
    path.write_text(
        "\n".join([f"{header},energy_uncertainty_j", *(f"{line},0.5" for line in lines)])
    )
    _, printed = plan_of(path, plan, "--schedule", "1f1b")
    assert re.search(r"saving, 95 % \(\+-\) +│ +\d+\.\d\d ", printed)
    assert simulate_json(path, plan)["saving_uncertainty_percent"] > 0
    plan_of(profile_path, plan, "--schedule", "1f1b")
    assert simulate_json(profile_path, plan)["saving_uncertainty_percent"] is None
