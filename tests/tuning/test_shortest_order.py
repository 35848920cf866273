"""The shortest order of whole jobs on emulated GPUs: found, held against the framework's, left."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from on_request import on_request

from emulated_job import EmulatedJob
from emulated_pipelines import Conditions, Pipelines
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.orders.builders import half_split
from envpipe_megatron.core.profile_rows import MEASURED_SPLIT
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.gpu.presets import load_preset
from envpipe_megatron.policies.objective import Goal
from envpipe_megatron.policies.planner import make_plan
from envpipe_megatron.runtime.job import phases
from envpipe_megatron.runtime.job.options import JobOptions
from envpipe_megatron.tuning import shortest
from envpipe_megatron.tuning.judge import WINDOW
from envpipe_megatron.tuning.shortest import ShortestOrder
from job_runs import Ran, exact_profile, run_job, slower

PRESET = load_preset("a100-sxm")
STAGES, MICROBATCHES = 2, 4
FORWARD_S = (0.03,) * STAGES
OWN = builders.one_f_one_b(STAGES, MICROBATCHES)
REQUEST = JobOptions(num_microbatches=MICROBATCHES, objective=Goal.TIME)
#: The share of the time that the shortest order takes less.
_EXACT = exact_profile(PRESET, FORWARD_S, {})
_BEST = make_plan(_EXACT, replace(REQUEST.request(), split=MEASURED_SPLIT)).plan
GAIN = -_BEST.cost.slowdown_percent(_BEST.baseline.cost) / 100
FRAMEWORKS, PLANNED = "The framework's own order: ", "The planned order takes "
#: Faults begin here, when the order is found, and are known after so many iterations.
BEGIN, FOUND_OUT = 40, 20

#: What is the matter in an iteration that runs an order, by (replica, stage).
Trouble = Callable[[int, Schedule], dict[tuple[int, int], Conditions]]


class OrderedPipelines(Pipelines):
    """GPUs whose trouble may depend on the order that runs."""

    def __init__(self, *given: Any, faults: Trouble = lambda at, order: {}, **named: Any) -> None:
        self.orders: list[Schedule] = []
        super().__init__(*given, faults=lambda at: faults(at, self.orders[at]), **named)

    def run(self, orders: Any) -> Any:
        """Run an iteration, at the highest clock."""
        assert all((order.frequency_mhz == PRESET.max_frequency_mhz).all() for order in orders)
        assert len({order.schedule.stages for order in orders}) == 1
        self.orders.append(orders[0].schedule)
        return super().run(orders)


def run(
    iterations: int = 60,
    trouble: Trouble = lambda at, order: {},
    *,
    request: JobOptions = REQUEST,
    splits: bool = True,
    **job: Any,
) -> Ran:
    """Run a job; more of it is as of `run_job`."""
    config = replace(
        request,
        baseline_steps=3,
        why_whole="" if splits else "of a test",
        runs_units="own_order" in job,
    )
    made: Any = OrderedPipelines
    return run_job(
        config, PRESET, FORWARD_S, iterations=iterations, faults=trouble, make=made, **job
    )


def new(ran: Ran) -> list[bool]:
    """Which iterations ran another order than the framework's, or half of that one split."""
    orders: Any = ran.pipelines
    return [order.stages not in (OWN.stages, half_split(OWN).stages) for order in orders.orders]


def tried(ran: Ran) -> list[int]:
    """Iterations that began with a new order, and the one before did not; not between both."""
    ran_new = new(ran)
    near = [any(ran_new[at : at + 6]) for at in range(len(ran_new))]
    return [at for at in range(1, len(near)) if near[at] and not near[at - 1]]


def less(ran: Ran, first: int, after: int) -> float:
    """Share of the time."""
    return -ran.longer(first, after)


def told(ran: Ran, begin: str) -> list[str]:
    return [text for text in ran.notes if text.startswith(begin)]


def in_new_orders(factor: float, begin: int = 0) -> Trouble:
    """GPUs whose units take longer, but in the framework's order and the one they are timed in."""
    known = OWN.stages, half_split(OWN).stages

    def trouble(at: int, order: Schedule) -> dict[tuple[int, int], Conditions]:
        ill = at >= begin and order.stages not in known
        return {(0, stage): slower(factor) for stage in range(STAGES) if ill}

    return trouble


SILENT = {(0, stage): Conditions(silent=True) for stage in range(STAGES)}


