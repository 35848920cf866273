"""What a closed loop does when parts of it fail, and what it must not take for harm."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from on_request import on_request
from window_reports import report_of

from benchmarks.online.runs import Ran, run_job, slower
from envpipe_megatron.gpu.presets import load_preset
from envpipe_megatron.policies.optimal.linear_program import LinearProgramError
from envpipe_megatron.runtime.job import phases
from envpipe_megatron.runtime.job.options import JobOptions
from envpipe_megatron.tuning import controller
from envpipe_megatron.tuning.commands import Window
from envpipe_megatron.tuning.judge import Judge, Silence
from envpipe_megatron.tuning.measured.meters import MeterSums

STAGES, MICROBATCHES, TOO_SLOW = 3, 12, "Too slow: "


def run(iterations: int, faults: Any, **asked: Any) -> Ran:
    config = JobOptions(num_microbatches=MICROBATCHES, baseline_steps=3, **asked)
    preset, forward_s = load_preset("a100-sxm"), [0.03] * STAGES
    return run_job(config, preset, forward_s, iterations=iterations, faults=faults)


def run_where_planning_fails(
    monkeypatch: pytest.MonkeyPatch, errors: list[Exception], iterations: int, share: float
) -> Ran:
    """From iteration 45 a stage is slower; the plans begun since then fail, one for each error."""
    inner, begun = phases.plan_online, []

    def plan_online(*arguments: Any) -> Any:
        if begun and errors:
            raise errors.pop()
        return inner(*arguments)

    def faults(iteration: int) -> Any:
        if iteration >= 45:
            begun.append(iteration)
        return {(0, 1): slower(share)} if iteration >= 45 else {}

    monkeypatch.setattr(phases, "plan_online", plan_online)
    return run(iterations, faults)


@on_request("CONTROL")
def test_a_plan_that_cannot_be_made_after_harm_is_tried_again(monkeypatch):
    errors: list[Exception] = [LinearProgramError("The solver has failed") for _ in range(3)]
    ran = run_where_planning_fails(monkeypatch, errors, 110, 1.1)
    assert any("The solver has failed" in text for _, text in ran.said)
    assert ran.job[-1].phase == "steady"
    assert ran.saved(90, 110) > ran.saved(35, 45)
    assert ran.slower(55, 110) < 0.005


def test_planning_that_fails_in_any_way_is_tried_again(monkeypatch):
    """There is a plan to go on with, whatever a solver or the machine has run out of."""
    ran = run_where_planning_fails(monkeypatch, [MemoryError()], 80, 1.05)
    assert any("nothing better is planned: MemoryError" in text for _, text in ran.said)
    assert ran.job[-1].phase == "steady"
    assert ran.saved(70, 80) > ran.saved(35, 45)


@on_request("CONTROL")
def test_what_changes_in_a_baseline_is_planned_for(monkeypatch):
    """No later window differs from what the baseline has shown."""
    monkeypatch.setattr(controller, "BASELINE_EVERY", 24)
    calm = run(70, lambda iteration: {})
    (at, *_) = (i for i, each in enumerate(calm.job) if i > 40 and each.phase == "baseline")
    ran = run(90, lambda iteration: {(0, 1): slower(1.08)} if iteration > at else {})
    assert any("stage 1's units take +8.0 %: planning again" in text for _, text in ran.said)
    assert ran.saved(80, 90) > calm.saved(30, 40) + 0.02


@on_request("CONTROL")
def test_the_bill_has_one_line_of_all_steps_that_were_too_slow():
    """A GPU is slow now and then: after each time, plans for a slow one are too slow."""
    ran = run(115, lambda at: {(0, 1): slower(1.1)} if at // 25 % 2 else {})
    told = [note for note in ran.notes if note.startswith(TOO_SLOW)]
    assert len(told) == 1
    assert sum("the framework's order" in text for _, text in ran.said) >= 2


@on_request("CONTROL")
def test_what_all_units_of_an_iteration_share_is_no_drift():
    common = 1 + 0.02 * np.random.default_rng(3).standard_normal(160)
    ran = run(160, lambda at: {(0, s): slower(float(common[at])) for s in range(STAGES)})
    planned = [at for at, text in ran.said if at >= 60 and "planning again" in text]
    assert len(planned) <= 1
    assert ran.longer(60, 160) < 0.015  # what chance gives here: 0.3 to 1.4 % with other numbers


def test_a_pause_in_a_baseline_does_not_blind():
    judge = Judge(1.0)
    judge.add_baseline(window([1.0, 1.0]), 1.0)
    judge.add_baseline(window([1.1, 1.43]), 1.1)  # units have become slower; one was held up
    judge.add(window([1.1] * 8))
    assert judge.late(1.1) == pytest.approx(0.0)
    judge.begin()
    judge.add(window([1.1 * 1.02] * 8))
    assert judge.harmed(1.1)


def window(steps_s: list[float], metered: tuple[int, ...] = (1,)) -> Window:
    steps = np.array([[*steps_s, np.nan]])
    return Window(
        tuple(
            report_of(
                np.ones((1, 2)), np.ones(steps.shape), steps - 1, steps, MeterSums.none(1), seen
            )
            for seen in metered
        )
    )


def test_harm_is_added_up():
    judge = Judge(1.0)
    judge.add_baseline(window([2.0]), 2.0)
    judge.blame(window([2.0, 2.02, 2.04]), 2.0, 0.0, "heat")
    told = judge.blame(window([2.2, 2.2, 2.2]), 2.0, 0.0, "a power cap")
    assert "6 steps took 0.66 s longer" in told
    assert "one 10.0 % longer" in told
    assert told.endswith("a power cap")


def test_counters_are_silent_after_a_while_and_may_come_back():
    silence = Silence(2)
    assert silence.add(window([1.0, 1.0], (1, 0))) == []  # a short window sees no refresh
    (news,) = silence.add(window([1.0, 1.0], (1, 0)))
    assert news.startswith("energy counters of stage 1 say nothing")
    assert silence.add(window([1.0, 1.0], (1, 0))) == []
    (news,) = silence.add(window([1.0, 1.0], (1, 1)))
    assert news == "energy counters of stage 1 are back"
    assert silence.add(window([1.0, 1.0], (1, 1))) == []


@pytest.mark.parametrize("seen", [(0, 1), (1, 1)])
def test_counters_that_come_in_time_are_not_silent(seen):
    silence = Silence(2)
    for _ in range(4):
        assert silence.add(window([1.0], (0, 1))) == []
        assert silence.add(window([1.0], (1, 1))) == []
    assert silence.add(window([1.0], seen)) == []
