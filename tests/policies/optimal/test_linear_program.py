"""The linear program over durations against a slow and obvious formulation, and its solver."""

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
from core_cases import B, F, needs, profile_of, rows_of, with_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from on_request import examples, on_request
from planning_cases import Job, random_profile
from program_cases import CLOSE, Case
from scipy.optimize import linprog

from envpipe_megatron.core.conditions import Conditions
from envpipe_megatron.core.kinds import SPLIT
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.orders.greedy import shortest
from envpipe_megatron.core.orders.job import OrderJob
from envpipe_megatron.core.profile_rows import SplitBackward
from envpipe_megatron.core.schedule import Placement
from envpipe_megatron.policies.optimal import interior_point
from envpipe_megatron.policies.optimal.interior_point import InteriorPoint
from envpipe_megatron.policies.optimal.linear_program import (
    DurationProgram,
    LinearProgramError,
    make_choices,
)
from envpipe_megatron.policies.optimal.newton_step import (
    NewtonStep,
)

SEEDS = st.integers(0, 2**32)


def slow_optimum_j(case):
    """The same optimum from the definitions: one weight for each profiled row of each unit.

    A unit's time and energy are any mixture of its rows; it starts when all that it needs has ended
    and arrived. Nothing of hulls, prices or the core's dependency graph is used.
    """
    schedule, conditions = case.schedule, case.conditions
    stages, chunks = schedule.num_stages, schedule.num_chunks
    hops_s = np.broadcast_to(conditions.latency_s, (stages - 1,))
    nodes = [(stage, unit) for stage, order in enumerate(schedule.stages) for unit in order]
    rows = [rows_of(case.profile, stage, unit) for stage, unit in nodes]
    first_weight = np.cumsum([0, *map(len, rows)])
    num_weights, iteration = int(first_weight[-1]), int(first_weight[-1]) + len(nodes)
    start = {node: num_weights + index for index, node in enumerate(nodes)}
    place = {node: index for index, node in enumerate(nodes)}
    cost = np.zeros(iteration + 1)
    cost[iteration] = np.dot(case.powers_w, conditions.gpus_by_stage)
    equal, less, limits = [], [], []

    def not_before(source, later, gap_s):
        """Row: the source's end + gap <= the column `later`."""
        row = np.zeros(iteration + 1)
        index = place[source]
        row[first_weight[index] : first_weight[index + 1]] = [r.time_s for r in rows[index]]
        row[start[source]] += 1.0
        row[later] -= 1.0
        less.append(row)
        limits.append(-gap_s)

    for index, (stage, unit) in enumerate(nodes):
        weights = slice(first_weight[index], first_weight[index + 1])
        cost[weights] = [
            conditions.gpus_by_stage[stage] * (row.energy_j - case.powers_w[stage] * row.time_s)
            for row in rows[index]
        ]
        row = np.zeros(iteration + 1)
        row[weights] = 1.0
        equal.append(row)
        for source in needs(stages, chunks, stage, unit, schedule.placement):
            if source[0] == stage:
                gap_s = 0.0
            elif abs(source[0] - stage) == 1 and source[1].chunk == unit.chunk:
                gap_s = hops_s[min(source[0], stage)]
            else:
                gap_s = max(hops_s)
            not_before(source, start[stage, unit], gap_s)
    for stage, order in enumerate(schedule.stages):
        for before, after in itertools.pairwise(order):
            not_before((stage, before), start[stage, after], 0.0)
        not_before((stage, order[-1]), iteration, case.tail_s[stage])
    # A hair above the deadline, which stands exactly at the fastest iteration in some cases.
    bounds = [(0.0, None)] * iteration + [(0.0, case.deadline_s * (1 + 1e-12))]
    solved = linprog(
        cost, A_ub=np.array(less), b_ub=limits, A_eq=np.array(equal), b_eq=np.ones(len(nodes)),
        bounds=bounds,
    )  # fmt: skip
    assert solved.status == 0, solved.message
    return float(solved.fun)


