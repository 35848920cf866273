"""The outcomes of EnvPipe's experiments: rows, claims and their basis, and a tiny run."""

from dataclasses import replace

import pytest
from click.testing import CliRunner
from on_request import on_request
from presets import preset_profile
from rich.console import Console

from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.gpu.presets import load_preset

pytest.importorskip("torch")
from benchmarks import all as everything
from benchmarks.evidence import read_rows
from benchmarks.figures import figure as command
from benchmarks.figures import requests
from benchmarks.figures.experiments import (
    BALANCED,
    BASELINE,
    ENVELOPE,
    EXPERIMENTS,
    GREEDY,
    UNIFORM,
    Experiment,
    Job,
)
from benchmarks.figures.findings import findings_of
from benchmarks.figures.requests import PROFILE_FILE, Place
from benchmarks.figures.rows import Outcome, PlanFacts
from benchmarks.figures.unit_times import EmulatedTime
from benchmarks.outputs import ROWS_FILE

REDUCED = Place("reduced")

#: Emulated time that no layers were counted for.
SOME_TIME = EmulatedTime(0.25, (0.01,) * 4, (0.03,) * 4)


@pytest.fixture(autouse=True)
def some_time(monkeypatch):
    monkeypatch.setattr(
        "benchmarks.figures.requests.emulated_time", lambda job, forward_ms: SOME_TIME
    )


def v100_profile(factor, stages):
    """Of equal stages, whose units take 40 and 120 ms times the factor at full clock."""
    clocks = load_preset("v100").supported_frequencies_mhz[12:100:12]
    times_s = {Kind.FORWARD: 0.04 * factor, Kind.BACKWARD: 0.12 * factor}
    return preset_profile("v100", stages, times_s, clocks)


# --- what is asked for, and where it is made ------------------------------------------------------


@pytest.fixture
def asked(monkeypatch):
    """Return what a command would train; eight GPUs are there."""
    seen = {}

    def make_rows(experiment, place, *_):
        seen.update(models=[job.model for job in experiment.jobs], place=place)
        return []

    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    monkeypatch.setattr(command, "make_rows", make_rows)
    monkeypatch.setattr(command, "leave_figure", lambda *_: None)
    return seen


@pytest.mark.parametrize(
    ("options", "place"),
    [
        ("", Place("reduced", None, "auto", 8)),
        (" --forward-ms 24", Place("reduced", None, "auto", 24)),
        (" --real-gpus", Place("reduced", 8, "auto", 8)),
        (" --size paper --gpu-backend nvml", Place("paper", 8, "nvml", 8)),
    ],
)
def test_gpus_are_emulated_unless_real_ones_are_asked_for(options, place, asked):
    chosen = f"--model resnet_152 --model gpt_125M{options}"
    done = CliRunner().invoke(command.figure_command("fig9_a"), f"--output there {chosen}")
    assert done.exit_code == 0, done.output
    assert asked["place"] == place
    assert asked["models"] == ["gpt_125M", "resnet_152"]


def test_the_reduced_size_trains_one_replica_with_as_many_microbatches():
    job = EXPERIMENTS["fig12"].jobs[0]
    asked = REDUCED.request(job, BASELINE)
    assert (asked.job.replicas, asked.job.num_microbatches, asked.steps) == (1, 128, 10)
    paper = replace(REDUCED, size="paper").request(job, BASELINE)
    assert (paper.job, paper.steps) == (job, 30)
    one_node = EXPERIMENTS["fig9_a"].jobs[0]
    assert REDUCED.request(one_node, BASELINE) == replace(REDUCED, size="paper").request(
        one_node, BASELINE
    )


def test_too_few_gpus_are_refused():
    with pytest.raises(EnvPipeError, match="needs 4 GPUs"):
        Place("reduced", 2).check(EXPERIMENTS["fig9_a"])
    Place("reduced", 4).check(EXPERIMENTS["fig9_a"])


# --- what comes out ------------------------------------------------------------------------------


