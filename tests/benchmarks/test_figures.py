"""EnvPipe's experiments: their list, unit times, scaling, rows and claims, and a tiny run."""

import csv
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from envpipe_megatron import builders
from envpipe_megatron.conditions import Conditions
from envpipe_megatron.gpu.presets import load_preset
from envpipe_megatron.plan import Plan
from envpipe_megatron.policies.frequencies import envelope
from envpipe_megatron.profile import ProfileRow, make_profile
from envpipe_megatron.schedule import Kind

pytest.importorskip("torch")
pytest.importorskip("matplotlib")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import all as everything
from claims import CLAIMS_FILE, Claim, read_claims, write_claims
from figures import command, training
from figures.emulation import time_factor, write_scaled_preset
from figures.experiments import (
    BALANCED,
    BASELINE,
    ENVELOPE,
    EXPERIMENTS,
    GREEDY,
    MODELS,
    UNIFORM,
    Experiment,
    Job,
    reduced,
)
from figures.findings import claims_of
from figures.followups import why_few_save_less
from figures.hardware import Place
from figures.layers import build_stage, layer_makers, split
from figures.outcome import Outcome, PlanFacts
from figures.requests import Batch, EmulatedTime, RunRequest
from figures.training import ExperimentError, batches
from figures.unit_times import UnitTimes, stage_operations

REDUCED = Place("reduced", 0, "auto")

#: Emulated time that no layers were counted for.
SOME_TIME = EmulatedTime(0.25, (0.01,) * 4, (0.03,) * 4)


@pytest.fixture
def some_time(monkeypatch):
    monkeypatch.setattr("figures.hardware.emulated_time", lambda job: SOME_TIME)


# --- what is trained -----------------------------------------------------------------------------

#: Every line of EnvPipe's scripts: figure, model, microbatch and minibatch size, GPU, settings.
V100 = [
    ("bert_336M", 4, 64), ("gpt_125M", 2, 32), ("megatron_125M", 4, 64), ("resnet_152", 2, 32),
]  # fmt: skip
RTX_3090 = [
    ("bert_1.3B", 4, 64), ("bert_3.9B", 2, 32), ("gpt_350M", 4, 64), ("megatron_350M", 4, 64),
    ("megatron_760M", 4, 64),
]  # fmt: skip
BASE, OURS = "baseline 1f1b default", "envelope ours balanced"
SCRIPTS = {
    "fig9_a": [(*job, "v100", s) for job in V100 for s in (BASE, OURS)],
    "fig9_b": [(*job, "rtx3090", s) for job in RTX_3090 for s in (BASE, OURS)],
    "fig10": [
        (*job, "rtx3090", s)
        for job in (("bert_1.3B", 4, 64), ("gpt_350M", 4, 64))
        for s in (BASE, "uniform 1f1b default", "envelope ours default", OURS)
    ],
    "fig11": [(*job, "v100", s) for job in V100 for s in (BASE, "envelope ours greedy", OURS)],
    "fig12": [("megatron_1.3B", 2, 512, "v100", s) for _ in (8, 4) for s in (BASE, OURS)],
    "fig13": [
        (model, micro, mini, "v100", s)
        for model, micro, minis in (
            ("bert_336M", 4, (16, 32, 64)),
            ("gpt_125M", 2, (8, 16, 32)),
            ("megatron_125M", 4, (16, 32, 64)),
            ("resnet_152", 2, (8, 16, 32)),
        )
        for mini in minis
        for s in (BASE, OURS)
    ],
}


