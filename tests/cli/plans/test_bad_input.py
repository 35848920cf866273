"""Bad input to `envpipe`: told as what, which value and what to do, never as a traceback."""

import json
import os

import pytest
from cli_helpers import plan_for, run_badly, write_profile


@pytest.fixture
def plan_path(profile_path, tmp_path):
    path = tmp_path / "plan.json"
    plan_for(profile_path, path)
    return path


def plan_badly(profile, tmp_path, *options, microbatches=8):
    output = tmp_path / "refused.json"
    message = run_badly(
        "plan", "--profile", profile, "--num-microbatches", microbatches, "--output", output,
        "--blocking-power", 80, *options,
    )  # fmt: skip
    assert not output.exists()
    return message


def simulate_badly(profile, plan, *options):
    return run_badly("simulate", "--profile", profile, "--plan", plan, *options)


def assert_says(message, *parts):
    for part in parts:
        assert part in message, f"{part!r} not in {message!r}"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("stage,instruction", "stage;instruction", ["line 1", "stage;instruction", "must name"]),
        ("0,forward,1200,0.1,40.0", "0,forward,1200,quick,40.0", ["line 2", "time", "'quick'"]),
        ("0,forward,1200,0.1,40.0", "0,forward,1200,-0.1,40.0", ["line 2", "time", "'-0.1'"]),
        ("0,forward,1200,0.1,40.0", "0,forward,1200,0.1,nan", ["line 2", "energy", "'nan'"]),
        ("0,forward,1200,0.1,40.0", "0,forward,1200,0.1", ["line 2", "few columns"]),
        ("0,forward,1000", "0,forward,1200", ["line 3", "second row", "1200", "line 2"]),
        ("0,forward,1200", "0,sideways,1200", ["line 2", "sideways", "forward or backward"]),
        ("0,forward,1200", "0,forward,1e20", ["line 2", "MHz", "below 1,000,000"]),
        ("0,forward,1200", "0.5,forward,1200", ["line 2", "stage", "0.5", "whole number"]),
    ],
)
def test_a_broken_profile_is_named_with_line_and_value(profile_path, tmp_path, old, new, said):
    text = profile_path.read_text()
    assert old in text
    profile_path.write_text(text.replace(old, new, 1))
    assert_says(plan_badly(profile_path, tmp_path), str(profile_path), *said)


@pytest.mark.parametrize("content", [b"", b"\x89PNG\r\n\x1a\n\xff\xfe", b"\n\n"])
def test_a_file_that_is_no_profile_at_all(tmp_path, content):
    path = tmp_path / "profile.csv"
    path.write_bytes(content)
    assert_says(plan_badly(path, tmp_path), str(path))


def test_a_profile_that_misses_a_combination(profile_path, tmp_path):
    lines = profile_path.read_text().splitlines()
    left = [line for line in lines if not line.startswith("2,backward")]
    profile_path.write_text("\n".join(left))
    assert_says(plan_badly(profile_path, tmp_path), str(profile_path), "stage 2 backward")


@pytest.mark.parametrize(
    ("sidecar", "said"),
    [
        ("{", ["JSON"]),
        ('{"format": "envpipe-profile/9"}', ["format", "envpipe-profile/9", "envpipe-profile/1"]),
        ('{"format": "envpipe-profile/1", "gpus": 3}', ["gpus", "Known"]),
        ('{"format": "envpipe-profile/1", "p2p_latency_s": [-1, 0, 0]}', ["p2p_latency_s", "-1"]),
    ],
)
def test_a_broken_sidecar_is_named(profile_path, tmp_path, sidecar, said):
    path = profile_path.with_suffix(".json")
    path.write_text(sidecar)
    assert_says(plan_badly(profile_path, tmp_path), str(path), *said)


def test_a_sidecar_of_another_number_of_stages(profile_path, tmp_path):
    sidecar = profile_path.with_suffix(".json")
    entries = [{"stage": s, "frequency_mhz": 1200, "power_w": 70} for s in range(2)]
    sidecar.write_text(json.dumps({"format": "envpipe-profile/1", "wait_power_w": entries}))
    message = run_badly(
        "plan", "--profile", profile_path, "--num-microbatches", 8,
        "--output", tmp_path / "refused.json",
    )  # fmt: skip
    assert_says(message, str(sidecar), "wait_power_w", "2 entries", "4 stages")
    sidecar.write_text('{"format": "envpipe-profile/1", "p2p_latency_s": [0.1]}')
    assert_says(plan_badly(profile_path, tmp_path), "latency")