@pytest.mark.parametrize(
    ("trouble", "emulated"),
    [
        (lambda at, order: {}, {}),
        (lambda at, order: SILENT, {}),
        (lambda at, order: {}, {"scatter": 0.02, "hiccups": 0.02}),
        (lambda at, order: {(0, 1): Conditions(partial=at in (5, 14, 30))}, {}),
    ],
    ids=["calm", "no meter", "noise", "partial iterations"],
)
def test_the_shortest_order_runs_once_it_has_shown_that_it_is(trouble, emulated):
    ran = run(90, trouble, emulated=emulated)
    assert new(ran).index(True) < 20
    assert all(new(ran)[30:])
    assert less(ran, 30, 90) == pytest.approx(GAIN, abs=0.015 if emulated else 1e-6)
    assert ran.job[-1].phase == "steady"
    (note,) = ran.notes
    found = re.fullmatch(r"The planned order takes (.*) % less time \(predicted (.*) %\)", note)
    assert found
    for percent in map(float, found.groups()):
        assert percent == pytest.approx(100 * GAIN, abs=3 if emulated else 0.1)
    assert ran.state.plan.schedule.split


def test_orders_of_whole_backwards_that_gain_nothing_are_not_tried():
    ran = run(80, splits=False)
    assert not any(new(ran))
    assert ran.notes == (f"{FRAMEWORKS}no other is predicted to take less time",)


@pytest.mark.parametrize(
    "factor",
    [1 / (1 - GAIN), pytest.param(1.3, marks=on_request("CONTROL"))],
    ids=["bounded by the host", "slow in a new order"],
)
def test_an_order_that_is_not_faster_is_left_and_tried_again_rarely(factor):
    ran = run(400, in_new_orders(factor))
    first = new(ran).index(True)
    assert not any(new(ran)[first + FOUND_OUT : first + 60])
    (note,) = ran.notes
    assert note.startswith(f"{FRAMEWORKS}the order that was planned was not faster (split")
    assert f"predicted {-100 * GAIN:.1f} %" in note
    assert len(tried(ran)) == 3  # 64 and 128 iterations later
    assert less(ran, 0, 400) > -0.01
    assert ran.state.plan.schedule.stages == OWN.stages


@pytest.mark.parametrize(
    "begin", [BEGIN, *(pytest.param(BEGIN + n, marks=on_request("CONTROL")) for n in (1, 2, 3))]
)
def test_an_order_that_has_become_slow_is_left(begin):
    ran = run(150, in_new_orders(1.3, begin))
    assert new(ran)[begin]
    assert not any(new(ran)[begin + FOUND_OUT : begin + 60])
    said = " ".join(text for at, text in ran.said if begin <= at < begin + FOUND_OUT)
    assert re.search(r"stage \d's units take \+\d|no stage's units say why", said)
    assert f"{FRAMEWORKS}the planned order is not faster any more (split backwards: +" in said
    assert told(ran, "Too slow: ")
    assert len(tried(ran)) <= 4


@on_request("CONTROL")
def test_an_order_that_was_slow_for_a_while_is_taken_up_again():
    def trouble(at: int, order: Schedule) -> dict[tuple[int, int], Conditions]:
        return in_new_orders(1.3, BEGIN)(at, order) if at < BEGIN + 20 else {}

    ran = run(160, trouble)
    assert told(ran, PLANNED)
    assert less(ran, 150, 160) == pytest.approx(GAIN)


def test_a_gain_that_is_gone_is_seen_by_the_next_look(monkeypatch):
    monkeypatch.setattr(shortest, "BASELINE_EVERY", 80)
    ran = run(160, in_new_orders(0.9995 / (1 - GAIN), BEGIN))
    assert any(new(ran)[BEGIN:])
    assert not any(new(ran)[140:])
    assert told(ran, f"{FRAMEWORKS}the planned order is not faster any more")
    assert not told(ran, "Too slow")


def test_a_job_that_becomes_slow_as_a_whole_keeps_its_order():
    ran = run(90, lambda at, order: {(0, s): slower(1.4) for s in range(STAGES) if at >= BEGIN})
    assert less(ran, BEGIN + FOUND_OUT, 90) == pytest.approx(GAIN, abs=1e-3)
    assert not told(ran, FRAMEWORKS)
    assert not told(ran, "Too slow")


