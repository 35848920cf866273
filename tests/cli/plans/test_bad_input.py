"""Bad input to `envpipe`: told as what, which value and what to do, never as a traceback.

One case of each kind: tests of the core and of the planner have the others.
"""

import json

import pytest
from cli_helpers import plan_badly, plan_for, write_sidecar
from commands import run_badly
from whole_layers import write_layers


@pytest.fixture
def plan_path(profile_path, tmp_path):
    path = tmp_path / "plan.json"
    plan_for(profile_path, path)
    return path


def simulate_badly(profile, plan, *options):
    return run_badly("simulate", "--profile", profile, "--plan", plan, *options)


def assert_says(message, *parts):
    for part in parts:
        assert part in message, f"{part!r} not in {message!r}"


def test_a_broken_profile_is_named_with_line_and_value(profile_path, tmp_path):
    good = profile_path.read_text()
    profile_path.write_text(good.replace("0,forward,1200,0.1,40.0", "0,forward,1200,quick,40.0"))
    told = plan_badly(profile_path, tmp_path)
    assert_says(told, str(profile_path), "line 2", "time", "'quick'")
    profile_path.write_text(good.replace("2,backward", "2,forward", 1))
    assert_says(plan_badly(profile_path, tmp_path), str(profile_path), "stage 2 forward")
    profile_path.write_bytes(b"\x89PNG\r\n\x1a\n\xff\xfe")
    assert_says(plan_badly(profile_path, tmp_path), str(profile_path))


@pytest.mark.parametrize(
    "options",
    [
        ["--schedule", "envpipe", "--policy", "envelope", "--channel-capacity", 1],
        ["--schedule", "auto", "--policy", "optimal"],
        ["--schedule", "interleaved", "--num-chunks", 2],
    ],
)
def test_more_microbatches_than_can_be_planned(profile_path, tmp_path, options):
    message = plan_badly(profile_path, tmp_path, *options, microbatches=2_000_000_000)
    assert_says(message, "2000000000 microbatches", "at most 4,000,000", "GB", "minutes")


def test_more_microbatches_than_any_file_has(profile_path, plan_path, tmp_path):
    layers = write_layers(tmp_path / "layers.json", {str(n): (0.1, 0.1) for n in range(4)})
    message = run_badly(
        "partition", "--layers", layers, "--num-stages", 2, "--num-microbatches", 2_000_000_000,
        "--output", tmp_path / "p.csv",
    )  # fmt: skip
    assert_says(message, "2000000000 microbatches", "at most 4,000,000")
    change(plan_path, num_microbatches=2_000_000_000)
    assert_says(simulate_badly(profile_path, plan_path), "'num_microbatches'", "fewer units")


@pytest.mark.parametrize(
    ("option", "given", "said"),
    [
        ("--blocking-power", "0.0836", "0.0836 kW is 83.6 W"),
        ("--blocking-power", "83600,84000", "83600 mW is 83.6 W"),
        ("--p2p-latency", "20", "20 ms is 0.02 s"),
        ("--tail-time", "1500", "1500 ms is 1.5 s"),
        ("--split-overhead", "5 %", "5 % is 0.05"),
        ("--deadline-factor", "2%", "2 % longer is 1.02"),
        ("--max-energy", "5kJ", "5 kJ is 5000 J"),
        ("--power-window", "100ms", "100 ms is 0.1 s"),
        ("--power-cap", "2.4kW", "2.4 kW is 2400 W"),
        ("--min-dwell", "50ms", "50 ms is 0.05 s"),
    ],
)
def test_an_option_in_another_unit_is_named(profile_path, tmp_path, option, given, said):
    assert_says(plan_badly(profile_path, tmp_path, option, given), option, f"'{given}'", said)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("wait_power_w", [{"stage": 0, "frequency_mhz": 1410, "power_w": 0.08}], "is 80 W"),
        ("wait_power_w", [{"stage": 0, "frequency_mhz": 1.41, "power_w": 80}], "is 1410 MHz"),
        ("p2p_latency_s", [20, 20, 20], "20 ms is 0.02 s"),
        ("frequency_change_s", 20, "20 ms is 0.02 s"),
    ],
)
def test_a_sidecar_in_another_unit_is_named(profile_path, tmp_path, field, value, said):
    write_sidecar(profile_path, **{field: value})
    assert_says(plan_badly(profile_path, tmp_path), f"field '{field}'", said)