@pytest.mark.parametrize("count", [0, -3])
def test_no_microbatch_at_all(profile_path, tmp_path, count):
    message = plan_badly(profile_path, tmp_path, microbatches=count)
    assert_says(message, "--num-microbatches", f"{count} is not in the range x>=1")


@pytest.mark.parametrize("count", [100_000_000, 2_000_000_000])
@pytest.mark.parametrize(
    "options",
    [
        ["--schedule", "1f1b"],
        ["--schedule", "gpipe"],
        ["--schedule", "envpipe", "--policy", "envelope", "--channel-capacity", 1],
        ["--schedule", "auto", "--policy", "optimal"],
        ["--schedule", "interleaved", "--num-chunks", 2],
    ],
)
def test_more_microbatches_than_can_be_planned(profile_path, tmp_path, count, options):
    message = plan_badly(profile_path, tmp_path, *options, microbatches=count)
    assert_says(message, f"{count} microbatches", "at most 4,000,000", "GB", "minutes")


def test_more_microbatches_than_any_file_has(profile_path, plan_path, tmp_path):
    layers = tmp_path / "layers.csv"
    rows = [f"{n},{k},1200,0.1,40" for n in range(4) for k in ("forward", "backward")]
    layers.write_text("\n".join(["layer,instruction,frequency,time,energy", *rows]))
    message = run_badly(
        "partition", "--layers", layers, "--num-stages", 2, "--num-microbatches", 2_000_000_000,
        "--output", tmp_path / "p.csv",
    )  # fmt: skip
    assert_says(message, "2000000000 microbatches", "at most 4,000,000")
    change(plan_path, num_microbatches=2_000_000_000)
    assert_says(simulate_badly(profile_path, plan_path), "'num_microbatches'", "fewer units")


def scaled(path, column, factor):
    """Multiply a column of a profile."""
    header, *rows = [line.split(",") for line in path.read_text().splitlines()]
    for row in rows:
        row[column] = str(float(row[column]) * factor)
    path.write_text("\n".join(map(",".join, [header, *rows])))


def test_a_profile_without_energies(profile_path, tmp_path):
    scaled(profile_path, 4, 0)
    assert_says(plan_badly(profile_path, tmp_path), str(profile_path), "stage 0 has no energy")


@pytest.mark.parametrize(("column", "factor"), [(3, 1000), (4, 1000), (4, 1e9), (4, 1e-3)])
def test_powers_that_no_gpu_has_are_told_with_row_and_remedy(
    profile_path, tmp_path, caplog, column, factor
):
    plan_for(profile_path, tmp_path / "plan.json")
    assert not caplog.records
    scaled(profile_path, column, factor)
    plan_for(profile_path, tmp_path / "plan.json")
    (record,) = caplog.records
    assert_says(
        record.getMessage(), f"{profile_path}, line 2", " W, and 31 more", "5 W to 5000 W",
        "Times are in s", "energies in J",
    )  # fmt: skip


@pytest.mark.parametrize("count", ["many", "2.5", ""])
def test_microbatches_that_are_no_number(profile_path, tmp_path, count):
    assert_says(plan_badly(profile_path, tmp_path, microbatches=count), "--num-microbatches")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--reconfigure", "balanced"], ["envelope", "'balanced'", "--policy envelope"]),
        (["--policy", "uniform", "--reconfigure", "greedy"], ["envelope", "uniform", "'greedy'"]),
        (
            ["--schedule", "envpipe", "--max-in-flight", "2,3"],
            ["in flight", "(got 2, 3)", "4 stages"],
        ),
        (["--schedule", "envpipe", "--max-in-flight", "3"], ["Stage 0", "(got 3)", "holds 4"]),
        (
            ["--schedule", "envpipe", "--max-in-flight", "4,3,1,1"],
            ["Stage 2", "(got 1)", "holds 2"],
        ),
        (["--schedule", "envpipe", "--max-in-flight", "4,x"], ["--max-in-flight", "'4,x'"]),
        (["--schedule", "envpipe", "--max-in-flight", "0"], ["--max-in-flight", "'0'"]),
        (["--max-in-flight", "2"], ["in flight", "'1f1b'", "--schedule envpipe"]),
        (["--schedule", "gpipe", "--max-extra-forwards", "2"], ["extra forwards", "'gpipe'"]),
        (["--max-extra-forwards", "-1"], ["--max-extra-forwards", "-1"]),
        (["--num-chunks", "2"], ["one chunk", "(got 2)", "interleaved"]),
        (["--schedule", "interleaved"], ["two chunks", "(got 1)", "1f1b"]),
        (["--schedule", "zigzag"], ["--schedule", "zigzag", "envpipe"]),
        (["--policy", "magic"], ["--policy", "magic", "envelope"]),
        (["--blocking-power", "-5"], ["--blocking-power", "-5"]),
        (["--blocking-power", "nan"], ["--blocking-power", "nan"]),
    ],
)
def test_wishes_that_cannot_be(profile_path, tmp_path, options, said):
    assert_says(plan_badly(profile_path, tmp_path, *options), *said)


