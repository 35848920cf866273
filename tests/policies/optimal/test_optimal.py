"""The optimal policy on random jobs: what its plans keep, and what its bound is worth."""

import random

import pytest
from core_cases import B, F, profile_of
from hypothesis import given, settings
from hypothesis import strategies as st
from on_request import examples
from planning_cases import random_job
from program_cases import CLOSE, Case

from envpipe_megatron.core.conditions import Conditions
from envpipe_megatron.core.orders import builders
from envpipe_megatron.policies.optimal.linear_program import LinearProgramError
from envpipe_megatron.policies.optimal.optimizer import Optimizer, all_maximum_s

SEEDS = st.integers(0, 2**32)
FACTORS = (1.0, 1.0, 1.02, 1.2, 2.0)


def optimizer_of(rng):
    case = Case(rng.getrandbits(32), job=lambda rng, _: random_job(rng))
    return Optimizer(case.schedule, case.profile, case.conditions)


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(SEEDS)
def test_plans_of_any_order_are_in_time_and_not_below_their_bound(seed):
    rng = random.Random(seed)
    optimizer = optimizer_of(rng)
    schedule, profile, conditions = optimizer.schedule, optimizer.profile, optimizer.conditions
    deadline_s = rng.choice(FACTORS) * all_maximum_s(schedule, profile, conditions)
    if deadline_s < optimizer.fastest_s * (1 - 1e-9):
        for refuse in (optimizer.plan, optimizer.relaxed):
            with pytest.raises(LinearProgramError, match=f"deadline.*{deadline_s}"):
                refuse(deadline_s)
        deadline_s = optimizer.fastest_s
    plan = optimizer.plan(deadline_s)
    assert plan.policy == "optimal"
    assert plan.cost.iteration_time_s <= deadline_s * (1 + 1e-9)
    assert plan.energy_lower_bound_j <= plan.cost.energy_j * (1 + 1e-9)
    # The certificate loses no more of the solver's optimum than its disturbed slopes do.
    relaxed_j = optimizer.relaxed(deadline_s).cost_j
    assert plan.energy_lower_bound_j == pytest.approx(relaxed_j, rel=CLOSE)


@pytest.mark.parametrize("seed", [53, 521])
def test_on_coarse_profiles_too_a_plan_takes_no_more_than_the_baseline(seed):
    """Two jobs of a thousand where rounding alone ends above all-maximum clocks."""
    job = random_job(random.Random(seed))
    own = builders.one_f_one_b(job.num_stages, job.num_microbatches)
    optimizer = Optimizer(own, job.profile, job.conditions)
    baseline_s = all_maximum_s(optimizer.schedule, optimizer.profile, optimizer.conditions)
    plan = optimizer.plan(baseline_s)
    assert plan.cost.energy_j <= plan.baseline.cost.energy_j * (1 + 1e-9)


def test_by_hand_bound_and_plan_of_one_forward_and_one_backward():
    """Of the second that is left, F takes half for 4 J; B would take the other half for 3.5 J.

    B has no clock for half a second, but one for a whole, which saves 7 J.
    """
    profile = profile_of(
        {
            (0, F): {1200: (1.0, 10.0), 1000: (1.5, 6.0)},
            (0, B): {1200: (1.0, 10.0), 900: (2.0, 3.0)},
        }
    )
    optimizer = Optimizer(builders.one_f_one_b(1, 1), profile, Conditions((0.0,)))
    plan = optimizer.plan(3.0)
    assert plan.energy_lower_bound_j == pytest.approx(12.5)
    assert optimizer.relaxed(3.0).cost_j == pytest.approx(12.5)
    assert plan.frequency_mhz.tolist() == [[1200, 900]]
    assert (plan.cost.iteration_time_s, plan.cost.energy_j) == (3.0, 13.0)
    assert plan.gap_percent == pytest.approx(4.0, rel=1e-5)


def test_times_that_only_rounding_tells_apart_leave_the_bound_its_digits():
    """As a page of dry runs measures them: each unit takes as long at every clock."""
    rng = random.Random(0)
    rows = {
        (stage, kind): {
            mhz: (time_s * (1 + rng.choice((-3, 0, 2)) * 1e-14), time_s * rng.uniform(469, 473))
            for mhz in (1410, 990, 570)
        }
        for stage in range(4)
        for kind, time_s in ((F, 0.03), (B, 0.06))
    }
    own, profile, conditions = builders.one_f_one_b(4, 8), profile_of(rows), Conditions((80.0,) * 4)
    plan = Optimizer(own, profile, conditions).plan(all_maximum_s(own, profile, conditions))
    assert plan.energy_lower_bound_j == pytest.approx(plan.cost.energy_j, rel=1e-6)


def test_a_bound_that_rounding_leaves_below_nothing_is_none():
    """Units that take no energy at some clocks, as where a counter stood still."""
    for seed in range(8):
        rng = random.Random(seed)
        curves = {
            at: {f: (rng.uniform(1, 2), rng.choice([0, 300.0])) for f in (1400, 1200, 1000)}
            for at in ((0, F), (0, B))
        }
        optimizer = Optimizer(builders.gpipe(1, 2), profile_of(curves), Conditions((300.0,)))
        plan = optimizer.plan(1.3 * optimizer.fastest_s)
        assert plan.energy_lower_bound_j is None or plan.energy_lower_bound_j > 0, seed
