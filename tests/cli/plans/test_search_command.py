"""`envpipe search`: from a layer profile to a configuration, its flags, plan and frontier."""

import csv
import json
from dataclasses import replace

import pytest
from cli_helpers import plan_for
from commands import run_badly, run_well
from on_request import on_request
from whole_layers import whole_layers

from envpipe_megatron.cli.plans import search as command
from envpipe_megatron.cli.plans import tables
from envpipe_megatron.core.plan import read_plan
from envpipe_megatron.core.profile import read_profile
from envpipe_megatron.gpu.presets import load_preset
from envpipe_megatron.search.configuration import Job
from envpipe_megatron.search.layer_file import layers_text, read_layers
from envpipe_megatron.search.layer_profile import Sizes
from envpipe_megatron.search.search import Found, Ranked
from envpipe_megatron.search.space import MegatronSpace, Space

JOB = ("--gpus", 4, "--gpus-per-node", 2, "--global-batch", 8)
ENERGY = ("--objective", "energy", "--max-slowdown", 20, "--blocking-power", 60)


@pytest.fixture
def layers_path(tmp_path):
    path = tmp_path / "layers.json"
    path.write_text(layers_text(whole_layers(1, ("layer",) * 6, clocks=3)))
    return path


def write_timed(layers_path, timed):
    """The same profile without joules."""
    fields = json.loads(layers_path.read_text())
    for measure in fields["measures"]:
        del measure["forward_j"], measure["backward_j"]
        for way in measure["recomputation"]:
            del way["energy_j"]
    timed.write_text(json.dumps(fields))


