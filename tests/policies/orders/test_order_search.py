"""The search for an order: what it returns keeps every limit, and what limits cost."""

import random
from pathlib import Path
from types import SimpleNamespace as Namespace

import numpy as np
import pytest
from core_cases import uniform_profile
from hypothesis import given, settings
from hypothesis import strategies as st
from on_request import examples, on_request
from planning_cases import Job, random_job

from envpipe_megatron.core.channel_model import completes
from envpipe_megatron.core.conditions import Conditions
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.plan import saving_uncertainty_percent
from envpipe_megatron.core.profile import read_profile
from envpipe_megatron.core.profile_rows import SplitBackward
from envpipe_megatron.policies.frontier import ObjectivePlanner
from envpipe_megatron.policies.objective import LEAST_ENERGY
from envpipe_megatron.policies.optimal.linear_program import LinearProgramError
from envpipe_megatron.policies.optimal.optimizer import Optimizer, all_maximum_s
from envpipe_megatron.policies.orders import families
from envpipe_megatron.policies.orders.auto import best_plan, memory_frontier
from envpipe_megatron.policies.orders.families import ENVPIPE, FamilySearch, Judged
from envpipe_megatron.policies.planner import make_plan
from envpipe_megatron.policies.problem import Problem
from envpipe_megatron.policies.request import PlanRequest

QUICKSTART = Path(__file__).parents[3] / "configs/profiles/quickstart.csv"
SEEDS = st.integers(0, 2**32)
CURVE = {f: (1 + (1200 - f) / 480, 10 + (f - 1080) / 20) for f in (1200, 1170, 1140, 1110, 1080)}


def one_f_one_b_s(job):
    own = builders.one_f_one_b(job.num_stages, job.num_microbatches)
    return all_maximum_s(own, job.profile, job.conditions)


def problem_of(job, **limits):
    around = {"profile": job.profile, "conditions": job.conditions}
    return Problem(job.num_microbatches, "auto", **around, **limits)


def search_of(job, factor=1.0, **limits):
    """The orders that are found, their search and its deadline."""
    problem, deadline_s = problem_of(job, **limits), factor * one_f_one_b_s(job)
    search = FamilySearch(ENVPIPE, problem, deadline_s)
    return search.search(problem), search, deadline_s


def plan_of(judged, deadline_s):
    """The best plan of what a search found."""
    return best_plan(judged, ObjectivePlanner(LEAST_ENERGY, deadline_s))


def any_job(seed, max_microbatches=8):
    rng = random.Random(seed)
    return rng, random_job(rng, stages=(2, 3, 4), max_microbatches=max_microbatches)


@settings(max_examples=examples(25), deadline=None, derandomize=True)
@given(SEEDS)
def test_orders_are_within_the_limits_and_in_time(seed):
    rng, job = any_job(seed)
    own = builders.one_f_one_b(job.num_stages, job.num_microbatches)
    factor, most = rng.choice([1.0, 1.0, 1.1]), rng.choice([None, 1, 2])
    limits = {"max_extra_forwards": most, "channel_capacity": rng.choice([1, 2, None])}
    judged, search, deadline_s = search_of(job, factor, **limits)
    orders = [order.optimizer.schedule for order in judged]
    assert own.stages in {order.stages for order in orders}
    assert len({order.stages for order in orders}) == len(orders) <= search.orders_tried
    for order, schedule in zip(judged, orders, strict=True):
        if most is not None:
            more = np.subtract(schedule.peak_in_flight, own.peak_in_flight)
            assert max(more) <= most
        assert completes(schedule, limits["channel_capacity"])
        relaxed_j = Optimizer(schedule, job.profile, job.conditions).relaxed(deadline_s).cost_j
        assert order.score == pytest.approx(relaxed_j, rel=1e-6)
        # Memory that saves next to nothing is a loss: 0.002 % each.
        more = max(0, sum(schedule.peak_in_flight) - sum(own.peak_in_flight))
        assert order.worth == pytest.approx(order.score * (1 + 2e-5 * more), rel=1e-12)


def test_1f1b_is_planned_too_where_the_best_orders_round_badly():
    """One job of 1,500: other orders have less relaxed energy, and dearer plans."""
    rng, job = any_job(942, max_microbatches=4)
    judged, _, deadline_s = search_of(job, rng.choice([1.0, 1.0, 1.05, 1.3]))
    judged = sorted(judged, key=lambda order: order.worth)
    own = next(o for o in judged if o.optimizer.schedule.stages == o.own.stages)
    energy_j = [o.optimizer.plan(deadline_s).cost.energy_j for o in (own, *judged[:2])]
    assert own not in judged[:2]
    assert energy_j[0] < 0.995 * min(energy_j[1:])
    assert plan_of(judged, deadline_s).cost.energy_j == energy_j[0]


OWN = builders.one_f_one_b(2, 4)


def judged_as(extra, score, plan, conditions):
    """An order that is judged by `score`, and whose plan is `plan`."""
    job = Job(uniform_profile(2, CURVE), 4, conditions)
    optimizer = Optimizer(builders.envpipe(2, 4, extra), job.profile, job.conditions)
    optimizer.plan = lambda *_: plan
    return Judged("envpipe", optimizer, score, OWN)


