"""The linear program over durations: both solvers against a slow and obvious formulation."""

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
from core_cases import B, F, needs, profile_of, rows_of
from hypothesis import given, settings
from hypothesis import strategies as st
from on_request import examples, on_request
from planning_cases import Job, random_profile
from program_cases import CLOSE, INTERIOR_POINT, SIMPLEX, SOLVERS, Case
from scipy.optimize import linprog

from envpipe_megatron.core.conditions import Conditions
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.timeline import Timeline
from envpipe_megatron.policies.optimal.choices import make_choices, node_keys
from envpipe_megatron.policies.optimal.duration_problem import SolverError
from envpipe_megatron.policies.optimal.interior_point import InteriorPoint
from envpipe_megatron.policies.optimal.linear_program import (
    DurationProgram,
    LinearProgramError,
)
from envpipe_megatron.policies.optimal.simplex import Simplex

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


@SOLVERS
@settings(max_examples=examples(50), deadline=None, derandomize=True)
@given(seed=SEEDS)
def test_both_solvers_find_the_optimum_of_the_definitions(max_simplex_units, seed):
    case = Case(seed)
    relaxed = case.program(max_simplex_units).solve(case.deadline_s)
    optimum_j = slow_optimum_j(case)
    close = CLOSE[max_simplex_units]
    assert relaxed.cost_j == pytest.approx(optimum_j, rel=close)
    # And it is what the durations cost, which are in time and between fastest and cheapest.
    assert case.iteration_s(relaxed.duration_s) <= case.deadline_s * (1 + 1e-6)
    assert case.cost_j(relaxed.duration_s) == pytest.approx(optimum_j, rel=close)
    for duration_s, (times_s, _) in zip(relaxed.duration_s, case.hulls, strict=True):
        assert times_s[0] * (1 - 1e-9) <= duration_s <= times_s[-1] * (1 + 1e-9)


@pytest.mark.parametrize(
    "schedule",
    [
        builders.one_f_one_b(4, 60),
        builders.envpipe(4, 60, [6, 4, 2, 0]),
        builders.gpipe(4, 60),
        builders.interleaved(4, 40, 2),
    ],
    ids=lambda schedule: schedule.name,
)
@pytest.mark.parametrize("factor", [1.0, 1.1, 3.0])
def test_both_solvers_agree_where_pipelines_are_longer(schedule, factor):
    profile = random_profile(random.Random(7), 4, 12).for_chunks(schedule.num_chunks)
    choices = make_choices(profile, np.full(4, 70.0), np.ones(4, dtype=np.int64))
    simplex, interior_point = (
        DurationProgram(schedule, choices, 0.01, np.zeros(4), units)
        for units in (SIMPLEX, INTERIOR_POINT)
    )
    fastest_s = np.array([unit.time_s[0] for unit in choices.units])[node_keys(schedule, choices)]
    timeline = Timeline(schedule, fastest_s.reshape(schedule.is_backward.shape), 0.01)
    deadline_s = factor * timeline.iteration_time_s
    vertex, point = simplex.solve(deadline_s), interior_point.solve(deadline_s)
    assert point.cost_j == pytest.approx(vertex.cost_j, rel=CLOSE[INTERIOR_POINT])
    # Where equally good solutions abound it too picks one with few units between profiled times.
    between = [
        sum(
            np.abs(choices.units[key].time_s / duration_s - 1).min() > 1e-4
            for key, duration_s in zip(
                node_keys(schedule, choices), relaxed.duration_s, strict=True
            )
        )
        for relaxed in (vertex, point)
    ]
    assert between[1] <= between[0] + 0.1 * schedule.num_units


@SOLVERS
@settings(max_examples=examples(30), deadline=None, derandomize=True)
@given(seed=SEEDS)
def test_deadlines_one_after_the_other_give_what_each_gives_alone(max_simplex_units, seed):
    case = Case(seed)
    program = case.program(max_simplex_units)
    for _ in range(4):
        deadline_s = case.fastest_s * case.rng.choice([1.0, 1.01, 1.1, 1.5, 10.0])
        again = program.solve(deadline_s).cost_j
        assert again == pytest.approx(
            case.program(max_simplex_units).solve(deadline_s).cost_j, rel=1e-7
        )


@SOLVERS
@settings(max_examples=examples(30), deadline=None, derandomize=True)
@given(seed=SEEDS)
def test_a_deadline_before_the_fastest_iteration_is_refused(max_simplex_units, seed):
    case = Case(seed)
    program = case.program(max_simplex_units)
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