def test_the_best_is_written_and_printed_with_why_others_lost(layers_path, tmp_path):
    output = tmp_path / "best"
    result = run_well("search", "--profile", layers_path, *JOB, *ENERGY, "--output", output)
    assert "The best configurations" in result.stdout
    assert "Where the time goes" in result.stdout
    fields = json.loads((output / "configuration.json").read_text())
    for flag in fields["megatron_flags"]:
        assert flag in result.stdout
    profile = read_profile(output / "profile.csv")
    plan = read_plan(output / "plan.json", profile)
    assert profile.num_stages == len(fields["stages"])
    assert plan.cost.energy_j == pytest.approx(fields["predicted"]["energy_j"])
    with (output / "frontier.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len({row["configuration"] for row in rows}) > 1
    assert min(float(row["energy_j"]) for row in rows) <= plan.cost.energy_j * (1 + 1e-6)
    assert (output / "frontier.png").stat().st_size > 1000
    # Again over what it wrote itself; but not over anyone else's.
    run_well("search", "--profile", layers_path, *JOB, "--output", output)
    (output / "configuration.json").unlink()
    assert "from elsewhere" in run_badly(
        "search", "--profile", layers_path, *JOB, "--output", output
    )


def test_memory_is_that_of_the_order_whose_energy_is_shown(layers_path, tmp_path, monkeypatch):
    job = Job(num_gpus=3, gpus_per_node=3, global_batch=8)
    megatron = MegatronSpace(read_layers(layers_path), job, Space())
    shape = next(each for each in megatron.shapes if each.num_stages == 3)
    best = megatron.best_cut(shape)
    ranked = Ranked(best, best.plan(60.0))
    planned = best.peak_bytes_of(ranked.plan.schedule)
    assert planned.max() > 1.1 * best.peak_bytes.max()
    monkeypatch.setattr(command, "search", lambda *_, **__: Found((ranked,), 1, 1))
    monkeypatch.setattr(command, "_FRONTIER_POINTS", 2)
    monkeypatch.setattr(tables, "_GIB", 1.0)
    output = tmp_path / "best"
    arguments = ("--gpus", 3, "--global-batch", 8, "--blocking-power", 60, "--output", output)
    shown = run_well("search", "--profile", layers_path, *arguments).stdout
    assert f"{planned.max():.1f} │" in shown
    for peak in planned:
        assert f"{peak:.2f} │" in shown
    predicted = json.loads((output / "configuration.json").read_text())["predicted"]
    assert predicted["peak_bytes"] == planned.tolist()
    # And with its tails the profile of the stages takes the search's time.
    plan_for(output / "profile.csv", output / "again.json", "--policy", "baseline", "--use", "tail")
    again = read_plan(output / "again.json", read_profile(output / "profile.csv"))
    assert again.cost.iteration_time_s == pytest.approx(predicted["own_order_iteration_time_s"])


def test_joules_are_modelled_where_none_are_and_only_there(layers_path, tmp_path):
    timed = tmp_path / "timed.json"
    write_timed(layers_path, timed)
    assert "energy (J)" not in run_well("search", "--profile", timed, *JOB).stdout
    assert "has no joules" in run_badly("search", "--profile", timed, *JOB, *ENERGY)
    model = ("--power-model", "a100-sxm")
    assert "energy (J)" in run_well("search", "--profile", timed, *JOB, *model).stdout
    assert "measured joules" in run_badly("search", "--profile", layers_path, *JOB, *model)


def test_rests_save_time_at_the_measured_clock_only():
    profile = whole_layers(1)
    measures = {
        name: replace(each, rested_s=0.9 * each.both_s)
        for name, each in profile.at(Sizes()).items()
    }
    preset = load_preset("a100-sxm")
    modelled = command.with_modelled_energy(replace(profile, measures={Sizes(): measures}), preset)
    for each in modelled.at(Sizes()).values():
        saved = 1 - each.known_rested_s / each.both_s
        assert saved == pytest.approx([0.1, *[0.0] * (len(saved) - 1)])


@pytest.mark.parametrize(("share", "noted"), [(0.89, False), (0.91, True)])
def test_layers_that_the_host_bounds_are_noted(layers_path, share, noted):
    fields = json.loads(layers_path.read_text())
    for measure in fields["measures"]:
        host_s = share * (measure["forward_s"][0] + measure["backward_s"][0])
        # An embedding is always bound by the host, and short.
        measure["host_s"] = host_s if measure["piece"] == "layer" else 1.0
    layers_path.write_text(json.dumps(fields))
    result = run_well("search", "--profile", layers_path, *JOB)
    assert ("Note: layer: the host" in result.stdout) == noted


def test_a_search_without_joules_leaves_no_plan_of_an_earlier_one(layers_path, tmp_path):
    search = ("search", "--profile", layers_path, *JOB)
    output = tmp_path / "best"
    output.mkdir()
    stale = ("profile.csv", "profile.json", "plan.json", "frontier.csv", "frontier.png")
    for name in ("configuration.json", *stale):
        (output / name).write_text("of an earlier search")
    write_timed(layers_path, layers_path)
    run_well(*search, "--output", output)
    assert [path.name for path in output.iterdir()] == ["configuration.json"]
    assert json.loads((output / "configuration.json").read_text())["num_gpus"] == 4


def test_what_cannot_be_searched_for_is_said(layers_path, profile_path):
    for profile, options, said in (
        (profile_path, (), "a CSV of stages is for envpipe plan"),
        (layers_path, ("--memory", 1e-9), "No configuration keeps"),
        (layers_path, ("--max-slowdown", 1), "goes with --objective energy or cost: "),
    ):
        assert said in run_badly("search", "--profile", profile, *JOB, *options)


def test_a_folder_that_cannot_be_made_is_named_before_the_search(layers_path, monkeypatch):
    monkeypatch.setattr("envpipe_megatron.cli.plans.search.search", None)
    output = layers_path / "best"
    words = ("search", "--profile", layers_path, *JOB, "--output", output)
    assert f"{output}: Not a directory" in run_badly(*words)


@on_request("CLI")
def test_links_that_were_not_measured_are_named(layers_path, caplog):
    alone = ("search", "--profile", layers_path, "--global-batch", 8, "--gpus")
    run_well(*alone, 2, "--gpus-per-node", 2)
    assert "links" not in caplog.text
    run_well(*alone, 4, "--gpus-per-node", 2)
    assert "knows no links across nodes" in caplog.text
    fields = json.loads(layers_path.read_text())
    layers_path.write_text(json.dumps({**fields, "links": {}}))
    run_well(*alone, 2)
    assert "cost nothing" in caplog.text
