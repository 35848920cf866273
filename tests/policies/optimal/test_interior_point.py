"""The interior-point method by itself: its steps, how many it needs, and what it does not solve."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from on_request import examples
from planning_cases import random_profile
from program_cases import CLOSE, INTERIOR_POINT, SIMPLEX, Case

from envpipe_megatron.core.kinds import SPLIT
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.orders.greedy import shortest
from envpipe_megatron.core.orders.job import OrderJob
from envpipe_megatron.core.profile_rows import SplitBackward
from envpipe_megatron.core.schedule import Placement
from envpipe_megatron.policies.optimal import interior_point
from envpipe_megatron.policies.optimal.choices import make_choices
from envpipe_megatron.policies.optimal.duration_problem import DurationProblem, SolverError
from envpipe_megatron.policies.optimal.interior_point import InteriorPoint
from envpipe_megatron.policies.optimal.linear_program import DurationProgram
from envpipe_megatron.policies.optimal.newton_step import BandMatrix, NewtonStep, Point
from envpipe_megatron.policies.optimal.simplex import Simplex

SEEDS = st.integers(0, 2**32)


def problem_of(case):
    """The arrays that a program hands to its solver."""
    return case.program(INTERIOR_POINT)._solver._problem


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(SEEDS)
def test_a_newton_step_solves_the_linear_equations(seed):
    """From any positive point: a full step leaves no residual, and changes products as told."""
    problem = problem_of(Case(seed))
    numbers = np.random.default_rng(seed)
    sizes = len(problem.target), len(problem.tail), len(problem.width), len(problem.width), 2
    slack, price, product = ([numbers.uniform(0.1, 2.0, size) for size in sizes] for _ in range(3))
    slack[3] = slack[2] + 0.0  # stretches and what is left of their widths sum to the widths
    widths = slack[2] + slack[3]
    problem = DurationProblem(**{**vars(problem), "width": widths})
    method = InteriorPoint(problem, np.arange(problem.num_nodes))
    point = Point(slack, price, numbers.uniform(0, 9, problem.num_nodes), 10.0)
    residual = method._residual(point, 12.0, 5.0)
    step = NewtonStep(problem, BandMatrix(problem, np.arange(problem.num_nodes)), point, residual)
    moved = step.step(product)
    after = method._residual(point.moved(moved, 1.0, 1.0), 12.0, 5.0)
    for name in ("edge", "iteration", "segment", "node", "early_late"):
        assert np.abs(getattr(after, name)).max(initial=0.0) < 1e-8, name
    ends = point.moved(moved, 1.0, 1.0)
    assert ends.slack[1] - point.slack[1] == pytest.approx(
        moved.iteration - moved.end[problem.last_node]
    )
    assert ends.slack[2] + ends.slack[3] == pytest.approx(widths)
    for s, p, ds, dp, told in zip(slack, price, moved.slack, moved.price, product, strict=True):
        assert s * dp + p * ds == pytest.approx(told, abs=1e-8)


@pytest.mark.parametrize(
    ("schedule", "height"),
    [
        (builders.one_f_one_b(12, 100), 14),
        (builders.gpipe(12, 100), 14),
        (builders.interleaved(12, 96, 3), 40),
        (builders.envpipe(12, 100, [22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0]), 40),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_the_matrix_is_a_band_as_wide_as_the_pipeline_is_deep(schedule, height):
    profile = random_profile(random.Random(0), 12, 2).for_chunks(schedule.num_chunks)
    choices = make_choices(profile, np.zeros(12), np.ones(12, dtype=np.int64))
    program = DurationProgram(schedule, choices, 0.0, np.zeros(12), INTERIOR_POINT)
    assert program._solver._matrix._height <= height


def test_the_band_of_an_order_without_a_pattern_is_made_narrow():
    """Of 151 nodes; in the order by Cuthill and McKee it is one of 226.

    As a list scheduler orders chunks of uneven stages whose backwards are split.
    """
    time_s = np.random.default_rng(0).uniform(0.8, 1.2, (3, 12, 3, 1)).repeat(48, axis=3)
    job = OrderJob(dict(zip(SPLIT, time_s, strict=True)), 0.0, Placement.LOOPED, [60] * 12)
    schedule = shortest(job, "uneven", 2)
    profile = random_profile(random.Random(0), 12, 2).with_split_backwards(SplitBackward())
    choices = make_choices(profile.for_chunks(3), np.zeros(12), np.ones(12, dtype=np.int64))
    program = DurationProgram(schedule, choices, 0.0, np.zeros(12), INTERIOR_POINT)
    assert program._solver._matrix._height <= 170


def cost_of(problem, solution, deadline):
    """Energy of an answer by itself, in the problem's units, waiting until its own end."""
    end = problem.ends(problem.by_node(solution.segment))
    iteration = float((end[problem.last_node] + problem.tail).max())
    assert iteration <= deadline * (1 + 1e-6)
    cost = problem.fixed_cost + float(problem.slope @ solution.segment)
    return cost + problem.waiting_cost * iteration


def test_it_needs_few_steps_and_no_help(monkeypatch):
    """On 60 programs, at most as many steps as when this was written, and a hundredth more.

    Processors round otherwise.
    """
    steps = 0

    def counted(*arguments):
        nonlocal steps
        steps += 1
        return NewtonStep(*arguments)

    monkeypatch.setattr(interior_point, "NewtonStep", counted)
    for seed in range(60):
        case = Case(seed)
        program = case.program(INTERIOR_POINT)
        problem, deadline = program._stated, case.deadline_s / program._time_unit_s
        own = program._solver.solve(deadline)
        vertex = Simplex(problem).solve(deadline)
        cost, optimum = (cost_of(problem, answer, deadline) for answer in (own, vertex))
        assert cost == pytest.approx(optimum, rel=CLOSE[INTERIOR_POINT]), seed
        for prices in (own.edge_price, own.deadline_price):
            assert (prices >= 0).all()
        assert own.deadline_price.sum() >= problem.waiting_cost * (1 - 1e-6)
    assert steps <= 800


@pytest.mark.parametrize("too_low", [500.0, 5e4])
def test_overtime_that_pays_is_made_dearer(too_low):
    case = Case(3, factors=(1.0,))
    program = case.program(INTERIOR_POINT)
    problem, deadline = program._stated, case.deadline_s / program._time_unit_s
    program._solver._overtime_cost /= too_low
    if too_low > 1e4:
        with pytest.raises(SolverError, match="stayed behind"):
            program._solver.solve(deadline)
        return
    own, vertex = program._solver.solve(deadline), Simplex(problem).solve(deadline)
    optimum = cost_of(problem, vertex, deadline)
    assert cost_of(problem, own, deadline) == pytest.approx(optimum, rel=CLOSE[INTERIOR_POINT])


def test_the_simplex_refuses_what_nothing_meets_and_prints_nothing(capfd):
    program = Case(3).program(SIMPLEX)
    with pytest.raises(SolverError, match="infeasible"):
        program._solver.solve(0.99 * program.fastest_iteration_s / program._time_unit_s)
    assert capfd.readouterr() == ("", "")