def test_units_that_have_changed_are_planned_for_without_turning_to_and_fro():
    """With a slow first stage, another order is the shortest."""
    ran = run(300, lambda at, order: {(0, 0): slower(1.5)} if at >= BEGIN else {})
    assert 1 <= len(tried(ran)) <= 5
    assert less(ran, 150, 300) > 0.05
    assert less(ran, BEGIN, 300) > 0.03


def test_replicas_run_the_same_order_however_slow_one_is():
    ill = {(1, stage): slower(1.1) for stage in range(STAGES)}
    ran = run(60, lambda at, order: ill, replicas=2)
    assert less(ran, 30, 60) == pytest.approx(GAIN, abs=1e-3)


def test_gpus_keep_their_own_highest_clocks(monkeypatch):
    lower, asked = (1200, 1300), list[Any]()
    pipelines = OrderedPipelines(PRESET, FORWARD_S, 2)
    pipelines.gpus[1][0].supported_frequencies_mhz = lower
    monkeypatch.setattr(pipelines, "run", lambda orders: asked.append(orders) or ran(orders))
    ran = partial(Pipelines.run, pipelines)
    pipelines.orders = [OWN] * 40
    with EmulatedJob(pipelines, replace(REQUEST, baseline_steps=3, why_whole="")) as job:
        job.run(40)
    for own, other in asked:
        assert set(own.frequency_mhz.ravel().tolist()) == {1410}
        assert set(other.frequency_mhz.ravel().tolist()) == {max(lower)}
        assert own.schedule is other.schedule or own.schedule.stages == other.schedule.stages


def test_where_gpus_have_a_single_clock_the_order_is_all_that_there_is():
    pipelines = OrderedPipelines(PRESET, FORWARD_S)
    for gpu in pipelines.gpus[0]:
        gpu.supported_frequencies_mhz = gpu.supported_frequencies_mhz[:1]
    config = replace(REQUEST, baseline_steps=3, why_whole="", objective=None)
    with EmulatedJob(pipelines, config) as job:
        job.run(240)
        assert job.planner is not None
        notes = job.planner.state.notes
    assert notes[0].endswith("has a single clock (MHz) (got 1410)")
    assert notes[-1].startswith(PLANNED)


def test_a_plan_without_memory_is_made_again_later():
    ran = run(130, rooms=(True, False, True))  # the first of these is for both parts
    assert any("the new plan does not run: A GPU has no memory" in text for _, text in ran.said)
    assert not any(new(ran)[:60])
    assert less(ran, 120, 130) == pytest.approx(GAIN)
    assert told(ran, PLANNED)


@on_request("CONTROL")
def test_planning_that_fails_is_tried_again(monkeypatch):
    made, errors = phases.plan_online, [MemoryError(), TimeoutError("no end")]

    def failing(*arguments: Any) -> Any:
        if errors:
            raise errors.pop()
        return made(*arguments)

    monkeypatch.setattr(phases, "plan_online", failing)
    ran = run(250)
    assert any(
        f"{FRAMEWORKS}nothing better is planned: TimeoutError" in text for _, text in ran.said
    )
    assert less(ran, 230, 250) == pytest.approx(GAIN)


def test_a_framework_that_runs_its_units_itself_runs_another_order_of_them():
    ran = run(50, own_order=OWN)
    assert less(ran, 30, 50) == pytest.approx(GAIN)


def test_chunks():
    """Two of each stage: the framework's order is interleaved."""
    ran = run(60, request=replace(REQUEST, num_chunks=2))
    assert less(ran, 40, 60) > 0.05
    assert told(ran, PLANNED)


#: What orders of a job without units are predicted to take, s.
PREDICTED_S = {"own": 1.0, "half": 1.0, "split": 0.93, "whole": 0.97}


class FakePlanner:
    """Has two plans as soon as they are asked for."""

    busy = False

    def __init__(self, split: Any, whole: Any) -> None:
        self._plans = {0: SimpleNamespace(schedule=split), 1: SimpleNamespace(schedule=whole)}
        self._asked = False

    def begin(self, order: None, *, whole: bool) -> None:
        self._asked = True

    def take(self) -> Any:
        asked, self._asked = self._asked, False
        return self._plans if asked else None

    def unplanned(self, own: Any) -> Any:
        return SimpleNamespace(schedule=own.schedule)


