"""Searches for a split where they are cut short, and the estimate that sorts splits by energy."""

from itertools import pairwise

import numpy as np
import pytest
from core_cases import uniform_profile
from test_partition import CURVE, planned_energy, table_of

from envpipe_megatron.core.longest_path import LongestPath
from envpipe_megatron.core.partition import stage_profile
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.policies.partitions import search as partition_search
from envpipe_megatron.policies.partitions.energy import _energy_estimate_j, least_energy, plan_cost
from envpipe_megatron.policies.partitions.search import (
    SplitSpace,
    cheapest_splits,
    fastest,
    list_splits,
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


def test_as_many_splits_are_timed_as_one_search_may(monkeypatch):
    space = SplitSpace(UNLIKE, 3, 8)
    every = list(cheapest_splits(space.stage_time_s, space.allowed))
    assert len(every) == 78

    def listed():
        splits, times_s, complete = list_splits(space, space.stage_time_s, space.allowed)
        assert splits == every[: len(splits)]
        assert times_s.tolist() == space.iteration_times_s(np.array(splits)).tolist()
        return len(splits), complete

    monkeypatch.setattr(partition_search, "_MAX_SPLITS", 78)
    assert listed() == (78, True)
    monkeypatch.setattr(partition_search, "_MAX_SPLITS", 77)
    assert listed() == (77, False)
    # A hundred at least, whatever their units come to: 48 each.
    space = SplitSpace(UNLIKE, 4, 8)
    every = list(cheapest_splits(space.stage_time_s, space.allowed))
    assert len(every) == 286
    monkeypatch.setattr(partition_search, "_MAX_SPLITS", 1000)
    monkeypatch.setattr(partition_search, "_MAX_UNITS", 64 * 150)
    assert listed() == (150, False)
    monkeypatch.setattr(partition_search, "_MAX_UNITS", 64)
    assert listed() == (100, False)


def test_splits_are_timed_in_batches_that_fit_into_memory(monkeypatch):
    space = SplitSpace(UNLIKE, 2, 2)
    splits = np.array([(n, 14 - n) for n in range(3, 10)])
    at_once = space.iteration_times_s(splits)
    sizes = []

    def path(schedule, duration_s):
        sizes.append(len(duration_s[0]))
        return LongestPath(schedule, duration_s)

    monkeypatch.setattr(partition_search, "LongestPath", path)
    monkeypatch.setattr(partition_search, "_BATCH_UNITS", 24)  # three splits of 2 x 4 units
    assert space.iteration_times_s(splits).tolist() == at_once.tolist()
    assert sizes == [3, 2, 2]
    sizes.clear()
    monkeypatch.setattr(partition_search, "_BATCH_UNITS", 1)
    assert space.iteration_times_s(splits).tolist() == at_once.tolist()
    assert sizes == [1] * 7


@pytest.mark.parametrize(
    ("seed", "most", "timed", "exact", "time_s"),
    [
        (0, 16, 14, True, 78.102),
        (0, 8, 16, False, 78.217),  # the first eight bring better ones into reach, the next none
        (5, 8, 8, False, 75.597),
        (6, 8, 8, True, 72.904),
        (6, 4, 4, False, 72.904),
        (2, 2, 2, True, 72.97),
    ],
)
def test_a_search_that_is_cut_short_goes_on_while_it_gets_better(
    monkeypatch, seed, most, timed, exact, time_s
):
    table = table_of(*np.random.default_rng(seed).uniform(0.1, 2.0, (2, 14)))
    space = SplitSpace(table, 5, 8)
    monkeypatch.setattr(partition_search, "_MAX_SPLITS", most)
    found = fastest(space, space.allowed)
    assert (found.num_considered, found.exact) == (timed, exact)
    assert found.iteration_time_s == pytest.approx(time_s, abs=1e-3)
    assert found.iteration_time_s == space.iteration_times_s(np.array([found.split]))[0]


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


@pytest.mark.parametrize(
    ("most", "planned", "exact", "split"),
    [
        (6, 6, True, (3, 2, 3, 2)),
        (5, 5, False, (3, 2, 3, 2)),
        (1, 2, False, (3, 2, 3, 2)),
        (0, 1, False, (3, 2, 2, 3)),
    ],
)
def test_the_most_promising_splits_are_planned_and_the_fastest(most, planned, exact, split):
    """And the answer says whether those are all that are fast enough."""
    table = table_of(*np.random.default_rng(3).uniform(0.1, 2.0, (2, 10)))
    space = SplitSpace(table, 4, 6)
    assert fastest(space, space.allowed).split == (3, 2, 2, 3)
    found = least_energy(space, 80.0, 0.02, most)
    assert (found.num_planned, found.exact, found.split) == (planned, exact, split)
    assert found.num_considered == 17
    limit_s = fastest(space, space.allowed).iteration_time_s * 1.02
    assert found.cost == plan_cost(stage_profile(table, split), 6, 80.0, limit_s * (1 + 1e-9))
    assert found.iteration_time_s == space.iteration_times_s(np.array([split]))[0]


def test_a_split_that_is_too_slow_in_every_order_is_refused():
    profile = uniform_profile(2, {clock: (t, t * w) for clock, (t, w) in CURVE.items()})
    with pytest.raises(EnvPipeError, match=r"longer than the deadline.*got 1.0"):
        plan_cost(profile, 4, 80.0, 1.0)
