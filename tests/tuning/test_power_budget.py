"""A power budget of a running job: how soon it is kept, what it costs, and what is said of it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from emulated_job import EmulatedJob
from emulated_pipelines import Iteration, Pipelines
from envpipe_megatron.core.conditions import known_conditions
from envpipe_megatron.formats.energy import Phase
from envpipe_megatron.formats.wishes import read_power_budget
from envpipe_megatron.gpu.presets import load_preset
from envpipe_megatron.policies.objective import Goal, Objective
from envpipe_megatron.policies.planner import make_plan
from envpipe_megatron.policies.request import PlanRequest
from envpipe_megatron.runtime.job.options import JobOptions, Level
from envpipe_megatron.tuning import judge
from envpipe_megatron.tuning.command_maker import EXCEEDS, Budget
from job_runs import exact_profile, scripted

PRESET, FORWARD_S, WINDOW = load_preset("a40"), [0.05] * 2, 4
#: Iterations before a budget: the job has its plan.
BEFORE = 40


class Job:
    """An emulated job whose budget changes; plans come a window after they are asked for."""

    def __init__(self, replicas: int = 1, budget: str | None = None, **emulated: object) -> None:
        self.pipelines = Pipelines(PRESET, FORWARD_S, replicas, **emulated)
        options = JobOptions(num_microbatches=8, baseline_steps=3)
        self.emulated = EmulatedJob(self.pipelines, options, late=(1,))
        self.emulated.run(1)
        assert self.emulated.planner is not None
        self.state = self.emulated.planner.state
        self.run(budget, BEFORE - 1)
        self.own = self.pipelines.iterations[1]

    def run(self, budget: object, iterations: int = 28) -> list[Iteration]:
        self.state.wishes = read_power_budget(budget)
        return self.emulated.run(iterations)

    def shares(self, ran: list[Iteration]) -> list[float]:
        """Mean power of each window, as a share of what the framework's own order takes."""
        joules, times_s = (np.array([getattr(i, of) for i in ran]) for of in ("energy_j", "time_s"))
        ones, own_w = np.ones(WINDOW), self.own.energy_j / self.own.time_s
        powers_w = np.convolve(joules, ones, "valid") / np.convolve(times_s, ones, "valid")
        return (powers_w / own_w).tolist()

    def longer(self, ran: list[Iteration]) -> float:
        return ran[-1].time_s / self.own.time_s

    def said(self) -> str:
        return "\n".join(text for _, text in self.emulated.said)


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    made = Job()
    with made.emulated:
        yield made


def fastest(share: float) -> float:
    """How much longer the fastest plan within a budget is, by times without errors."""
    profile = exact_profile(PRESET, FORWARD_S, {})
    conditions = known_conditions(profile)
    usual = make_plan(
        profile, PlanRequest(8, "auto", "optimal", conditions=conditions, runnable=True)
    ).plan
    own = usual.baseline.cost
    objective = Objective(Goal.TIME, power_cap_w=share * own.mean_power_w)
    asked = PlanRequest(
        8, policy="optimal", order=usual.schedule, objective=objective, conditions=conditions
    )
    return make_plan(profile, asked).plan.cost.iteration_time_s / own.iteration_time_s


def test_a_budget_is_kept_at_once_by_lower_clocks_and_then_by_the_fastest_plan(job):
    before = job.run(None, 8)
    for share in (0.8, 0.7, 0.8):
        ran = job.run(f"{100 * share:g}%")
        kept = job.shares(ran)[2 * WINDOW :]
        assert max(kept) < share * (1 + EXCEEDS)
        assert job.longer(ran) < fastest(share) + 0.005
    ran = job.run(None)
    assert job.longer(ran) == pytest.approx(job.longer(before), rel=1e-3), "as before"
    assert ran[-1].energy_j == pytest.approx(before[-1].energy_j, rel=5e-3)
    assert "the power budget is lifted" in job.said()
    assert job.state.power is not None
    assert job.state.power["budget_w"] is None
    own_w = job.own.energy_j / job.own.time_s / len(FORWARD_S)
    assert job.state.power["peak_w"] < own_w
    assert job.state.power["swing_w"] > 0.05 * own_w


