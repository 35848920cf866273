"""Training goes on, on all ranks, while the plan of a job with a sweep is made."""

from types import SimpleNamespace
from typing import Any

import pytest

from envpipe_megatron.formats.energy import Phase
from envpipe_megatron.gpu.presets import load_preset
from envpipe_megatron.runtime.job.options import JobOptions
from envpipe_megatron.tuning.background import Background
from envpipe_megatron.tuning.planner import Planner, planned_beside
from job_runs import Ran, run_job

LOOKS = 7


def run(reconfigure: str, late: int) -> Ran:
    config = JobOptions(
        num_microbatches=6,
        type="envelope",
        reconfigure=reconfigure,
        baseline_steps=3,
        profile_steps=1,
        window_s=0.0,
    )
    preset = load_preset("a100-sxm")
    return run_job(config, preset, [0.03, 0.03, 0.036], iterations=130, replicas=2, late=(late,))


@pytest.mark.parametrize("reconfigure", ["default", "balanced"])
def test_training_goes_on_while_the_plan_is_made(reconfigure):
    at_once, slow = run(reconfigure, 0), run(reconfigure, LOOKS)
    phases, before = ([one.phase for one in ran.job] for ran in (slow, at_once))
    first, planned = at_once.profiled, at_once.profiled + LOOKS
    assert phases == [*before[:first], *[Phase.PROFILE] * LOOKS, *before[first:-LOOKS]]
    # The framework's order at the highest clocks, once these have come.
    assert slow.slower(first + 1, planned) < 1e-9
    assert abs(slow.saved(first + 1, planned)) < 1e-9
    assert slow.saved(129, 130) == pytest.approx(at_once.saved(129, 130)) != 0
    assert slow.notes == at_once.notes == ()


def test_what_splitting_wins_is_said_of_the_plan_and_not_of_those_that_follow_it():
    made = {0: ("the plan", "Split backwards: 5 %"), 3: ("one that follows it", "")}
    background: Any = SimpleNamespace(busy=True, take=lambda: made)
    nothing: Any = None
    planner = Planner(nothing, nothing, lambda plan: None, nothing, lambda: background)
    assert planner.take(pytest.fail) == {0: "the plan", 3: "one that follows it"}
    assert planner.won == "Split backwards: 5 %"


def test_planning_that_nobody_waits_for_is_ended():
    background: Background[Any] = Background()
    run = planned_beside(background, (None, ()))  # type: ignore[arg-type]
    next(run)
    assert background.busy
    run.close()
    assert not background.busy