def test_the_experiments_are_those_of_envpipes_scripts():
    ours = {
        name: [
            (
                job.model, job.microbatch_size, job.minibatch_size, job.gpu,
                f"{setting.type} {setting.scheduling} {setting.reconfigure}",
            )
            for job, setting in experiment.runs()
        ]
        for name, experiment in EXPERIMENTS.items()
    }  # fmt: skip
    assert ours == SCRIPTS
    assert [(j.replicas, j.stages, j.num_microbatches) for j in EXPERIMENTS["fig12"].jobs] == [
        (2, 8, 128), (4, 4, 64),
    ]  # fmt: skip
    fig13 = [job.num_microbatches // job.stages for job in EXPERIMENTS["fig13"].jobs]
    assert fig13 == [1, 2, 4] * 4


@pytest.mark.parametrize(
    ("model", "stages", "layers"),
    [
        ("resnet_152", 4, [8, 12, 15, 17]),
        ("resnet_152", 2, [26, 26]),
        ("bert_336M", 4, [6, 6, 6, 7]),
        ("gpt_125M", 4, [3, 3, 3, 5]),
        ("megatron_1.3B", 8, [4, 3, 3, 3, 3, 3, 3, 5]),
    ],
)
def test_stages_get_envpipes_layers(model, stages, layers):
    parts = split(MODELS[model], stages)
    assert [len(part) for part in parts] == layers
    assert parts[-1].stop == len(layer_makers(MODELS[model]))


# --- how long it takes ---------------------------------------------------------------------------


def test_operations_of_transformer_layers_by_hand():
    model = MODELS["bert_336M"]
    tokens, width, length = 4 * 512, 1024, 512
    layer = 24 * tokens * width**2 + 4 * tokens * length * width
    for stage in stage_operations(model, 4, 4):
        assert stage.forward == 6 * layer
        assert stage.backward == 3 * stage.forward  # one of it computes the forward again


def test_megatrons_head_is_not_computed_again():
    model = MODELS["megatron_125M"]
    tokens, width, length = 4 * 2048, 768, 2048
    layers = 3 * (24 * tokens * width**2 + 4 * tokens * length * width)
    head = 2 * tokens * width * 50304
    first, *_, last = stage_operations(model, 4, 4)
    assert first.forward == layers
    assert last.forward == layers + head
    assert last.backward == 3 * layers + 2 * head


def test_a_decoder_layer_has_two_attentions():
    tokens, width, length = 2 * 2048, 768, 2048
    layer = 32 * tokens * width**2 + 8 * tokens * length * width
    assert stage_operations(MODELS["gpt_125M"], 4, 2)[1].forward == 3 * layer


def test_the_factor_leaves_no_unit_too_short_for_a_host():
    alike = UnitTimes((0.1, 0.1), (0.3, 0.3))
    uneven = UnitTimes((0.1, 0.5), (0.3, 1.5))
    shortest = min(uneven.scaled(time_factor(uneven)).forward_s)
    assert max(alike.scaled(time_factor(alike)).forward_s) >= shortest > 0.005


def profile_of_preset(preset, factor, stages):
    """A profile of equal stages, whose units take 40 and 120 ms times the factor at full clock."""
    clocks = preset.supported_frequencies_mhz[:100:12]
    rows = []
    for stage, kind, clock in ((s, k, c) for s in range(stages) for k in Kind for c in clocks):
        at_max_s = factor * (0.04 if kind is Kind.FORWARD else 0.12)
        time_s = preset.unit_time_s(kind.value, clock, at_max_s)
        energy_j = time_s * preset.busy_power_w(kind.value, clock)
        rows.append((stage, kind, ProfileRow(clock, time_s, energy_j)))
    return make_profile(rows, source="preset")


def plan_at(folder, factor):
    preset = load_preset(str(write_scaled_preset("v100", factor, folder)))
    profile = profile_of_preset(preset, factor, 4)
    schedule = builders.envpipe(4, 8, [3, 2, 1, 0])
    conditions = Conditions((preset.wait_power_w,) * 4, change_time_s=preset.frequency_change_s)
    return Plan("envelope", schedule, envelope(schedule, profile), profile, conditions)


def test_shares_of_time_and_energy_do_not_depend_on_the_factor(tmp_path):
    whole, scaled = plan_at(tmp_path / "1", 1.0), plan_at(tmp_path / "2", 0.23)
    assert scaled.cost.iteration_time_s == pytest.approx(0.23 * whole.cost.iteration_time_s)
    for share in ("saving_percent", "slowdown_percent"):
        of_whole = getattr(whole.cost, share)(whole.baseline.cost)
        assert getattr(scaled.cost, share)(scaled.baseline.cost) == pytest.approx(of_whole)
        assert of_whole > 1


@pytest.mark.parametrize("name", ["v100", "rtx3090"])
def test_a_scaled_preset_differs_in_its_times_and_its_steps_alone(name, tmp_path):
    real, scaled = load_preset(name), load_preset(str(write_scaled_preset(name, 0.5, tmp_path)))
    halved = {name: getattr(real, name) / 2 for name in ("frequency_change_s", "refresh_s")}
    control = replace(real.control, profile_step_mhz=30)
    assert scaled == replace(real, **halved, control=control)


# --- what is run, and what was run before --------------------------------------------------------


def request(setting=BALANCED, **changes):
    job = replace(Job("bert_336M", "v100", 4, 64), **changes)
    return RunRequest(job, setting, 10, EmulatedTime(0.5, (0.01,) * 4, (0.03,) * 4))


def test_a_key_is_all_of_the_settings():
    keys = {
        request().key,
        request(BASELINE).key,
        request(minibatch_size=32).key,
        replace(request(), steps=30).key,
        replace(request(), emulated=None).key,
        replace(request(), emulated=replace(request().emulated, factor=0.6)).key,
    }
    assert len(keys) == 6
    assert request().key == request().key


def test_one_profile_serves_all_numbers_of_microbatches():
    few, many = request(minibatch_size=16), request()
    assert few.profiling() == many.profiling()
    assert few.profiling().job.num_microbatches == 4
    assert request(GREEDY).profiling() == many.profiling()


def test_runs_are_grouped_by_ranks_with_profiles_in_front(tmp_path):
    eight = request(stages=8)
    (of_four, of_eight) = batches([request(BASELINE), request(), request(GREEDY), eight], tmp_path)
    assert of_four.requests == (
        request(BASELINE), request().profiling(), request(), request(GREEDY),
    )  # fmt: skip
    assert of_eight.requests == (eight.profiling(), eight)


def test_a_batch_survives_its_file(tmp_path):
    batch = Batch((request(), replace(request(BASELINE), emulated=None)), tmp_path)
    batch.write(tmp_path / "batch.json")
    assert Batch.read(tmp_path / "batch.json") == batch


@pytest.mark.usefixtures("some_time")
def test_the_reduced_size_trains_one_replica_with_as_many_microbatches():
    job = EXPERIMENTS["fig12"].jobs[0]
    asked = REDUCED.request(job, BASELINE)
    assert (asked.job.replicas, asked.job.num_microbatches, asked.steps) == (1, 128, 10)
    paper = replace(REDUCED, size="paper").request(job, BASELINE)
    assert (paper.job, paper.steps) == (job, 30)


def test_too_few_gpus_are_refused():
    with pytest.raises(ExperimentError, match="needs 4 GPUs"):
        Place("reduced", 2, "auto").check(EXPERIMENTS["fig9_a"])
    Place("reduced", 4, "auto").check(EXPERIMENTS["fig9_a"])


# --- what comes out ------------------------------------------------------------------------------


def ended(energy_j=200.0, iteration_time_s=2.0, losses=((1.5,), (1.25,)), **changes):
    fields = {
        "gpu": "GPU", "control": "emulated", "iterations": 2,
        "losses": [list(step) for step in losses], "iteration_time_s": iteration_time_s,
        "energy_j": energy_j, "energy_uncertainty_j": 1.0, "trusted": True,
        "overrun_percent": 0.0, "reconfigure_steps": 0, "reconfigure_ended": "", "notes": [],
        "plan": None,
    }  # fmt: skip
    return Outcome(**{**fields, **changes})


def leave_results(place, experiment, folder, outcome_of):
    for job, setting in experiment.runs():
        asked = place.request(job, setting)
        run = folder / asked.key
        run.mkdir(parents=True, exist_ok=True)
        outcome_of(job, setting).write(run / training.RESULT_FILE)


def rows_of(name, tmp_path, outcome_of):
    leave_results(REDUCED, EXPERIMENTS[name], tmp_path, outcome_of)
    return command.make_rows(EXPERIMENTS[name], REDUCED, tmp_path, Console(quiet=True))


def saving(percent, slowdown_percent=0.0):
    plan = PlanFacts([2, 1, 1, 0], [6, 4, 3, 1], percent, slowdown_percent)
    time_s = 2.0 * (1 + slowdown_percent / 100)
    return ended(200.0 * (1 - percent / 100), time_s, plan=plan)


@pytest.mark.usefixtures("some_time")
def test_what_was_run_before_is_not_run_again(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "_train_batch", lambda *_: pytest.fail("trained again"))
    rows = rows_of("fig9_a", tmp_path, lambda job, s: ended() if s == BASELINE else saving(20))
    assert [round(row.saving_percent, 6) for row in rows] == [0, 20] * 4
    # All of these runs but greedy's are fig9_a's.
    fig11 = [REDUCED.request(*run) for run in EXPERIMENTS["fig11"].runs()]
    missing = [asked for asked in fig11 if training.read_result(tmp_path, asked) is None]
    assert {asked.setting for asked in missing} == {GREEDY}


@pytest.mark.usefixtures("some_time")
def test_columns_are_envpipes_then_ours_at_the_real_size(tmp_path):
    rows = rows_of("fig12", tmp_path, lambda job, s: ended() if s == BASELINE else saving(10, 0.5))
    columns = rows[1].columns()
    assert list(columns)[:10] == [
        "DP", "PP", "Model", "Microbatch size", "Minibatch size", "Type", "Scheduling",
        "Reconfig", "Throughput (sample/s)", "Energy (mJ)",
    ]  # fmt: skip
    factor = rows[1].factor
    assert factor == SOME_TIME.factor
    assert columns["Iteration time (s)"] == pytest.approx(2.01 / factor)
    # One of two pipelines was trained, and the other takes as much.
    assert columns["Energy (mJ)"] == pytest.approx(2 * 180e3 / factor, abs=1e-3)
    assert columns["Throughput (sample/s)"] == pytest.approx(512 * factor / 2.01, abs=1e-3)
    assert columns["Saving (%)"] == pytest.approx(10)
    assert columns["Hardware"] == "emulated NVIDIA V100 SXM2 (not fitted)"
    assert columns["Losses equal baseline's"] == "yes"
    assert columns["Peak in flight"] == "6 4 3 1"
    assert rows[0].columns()["Peak in flight"] == "8 7 6 5 4 3 2 1"


@pytest.mark.usefixtures("some_time")
def test_a_loss_that_differs_in_its_last_bit_is_told(tmp_path):
    other = ended(losses=((1.5,), (1.25 + 2**-50,)))
    rows = rows_of("fig9_a", tmp_path, lambda job, s: ended() if s == BASELINE else other)
    assert rows[1].columns()["Losses equal baseline's"] == "no"
    last = claims_of(EXPERIMENTS["fig9_a"], rows, "command")[-1]
    assert not last.agrees
    assert "0 of 4" in last.claim


def verdicts(name, tmp_path, outcome_of):
    rows = rows_of(name, tmp_path, outcome_of)
    return [claim.agrees for claim in claims_of(EXPERIMENTS[name], rows, "command")]


PARTS = {BASELINE: ended(), UNIFORM: saving(20, 25), ENVELOPE: saving(15, 6), BALANCED: saving(12)}


@pytest.mark.usefixtures("some_time")
@pytest.mark.parametrize(
    ("name", "outcomes", "agrees"),
    [
        ("fig9_b", {BASELINE: ended(), BALANCED: saving(15, 0.9)}, True),
        ("fig9_b", {BASELINE: ended(), BALANCED: saving(15, 1.1)}, False),
        ("fig9_b", {BASELINE: ended(), BALANCED: saving(-1)}, False),
        ("fig10", PARTS, True),
        ("fig10", {**PARTS, UNIFORM: saving(20, 5)}, False),
        ("fig10", {**PARTS, BALANCED: saving(12, 2)}, False),
        ("fig11", {BASELINE: ended(), GREEDY: saving(11), BALANCED: saving(12)}, True),
        ("fig11", {BASELINE: ended(), GREEDY: saving(13), BALANCED: saving(12)}, False),
    ],
)
def test_a_claim_agrees_only_where_the_numbers_do(name, outcomes, agrees, tmp_path):
    first, *_ = verdicts(name, tmp_path, lambda job, setting: outcomes[setting])
    assert first is agrees


@pytest.mark.usefixtures("some_time")
def test_clocks_that_were_left_alone_prove_nothing(tmp_path):
    left_alone = ended(control="dry_run")
    first, *_ = verdicts("fig9_a", tmp_path, lambda job, setting: left_alone)
    assert first is None


@pytest.mark.usefixtures("some_time")
@pytest.mark.parametrize(("sign", "agrees"), [(-1, True), (1, False)])
def test_savings_must_fall_with_the_microbatches(sign, agrees, tmp_path, monkeypatch):
    monkeypatch.setattr("figures.findings.why_few_save_less", lambda profile, counts: "So.")

    def outcome_of(job, setting):
        return ended() if setting == BASELINE else saving(20 + sign * job.num_microbatches)

    assert verdicts("fig13", tmp_path, outcome_of) == [agrees] * 4 + [True]


def test_why_few_microbatches_save_less(tmp_path):
    profile_of_preset(load_preset("v100"), 1.0, 4).write(tmp_path / "profile.csv")
    why = why_few_save_less(tmp_path / "profile.csv", (4, 16))
    # Of 8 and 32 units a stage, each of three stages has two on the envelope, and the last all.
    assert "holds 44, 30 % of the units." in why
    best = [float(number) for number in why.split(" save ")[1].removesuffix(" %.").split(", ")]
    assert all(5 < percent < 30 for percent in best)


# --- a tiny run of the real runtime --------------------------------------------------------------


@pytest.mark.xdist_group("figures")
@pytest.mark.usefixtures("some_time")
def test_a_figure_from_end_to_end(tmp_path, monkeypatch):
    job = Job("gpt_125M", "v100", 2, 8, stages=2)
    tiny = Experiment("fig9_a", "tiny", (job,), (BASELINE, BALANCED))
    monkeypatch.setitem(command.EXPERIMENTS, "fig9_a", tiny)
    monkeypatch.setattr("figures.hardware.STEPS", {"reduced": 3, "paper": 3})
    # Profiling online takes most of the time, and is tested elsewhere.
    profiling = REDUCED.request(job, BALANCED).profiling()
    profiled = tmp_path / "runs" / profiling.key
    profiled.mkdir(parents=True)
    profile_of_preset(load_preset("v100"), SOME_TIME.factor, 2).write(profiled / "profile.csv")
    ended().write(profiled / training.RESULT_FILE)
    done = CliRunner().invoke(
        command.figure_command("fig9_a"), ["--stages", "2", "--output", str(tmp_path)]
    )
    assert done.exit_code == 0, done.output
    folder = tmp_path / "fig9_a"
    with (folder / "fig9_a.csv").open() as file:
        baseline, balanced = csv.DictReader(file)
    assert float(baseline["Saving (%)"]) == 0
    assert float(balanced["Saving (%)"]) > 1
    assert abs(float(balanced["Slowdown (%)"])) < 1
    assert balanced["Losses equal baseline's"] == "yes"
    assert {path.suffix for path in folder.iterdir()} == {
        ".csv",
        ".png",
        ".svg",
        ".json",
    }
    assert [claim.agrees for claim in read_claims(tmp_path / "fig9_a" / CLAIMS_FILE)] == [
        True,
        True,
    ]


def test_reduced_models_train_with_every_number_of_stages():
    for model in ("resnet_152", "megatron_125M", "gpt_125M", "bert_336M"):
        for stages in (2, 4):
            small = reduced(MODELS[model], stages)
            built = [build_stage(small, stages, stage) for stage in range(stages)]
            assert sum(len(stage.layers) for stage in built) == len(layer_makers(small))


# --- all of them ---------------------------------------------------------------------------------


def test_all_goes_on_after_a_part_that_fails(tmp_path, monkeypatch):
    script = tmp_path / "part.py"
    script.write_text(
        "import json, pathlib, sys\n"
        "folder = pathlib.Path(sys.argv[2])\n"
        "folder.mkdir()\n"
        "claim = dict(figure=folder.name, command='c', claim='x | y', basis='b')\n"
        "(folder / 'claims.json').write_text(json.dumps([claim]))\n"
        "sys.exit(folder.name == 'first')\n"
    )
    parts = tuple(everything.Part(name, str(script)) for name in ("first", "second"))
    monkeypatch.setattr(everything, "PARTS", parts)
    done = CliRunner().invoke(everything.main, ["--output", str(tmp_path / "out")])
    assert done.exit_code == 1
    assert "Failed: first" in done.output
    table = (tmp_path / "out" / "claims.md").read_text()
    assert [line.split(" | ")[0] for line in table.splitlines()[2:]] == ["| first", "| second"]
    assert "x \\| y" in table


def test_the_table_of_claims_says_why_they_contradict(tmp_path):
    claim = Claim("fig9_a", "python x.py", "It saves 1 %", "emulated", "25 %", False, "Since so.")
    write_claims(tmp_path / CLAIMS_FILE, [claim])
    table = everything.claims_table(read_claims(tmp_path / CLAIMS_FILE))
    assert "It saves 1 %. Since so." in table
    assert "**no**" in table