def test_a_budget_in_watts_that_the_plan_keeps_anyway_changes_nothing(job):
    before = job.run(None, 8)[-1]
    ran = job.run(float(0.99 * job.own.energy_j / job.own.time_s / len(FORWARD_S)))
    assert ran[-1].time_s == pytest.approx(before.time_s)
    assert {each.phase for each in ran} == {Phase.STEADY}


def test_less_than_is_reachable_is_said_and_the_least_runs(job):
    lowest = min(job.shares(job.run("20%")))
    (why,) = (note for note in job.state.notes if "least that is reachable" in note)
    assert float(why.split()[-2]) == pytest.approx(
        lowest * job.own.energy_j / job.own.time_s / len(FORWARD_S), rel=0.02
    )
    job.run(None)
    (note,) = (note for note in job.state.notes if "reachable" in note)
    assert note == f"{why}, until it was changed"


def test_no_baseline_runs_while_a_budget_is_below_it(monkeypatch):
    monkeypatch.setattr(judge, "BASELINE_EVERY", 20)
    job = Job(budget="85%")
    with job.emulated:
        ran = job.run("85%", 60)
        assert Phase.BASELINE in {each.phase for each in job.run(None)}
    assert max(job.shares(ran[2 * WINDOW :])) < 0.85 * (1 + EXCEEDS)
    assert Phase.BASELINE not in {each.phase for each in ran}


def test_a_replica_that_becomes_slower_breaks_no_budget():
    begin, end = BEFORE + 20, BEFORE + 60
    job = Job(2, faults=scripted("replica", begin, end, len(FORWARD_S), 2))
    with job.emulated:
        ran = job.run("80%", 90)
    assert max(job.shares(ran[2 * WINDOW :])) < 0.8 * (1 + EXCEEDS)
    assert job.longer(ran) < fastest(0.8) + 0.005, "fast again"


def test_how_a_budget_was_kept_is_added_up():
    budget = Budget()
    for asked, power_w, time_s in (
        (None, 999.0, 1.0),
        (260, 200.0, 10.0),
        (260, 300.0, 10.0),
        ("50%", 250.0, 30.0),
    ):
        budget.own_w = 600.0
        wishes, steps_s = read_power_budget(asked), np.array([time_s])
        window = SimpleNamespace(power_w=power_w, steps_s=steps_s, wishes=wishes)
        budget.update(window)
        budget.count(window)
    assert budget.facts == {
        "budget_w": 300.0,
        "time_s": 50.0,
        "energy_j": 12500.0,
        "mean_w": 250.0,
        "peak_w": 300.0,
        "swing_w": 100.0,
        "ramp_w_per_s": 10.0,
        "exceeded_s": 10.0,
    }


def test_silent_meters_are_no_budget_that_was_kept():
    budget, wishes = Budget(), read_power_budget("80%")
    silent = SimpleNamespace(power_w=math.nan, steps_s=np.ones(WINDOW), wishes=wishes)
    assert budget.update(silent) == "power budget: 80%; full clock is not metered yet"
    assert budget.facts is not None
    assert budget.facts["budget_w"] is None
    budget.own_w = 300.0
    assert budget.count(silent) == budget.billed
    assert "no meter" in budget.billed
    assert not budget.count(silent), "said once"
    assert budget.facts["exceeded_s"] is None


def test_jobs_that_choose_clocks_as_they_train_keep_budgets():
    job = JobOptions(num_microbatches=8)
    assert job.keeps_power
    assert replace(job, level=Level.UNIFORM).keeps_power
    for fixed in ({"objective": Goal.TIME}, {"type": "envelope"}, {"gpu_control": "dry_run"}):
        assert not replace(job, **fixed).keeps_power
