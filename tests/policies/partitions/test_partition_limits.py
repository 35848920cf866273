"""Searches for a split where they are cut short, and the estimate that sorts splits by energy."""

from itertools import pairwise

import numpy as np
import pytest
from core_cases import uniform_profile
from test_partition import CURVE, planned_energy, table_of

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.policies.partitions.energy import _energy_estimate_j, plan_cost
from envpipe_megatron.policies.partitions.search import (
    SplitSpace,
    cheapest_splits,
    fastest,
)

#: Forwards and backwards of unlike ratio, so that no split reaches the bound.
UNLIKE = table_of(*np.random.default_rng(1).uniform(0.1, 2.0, (2, 14)))


@pytest.mark.parametrize("sizes", [(1, 4), (2, 0)])
def test_a_split_needs_two_stages_and_a_microbatch(sizes):
    table = table_of(np.ones(4), np.ones(4))
    with pytest.raises(EnvPipeError, match="two stages and one microbatch"):
        SplitSpace(table, *sizes)
    space = SplitSpace(table, 2, 1)
    assert fastest(space, space.allowed).split == (2, 2)


def test_a_stage_that_waits_at_both_ends_bounds_the_iteration():
    """The middle one, a little longer, waits for its first backward and for its last one."""
    forward_s = np.array([1.0, 1.2, 1.0])
    space = SplitSpace(table_of(forward_s, 2 * forward_s), 3, 8)
    time_s = float(space.iteration_times_s(np.array([[1, 1, 1]]))[0])
    assert time_s == pytest.approx(9.6 + 3.0 + 6 * 3.6)
    assert space.bound_s[1, 1, 2] == pytest.approx(time_s)
    # With fewer microbatches the last forward is ahead of the first backward.
    few = SplitSpace(table_of(forward_s, 2 * forward_s), 3, 2)
    assert few.bound_s[1, 1, 2] <= few.iteration_times_s(np.array([[1, 1, 1]]))[0] * (1 + 1e-9)


def test_no_plan_is_below_the_estimate():
    """For every split: the estimate, and what all stages take by waiting as long as it lasts."""
    space = SplitSpace(UNLIKE, 3, 4)
    splits = list(cheapest_splits(space.stage_time_s, space.allowed))
    times_s = space.iteration_times_s(np.array(splits))
    limit_s = 1.1 * float(times_s.min())
    allowed = space.allowed & (space.bound_s <= limit_s)
    estimate_j = _energy_estimate_j(space, allowed, limit_s, 80.0)
    assert not estimate_j[~allowed].any()
    checked = 0
    for split, time_s in zip(splits, times_s, strict=True):
        if time_s <= limit_s:
            edges = enumerate(pairwise(np.cumsum((0, *split))))
            least_j = 4 * sum(estimate_j[stage, a, b] for stage, (a, b) in edges)
            least_j += 3 * 80.0 * time_s
            assert least_j <= planned_energy(UNLIKE, split, 4, 80.0, limit_s) * (1 + 1e-9)
            checked += 1
    assert checked > 3


def test_the_estimate_takes_the_slowest_clocks_that_there_is_time_for():
    # Two layers take 6 s at 1200 MHz, 6.6 s at 1000. Less what waiting takes they use 1920 J there,
    # 1518 J at 1000 MHz and 1368 J at 900, the least.
    space = SplitSpace(table_of(np.ones(4), np.full(4, 2.0)), 2, 2)
    limit_s = 6.0 + 2 * 6.6
    estimate_j = _energy_estimate_j(space, space.allowed, limit_s, 80.0)
    assert estimate_j[0, 0, 2] == pytest.approx(1368.0)
    assert estimate_j[1, 2, 4] == pytest.approx(1518.0)


def test_a_split_that_is_too_slow_in_every_order_is_refused():
    profile = uniform_profile(2, {clock: (t, t * w) for clock, (t, w) in CURVE.items()})
    with pytest.raises(EnvPipeError, match=r"longer than the deadline.*got 1.0"):
        plan_cost(profile, 4, 80.0, 1.0)