def test_interleaved_needs_whole_groups_of_microbatches(profile_path, tmp_path):
    options = ["--schedule", "interleaved", "--num-chunks", 2]
    message = plan_badly(profile_path, tmp_path, *options, microbatches=6)
    assert_says(message, "multiple of 4", "(got 6)")


def test_a_plan_for_another_number_of_stages(plan_path, tmp_path):
    two = write_profile(tmp_path / "two.csv", stages=2)
    assert_says(simulate_badly(two, plan_path), "4 stages", str(two), "(got 2)", "plan again")


def change(plan_path, **fields):
    plan_path.write_text(json.dumps({**json.loads(plan_path.read_text()), **fields}))


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("format", "envpipe-plan/2", ["'envpipe-plan/2'", "'envpipe-plan/1'"]),
        ("format", None, ["got nothing", "'envpipe-plan/1'"]),
        ("num_microbatches", "eight", ["'eight'"]),
        ("schedule", [["F0", "B0"]], ["list of 4"]),
        ("schedule", [["F0", "X0"] * 8] * 4, ["X0"]),
        ("frequency_mhz", [[1200]] * 4, ["16"]),
        ("blocking_power_w", [80.0], ["list of 4"]),
        ("energy_j", 1.0, ["make the plan again"]),
        ("iteration_time_s", "soon", ["'soon'", "make the plan again"]),
    ],
)
def test_a_wrong_field_of_a_plan_is_named(profile_path, plan_path, field, value, said):
    change(plan_path, **{field: value})
    message = simulate_badly(profile_path, plan_path)
    assert_says(message, str(plan_path), f"'{field}'", *said)


def test_a_frequency_that_was_not_profiled(profile_path, plan_path):
    change(plan_path, frequency_mhz=[[1111] * 16] * 4)
    assert_says(simulate_badly(profile_path, plan_path), "1111", "1200, 1000, 900, 600")


def test_a_plan_that_would_deadlock(profile_path, plan_path):
    orders = json.loads(plan_path.read_text())["schedule"]
    orders[3] = [*orders[3][1:], orders[3][0]]  # B0 before its own F0
    change(plan_path, schedule=orders)
    assert_says(simulate_badly(profile_path, plan_path), str(plan_path), "schedule", "B0")


@pytest.mark.parametrize("content", ["", "[1, 2]", "{'format': 'envpipe-plan/1'}"])
def test_a_file_that_is_no_plan_at_all(profile_path, tmp_path, content):
    path = tmp_path / "plan.json"
    path.write_text(content)
    assert_says(simulate_badly(profile_path, path), str(path), "JSON")


def test_missing_files(profile_path, plan_path, tmp_path):
    gone = tmp_path / "gone.csv"
    assert_says(plan_badly(gone, tmp_path), "--profile", str(gone), "does not exist")
    assert_says(simulate_badly(profile_path, gone), "--plan", str(gone), "does not exist")
    assert_says(simulate_badly(gone, plan_path), "--profile", str(gone), "does not exist")
    assert_says(plan_badly(tmp_path, tmp_path), "--profile", str(tmp_path), "directory")


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


def test_a_folder_of_somebody_else(profile_path, plan_path, tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    if os.access(closed, os.W_OK):
        pytest.skip("this user may write everywhere")
    message = plan_into(profile_path, closed / "plan.json")
    assert_says(message, str(closed / "plan.json"), "Permission denied", "yours to write")
    message = simulate_badly(profile_path, plan_path, "--output", closed / "pictures")
    assert_says(message, str(closed / "pictures"), "Permission denied")


def test_a_plan_never_overwrites_its_profile_or_the_sidecar(profile_path):
    before = profile_path.read_bytes()
    for output in (profile_path, profile_path.with_suffix(".json")):
        assert_says(plan_into(profile_path, output), "overwrite", str(output), "--output")
    assert profile_path.read_bytes() == before
    assert not profile_path.with_suffix(".json").exists()