def ended(energy_j=200.0, iteration_time_s=2.0, losses=((1.5,), (1.25,)), **changes):
    fields = {
        "gpu": "GPU", "control": "emulated", "iterations": 2,
        "losses": [list(step) for step in losses], "iteration_time_s": iteration_time_s,
        "energy_j": energy_j, "energy_uncertainty_j": 1.0,
        "reconfigure_steps": 0, "reconfigure_ended": "", "notes": [],
        "plan": None,
    }  # fmt: skip
    return Outcome(**{**fields, **changes})


def rows_of(name, tmp_path, outcomes):
    """The rows of a figure whose runs ended so: by setting, or by job and setting."""
    for job, setting in EXPERIMENTS[name].runs():
        run = tmp_path / REDUCED.request(job, setting).key
        run.mkdir(parents=True, exist_ok=True)
        outcome = outcomes(job, setting) if callable(outcomes) else outcomes[setting]
        outcome.write(run / requests.RESULT_FILE)
    return command.make_rows(EXPERIMENTS[name], REDUCED, tmp_path, Console(quiet=True))


def saving(percent, slowdown_percent=0.0):
    plan = PlanFacts([2, 1, 1, 0], [6, 4, 3, 1], percent, slowdown_percent)
    time_s = 2.0 * (1 + slowdown_percent / 100)
    return ended(200.0 * (1 - percent / 100), time_s, plan=plan)


def test_what_was_run_before_is_not_run_again(tmp_path, monkeypatch):
    monkeypatch.setattr(requests, "_train_batch", lambda *_: pytest.fail("trained again"))
    rows = rows_of("fig9_a", tmp_path, {BASELINE: ended(), BALANCED: saving(20)})
    assert [round(row.saving_percent, 6) for row in rows] == [0, 20] * 4
    # All of these runs but greedy's are fig9_a's.
    fig11 = [REDUCED.request(*run) for run in EXPERIMENTS["fig11"].runs()]
    missing = [asked for asked in fig11 if requests.read_result(tmp_path, asked) is None]
    assert {asked.setting for asked in missing} == {GREEDY}


def test_a_loss_that_differs_in_its_last_bit_is_found(tmp_path):
    other = ended(losses=((1.5,), (1.25 + 2**-50,)))
    rows = rows_of("fig9_a", tmp_path, {BASELINE: ended(), BALANCED: other})
    assert rows[1].columns()["Losses equal baseline's"] == "no"
    last = findings_of(EXPERIMENTS["fig9_a"], rows)[-1]
    assert not last.agrees
    assert "0 of 4" in last.seen


def findings(name, tmp_path, outcomes):
    return findings_of(EXPERIMENTS[name], rows_of(name, tmp_path, outcomes))


PARTS = {BASELINE: ended(), UNIFORM: saving(20, 25), ENVELOPE: saving(15, 6), BALANCED: saving(12)}


@pytest.mark.parametrize(
    ("name", "outcomes", "agrees"),
    [
        ("fig9_b", {BASELINE: ended(), BALANCED: saving(15, 0.9)}, True),
        ("fig9_b", {BASELINE: ended(), BALANCED: saving(15, 1.1)}, False),
        ("fig10", PARTS, True),
        ("fig10", {**PARTS, UNIFORM: saving(20, 5)}, False),
        ("fig11", {BASELINE: ended(), GREEDY: saving(11), BALANCED: saving(12)}, True),
        # 1 J of 200 J each: 1.4 points are told apart, and less is not.
        ("fig11", {BASELINE: ended(), GREEDY: saving(13.3), BALANCED: saving(12)}, True),
        ("fig11", {BASELINE: ended(), GREEDY: saving(13.5), BALANCED: saving(12)}, False),
    ],
)
def test_a_finding_agrees_only_where_the_numbers_do(name, outcomes, agrees, tmp_path):
    assert findings(name, tmp_path, outcomes)[0].agrees is agrees