def fake_job(
    takes_s: Callable[[str, int], float],
    noise: float,
    iterations: int,
    seed: int = 0,
    best: str = "split",
) -> tuple[list[str], list[str]]:
    """Which orders ran, and what was said, where steps scatter.

    `takes_s` is of an order's name and the iteration, and `noise` a share of it.
    """
    orders: Any = {
        name: SimpleNamespace(name=name, stages=name, split=name == "split") for name in PREDICTED_S
    }
    store: Any = SimpleNamespace(
        schedule=orders["half"],
        lateness=SimpleNamespace(late_s=0.0),
        tail_s=np.zeros(1),
        at_top=lambda order: SimpleNamespace(schedule=order, frequency_mhz=None),
        iteration_s=lambda order, clocks: PREDICTED_S[order.name],
        learn=lambda *of, **named: np.zeros(1),
    )
    planner: Any = FakePlanner(orders[best], orders["whole"])
    job = ShortestOrder(orders["own"], store, planner)
    random, ran, said, name = np.random.default_rng(seed), list[str](), list[str](), "own"

    def steps_s(count: int) -> list[float]:
        took = [takes_s(name, len(ran) + at) for at in range(count)]
        ran.extend([name] * count)
        return list(took * (1 + noise * random.standard_normal(count)))

    steps = steps_s(3)
    run = job.run(None)  # type: ignore[arg-type]  # it does not look at the warm-up
    command = next(run)
    while len(ran) < iterations:
        while command.plan is not None:
            command = run.send(SimpleNamespace(refused=""))  # type: ignore[arg-type]
        said += filter(None, [command.note])
        steps = steps[-1:]  # a window's last step ends with the first of the next
        if command.orders:
            name, steps = command.orders[0].schedule.name, []
        steps_s(command.settle)
        steps += steps_s(command.iterations)
        window: Any = SimpleNamespace(steps_s=np.array(steps[:-1]), problems=())
        command = run.send(window)
    return ran, said


@pytest.mark.parametrize("longer", [0.0, 0.02, 0.3])
@pytest.mark.parametrize(
    "noise", [0.01, *(pytest.param(each, marks=on_request("CONTROL")) for each in (0.003, 0.03))]
)
def test_where_nothing_is_to_be_gained_no_more_than_a_percent_is_lost(noise, longer):
    takes_s = {"own": 1.0, "half": 1.01, "split": 1 + longer, "whole": 1.0}
    ran, _ = fake_job(lambda name, at: takes_s[name], noise, 10_000)
    assert np.mean([takes_s[name] for name in ran]) < 1.01


@pytest.mark.parametrize(("noise", "most"), [(0.01, 3), (0.03, 3)])
def test_gains_are_found_in_noise_and_chance_is_none(noise, most):
    """Of twenty jobs each."""
    won = {"own": 1.0, "half": 1.01, "split": 0.93, "whole": 0.97}
    nothing = dict.fromkeys(won, 1.0)
    kept = [fake_job(lambda name, at: won[name], noise, 80, seed)[0][-1] for seed in range(20)]
    chance = [
        fake_job(lambda name, at: nothing[name], noise, 80, seed)[0][-1] for seed in range(20)
    ]
    assert kept.count("split") >= 20 - most
    assert chance.count("own") >= 20 - most


def test_where_splitting_costs_more_than_it_gains_whole_backwards_run():
    takes_s = {"own": 1.0, "half": 1.01, "split": 1.02, "whole": 0.97}
    ran, said = fake_job(lambda name, at: takes_s[name], 0.005, 80)
    assert ran[-1] == "whole"
    assert re.fullmatch(
        r"The planned order takes [23].\d % less time \(predicted 3.0 %\)", said[-1]
    )


def test_the_order_of_whole_backwards_is_not_tried_twice_where_it_is_the_best():
    ran, said = fake_job(lambda name, at: 1 + 0.3 * (name == "whole"), 0.005, 60, best="whole")
    assert ran.count("whole") == WINDOW + 1
    assert said[-1].count("whole backwards") == 1


@pytest.mark.parametrize("ends", [-0.2, 0.2], ids=["warms up", "heats up"])
def test_a_job_that_changes_by_itself_is_no_gain(ends):
    def takes_s(name: str, at: int) -> float:
        return 1 - ends * float(np.exp(-at / 15))

    for seed in range(5):
        ran, _ = fake_job(takes_s, 0.0005, 80, seed)
        assert ran[-1] == "own"