def test_a_plan_in_place_of_a_profile_is_named_and_the_other_way_round(profile_path, plan_path):
    swapped = simulate_badly(plan_path, profile_path)
    assert_says(swapped, str(plan_path), "JSON (envpipe-plan/1)", "Give the CSV of a profile")
    assert_says(simulate_badly(profile_path, profile_path), "a table of stage,", "JSON of a plan")


BASELINE = ("--policy", "baseline")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--reconfigure", "balanced"], ["envelope", "'balanced'", "--policy envelope"]),
        (["--schedule", "envpipe", "--max-in-flight", "2,3"], ["(got 2, 3)", "4 stages"]),
        (
            ["--schedule", "1f1b", "--max-in-flight", "memory"],
            ["in flight (got 'memory')", "--schedule envpipe, auto, zb-h1, zb-h2 or zb-v"],
        ),
        (
            ["--schedule", "gpipe", "--max-extra-forwards", "2"],
            ["gpipe has no extra forwards to limit (got 2)", "Use --schedule envpipe or auto"],
        ),
        (["--schedule", "interleaved"], ["two chunks", "(got 1)", "1f1b"]),
        (["--schedule", "zigzag"], ["--schedule", "zigzag", "envpipe"]),
        (["--schedule", "auto", *BASELINE], ["auto", "'baseline'", "--policy optimal"]),
        (
            [*BASELINE, "--deadline-factor", "1.1"],
            ["baseline", "deadline", "1.1", "--policy optimal"],
        ),
        (["--deadline-factor", "nan"], ["--deadline-factor", "nan", "not a number"]),
        (["--schedule", "auto", "--deadline-factor", 0.9], ["Its fastest iteration"]),
        (["--schedule", "auto", "--channel-capacity", "0"], ["Not even 1F1B"]),
        (["--policy", "envelope", "--frontier", "f.csv"], []),
        (["--schedule", "1f1b", "--memory-frontier", "m.csv"], []),
        (["--frontier-points", "5"], []),
        (["--frontier", "f.csv", "--frontier-points", "9" * 23], ["--frontier-points", "10000"]),
        (["--frontier", "refused.json"], ["overwrite"]),
    ],
)
def test_options_that_contradict_each_other(profile_path, tmp_path, monkeypatch, options, said):
    monkeypatch.chdir(tmp_path)
    assert_says(plan_badly(profile_path, tmp_path, *options, microbatches=6), *said)


def change(plan_path, **fields):
    plan_path.write_text(json.dumps({**json.loads(plan_path.read_text()), **fields}))


def plan_into(profile, output):
    return run_badly(
        "plan", "--profile", profile, "--num-microbatches", 4, "--blocking-power", 80,
        "--output", output,
    )  # fmt: skip


def test_outputs_that_cannot_be_written(profile_path, plan_path, tmp_path):
    nowhere = tmp_path / "nowhere" / "plan.json"
    assert_says(plan_into(profile_path, nowhere), str(nowhere), "no folder", "Make it")
    assert not nowhere.parent.exists()
    below_file = profile_path / "plan.json"
    assert_says(plan_into(profile_path, below_file), str(below_file), "no folder")
    assert_says(plan_into(profile_path, tmp_path), "--output", str(tmp_path), "directory")
    pictures = profile_path / "pictures"
    message = simulate_badly(profile_path, plan_path, "--output", pictures)
    assert_says(message, str(pictures), "Not a directory")
    message = simulate_badly(profile_path, plan_path, "--output", plan_path)
    assert_says(message, "--output", str(plan_path), "is a file")
