"""Plans that fail are tried again, and iterations that did not run whole teach nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.online import emulated_job
from benchmarks.online.emulated_job import Immediate
from benchmarks.online.pipelines import Pipelines
from benchmarks.online.runs import Ran, run_job
from envpipe_megatron.core.kinds import WHOLE
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.sidecar import Sidecar
from envpipe_megatron.gpu.emulated.presets import load_preset
from envpipe_megatron.policies.request import PlanRequest
from envpipe_megatron.runtime.execution.executor import StageRecord, make_record
from envpipe_megatron.runtime.job import online, phases
from envpipe_megatron.runtime.job.config import SessionConfig
from envpipe_megatron.runtime.memory.peak import MemoryFullError
from envpipe_megatron.tuning.controller import Controller
from envpipe_megatron.tuning.store import Store

ITERATIONS = 60


def run(schedule: str = "auto", iterations: int = ITERATIONS) -> Ran:
    config = SessionConfig(PlanRequest(12, schedule=schedule, policy="optimal"), closed_loop=True)
    return run_job(config, load_preset("a100-sxm"), [0.03, 0.03, 0.036], iterations=iterations)


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
    ("name", "errors"),
    [
        ("plan_online", [TimeoutError("no end"), MemoryError()]),
        # Of each of the three ranks.
        ("make_room", [MemoryFullError("Stages 0 have no memory")] * 3),
    ],
)
def test_a_first_plan_that_fails_is_not_the_last(monkeypatch, calm, name, errors):
    fails_once(monkeypatch, phases if name == "plan_online" else online, name, errors)
    ran = run()
    assert ran.saved(50, ITERATIONS) == pytest.approx(calm, abs=1e-3)
    assert ran.slower(ran.profiled, ITERATIONS) < 1e-3
    assert ran.notes == ("The framework's own order ran until there was a plan",)


def test_a_later_plan_without_memory_leaves_the_one_that_runs(monkeypatch):
    rooms = online.make_room

    def full(job: Any, plan: Any) -> None:
        if job.state.plan is not None:
            raise MemoryFullError("Stages 0 have no memory")
        rooms(job, plan)

    monkeypatch.setattr(online, "make_room", full)
    monkeypatch.setattr(phases, "plan_online", of_another_order(phases.plan_online))
    ran = run()
    assert any("the new plan does not run: Stages 0" in text for _, text in ran.said)
    assert ran.job[-1].phase == "steady"
    assert ran.saved(50, ITERATIONS) > 0.1
    assert ran.notes == ()


def of_another_order(inner: Callable[..., Any]) -> Callable[..., Any]:
    """The first plans are of 1F1B, later ones of any order."""
    calls: list[int] = []

    def plan_online(job: Any, profile: Any, order: Any, factor: float) -> Any:
        calls.append(0)
        first = len(calls) <= 1
        return inner(job, profile, builders.one_f_one_b(3, 12) if first else None, factor)

    return plan_online


def test_while_the_best_plan_takes_long_a_quick_one_runs(monkeypatch, calm):
    class Slow(Immediate):
        """The first that is made is not ready for so many looks."""

        made = 0

        def __init__(self) -> None:
            super().__init__()
            self.looks = 0 if Slow.made else 24
            Slow.made += 1

        def take(self) -> Any:
            self.looks -= 1
            return None if self.looks > 0 else super().take()

    monkeypatch.setattr(emulated_job, "Immediate", Slow)
    ran = run(iterations=130)
    (quick,) = (at for at, text in ran.said if "made in seconds" in text)
    assert quick == ran.profiled
    assert 0.02 < ran.saved(quick + 2, 60) < calm
    assert ran.saved(120, 130) == pytest.approx(calm, abs=1e-3)
    assert ran.slower(quick, 130) < 0.01


def test_the_best_plan_that_is_ended_for_new_clocks_is_begun_again():
    """As when a quick plan turns out too slow while the best one is being made."""
    begun: list[object] = []
    planner: Any = SimpleNamespace(busy=True, begin=lambda order, faster: begun.append(order))
    own = builders.one_f_one_b(1, 2)
    loop = Controller(own, Store(1, 1, WHOLE, [1000, 900], Sidecar()), 1, planner)
    loop.plan = SimpleNamespace(schedule=own)  # type: ignore[assignment]
    for reorder in (True, False):
        loop._replan(reorder=reorder)
    assert begun == [None, own]
    assert loop._again_at > 0
    loop._replan(reorder=True)
    assert loop._again_at == 0


def test_a_loop_that_failed_is_begun_anew(monkeypatch, calm):
    monkeypatch.setattr(phases, "_TRIED_AFTER", 5)
    fails_once(monkeypatch, Store, "learn", [ZeroDivisionError("of a test")])
    ran = run(iterations=80)
    assert any("ZeroDivisionError: of a test" in text for _, text in ran.said)
    assert ran.notes == ("After a failure, the closed loop was begun anew",)
    assert ran.saved(70, 80) == pytest.approx(calm, abs=1e-3)


def completed(record: StageRecord) -> StageRecord:
    """As `Followed.complete` leaves it: all units but the first take no time."""
    starts_s, ends_s = record.start_s.tolist(), record.end_s.tolist()
    for unit in range(1, len(ends_s)):
        starts_s[unit] = ends_s[-1] + 2e-6 * unit
        ends_s[unit] = starts_s[unit] + 1e-6
    rest = record.begin_s, record.iteration_time_s, record.wall_time_s
    return make_record(starts_s, ends_s, *rest)


@pytest.mark.parametrize(("at", "told"), [(4, True), (25, True), (4, False)])
def test_iterations_that_did_not_run_whole_teach_nothing(monkeypatch, told, at):
    """In a probe, and at a look at the highest clock; if it is told, and nearly so if it is not."""
    inner = Pipelines.run

    def odd(self: Pipelines, orders: Any) -> Any:
        records = inner(self, orders)
        if self.begun - 1 == at and self.begun == len(self.iterations):
            records[0][1] = replace(completed(records[0][1]), whole=not told)
        return records

    usual = run("1f1b")
    monkeypatch.setattr(Pipelines, "run", odd)
    ran = run("1f1b")
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