@pytest.mark.parametrize(("saved", "taken"), [(1e-16, False), (1e-5, False), (1e-4, True)])
def test_a_microbatch_is_not_taken_for_next_to_nothing(saved, taken):
    """Neither by a plan nor by a point of the memory frontier: 0.002 % each is what it must buy."""
    conditions = Conditions((10.0,) * 2)
    more, own = (
        judged_as(
            extra,
            score,
            Namespace(
                cost=Namespace(iteration_time_s=1.0, energy_j=100.0 * (1 - saved * sum(extra))),
                extra=extra,
                conditions=conditions,
            ),
            conditions,
        )
        for extra, score in (((1, 0), 99.0), ((0, 0), 99.1))
    )
    assert plan_of([more, own], 1.0).extra == ((1, 0) if taken else (0, 0))
    auto = Namespace(
        judged=[more, own],
        judge=lambda problem: [more, own][1 - problem.max_extra_forwards :],
        problem=problem_of(Job(uniform_profile(2, CURVE), 4, conditions)),
        most_extra_forwards=1,
        planner=ObjectivePlanner(LEAST_ENERGY, 1.0),
    )
    points = memory_frontier(auto)
    assert [point.max_extra_forwards for point in points] == ([0, 1] if taken else [0])


def test_large_jobs_are_searched_with_few_linear_programs():
    profile = uniform_profile(8, CURVE, slowness=[1, 1, 1, 1, 1, 1, 1, 1.2])
    judged, search, _ = search_of(Job(profile, 96, Conditions((10.0,) * 8)))
    assert search.orders_tried <= 16
    own = next(o for o in judged if o.optimizer.schedule.stages == o.own.stages)
    assert min(order.score for order in judged) < 0.99 * own.score


def test_of_very_many_units_only_the_best_order_is_planned(monkeypatch):
    job = Job(uniform_profile(3, CURVE), 60, Conditions((30.0,) * 3))
    several, *_ = search_of(job)
    monkeypatch.setattr(families, "_MANY_UNITS", 359)
    monkeypatch.setattr(families, "_UNIT_BUDGET", 0)
    [best], *_ = search_of(job)
    assert len(several) > 1
    assert best.score < 1.001 * min(order.score for order in several)


def test_auto_saves_no_less_than_the_rules_order_with_a_dwell_time():
    profile = read_profile(QUICKSTART)
    saved = {}
    for schedule in ("envpipe", "auto"):
        request = PlanRequest(16, schedule, "optimal", blocking_power_w=83.64, min_dwell_s=0.5)
        plan = make_plan(profile, request).plan
        saved[schedule] = plan.cost.saving_percent(plan.baseline.cost)
    assert saved["envpipe"] > 15.3
    assert saved["auto"] > saved["envpipe"] - 0.05  # what bringing runs to clocks may lose


@pytest.mark.parametrize("slow_stage", [pytest.param(0, marks=on_request("CORE")), 3, 7])
def test_one_microbatch_more_in_flight_is_used_well(slow_stage):
    """Rear stages have room for more than one extra forward then, and using it costs energy."""
    profile = uniform_profile(8, CURVE, slowness=[1 + 0.1 * (s == slow_stage) for s in range(8)])
    conditions = Conditions((10.0,) * 8)
    judged, _, deadline_s = search_of(Job(profile, 48, conditions), max_in_flight=(9,) * 8)
    front_parts = [tuple(int(s < count) for s in range(8)) for count in range(8)]
    least_j = min(
        Optimizer(builders.envpipe(8, 48, extra), profile, conditions).relaxed(deadline_s).cost_j
        for extra in front_parts
    )
    assert min(order.score for order in judged) < least_j * 1.002


def test_orders_that_hide_the_latency_meet_deadlines_that_1f1b_misses():
    """1F1B pays two hops for every microbatch; extra forwards are on their way meanwhile."""
    profile, conditions = uniform_profile(4, CURVE), Conditions((30.0,) * 4, 0.5)
    own = Optimizer(builders.one_f_one_b(4, 16), profile, conditions)
    deadline_s = 0.9 * own.fastest_s
    with pytest.raises(LinearProgramError):
        own.plan(deadline_s)
    job = Job(profile, 16, conditions)
    search = FamilySearch(ENVPIPE, problem_of(job), deadline_s)
    judged = search.search(problem_of(job))
    assert all(any(order.optimizer.schedule.extra_forwards) for order in judged)
    assert plan_of(judged, deadline_s).cost.iteration_time_s <= deadline_s * (1 + 1e-9)
    assert search.search(problem_of(job, max_extra_forwards=0)) == []


def test_a_profile_without_energies_gets_an_order_that_saves_nothing():
    times_s = uniform_profile(2, {1400: (0.1, 0.0), 1000: (0.13, 0.0)})
    request = PlanRequest(4, "auto", "optimal", split=SplitBackward(0.5, 0.01), max_in_flight=3)
    planned = make_plan(times_s, request)
    assert planned.plan.cost.energy_j == 0
    assert "can save more than 0.00 %" in planned.notes[0]
    assert planned.auto is not None
    assert planned.auto.next_microbatch_percent() == 0
    assert saving_uncertainty_percent(planned.plan) is None
