"""The figures of a report: from energy logs, and what levels would save by full clocks."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from run_made import FORWARD_S, iterations, profile

from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.orders.builders import half_split
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.formats.account import Tariff
from envpipe_megatron.formats.energy import EnergyLogs, EnergyNote, EnergyWindow
from envpipe_megatron.formats.steps import StepEnergy
from envpipe_megatron.formats.timeline import TimelineLogs
from envpipe_megatron.policies.planner import make_plan
from envpipe_megatron.report import facts as facts_module
from envpipe_megatron.report.bubbles import _times, find_bubbles, predict
from envpipe_megatron.report.run_folder import RunFolder
from envpipe_megatron.report.summary import sections_of

#: Labels of a job that was started twice.
FIRST, SECOND = "2026-05-04T10:11:12.345+00:00", "2026-05-04T11:00:00.000+00:00"

STAGES, MICROBATCHES = 3, 6
ROWS = [(1410, FORWARD_S, 3.0), (1200, 1.1 * FORWARD_S, 2.4), (900, 1.4 * FORWARD_S, 2.1)]


def window(rank, first, last, *, energy_j, phase="steady", run=FIRST):
    steps = last - first + 1
    return EnergyWindow(
        "n1", f"GPU-{rank}", "A100", rank, rank // 2, run, phase, first, last, energy_j,
        2.0 * steps, 0.1, (steps, steps / 2, steps / 2), 100.0 + 2 * first,
    )  # fmt: skip


def report_facts(of):
    return facts_module.report_facts(of, Tariff())


def folder(*lines, **more):
    known = dict.fromkeys(("profile", "plan", "summary")) | more
    logs = EnergyLogs(lines, 0, ())
    return RunFolder(Path("job"), TimelineLogs(), logs, clocks=(), missing=(), **known)


def result_of(read):
    """Return the lines below the first table of a report."""
    return sections_of(read, report_facts(read), (), {})[0].lines


def test_a_job_that_was_killed_before_its_steady_phase_has_its_warm_up():
    lines = [window(rank, 0, 3, energy_j=800, phase="warm-up") for rank in range(4)]
    facts = report_facts(folder(*lines))
    assert (facts.steady, facts.baseline, facts.compared) == (None, None, None)
    (warm_up,) = facts.phases.values()
    assert (warm_up.num_gpus, warm_up.energy_j) == (4, pytest.approx(4 * 200))
    assert warm_up.mean.power_w == pytest.approx(100)


def test_what_was_compared_with_no_baseline_is_in_the_report_as_in_the_bill():
    """With the warm-up, whose first step is slow, all would seem to save."""
    lines = [window(0, 0, 3, energy_j=1600, phase="warm-up"), window(0, 4, 7, energy_j=800)]
    facts = report_facts(folder(*lines))
    assert (facts.baseline, facts.compared) == (None, None)
    assert [line.partition(":")[0] for line in facts.account] == ["energy of 1 GPUs"]
    assert "steady steps had no baseline" in result_of(folder(*lines))[0]
    assert "no steps of the steady phase" in result_of(folder(*lines[:1]))[0]


def test_windows_alone_tell_of_how_many_iterations_their_baseline_is():
    baseline = StepEnergy(3, 2.0, 0.0, 400.0, 0.1)
    facts = report_facts(folder(replace(window(0, 4, 11, energy_j=1600), baseline=baseline)))
    assert (facts.baseline.mean.iterations, facts.steady.mean.iterations) == (3, 8)
    assert facts.baseline.energy_j == 400
    assert facts.compared.saving_percent == 50


def test_batches_of_each_size_are_in_the_account():
    base = StepEnergy(3, 2.0, None, 200.0, None)
    lines = window(0, 4, 5, energy_j=300), window(0, 0, 3, energy_j=400, phase="steady m4")
    full, m4 = (replace(line, baseline=base) for line in lines)
    of_full, saved, of_m4, saved_m4, _ = result_of(folder(full, m4))
    assert "own baseline: a step takes 2 s (0.00 % less time) and 150 J" in of_full
    assert "own baseline, batches of m4: a step takes 2 s (0.00 % less time) and 100 J" in of_m4
    assert (saved[:17], saved_m4[:17]) == ("in 2 such steps: ", "in 4 such steps: ")
    assert result_of(folder(m4))[:2] == (of_m4, saved_m4), "as batches grow"


def test_notes_alone_are_told_without_energies():
    facts = report_facts(folder(EnergyNote("n1", "begun", {})))
    assert facts.phases == {}
    assert facts.notes == (
        "The bill is incomplete: n1 was lost: its energy up to its last line is in the bill",
    )


@pytest.mark.parametrize("moved", [False, True], ids=["same GPUs", "another GPU"])
def test_a_step_of_a_restarted_job_is_that_of_all_its_starts(moved):
    """10 steps of 100 J and 30 of 200 J on each of four GPUs."""
    first = [window(rank, 0, 9, energy_j=1000) for rank in range(4)]
    second = [window(rank, 10, 39, energy_j=6000, run=SECOND) for rank in range(4)]
    if moved:
        second[3] = replace(second[3], node="n2", gpu_uid="GPU-spare")
    read = folder(*first, *second)
    facts = report_facts(read)
    assert (facts.steady.num_gpus, facts.steady.mean.iterations) == (4, 40)
    assert facts.steady.energy_j == pytest.approx(4 * 7000 / 40)
    assert [*facts.phases] == ["steady"]
    (stages,) = (
        part for part in sections_of(read, facts, (), {}) if part.title.startswith("Stages")
    )
    assert [row[:4] for row in stages.rows] == [
        ("steady", "0", "2", "175.0"),
        ("steady", "1", "2", "175.0"),
    ]


def test_a_start_that_asked_for_something_else_is_in_no_figure():
    looks, saves = (
        EnergyNote("n1", "job", {"facts": {"level": level}}) for level in ("observe", "order")
    )
    first, second = window(0, 0, 9, energy_j=3000), window(0, 10, 19, energy_j=2000, run=SECOND)
    facts = report_facts(folder(looks, first, saves, second))
    assert (facts.steady.mean.iterations, facts.steady.energy_j) == (10, 200.0)
    assert FIRST in facts.notes[0]
    facts = report_facts(folder(looks, first, saves, replace(second, run=FIRST)))
    assert facts.steady.mean.iterations == 20, "starts without names cannot be told apart"


@pytest.mark.parametrize("known", [100, 0, None, "damaged"])
def test_a_job_without_an_agent_has_its_tokens_from_its_summary(known):
    line = replace(window(0, 4, 7, energy_j=800), baseline=StepEnergy(3, 2.0, 0.0, 400.0, 0.1))
    told = report_facts(folder(line, summary={"tokens_per_iteration": known})).account[0]
    assert ("a token" in told) == (known == 100)


@pytest.fixture(scope="module")
def bubbles():
    return find_bubbles(iterations(STAGES, MICROBATCHES), STAGES)


def saved(predicted):
    return {level: percent for level, (percent, _) in predicted.levels.items()}


def test_each_level_saves_more_than_the_one_below(bubbles):
    predicted = predict(bubbles, None, "NVIDIA A100-SXM4-80GB")
    by_level = saved(predicted)
    assert list(by_level) == ["uniform", "units", "order"]
    assert by_level["uniform"] == 0.0  # at a lower clock the path through all stages is longer
    assert 3 < by_level["units"] <= by_level["order"] + 1e-6
    assert max(slower for _, slower in predicted.levels.values()) <= 1e-6
    assert "a100-sxm (fitted to measurements)" in predicted.assumed[0]
    assert len(predicted.waiting_power_w) == STAGES
    assert not predicted.lacking


def test_one_clock_saves_where_a_lower_one_is_as_fast(bubbles):
    capped = [(1500, FORWARD_S, 4.0), *ROWS]
    predicted = predict(bubbles, profile(STAGES, capped), "a GPU")
    assert saved(predicted)["uniform"] > 0


def test_the_jobs_own_profile_comes_before_a_model(bubbles):
    predicted = predict(bubbles, profile(STAGES, ROWS), "a GPU")
    assert "own profile" in predicted.assumed[0]
    assert "waiting takes no power" in predicted.assumed
    assert saved(predicted)["units"] > 0
    assert predicted.waiting_power_w is None


@pytest.mark.parametrize(("stages", "rows"), [(STAGES + 1, ROWS), (STAGES, ROWS[:1])])
def test_a_profile_of_other_stages_or_of_one_clock_is_not_taken(bubbles, stages, rows):
    """A job that sets no clock measures one only, which says nothing of others."""
    predicted = predict(bubbles, profile(stages, rows), "NVIDIA A40")
    assert "the model a40" in predicted.assumed[0]


def test_a_level_without_a_plan_is_named_and_others_stay(bubbles, monkeypatch):
    def refusing(own, request):
        if request.order is None:
            raise EnvPipeError("no such order")
        return make_plan(own, request)

    monkeypatch.setattr("envpipe_megatron.report.bubbles.make_plan", refusing)
    predicted = predict(bubbles, None, "NVIDIA A40")
    assert list(saved(predicted)) == ["uniform", "units"]
    assert predicted.lacking == ("order: no such order",)


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A40", "a40"),
        ("NVIDIA A100 SXM (emulated)", "a100-sxm"),
    ],
)
def test_the_model_is_that_of_the_chip(bubbles, name, model):
    assert f"the model {model} (" in predict(bubbles, None, name).assumed[0]


@pytest.mark.parametrize("name", ["AMD Instinct MI300X", "NVIDIA RTX 6000 Ada Generation"])
def test_a_gpu_without_a_model_gets_no_prediction(bubbles, name):
    predicted = predict(bubbles, None, name)
    assert not predicted.levels
    assert name in predicted.lacking[0]


def test_parts_of_a_backward_cost_what_those_do_that_do_not_run_as_one(bubbles):
    order = half_split(builders.one_f_one_b(STAGES, MICROBATCHES))
    kinds = tuple(Kind)
    takes_s = {Kind.NOTHING: 0.0, Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0}
    unit_s = np.array([[takes_s.get(kinds[of], 1.1) for of in own] for own in order.priced_kinds])
    times = list(_times(replace(bubbles, schedule=order, unit_s=unit_s)))
    a_stage = [(Kind.FORWARD, 1.0), (Kind.INPUT_GRADIENT, 1.1), (Kind.WEIGHT_GRADIENT, 1.1)]
    assert times == [(s, *one) for s in range(STAGES) for one in a_stage]
