"""Frontiers, stragglers and conditions by the command."""

import csv
import json

import pytest
from cli_helpers import plan_for, write_profile, write_sidecar
from commands import run_badly, run_well


def rows(path):
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def frontier(tmp_path_factory):
    """The stored frontier, and what was printed."""
    folder = tmp_path_factory.mktemp("frontier")
    result = plan_for(
        write_profile(folder / "profile.csv"), folder / "plan.json", "--schedule", "auto",
        "--policy", "optimal", "--frontier", folder / "frontier.csv", "--frontier-points", 12,
    )  # fmt: skip
    return folder / "frontier.jsonl", result.stdout


def test_a_frontier_is_a_csv_plans_and_a_picture(frontier):
    stored, printed = frontier
    listed = rows(stored.with_suffix(".csv"))
    assert 2 < len(listed) <= 12
    assert len(stored.read_text().splitlines()) == 1 + len(listed)
    assert stored.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert f"Frontier: {len(listed)} plans" in printed
    assert "gap to the lower bound (%)" in printed
    assert "No order of whole backwards can save more than" in printed


def straggler(profile, frontier, output, *how, runs=run_well):
    return runs("straggler", "--profile", profile, "--frontier", frontier, "--output", output, *how)


def test_a_straggler_slows_the_plan_down_and_saves(frontier, profile_path, tmp_path):
    stored, _ = frontier
    baseline_s = json.loads(stored.read_text().splitlines()[0])["baseline"]["iteration_time_s"]
    energy_j = []
    for number, how in enumerate(
        [
            ("--factor", 1.0),
            ("--factor", 1.1),
            ("--time", 1.1 * baseline_s),
            ("--time", 90 * baseline_s),
        ]
    ):
        output = tmp_path / f"straggler{number}.json"
        shown = straggler(profile_path, stored, output, *how).stdout
        plan = json.loads(output.read_text())
        allowed_s = how[1] * (baseline_s if how[0] == "--factor" else 1)
        assert f"The plan takes {plan['iteration_time_s']:.4f} s, the slower" in shown
        assert f"replica {allowed_s:.4f} s" in shown
        assert plan["iteration_time_s"] <= allowed_s * (1 + 1e-9)
        energy_j.append(plan["energy_j"])
    assert energy_j[0] > energy_j[1] == energy_j[2] >= energy_j[3]


def test_a_replica_faster_than_all_plans_gets_the_fastest_and_a_note(
    frontier, profile_path, tmp_path
):
    result = straggler(profile_path, frontier[0], tmp_path / "s.json", "--time", 0.001)
    assert "no plan of the frontier is so fast" in result.stdout


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ((), "--factor or --time"),
        (("--factor", 1.1, "--time", 3.0), "--factor or --time"),
        (("--time", "nan"), "not a number"),
        (("--factor", "inf"), "not a number"),
        (("--factor", "10%"), "10 % longer is 1.1"),
        (("--time", 3800), "in s, not ms"),
    ],
)
def test_how_slow_a_straggler_is_must_be_said_once_and_as_a_number(
    frontier, profile_path, tmp_path, how, said
):
    output = tmp_path / "s.json"
    assert said in straggler(profile_path, frontier[0], output, *how, runs=run_badly)
    assert not output.exists()


def test_a_memory_frontier_says_what_each_microbatch_buys(profile_path, tmp_path):
    result = plan_for(
        profile_path, tmp_path / "plan.json", "--schedule", "auto", "--policy", "optimal",
        "--memory-frontier", tmp_path / "memory.csv",
    )  # fmt: skip
    listed = rows(tmp_path / "memory.csv")
    assert [row["max_extra_forwards"] for row in listed[:2]] == ["0", "1"]
    savings = [float(row["saving_percent"]) for row in listed]
    assert savings == sorted(savings)
    assert savings[-1] > savings[0]
    assert "peak in" in result.stdout


def test_conditions_are_options_and_stand_in_the_plan(profile_path, tmp_path):
    output = tmp_path / "plan.json"
    plan_for(profile_path, output, "--policy", "optimal")
    plain = json.loads(output.read_text())
    plan_for(
        profile_path, output, "--policy", "optimal", "--p2p-latency", "0.01", "--tail-time",
        "0.5,0.1,0.1,0.2", "--tensor-parallel", "2", "--change-time", "0.005",
        "--change-energy", "0.25",
    )  # fmt: skip
    surrounded = json.loads(output.read_text())
    assert surrounded["p2p_latency_s"] == [0.01] * 3
    assert surrounded["tail_time_s"] == [0.5, 0.1, 0.1, 0.2]
    assert surrounded["gpus_per_stage"] == [2] * 4
    assert surrounded["frequency_change_s"] == 0.005
    assert surrounded["frequency_change_j"] == 0.25
    assert surrounded["energy_j"] > 1.9 * plain["energy_j"]
    assert surrounded["iteration_time_s"] > plain["iteration_time_s"] + 0.5
    assert "gpus_per_stage" not in plain


def test_conditions_come_from_the_sidecar_when_asked_for(profile_path, tmp_path):
    known = {"tail_time_s": [0.3, 0.3, 0.3, 0.4], "p2p_latency_s": [0.01, 0.02, 0.01]}
    write_sidecar(profile_path, **known)
    output = tmp_path / "plan.json"
    plan_for(profile_path, output)
    assert "tail_time_s" not in json.loads(output.read_text())
    plan_for(profile_path, output, "--use", "tail")
    plan = json.loads(output.read_text())
    assert {name: plan[name] for name in known} == known  # messages as without the option
    message = run_badly(
        "plan", "--profile", profile_path, "--num-microbatches", 4, "--output", output,
        "--use", "change",
    )  # fmt: skip
    assert "frequency_change_s" in message


def test_a_dwell_time_is_an_option(profile_path, tmp_path):
    output = tmp_path / "plan.json"
    for options in ((), ("--min-dwell", "10")):
        run_well(
            "plan", "--profile", profile_path, "--num-microbatches", 8, "--output", output,
            "--blocking-power", 60, "--schedule", "envpipe", "--policy", "optimal", *options,
        )  # fmt: skip
        clocks = json.loads(output.read_text())["frequency_mhz"]
        # Kept longer than an iteration lasts.
        assert all(len(set(row)) == 1 for row in clocks) == bool(options)