@settings(max_examples=examples(50), deadline=None, derandomize=True)
@given(SEEDS)
def test_it_finds_the_optimum_of_the_definitions_and_proves_it(seed):
    case = Case(seed)
    relaxed = case.program().solve(case.deadline_s)
    optimum_j = slow_optimum_j(case)
    assert relaxed.cost_j == pytest.approx(optimum_j, rel=CLOSE)
    # And it is what the durations cost, which are in time and between fastest and cheapest.
    assert case.iteration_s(relaxed.duration_s) <= case.deadline_s * (1 + 1e-6)
    assert case.cost_j(relaxed.duration_s) == pytest.approx(optimum_j, rel=CLOSE)
    for duration_s, (times_s, _) in zip(relaxed.duration_s, case.hulls, strict=True):
        assert times_s[0] * (1 - 1e-9) <= duration_s <= times_s[-1] * (1 + 1e-9)
    # Disturbed slopes cost the bound no more than half of 0.1 % of what stretching saves.
    can_save_j = sum(float(cost_j[0] - cost_j[-1]) for _, cost_j in case.hulls)
    below_j = optimum_j - relaxed.lower_bound_j
    assert -1e-7 * abs(optimum_j) <= below_j <= 5e-4 * can_save_j + CLOSE * abs(optimum_j)