@pytest.mark.parametrize(("percent", "agrees"), [(15, None), (30, None), (-1, False)])
def test_how_much_is_saved_agrees_with_nothing_on_emulated_gpus(percent, agrees, tmp_path):
    _, saved, _ = findings("fig12", tmp_path, {BASELINE: ended(), BALANCED: saving(percent)})
    assert saved.agrees is agrees
    assert "28.4 %" in saved.paper
    assert "guesses" in saved.why


@pytest.mark.parametrize(
    ("points", "agrees", "profiled", "why"),
    [
        (-1, True, True, ""),
        (1, False, True, "So."),
        (1, False, False, "Its profile is gone"),
        (0.01, None, True, "The meters cannot tell"),
    ],
)
def test_savings_must_fall_with_the_microbatches(
    points, agrees, profiled, why, tmp_path, monkeypatch
):
    monkeypatch.setattr(
        "benchmarks.figures.findings.why_few_save_less", lambda profile, counts: "So."
    )

    def outcome_of(job, setting):
        profiling = tmp_path / REDUCED.request(job, setting).profiling().key
        profiling.mkdir(exist_ok=True)
        if profiled:
            (profiling / PROFILE_FILE).touch()
        return ended() if setting == BASELINE else saving(20 + points * job.num_microbatches)

    *savings, _ = findings("fig13", tmp_path, outcome_of)
    assert [finding.agrees for finding in savings] == [agrees] * 4
    assert all(each.why.startswith(why) and bool(each.why) == bool(why) for each in savings)
    assert savings[0].why.endswith("So.") == (points > 0 and profiled)


# --- a tiny run of the real runtime --------------------------------------------------------------


@on_request("FIGURES")
def test_a_figure_from_end_to_end(tmp_path, monkeypatch):
    job = Job("gpt_125M", "v100", 2, 8, stages=2)
    tiny = Experiment("fig9_a", "tiny", (job,), (BASELINE, BALANCED))
    monkeypatch.setitem(command.EXPERIMENTS, "fig9_a", tiny)
    monkeypatch.setattr("benchmarks.figures.requests.STEPS", 3)
    # Profiling online takes most of the time, and is tested elsewhere.
    profiling = REDUCED.request(job, BALANCED).profiling()
    profiled = tmp_path / "runs" / profiling.key
    profiled.mkdir(parents=True)
    v100_profile(SOME_TIME.factor, 2).write(profiled / "profile.csv")
    ended().write(profiled / requests.RESULT_FILE)
    done = CliRunner().invoke(
        command.figure_command("fig9_a"), ["--stages", "2", "--output", str(tmp_path)]
    )
    assert done.exit_code == 0, done.output
    folder = tmp_path / "fig9_a"
    baseline, balanced, *found = (row.measured for row in read_rows(folder / ROWS_FILE))
    assert baseline["Saving (%)"].value == 0
    assert balanced["Saving (%)"].value > 1
    assert abs(balanced["Slowdown (%)"].value) < 1
    assert balanced["Losses equal baseline's"] == "yes"
    assert {path.suffix for path in folder.iterdir()} == {".jsonl", ".png", ".svg"}
    assert [each["verdict"] for each in found] == ["agrees", "not compared", "agrees"]


# --- all of them ---------------------------------------------------------------------------------


def test_all_goes_on_after_a_part_that_fails(tmp_path, monkeypatch):
    script = tmp_path / "part.py"
    script.write_text(
        "import pathlib, sys\n"
        "folder = pathlib.Path(sys.argv[-1])\n"
        "folder.mkdir()\n"
        "sys.exit(folder.name == 'first')\n"
    )
    parts = dict.fromkeys(("first", "second"), (str(script),))
    monkeypatch.setattr(everything, "PARTS", parts)
    done = CliRunner().invoke(everything.main, ["--output", str(tmp_path / "out")])
    assert done.exit_code == 1
    assert "Failed: first" in done.output
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"first", "second"}