@on_request("CORE")
def test_the_interior_point_method_forced_on_125_programs_never_ends_wrong():
    """However badly conditioned: one is late, one needs a second try, two need the simplex."""
    for seed in range(125):
        case = Case(seed, max_microbatches=4, job=wild_job)
        relaxed = case.program(INTERIOR_POINT).solve(case.deadline_s)
        assert case.iteration_s(relaxed.duration_s) <= case.deadline_s * (1 + 1e-6), seed
        # Any prices give a bound (test_certificate), so an answer that is near it is right.
        can_save_j = sum(float(cost_j[0] - cost_j[-1]) for _, cost_j in case.hulls)
        cost_j = case.cost_j(relaxed.duration_s)
        assert cost_j - relaxed.lower_bound_j <= 1e-3 * (abs(cost_j) + can_save_j), seed


def wrong(solution, problem, how):
    """An answer that is late, too dear, or proven by nothing."""
    none, all_of_it = np.zeros_like(problem.width), problem.width.copy()
    return {
        "late": replace(solution, segment=all_of_it),
        "dear": replace(solution, segment=none),
        "unproven": replace(solution, deadline_price=np.zeros_like(problem.tail)),
        "not a number": replace(solution, deadline_price=np.full_like(problem.tail, np.nan)),
    }[how]


@pytest.mark.parametrize("unit_j", [1.0, 1e-6])
@pytest.mark.parametrize("how", ["late", "dear", "unproven", "not a number"])
@pytest.mark.parametrize("solver", [Simplex, InteriorPoint])
def test_a_wrong_answer_is_noticed(monkeypatch, solver, how, unit_j):
    schedule = builders.one_f_one_b(3, 5)
    profile = random_profile(random.Random(7), 3, 6)
    rows = tuple(
        {k: [replace(row, energy_j=row.energy_j * unit_j) for row in kinds[k]] for k in kinds}
        for kinds in profile.rows
    )
    profile = replace(profile, rows=rows)
    choices = make_choices(profile, np.full(3, 70.0 * unit_j), np.ones(3, dtype=np.int64))
    right, asked = (
        DurationProgram(schedule, choices, 0.0, np.zeros(3), units)
        for units in (SIMPLEX, {Simplex: SIMPLEX, InteriorPoint: INTERIOR_POINT}[solver])
    )
    deadline_s = 1.05 * right.fastest_iteration_s
    optimum_j = right.solve(deadline_s).cost_j
    solve = solver.solve

    def solve_wrongly(self, deadline):
        return wrong(solve(self, deadline), self._problem, how)

    monkeypatch.setattr(solver, "solve", solve_wrongly)
    if solver is InteriorPoint:  # the simplex is asked instead
        assert asked.solve(deadline_s).cost_j == pytest.approx(optimum_j)
    else:
        with pytest.raises(LinearProgramError, match="although it can be met"):
            asked.solve(deadline_s)


@pytest.mark.parametrize(
    ("unit_s", "message_s", "tail_s", "said"),
    [
        (1.0, 0.1, 0.1, "Allow a little more time"),
        (1e14, 0.1, 0.1, "the longest unit takes 1e\\+14 s"),
        (1.0, 1e9, 0.1, "the longest message takes 1e\\+09 s, the shortest unit 1 s"),
        (1.0, 0.1, 1e9, "the longest tail takes 1e\\+09 s"),
    ],
)
def test_times_that_lie_too_far_apart_are_named(monkeypatch, unit_s, message_s, tail_s, said):
    def fail(self, deadline):
        raise SolverError("infeasible")

    monkeypatch.setattr(Simplex, "solve", fail)
    table = {(s, kind): {1400: (1.0, 9.0), 1200: (2.0, 5.0)} for s in (0, 1) for kind in (F, B)}
    table[1, F] = {1400: (unit_s, 9.0)}
    choices = make_choices(profile_of(table), np.zeros(2), np.ones(2, dtype=np.int64))
    schedule = builders.one_f_one_b(2, 2)
    program = DurationProgram(schedule, choices, message_s, np.array([0.0, tail_s]))
    with pytest.raises(LinearProgramError, match=said):
        program.solve(program.fastest_iteration_s)


@SOLVERS
def test_units_without_a_choice_are_no_trouble(max_simplex_units):
    profile = random_profile(random.Random(3), 3, 2)
    rows = tuple({kind: listed[:1] for kind, listed in kinds.items()} for kinds in profile.rows)
    choices = make_choices(replace(profile, rows=rows), np.zeros(3), np.ones(3, dtype=np.int64))
    schedule = builders.one_f_one_b(3, 5)
    program = DurationProgram(schedule, choices, 0.0, np.zeros(3), max_simplex_units)
    times_s = np.array([unit.time_s[0] for unit in choices.units])[node_keys(schedule, choices)]
    energies_j = np.array([unit.cost_j[0] for unit in choices.units])[node_keys(schedule, choices)]
    relaxed = program.solve(2 * float(times_s.sum()))
    assert relaxed.duration_s == pytest.approx(times_s)
    assert relaxed.cost_j == pytest.approx(energies_j.sum())
