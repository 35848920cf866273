"""What a closed loop does when parts of it fail, and what it must not take for harm."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from on_request import on_request
from window_reports import report_of

from emulated_pipelines import Conditions
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.sidecar import Sidecar
from envpipe_megatron.gpu.presets import load_preset
from envpipe_megatron.runtime.job import phases
from envpipe_megatron.runtime.job.options import JobOptions
from envpipe_megatron.tuning import judge
from envpipe_megatron.tuning.commands import Window
from envpipe_megatron.tuning.judge import Judge, Silence
from envpipe_megatron.tuning.measured.store import Store
from job_runs import Ran, run_job, slower

STAGES, MICROBATCHES, TOO_SLOW = 3, 12, "Too slow: "


ITERATIONS, UNEVEN = 60, (0.03, 0.03, 0.036)


def run(
    iterations: int = ITERATIONS,
    faults: Any = lambda iteration: {},
    *,
    forward_s: Sequence[float] = (0.03,) * STAGES,
    schedule: str = "auto",
    **trouble: Any,
) -> Ran:
    config = JobOptions(num_microbatches=MICROBATCHES, scheduling=schedule, baseline_steps=3)
    preset = load_preset("a100-sxm")
    return run_job(config, preset, forward_s, iterations=iterations, faults=faults, **trouble)


@on_request("CONTROL")
def test_what_changes_in_a_baseline_is_planned_for(monkeypatch):
    """No later window differs from what the baseline has shown."""
    monkeypatch.setattr(judge, "BASELINE_EVERY", 24)
    calm = run(70)
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


def varied(work: float, at: int, grown: float = 1.0, slow: float = 1.0) -> Ran:
    """Run 160 iterations whose work differs, as `work` of `Pipelines` says.

    From iteration `at` on all units take `grown` times as long, and stage 1's `slow` times that.
    """

    def faults(iteration: int) -> dict[tuple[int, int], Conditions]:
        if iteration < at:
            return {}
        return {(0, s): slower(grown * (slow if s == 1 else 1.0)) for s in range(STAGES)}

    return run(160, faults, forward_s=UNEVEN, emulated={"work": (work, 0.0)})


@pytest.mark.parametrize("work", [0.04, 0.15])
def test_work_that_varies_from_step_to_step_is_no_drift(calm, work):
    ran = varied(work, 160)
    assert ran.longer(60, 160) < 0.002
    assert ran.saved(60, 160) == pytest.approx(calm, abs=0.005)
    assert sum(at >= 60 and "planning again" in text for at, text in ran.said) <= 1


def test_a_gpu_that_becomes_slow_is_seen_where_work_varies():
    ran, still = varied(0.08, 60, slow=1.1), varied(0.0, 60, slow=1.1)
    assert ran.longer(80, 160) < 0.005
    assert ran.saved(80, 160) == pytest.approx(still.saved(80, 160), abs=0.01)


def test_work_that_has_grown_for_good_is_seen():
    ran = varied(0.04, 60, grown=1.2)
    assert ran.longer(60, 160) < 0.005
    first = next(text for at, text in ran.said if at >= 60 and "units take" in text)
    percent = float(first.split("units take ")[1].split(" %")[0])
    assert percent == pytest.approx(20, abs=6)


def test_a_pause_in_a_baseline_does_not_blind():
    judge = Judge(1.0)
    judge.add_baseline(np.array([1.0, 1.0]), 1.0)
    judge.add_baseline(np.array([1.1, 1.43]), 1.1)  # units have become slower; one was held up
    judge.add(np.full(8, 1.1))
    assert judge.late(1.1) == pytest.approx(0.0)
    judge.begin()
    judge.add(np.full(8, 1.1 * 1.02))
    assert judge.harmed(1.1)


def window(steps_s: list[float], metered: tuple[int, ...] = (1,)) -> Window:
    steps = np.array([[*steps_s, np.nan]])
    return Window(
        tuple(
            report_of(np.ones((1, 2)), np.ones(steps.shape), steps, np.diag([0, 0, seen]))
            for seen in metered
        )
    )


def test_harm_is_added_up():
    judge = Judge(1.0)
    judge.add_baseline(np.array([2.0]), 2.0)
    judge.blame(np.array([2.0, 2.02, 2.04]), 2.0, 0.0, "heat")
    told = judge.blame(np.array([2.2, 2.2, 2.2]), 2.0, 0.0, "a power cap")
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


# What fails is tried again, and iterations that did not run whole teach nothing ------------------

run_uneven = partial(run, forward_s=UNEVEN)


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
    return run_uneven().saved(50, ITERATIONS)


@pytest.mark.parametrize(
    ("errors", "trouble"),
    [([TimeoutError("no end"), MemoryError()], {}), ([], {"rooms": (False, True)})],
    ids=["not planned", "no memory"],
)
def test_a_first_plan_that_fails_is_not_the_last(monkeypatch, calm, errors, trouble):
    fails_once(monkeypatch, phases, "plan_online", errors)
    ran = run_uneven(**trouble)
    assert ran.saved(50, ITERATIONS) == pytest.approx(calm, abs=1e-3)
    assert ran.slower(ran.profiled, ITERATIONS) < 1e-3
    assert ran.notes == ("The framework's own order ran until there was a plan",)


def test_a_later_plan_without_memory_leaves_the_one_that_runs(monkeypatch):
    monkeypatch.setattr(phases, "plan_online", of_another_order(phases.plan_online))
    ran = run_uneven(rooms=(False,))
    assert any("the new plan does not run: A GPU has no memory" in text for _, text in ran.said)
    assert ran.job[-1].phase == "steady"
    assert ran.saved(50, ITERATIONS) > 0.1
    assert ran.notes == ()


def test_plans_that_never_find_memory_are_made_ever_more_seldom():
    """Clocks of the framework's order save meanwhile."""
    ran = run_uneven(iterations=150, rooms=(False,) * 20)
    assert ran.saved(40, 150) > 0.1
    failed = [at for at, text in ran.said if "the new plan does not run" in text]
    pauses = [later - at for at, later in pairwise(failed)]
    assert pauses[-1] > pauses[-2] > pauses[-3], pauses