@pytest.mark.parametrize(
    ("schedule", "vertices"),
    [
        (builders.one_f_one_b(4, 60), (11, 9, 9)),
        (builders.envpipe(4, 60, [6, 4, 2, 0]), (55, 88, 43)),
        (builders.gpipe(4, 60), (141, 174, 174)),
        (builders.interleaved(4, 40, 2), (32, 44, 44)),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_longer_pipelines_are_solved_with_few_units_between_profiled_times(schedule, vertices):
    """At three deadlines hardly more units than in the vertex that HiGHS' simplex finds."""
    profile = random_profile(random.Random(7), 4, 12).for_chunks(schedule.num_chunks)
    choices = make_choices(profile, np.full(4, 70.0), np.ones(4, dtype=np.int64))
    program = DurationProgram(schedule, choices, Conditions((0.0,) * 4, 0.01))
    keys = program.key
    for factor, of_vertex in zip((1.0, 1.1, 3.0), vertices, strict=True):
        relaxed = program.solve(factor * program.fastest_iteration_s)
        assert relaxed.cost_j <= relaxed.lower_bound_j * (1 + CLOSE)
        between = sum(
            np.abs(choices.units[key].time_s / duration_s - 1).min() > 1e-4
            for key, duration_s in zip(keys, relaxed.duration_s, strict=True)
        )
        assert between <= of_vertex + 0.1 * schedule.num_units


@settings(max_examples=examples(30), deadline=None, derandomize=True)
@given(SEEDS)
def test_deadlines_one_after_the_other_give_what_each_gives_by_itself(seed):
    case = Case(seed)
    program = case.program()
    for _ in range(4):
        deadline_s = case.fastest_s * case.rng.choice([1.0, 1.01, 1.1, 1.5, 10.0])
        again = program.solve(deadline_s).cost_j
        assert again == case.program().solve(deadline_s).cost_j


@settings(max_examples=examples(30), deadline=None, derandomize=True)
@given(SEEDS)
def test_a_deadline_before_the_fastest_iteration_is_refused(seed):
    case = Case(seed)
    program = case.program()
    program.solve(case.fastest_s)
    with pytest.raises(LinearProgramError, match="at any frequencies") as error:
        program.solve(0.999 * case.fastest_s)
    assert case.schedule.name in str(error.value)
    assert error.value.remedy


def wild_job(rng, max_microbatches):
    """A job whose times and energies span six orders of magnitude, as no pipeline's do."""
    stages = rng.choice([1, 2, 3])
    table = {}
    for at in itertools.product(range(stages), (F, B)):
        time_s, energy_j = 10 ** rng.uniform(-3, 3), 10 ** rng.uniform(-3, 3)
        table[at] = {
            clock: (time_s * rng.uniform(0.5, 2), energy_j * rng.uniform(0.5, 2))
            for clock in rng.sample(range(400, 2000, 15), rng.randint(1, 6))
        }
    power_w, latency_s = rng.choice([0.0, 60.0]), rng.choice([0.0, 0.01])
    conditions = Conditions((power_w,) * stages, (latency_s,) * (stages - 1))
    return Job(profile_of(table), rng.randint(1, max_microbatches), conditions)


@pytest.mark.parametrize("jobs", [25, pytest.param(2000, marks=on_request("CORE"))])
def test_badly_conditioned_programs_are_solved_too(jobs):
    """None ends further from its bound than disturbed slopes explain."""
    for seed in range(jobs):
        case = Case(seed, max_microbatches=4, job=wild_job)
        relaxed = case.program().solve(case.deadline_s)
        assert case.iteration_s(relaxed.duration_s) <= case.deadline_s * (1 + 1e-6), seed
        # Any prices give a bound (see below), so an answer that is near it is right.
        can_save_j = sum(float(cost_j[0] - cost_j[-1]) for _, cost_j in case.hulls)
        cost_j = case.cost_j(relaxed.duration_s)
        assert cost_j - relaxed.lower_bound_j <= 6e-4 * (abs(cost_j) + can_save_j), seed


def test_numbers_that_overflow_end_the_search():
    case = Case(1, max_microbatches=4, job=wild_job)
    tail_s = (1e170,) * case.schedule.num_stages
    program = DurationProgram(
        case.schedule, case.program().choices, replace(case.conditions, tail_time_s=tail_s)
    )
    assert program.solve(2e170).end_s <= 2e170


@pytest.mark.parametrize("unit_j", [1.0, 1e-6])
@pytest.mark.parametrize("how", ["late", "dear", "unproven", "nothing"])
def test_a_wrong_answer_is_in_time_and_its_bound_shows_it(monkeypatch, how, unit_j):
    """A second try is made; where all are wrong, the nearest to its bound is the answer."""
    schedule = builders.one_f_one_b(3, 5)
    profile = with_rows(
        random_profile(random.Random(7), 3, 6),
        lambda row: replace(row, energy_j=row.energy_j * unit_j),
    )
    choices = make_choices(profile, np.full(3, 70.0 * unit_j), np.ones(3, dtype=np.int64))
    job = schedule, choices, Conditions((0.0,) * 3)
    right, asked, wrong = (DurationProgram(*job) for _ in range(3))
    deadline_s = 1.05 * right.fastest_iteration_s
    optimum_j = right.solve(deadline_s).cost_j
    solve, rightly = InteriorPoint.solve, {"from": 10.0}

    def solve_wrongly(self, deadline, dearer):
        answer, problem = solve(self, deadline, dearer), self._problem
        changes = {
            "late": {"segment": problem.width.copy()},
            "dear": {"segment": np.zeros_like(problem.width)},
            "unproven": {"deadline_price": np.zeros_like(problem.tail)},
            "nothing": {
                "segment": np.zeros_like(problem.width),
                "edge_price": np.zeros_like(problem.least),
                "deadline_price": np.zeros_like(problem.tail),
            },
        }
        return answer if dearer >= rightly["from"] else replace(answer, **changes[how])

    monkeypatch.setattr(InteriorPoint, "solve", solve_wrongly)
    assert asked.solve(deadline_s).cost_j == pytest.approx(optimum_j, rel=CLOSE)
    rightly["from"] = np.inf
    relaxed = wrong.solve(deadline_s)
    end_s = wrong._iteration_s(relaxed.duration_s)
    assert end_s <= deadline_s * (1 + 1e-6)
    assert relaxed.lower_bound_j <= optimum_j * (1 + CLOSE)
    assert relaxed.cost_j > relaxed.lower_bound_j + 1e-3 * abs(optimum_j)


def test_times_that_lie_far_apart_are_no_trouble():
    for unit_s, message_s, tail_s in ((1e14, 0.1, 0.1), (1.0, 1e9, 0.1), (1.0, 0.1, 1e9)):
        table = {(s, kind): {1400: (1.0, 9.0), 1200: (2.0, 5.0)} for s in (0, 1) for kind in (F, B)}
        table[1, F] = {1400: (unit_s, 9.0)}
        choices = make_choices(profile_of(table), np.zeros(2), np.ones(2, dtype=np.int64))
        schedule = builders.one_f_one_b(2, 2)
        around = Conditions((0.0,) * 2, message_s, tail_time_s=(0.0, tail_s))
        program = DurationProgram(schedule, choices, around)
        fastest_s = program.fastest_iteration_s
        assert program._iteration_s(program.solve(fastest_s).duration_s) <= fastest_s * (1 + 1e-6)


def test_units_without_a_choice_are_no_trouble():
    profile = random_profile(random.Random(3), 3, 2)
    rows = tuple({kind: listed[:1] for kind, listed in kinds.items()} for kinds in profile.rows)
    choices = make_choices(replace(profile, rows=rows), np.zeros(3), np.ones(3, dtype=np.int64))
    schedule = builders.one_f_one_b(3, 5)
    program = DurationProgram(schedule, choices, Conditions((0.0,) * 3))
    times_s = np.array([unit.time_s[0] for unit in choices.units])[program.key]
    energies_j = np.array([unit.cost_j[0] for unit in choices.units])[program.key]
    relaxed = program.solve(2 * float(times_s.sum()))
    assert relaxed.duration_s == pytest.approx(times_s)
    assert relaxed.cost_j == pytest.approx(energies_j.sum())


def uneven():
    """As a list scheduler orders chunks of uneven stages whose backwards are split."""
    time_s = np.random.default_rng(0).uniform(0.8, 1.2, (3, 12, 3, 1)).repeat(48, axis=3)
    job = OrderJob(dict(zip(SPLIT, time_s, strict=True)), 0.0, Placement.LOOPED, [60] * 12)
    return shortest(job, "uneven", 2)


@pytest.mark.parametrize(
    ("make", "height"),
    [
        (lambda: builders.one_f_one_b(12, 100), 14),
        (lambda: builders.interleaved(12, 96, 3), 40),
        (lambda: builders.envpipe(12, 100, range(22, -1, -2)), 40),
        (uneven, 170),  # of 151 nodes; in the order by Cuthill and McKee it is one of 226
    ],
)
def test_the_matrix_is_a_band_as_wide_as_the_pipeline_is_deep_or_is_made_narrow(make, height):
    schedule, profile = make(), random_profile(random.Random(0), 12, 2)
    if schedule.split:
        profile = profile.with_split_backwards(SplitBackward())
    profile = profile.for_chunks(schedule.num_chunks)
    choices = make_choices(profile, np.zeros(12), np.ones(12, dtype=np.int64))
    program = DurationProgram(schedule, choices, Conditions((0.0,) * 12))
    assert program._solver._matrix._height <= height


def test_it_needs_few_steps(monkeypatch):
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
        program = case.program()
        deadline = case.deadline_s / program._time_unit_s
        own = program._solver.solve(deadline)
        for prices in (own.edge_price, own.deadline_price):
            assert (prices >= 0).all()
        assert own.deadline_price.sum() >= program._problem.waiting_cost * (1 - 1e-6)
    assert steps <= 820


def garbage(case, program, scale_w):
    """Duals that no solver would give: any numbers, many of them 0."""
    numbers = np.random.default_rng(case.rng.randrange(2**32))
    edges, stages = len(program._problem.target), case.schedule.num_stages

    def some(count):
        return numbers.random(count) * numbers.integers(0, 2, count)

    return some(edges), scale_w * some(stages)


@settings(max_examples=examples(100), deadline=None, derandomize=True)
@given(SEEDS)
def test_any_duals_give_a_bound(seed):
    """Below the relaxed optimum, for all builders' orders and chunks, and at any scale."""
    case = Case(seed)
    program = case.program()
    optimum_j = program.solve(case.deadline_s).cost_j
    steepest_w = max(
        float(np.max(-np.diff(cost_j) / np.diff(time_s), initial=1.0))
        for time_s, cost_j in case.hulls
    )
    for scale in (0.0, 0.1, 1.0, 30.0):
        prices = garbage(case, program, scale * steepest_w)
        bound, _ = program.lower_bound_j(case.deadline_s, *prices)
        assert bound <= optimum_j + 1e-7 * abs(optimum_j)
