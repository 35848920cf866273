"""The search for runs by its pieces: what they cost, what they keep, and where it stops."""

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from planning_cases import random_job
from test_optimal_conditions import any_conditions

from envpipe_megatron.core.conditions import Conditions
from envpipe_megatron.core.kinds import WHOLE
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.plan import Plan, max_frequencies
from envpipe_megatron.core.profile import make_profile, read_profile
from envpipe_megatron.core.profile_rows import ProfileRow
from envpipe_megatron.policies.clock_changes.clock_runs import shortest_dwell_s
from envpipe_megatron.policies.clock_changes.run_search import RunSearch
from envpipe_megatron.policies.optimal.optimizer import Optimizer, all_maximum_s
from envpipe_megatron.policies.planner import make_plan
from envpipe_megatron.policies.request import PlanRequest

ROOT = Path(__file__).resolve().parents[3]


class Case:
    """A search that starts from clocks at random, the same for some units in a row."""

    def __init__(self, seed):
        self.optimizer, self.deadline_s, self.dwell_s = any_conditions(seed)
        optimizer, conditions = self.optimizer, self.optimizer.conditions
        powers_w = np.array(conditions.blocking_power_w)
        self.numbers = np.random.default_rng(seed)
        highest = max_frequencies(optimizer.schedule, optimizer.profile)
        plan = Plan("mine", optimizer.schedule, highest, optimizer.profile, conditions)
        relaxed = optimizer.relaxed(self.deadline_s)
        self.search = RunSearch(
            plan, relaxed, powers_w, self.deadline_s, self.dwell_s, optimizer.plan
        )
        self.table = self.search._table

    def any_plan(self):
        index = np.zeros(self.optimizer.schedule.is_backward.shape, dtype=np.int64)
        for stage, position in np.ndindex(index.shape):
            known = np.flatnonzero(self.table.profiled[position, stage])
            before = index[stage, position - 1]
            keep = position and before in known and self.numbers.random() < 0.7
            index[stage, position] = before if keep else self.numbers.choice(known)
        return index, self.search._plan(index)


def chosen(values, index):
    """[units_per_stage, num_stages] the values of the chosen clocks."""
    return np.take_along_axis(values, index.T[:, :, None], axis=2)[:, :, 0]


@pytest.mark.parametrize("seed", range(16))
def test_costs_waiting_and_changes_add_up_to_the_plans_energy(seed):
    case = Case(seed)
    index, plan = case.any_plan()
    conditions = plan.conditions
    price_w = case.numbers.random(index.shape)
    cost_j, late = case.search._costs(plan, price_w)
    assert (late is not None) == (conditions.change_time_s > 0)
    if late is None:
        total_j = chosen(cost_j, index).sum()
        total_j += np.dot(conditions.blocking_power_w, conditions.gpus_by_stage) * (
            plan.cost.iteration_time_s
        )
        total_j += np.dot(plan.evaluation.clock_changes, case.search._change_j)
        assert total_j == pytest.approx(plan.cost.energy_j)
        return
    wait_s = plan.timeline.wait_s.T
    expected_s = np.maximum(conditions.change_time_s - wait_s, 0.0)
    assert late.late_s[1:].tolist() == expected_s[1:].tolist()
    assert not late.late_s[0].any()
    at = chosen(late.cost_j - cost_j, index)
    assert at == pytest.approx(price_w.T * chosen(case.table.time_s, index))


def test_a_long_dwell_time_still_saves_by_runs_with_waits_in_them():
    """Of an iteration of 1.9 s; a plan of a longer dwell time is one of a shorter one, too."""
    profile = read_profile(ROOT / "configs" / "profiles" / "quickstart.csv")
    conditions = Conditions(profile.sidecar.blocking_power_w)
    savings = []
    for dwell_s in (0.5, 0.75):
        request = PlanRequest(16, "1f1b", "optimal", conditions=conditions, min_dwell_s=dwell_s)
        plan = make_plan(profile, request).plan
        assert shortest_dwell_s(plan) >= dwell_s * (1 - 1e-9)
        savings.append(plan.cost.saving_percent(plan.baseline.cost))
    assert savings == sorted(savings, reverse=True)
    assert savings[-1] > 8


def test_where_slower_units_leave_shorter_waits_runs_are_still_found():
    """Clocks are few and what they cost is ragged: one for each stage saves half of that."""
    times_ms = (
        ((54, 62, 77, 99, 88), (129, 114, 154, 160, 172)),
        ((122, 119, 125, 160, 201), (258, 201, 314, 295, 339)),
        ((165, 188, 228, 245, 255), (403, 373, 482, 584, 565)),
    )
    energies_j = (
        ((20.0, 26.3, 19.4, 17.7, 14.2), (43.0, 46.0, 41.9, 27.6, 26.1)),
        ((47.9, 51.3, 31.1, 23.2, 30.9), (103.4, 79.5, 81.4, 41.3, 53.6)),
        ((68.1, 62.2, 47.3, 34.6, 36.4), (166.1, 146.5, 114.1, 86.9, 85.9)),
    )
    profile = make_profile(
        [
            (stage, kind, ProfileRow(clock, 1e-3 * times_ms[stage][k][n], energies_j[stage][k][n]))
            for stage in range(3)
            for k, kind in enumerate(WHOLE)
            for n, clock in enumerate((1320, 1290, 945, 690, 660))
        ],
        source="made for a test",
    )
    conditions = Conditions((76.0, 68.0, 99.0), change_energy_j=0.1)
    savings = []
    for dwell_s in (0.4, 0.8, 1.6):
        request = PlanRequest(6, "auto", "optimal", conditions=conditions, min_dwell_s=dwell_s)
        plan = make_plan(profile, request).plan
        savings.append(plan.cost.saving_percent(plan.baseline.cost))
    assert savings == sorted(savings, reverse=True)


def test_late_plans_with_a_dwell_time_are_made_faster_where_no_other_is_in_time():
    """Of this job all runs near the relaxed durations are late; one clock per stage costs 37 %."""
    job = random_job(random.Random(31), stages=(2, 3, 4), max_microbatches=8)
    own = builders.one_f_one_b(job.num_stages, job.num_microbatches)
    deadline_s = all_maximum_s(own, job.profile, job.conditions)
    unit_s = deadline_s / (2 * (job.num_microbatches + job.num_stages))
    conditions = replace(job.conditions, change_time_s=0.3 * unit_s)
    plan = Optimizer(own, job.profile, conditions).plan(deadline_s, 2 * unit_s)
    assert plan.cost.iteration_time_s <= deadline_s * (1 + 1e-9)
    assert shortest_dwell_s(plan) >= 2 * unit_s * (1 - 1e-9)
    assert plan.cost.energy_j < 1.2 * plan.energy_lower_bound_j


def test_runs_that_are_found_several_ways_are_searched_once(monkeypatch):
    """One stage at two clocks: all ways to begin lead to the same runs."""
    divided = []
    as_before = RunSearch._divided
    monkeypatch.setattr(
        RunSearch, "_divided", lambda *args: divided.append(args[1]) or as_before(*args)
    )
    rows = [
        (0, kind, ProfileRow(clock, 1e3 / clock, clock / 20))
        for kind in WHOLE
        for clock in (1000, 900)
    ]
    profile = make_profile(rows, source="two clocks")
    plan = Optimizer(builders.one_f_one_b(1, 3), profile, Conditions((20.0,))).plan(10.0, 20.0)
    assert (plan.frequency_mhz == 900).all()
    assert len(divided) == 2  # those runs, and the best of what was divided
