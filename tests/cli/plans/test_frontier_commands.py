"""Frontiers and conditions by the command."""

import csv
import json
from itertools import pairwise

import pytest
from cli_helpers import plan_for, run_badly, run_well


def rows(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def test_a_frontier_is_a_csv_and_a_picture(profile_path, tmp_path):
    printed = plan_for(
        profile_path, tmp_path / "plan.json", "--schedule", "auto", "--policy", "optimal",
        "--frontier", tmp_path / "frontier.csv", "--frontier-points", 12,
    ).stdout  # fmt: skip
    listed = rows(tmp_path / "frontier.csv")
    assert 2 < len(listed) <= 12
    figures = [[float(cell) for cell in row.values()] for row in listed]
    for (time_s, energy_j, bound_j, power_w), slower in pairwise(figures):
        assert time_s < slower[0]
        assert slower[1] < energy_j >= bound_j * (1 - 1e-12)
        assert power_w == pytest.approx(energy_j / time_s)
    # A replica as slow as another takes what the frontier says.
    factor = figures[-1][0] / float(figures[0][0])
    late = plan_for(profile_path, tmp_path / "late.json", "--deadline-factor", factor)
    assert late.exit_code == 0
    assert json.loads((tmp_path / "late.json").read_text())["energy_j"] <= 1.01 * figures[-1][1]
    assert (tmp_path / "frontier.png").read_bytes().startswith(b"\x89PNG")
    assert f"Frontier: {len(listed)} plans" in printed
    assert "gap to the lower bound (%)" in printed
    assert "No order of whole backwards can save more than" in printed


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
    sidecar = {"format": "envpipe-profile/1", "tail_time_s": [0.3, 0.3, 0.3, 0.4]}
    sidecar["p2p_latency_s"] = [0.01, 0.02, 0.01]
    profile_path.with_suffix(".json").write_text(json.dumps(sidecar))
    output = tmp_path / "plan.json"
    plan_for(profile_path, output)
    assert "tail_time_s" not in json.loads(output.read_text())
    plan_for(profile_path, output, "--use", "tail")
    plan = json.loads(output.read_text())
    assert plan["tail_time_s"] == [0.3, 0.3, 0.3, 0.4]
    assert plan["p2p_latency_s"] == [0.01, 0.02, 0.01]  # as without the option
    message = run_badly(
        "plan", "--profile", profile_path, "--num-microbatches", 4, "--output", output,
        "--use", "change",
    )  # fmt: skip
    assert "frequency_change_s" in message


def test_dwell_and_parking_are_options(profile_path, tmp_path):
    output = tmp_path / "plan.json"
    optimal = ("--schedule", "envpipe", "--policy", "optimal")
    wanted = ("plan", "--profile", profile_path, "--num-microbatches", 8, "--output", output)
    assert "wait-power" in run_badly(*wanted, "--blocking-power", 60, *optimal, "--park")
    curve = [
        {"stage": stage, "frequency_mhz": clock, "power_w": power}
        for stage in range(4)
        for clock, power in ((300, 20.0), (1200, 60.0))
    ]
    sidecar = {"format": "envpipe-profile/1", "wait_power_w": curve}
    profile_path.with_suffix(".json").write_text(json.dumps(sidecar))
    energy_j = []
    for options in ((), ("--park",), ("--park", "--min-dwell", "10")):
        run_well(*wanted, "--use", "wait-power", *optimal, *options)
        energy_j.append(json.loads(output.read_text())["energy_j"])
        if options == ("--park",):
            assert any(300 in row for row in json.loads(output.read_text())["park_mhz"])
    assert energy_j[1] < energy_j[0]
    assert energy_j[2] > energy_j[1]
    clocks = json.loads(output.read_text())["frequency_mhz"]
    assert all(len(set(row)) == 1 for row in clocks)  # kept longer than an iteration lasts
