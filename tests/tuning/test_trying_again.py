"""Plans that fail are tried again, and iterations that did not run whole teach nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from benchmarks.online.pipelines import Conditions
from benchmarks.online.runs import Ran, run_job
from envpipe_megatron.core.kinds import WHOLE
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.sidecar import Sidecar
from envpipe_megatron.gpu.presets import load_preset
from envpipe_megatron.runtime.job import phases
from envpipe_megatron.runtime.job.options import JobOptions
from envpipe_megatron.tuning.measured.store import Store

ITERATIONS = 60


def run(schedule: str = "auto", iterations: int = ITERATIONS, **trouble: Any) -> Ran:
    config = JobOptions(num_microbatches=12, scheduling=schedule, baseline_steps=3)
    preset, forward_s = load_preset("a100-sxm"), [0.03, 0.03, 0.036]
    return run_job(config, preset, forward_s, iterations=iterations, **trouble)


def fails_once(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, errors: Sequence[Exception]
) -> None:
    left, original = list(errors), getattr(owner, name)

    def failing(*arguments: Any, **named: Any) -> Any:
        if left:
            raise left.pop()
        return original(*arguments, **named)

    monkeypatch.setattr(owner, name, failing)


@pytest.fixture(scope="module")
def calm() -> float:
    return run().saved(50, ITERATIONS)


@pytest.mark.parametrize(
    ("errors", "trouble"),
    [([TimeoutError("no end"), MemoryError()], {}), ([], {"rooms": (False, True)})],
    ids=["not planned", "no memory"],
)
def test_a_first_plan_that_fails_is_not_the_last(monkeypatch, calm, errors, trouble):
    fails_once(monkeypatch, phases, "plan_online", errors)
    ran = run(**trouble)
    assert ran.saved(50, ITERATIONS) == pytest.approx(calm, abs=1e-3)
    assert ran.slower(ran.profiled, ITERATIONS) < 1e-3
    assert ran.notes == ("The framework's own order ran until there was a plan",)


def test_a_later_plan_without_memory_leaves_the_one_that_runs(monkeypatch):
    monkeypatch.setattr(phases, "plan_online", of_another_order(phases.plan_online))
    ran = run(rooms=(False,))
    assert any("the new plan does not run: A GPU has no memory" in text for _, text in ran.said)
    assert ran.job[-1].phase == "steady"
    assert ran.saved(50, ITERATIONS) > 0.1
    assert ran.notes == ()


def of_another_order(inner: Callable[..., Any]) -> Callable[..., Any]:
    """The first plans are of 1F1B, later ones of any order."""
    calls: list[int] = []

    def plan_online(job: Any, profile: Any, order: Any, factor: float, objective: Any) -> Any:
        calls.append(0)
        first = len(calls) <= 1
        order = builders.one_f_one_b(3, 12) if first else None
        return inner(job, profile, order, factor, objective)

    return plan_online


def test_while_the_best_plan_takes_long_a_quick_one_runs(calm):
    ran = run(iterations=130, late=(23, 0))
    (quick,) = (at for at, text in ran.said if "made in seconds" in text)
    assert quick == ran.profiled
    assert 0.02 < ran.saved(quick + 2, 60) < calm
    assert ran.saved(120, 130) == pytest.approx(calm, abs=1e-3)
    assert ran.slower(quick, 130) < 0.01


def test_a_loop_that_failed_is_begun_anew(monkeypatch, calm):
    monkeypatch.setattr(phases, "_TRIED_AFTER", 5)
    fails_once(monkeypatch, Store, "learn", [ZeroDivisionError("of a test")])
    ran = run(iterations=80)
    assert any("ZeroDivisionError: of a test" in text for _, text in ran.said)
    failed, anew = ran.notes
    assert failed.startswith("The framework's own order, at the highest clock: ")
    assert anew == "After a failure, the closed loop was begun anew"
    assert ran.saved(70, 80) == pytest.approx(calm, abs=1e-3)


@pytest.mark.parametrize(("at", "told"), [(4, True), (25, True), (4, False)])
def test_iterations_that_did_not_run_whole_teach_nothing(told, at):
    """In a probe, and at a look at the highest clock; if it is told, and nearly so if it is not."""
    ill = {(0, 1): Conditions(partial=True, untold=not told)}
    usual = run("1f1b")
    ran = run("1f1b", faults=lambda iteration: ill if iteration == at else {})
    assert ran.saved(50, ITERATIONS) == pytest.approx(
        usual.saved(50, ITERATIONS), abs=1e-3 if told else 1e-2
    )
    assert ran.slower(20, ITERATIONS) < 1e-3
    assert not any("%: planning again" in text for _, text in ran.said)


def test_units_that_became_much_faster_are_believed_the_second_time():
    store = Store(1, 1, WHOLE, [1000, 900], Sidecar())
    known_s = np.full((1, 4), 1.0)
    assert not store._odd(known_s, known_s).any()
    assert store._odd(0.2 * known_s, known_s).all()
    assert not store._odd(0.2 * known_s, known_s).any()
    assert store._odd(np.full((1, 4), np.nan), known_s).all()
