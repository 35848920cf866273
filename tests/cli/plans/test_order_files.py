"""What `envpipe plan` does by itself, and with orders and clocks from files."""

import json

import pytest
from cli_helpers import plan_badly, plan_for, rows_of, write_sidecar
from commands import run_badly, run_well

from envpipe_megatron.core.orders import builders
from envpipe_megatron.formats.torch_csv import torch_csv

ORDER = builders.envpipe(4, 8, [2, 1, 1, 0])


def plan(profile, *options):
    return run_well("plan", "--profile", profile, "--blocking-power", 80, *options)


def made(path):
    return json.loads(path.read_text())


@pytest.fixture
def order_path(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text(torch_csv(ORDER))
    return path


@pytest.mark.parametrize(
    ("options", "title"),
    [
        (["--schedule", "1f1b"], "optimal on 1f1b"),
        (["--policy", "optimal"], "optimal on envpipe"),
        (["--policy", "baseline"], "baseline on 1f1b"),
        (["--policy", "envelope", "--reconfigure", "greedy"], "envelope-greedy on 1f1b"),
        (["--max-in-flight", "5,4,3,1"], "optimal on envpipe"),
    ],
)
def test_what_is_not_named_goes_with_what_is(profile_path, options, title):
    assert title in plan(profile_path, "--num-microbatches", 8, *options).stdout


def test_activations_are_shown_where_they_are_known(profile_path):
    write_sidecar(profile_path, activation_bytes=[2**30, 2**29, 2**28, 2**27])
    options = ("--schedule", "gpipe", "--num-microbatches", 8)
    for chunks in ([], ["--schedule", "interleaved", "--num-chunks", 2]):
        shown = plan(profile_path, *options, *chunks).stdout
        rows = rows_of(shown)
        peaks, held = (rows[f"{name} by stage"] for name in ("peak in flight", "activations (GiB)"))
        for peak, gib in zip(peaks, held, strict=True):
            wanted = [float(n) / 2**stage for stage, n in enumerate(peak.split())]
            assert list(map(float, gib.split())) == pytest.approx(wanted, rel=5e-3, abs=6e-3)
        assert peaks[1].split() == (
            ["5.5", "4.5", "3.5", "2.5"] if chunks else ["4", "3", "2", "1"]
        )


def test_clocks_for_the_order_of_a_table(profile_path, order_path, tmp_path):
    output = tmp_path / "plan.json"
    plan(profile_path, "--schedule", order_path, "--output", output)
    found = made(output)
    assert (found["policy"], found["schedule_name"]) == ("optimal", "mine")
    assert found["schedule"] == ORDER.labels()
    assert found["energy_lower_bound_j"] < found["energy_j"] < found["baseline"]["energy_j"]
    assert found["baseline"]["schedule"] == "1f1b"
    # Out and in again, as a table and as a plan, it is the same order with the same clocks.
    assert run_well("export-schedule", output).stdout == order_path.read_text()
    run_well("export-schedule", output, "--output", tmp_path / "again.csv")
    for again in (tmp_path / "again.csv", output):
        plan(profile_path, "--schedule", again, "--output", tmp_path / "second.json")
        second = made(tmp_path / "second.json")
        assert second | {"schedule_name": "mine"} == found


@pytest.mark.parametrize("named", [["breadth-first"], ["interleaved", "--group-size", 8]])
def test_a_plan_as_an_order_keeps_its_baseline(profile_path, tmp_path, named):
    """In both the first stage runs all forwards of a chunk before the next."""
    around = ("--p2p-latency", 0.02, "--output")
    one, two, table = (tmp_path / name for name in ("one.json", "two.json", "order.csv"))
    job = ("--num-microbatches", 8, "--num-chunks", 2)
    plan(profile_path, *job, "--schedule", *named, *around, one)
    plan(profile_path, "--schedule", one, *around, two)
    assert made(two) == made(one)
    run_well("export-schedule", one, "--output", table)
    plan(profile_path, "--schedule", table, *around, two)
    assert made(two)["baseline"] == made(one)["baseline"]


def test_a_frontier_and_other_policies_of_a_table(profile_path, order_path, tmp_path):
    options = ("--schedule", order_path, "--frontier", tmp_path / "f.csv", "--frontier-points", 3)
    assert "optimal on mine" in plan(profile_path, *options).stdout
    assert len((tmp_path / "f.csv").read_text().splitlines()) > 2
    options = ("--schedule", order_path, "--policy", "envelope", "--reconfigure", "balanced")
    assert "envelope-balanced on mine" in plan(profile_path, *options).stdout


def test_what_does_not_go_with_a_table(profile_path, order_path, tmp_path):
    def told(*options, **job):
        return plan_badly(profile_path, tmp_path, *options, **job)

    assert "4 stages, 8 microbatches" in told("--schedule", order_path, microbatches=6)
    assert "'mine'" in told("--schedule", order_path, "--max-in-flight", 6)
    assert "'mine'" in told("--schedule", order_path, "--channel-capacity", 1)
    for chunks in ("--num-chunks", "--group-size"):
        assert "no order from a file" in told("--schedule", order_path, chunks, 4)
    assert "does not exist" in told("--schedule", tmp_path / "none.csv")
    split = torch_csv(ORDER).replace("0B0", "0I0,0W0")
    (tmp_path / "split.csv").write_text(split)
    message = told("--schedule", tmp_path / "split.csv")
    assert "kind input-gradient and weight-gradient" in message
    assert "'--num-microbatches'" in run_badly("plan", "--profile", profile_path)
    order_path.write_text(order_path.read_text().replace("0F3", "0F9"))
    assert f"{order_path}: Stage 0 lacks a unit" in told("--schedule", order_path)
    assert "is not readable JSON" in run_badly("export-schedule", order_path)
    (tmp_path / "mine.json").write_text('{"format": "envpipe-profile/1"}')
    assert "field 'format'" in told("--schedule", tmp_path / "mine.json")


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
