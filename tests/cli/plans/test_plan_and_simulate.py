"""`envpipe plan` and `envpipe simulate` on good input."""

import json
import os
import subprocess
import sys

from cli_helpers import plan_for, simulate_json, write_sidecar
from commands import run_well

from envpipe_megatron import __version__
from envpipe_megatron.cli import main


def options_of(policy, schedule):
    options = ["--policy", policy[0], "--schedule", schedule]
    if len(policy) > 1:
        options += ["--reconfigure", policy[1]]
    return options + (["--num-chunks", 2] if schedule == "interleaved" else [])


def test_limits_reach_the_plan_and_a_shallow_channel_is_told(profile_path, tmp_path):
    path = tmp_path / "plan.json"
    plan_for(profile_path, path, "--schedule", "envpipe", "--max-in-flight", "5,4,2,1")
    assert json.loads(path.read_text())["peak_in_flight"] == [5, 4, 2, 1]
    plan_for(profile_path, path, "--schedule", "envpipe", "--max-extra-forwards", 0)
    assert json.loads(path.read_text())["peak_in_flight"] == [4, 3, 2, 1]
    told = plan_for(profile_path, path, "--schedule", "envpipe", "--channel-capacity", 1)
    assert "Note: " in told.stdout


def test_pictures_and_figures_are_written_to_a_folder_that_is_made(profile_path, tmp_path):
    plan_for(profile_path, tmp_path / "plan.json", *options_of(("envelope",), "envpipe"))
    folder = tmp_path / "new" / "pictures [1]"
    arguments = ("--profile", profile_path, "--plan", tmp_path / "plan.json", "--output", folder)
    result = run_well("simulate", *arguments)
    assert f"Pictures written to {folder}\n" in result.stdout  # neither broken nor markup
    for name in ("timeline.png", "timeline_baseline.png", "energy_valley.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG"), name
    facts = json.loads((folder / "simulation.json").read_text())
    assert facts == simulate_json(profile_path, tmp_path / "plan.json")


def test_tables_tell_the_saving_and_every_stage(profile_path, tmp_path):
    told = plan_for(profile_path, tmp_path / "plan.json", *options_of(("uniform",), "1f1b"))
    shown = run_well("simulate", "--profile", profile_path, "--plan", tmp_path / "plan.json")
    saving = simulate_json(profile_path, tmp_path / "plan.json")["saving_percent"]
    for result in (told, shown):
        assert f"{saving:.2f}" in result.stdout
    assert shown.stdout.count("900-900") == 4
    assert f"Plan written to {tmp_path / 'plan.json'}\n" in told.stdout


def test_blocking_power_comes_from_the_sidecar_at_its_highest_clock(profile_path, tmp_path):
    curves = [
        {"stage": stage, "frequency_mhz": frequency, "power_w": power}
        for stage in range(4)
        for frequency, power in ((1200, 70 + stage), (600, 35))
    ]
    write_sidecar(profile_path, wait_power_w=curves)
    plan = tmp_path / "plan.json"
    wanted = ("plan", "--profile", profile_path, "--num-microbatches", 4, "--output", plan)
    run_well(*wanted)
    assert json.loads(plan.read_text())["blocking_power_w"] == [70, 71, 72, 73]
    run_well(*wanted, "--blocking-power", 50)
    assert json.loads(plan.read_text())["blocking_power_w"] == [50] * 4


def envpipe(*arguments):
    command = [sys.executable, "-m", "envpipe_megatron.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=os.environ)


def test_without_any_blocking_power_it_is_0_and_standard_error_warns(profile_path, tmp_path):
    plan = tmp_path / "plan.json"
    wanted = ("plan", "--profile", profile_path, "--num-microbatches", 4, "--output", plan)
    result = envpipe(*wanted)
    assert result.returncode == 0
    assert json.loads(plan.read_text())["blocking_power_w"] == [0] * 4
    assert "No blocking power is known" in result.stderr
    # The message is broken over lines, within paths too.
    said = "".join(result.stderr.split())
    assert f"{profile_path.with_suffix('.json')}ismissing" in said
    assert "--blocking-power" in result.stderr
    assert "blocking power" not in result.stdout
    assert envpipe(*wanted, "--blocking-power", 0).stderr == ""  # 0 was asked for


def _parts(name):
    return getattr(main.commands[name], "commands", ())


def test_every_command_has_help_with_an_example_that_a_shell_takes_as_it_is():
    nested = [(name, part) for name in main.commands for part in _parts(name)]
    for words in [*((name,) for name in main.commands), *nested]:
        printed = run_well(*words, "--help").stdout
        assert "Example:" in printed, words
        example = printed.split("Example:")[1].split("\nOptions:")[0].replace("\\\n", " ")
        lines = [line.strip() for line in example.splitlines() if line.strip()]
        begun = [line.startswith((" ".join(("envpipe", *words)), "#")) for line in lines]
        assert begun, words
        assert all(begun), lines  # a line that was broken would be a command of its own
    overview = run_well("--help").stdout
    assert all(name in overview for name in ("plan", "simulate", "quickstart"))
    assert run_well("-h").stdout == overview
    assert __version__ in run_well("--version").stdout