def of_another_order(inner: Callable[..., Any]) -> Callable[..., Any]:
    """The first plans are of 1F1B, later ones of any order."""
    calls: list[int] = []

    def plan_online(job: Any, profile: Any, order: Any) -> Any:
        calls.append(0)
        first = len(calls) <= 1
        order = builders.one_f_one_b(3, 12) if first else None
        return inner(job, profile, order)

    return plan_online


def test_while_a_plan_takes_long_the_frameworks_own_order_runs(calm):
    usual, late = run_uneven(), run_uneven(late=(23, 0))
    assert late.profiled == usual.profiled + 23
    assert late.slower(usual.profiled, late.profiled) < 1e-9
    assert late.saved(50, ITERATIONS) == pytest.approx(calm, abs=1e-3)


def test_a_loop_that_failed_is_begun_anew(monkeypatch, calm):
    monkeypatch.setattr(phases, "_TRIED_AFTER", 5)
    fails_once(monkeypatch, Store, "learn", [ZeroDivisionError("of a test")])
    ran = run_uneven(iterations=80)
    assert any("ZeroDivisionError: of a test" in text for _, text in ran.said)
    failed, anew = ran.notes
    assert failed.startswith("The framework's own order, at the highest clock: ")
    assert anew == "After a failure, the closed loop was begun anew"
    assert ran.saved(70, 80) == pytest.approx(calm, abs=1e-3)


def test_a_loop_that_had_run_for_long_is_begun_anew_as_soon_as_the_first_time(monkeypatch):
    monkeypatch.setattr(phases, "_TRIED_AFTER", 5)
    learn, fails = Store.learn, [1, 2, 3, 40]

    def failing(*arguments: Any, **named: Any) -> Any:
        fails[:] = [left - 1 for left in fails]
        if 0 in fails:
            raise ZeroDivisionError("of a test")
        return learn(*arguments, **named)

    monkeypatch.setattr(Store, "learn", failing)
    ran = run_uneven(iterations=260)
    ends = [at for at, text in ran.said if text.startswith("steady: ")]
    begins = [at for at, text in ran.said if text.startswith("After a failure")]
    pauses = [after - before for before, after in zip(ends, begins, strict=True)]
    assert pauses == [5, 10, 20, 5]


@pytest.mark.parametrize(("at", "told"), [(4, True), (25, True), (4, False)])
def test_iterations_that_did_not_run_whole_teach_nothing(told, at):
    """In a probe, and at a look at the highest clock; if it is told, and nearly so if it is not."""
    ill = {(0, 1): Conditions(partial=True, untold=not told)}
    usual = run_uneven(schedule="1f1b")
    ran = run_uneven(schedule="1f1b", faults=lambda iteration: ill if iteration == at else {})
    assert ran.saved(50, ITERATIONS) == pytest.approx(
        usual.saved(50, ITERATIONS), abs=1e-3 if told else 1e-2
    )
    assert ran.slower(20, ITERATIONS) < 1e-3
    assert not any("%: planning again" in text for _, text in ran.said)


def test_units_that_became_much_faster_are_believed_the_second_time():
    store = Store(builders.one_f_one_b(1, 2), [1000, 900], Sidecar())
    known_s = np.full((1, 4), 1.0)
    assert not store._odd(known_s, known_s).any()
    assert store._odd(0.2 * known_s, known_s).all()
    assert not store._odd(0.2 * known_s, known_s).any()
    assert store._odd(np.full((1, 4), np.nan), known_s).all()


def test_what_steps_took_before_units_changed_is_no_harm():
    """Units are slow for a while; behind that there is no plan for some time."""
    slow = dict.fromkeys(((0, stage) for stage in range(STAGES)), slower(1.03))
    ran = run(110, lambda at: slow if 50 <= at < 70 else {}, late=(0, 0, 30))
    assert "baseline" not in {each.phase for each in ran.job}
    assert ran.notes == ()
    assert ran.saved(75, 110) > 0.1


@pytest.mark.parametrize("forward_s", [1e-6, 0.0])
def test_a_stage_that_has_nothing_to_do_keeps_no_job_from_saving(forward_s):
    """No look is for its units, which take microseconds, or less than events show."""
    ran = run(60, forward_s=(0.03, 0.03, forward_s))
    assert ran.profiled < 30
    assert ran.saved(50, 60) > 0.05
