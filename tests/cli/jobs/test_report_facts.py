"""The figures of a report, from what energy logs hold."""

from dataclasses import replace
from pathlib import Path

import pytest

from envpipe_megatron.cli.jobs.report_facts import report_facts
from envpipe_megatron.formats.energy import EnergyLogs, EnergyNote, EnergyWindow
from envpipe_megatron.formats.timeline import TimelineLogs
from envpipe_megatron.report.run_folder import RunFolder

#: Labels of a job that was started twice.
FIRST, SECOND = "2026-05-04T10:11:12.345+00:00", "2026-05-04T11:00:00.000+00:00"


def window(rank, first, last, *, energy_j, phase="steady", run=FIRST):
    steps = last - first + 1
    return EnergyWindow(
        "n1", f"GPU-{rank}", "A100", rank, rank // 2, run, phase, first, last, energy_j,
        2.0 * steps, 0.1, (steps, steps / 2, steps / 2), 100.0 + 2 * first,
    )  # fmt: skip


def folder(*lines, **more):
    known = dict.fromkeys(("profile", "plan", "summary", "job", "bill")) | more
    logs = EnergyLogs(lines, 0, ())
    return RunFolder(Path("job"), TimelineLogs(), logs, clocks=(), loop=(), missing=(), **known)


def test_a_job_that_was_killed_before_its_steady_phase_has_its_baseline():
    lines = [window(rank, 0, 3, energy_j=800, phase="warm-up") for rank in range(4)]
    facts = report_facts(folder(*lines))
    assert facts.steady is None
    assert facts.baseline.num_gpus == 4
    assert facts.baseline.energy_j == pytest.approx(4 * 200)
    assert facts.baseline.power_w == pytest.approx(100)


def test_a_baseline_of_which_no_gpu_was_metered_has_no_power():
    told = {"time_s": 2.0, "iterations": 3, "energy_j": 200.0}
    told |= dict.fromkeys(("time_uncertainty_s", "metering_uncertainty_j"))
    lines = [window(0, 4, 5, energy_j=300, phase="profile")]
    facts = report_facts(folder(*lines, job={"baseline": {"mean": told}}))
    assert facts.baseline.time_s == 2.0
    assert facts.baseline.energy_j is facts.baseline.power_w is None


def test_notes_alone_are_told_without_energies():
    facts = report_facts(folder(EnergyNote("n1", "begun", {})))
    assert facts.phases == ()
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
    facts = report_facts(folder(*first, *second))
    assert (facts.steady.num_gpus, facts.steady.iterations) == (4, 40)
    assert facts.steady.energy_j == pytest.approx(4 * 7000 / 40)
    assert facts.phases == (replace(facts.steady, name="steady"),)
    own = [stage for stage in facts.stages if stage.name == "steady"]
    assert [(stage.stage, stage.num_gpus) for stage in own] == [(0, 2), (1, 2)]
    assert [stage.energy_j for stage in own] == pytest.approx([175, 175])


def test_a_start_that_asked_for_something_else_is_in_no_figure():
    looks, saves = (
        EnergyNote("n1", "job", {"facts": {"level": level}}) for level in ("observe", "order")
    )
    first, second = window(0, 0, 9, energy_j=3000), window(0, 10, 19, energy_j=2000, run=SECOND)
    facts = report_facts(folder(looks, first, saves, second))
    assert (facts.steady.iterations, facts.steady.energy_j) == (10, 200.0)
    assert FIRST in facts.notes[0]
    facts = report_facts(folder(looks, first, saves, replace(second, run=FIRST)))
    assert facts.steady.iterations == 20, "starts without names cannot be told apart"


def test_the_present_jobs_baseline_is_not_that_of_an_earlier_jobs_summary():
    step = {"iterations": 3, "time_uncertainty_s": 0.0, "metering_uncertainty_j": 0.1}
    new, old = ({**step, "time_s": 2.0, "energy_j": joules} for joules in (400.0, 800.0))
    lines = [window(0, 0, 3, energy_j=800, phase="warm-up"), window(0, 4, 7, energy_j=800)]
    known = {"job": {"baseline": {"mean": new}}, "summary": {"baseline": old}}
    assert report_facts(folder(*lines, **known)).saved.startswith("50.00")
    assert report_facts(folder(*lines, summary={"baseline": old})).saved.startswith("75.00")
    # The job was killed before it could tell: its warm-up stands in, which takes as much.
    killed = known | {"job": {"baseline": {"mean": None}}}
    assert report_facts(folder(*lines, **killed)).saved.startswith("0.00")


def test_a_baseline_alone_saves_nothing_against_its_own_warm_up():
    lines = [
        window(0, 0, 3, energy_j=900, phase="warm-up", run="baseline"),
        window(0, 4, 7, energy_j=800, run="baseline"),
    ]
    facts = report_facts(folder(*lines))
    assert facts.baseline is None
    assert facts.saved == "not known"
    assert [(stage.name, stage.energy_j) for stage in facts.stages] == [("baseline", 200)]
    assert "Only the run `baseline`" in facts.notes[0]
