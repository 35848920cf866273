"""The optimal policy under conditions that its linear program does not hold."""

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from core_cases import random_orders, uniform_profile
from hypothesis import given, settings
from hypothesis import strategies as st
from on_request import asked_for, examples, on_request
from planning_cases import random_job

from envpipe_megatron.core.conditions import Conditions
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.profile import make_profile, read_profile
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.policies.clock_changes import run_search
from envpipe_megatron.policies.clock_changes.clock_runs import shortest_dwell_s
from envpipe_megatron.policies.optimal.linear_program import LinearProgramError
from envpipe_megatron.policies.optimal.optimizer import Optimizer, all_maximum_s

SEEDS = st.integers(0, 2**32)
QUICKSTART = Path(__file__).parents[3] / "configs/profiles/quickstart.csv"


def modelled_profile(num_stages=4, clocks=range(600, 1980, 60), slowness=None):
    """Time falls and power rises with the clock, in the way of a real GPU; units of 50-140 ms."""
    curve = {}
    for f in clocks:
        share = f / max(clocks)
        time_s = 0.05 * (0.15 + 0.85 / share)
        curve[f] = (time_s, time_s * (90 + 300 * share**2.4))
    return uniform_profile(num_stages, curve, slowness=slowness)


def optimizer_of(conditions, microbatches=8, profile=None, extra=None, **options):
    profile = profile or modelled_profile(slowness=[1.0, 1.15, 0.9, 1.1])
    schedule = builders.one_f_one_b(profile.num_stages, microbatches)
    if extra:
        schedule = builders.envpipe(profile.num_stages, microbatches, extra)
    return Optimizer(schedule, profile, conditions, **options)


def conditions_of(**options):
    return Conditions((80.0,) * 4, **options)


def wait_curve(full_w=80.0):
    return {210: 0.6 * full_w, 1920: full_w}


def deadline_of(optimizer, factor=1.05):
    return factor * all_maximum_s(optimizer.schedule, optimizer.profile, optimizer.conditions)


def changes(plan):
    return int(plan.evaluation.clock_changes.sum())


def also(*values):
    """Parameters between others that show the same."""
    return [pytest.param(value, marks=on_request("CORE")) for value in values]


class TestWaitingPowerByClock:
    conditions = conditions_of(wait_power_w=(wait_curve(),) * 4)

    @pytest.mark.parametrize("blocking_w", [*also(0.0), 80.0, 300.0])
    def test_a_plan_is_no_worse_than_one_that_ignores_it(self, blocking_w):
        conditions = replace(self.conditions, blocking_power_w=(blocking_w,) * 4)
        for factor in (1.0, 1.05, 1.3):
            own = optimizer_of(conditions)
            ignoring = optimizer_of(replace(conditions, wait_power_w=None))
            deadline_s = deadline_of(own, factor)
            plan = own.plan(deadline_s)
            other = replace(ignoring.plan(deadline_s), conditions=conditions)
            # Waiting is priced once, by a first guess of where it is: 0.003 % are lost at 80 W.
            assert plan.cost.energy_j <= other.cost.energy_j * (1 + 5e-5)
            assert plan.energy_lower_bound_j <= plan.cost.energy_j

    def test_a_blocking_power_that_is_far_off_is_mended(self):
        # At 300 W waiting seems so dear that units run faster than they should.
        conditions = replace(self.conditions, blocking_power_w=(300.0,) * 4)
        own = optimizer_of(conditions)
        deadline_s = deadline_of(own, 1.3)
        plan = own.plan(deadline_s)
        ignoring = optimizer_of(replace(conditions, wait_power_w=None)).plan(deadline_s)
        assert plan.cost.energy_j < 0.99 * replace(ignoring, conditions=conditions).cost.energy_j
        assert plan.gap_percent < 3


class TestChangeEnergy:
    @pytest.mark.parametrize("extra", [None, (3, 2, 1, 0)])
    @pytest.mark.parametrize("change_j", [1.0, *also(4.0), 20.0])
    def test_fewer_changes_at_less_energy(self, change_j, extra):
        plain = optimizer_of(conditions_of(), extra=extra)
        conditions = conditions_of(change_energy_j=change_j)
        deadline_s = deadline_of(plain)
        ignoring = replace(plain.plan(deadline_s), conditions=conditions)
        plan = optimizer_of(conditions, extra=extra).plan(deadline_s)
        assert changes(plan) < changes(ignoring)
        assert plan.cost.energy_j < ignoring.cost.energy_j
        assert plan.cost.iteration_time_s <= deadline_s * (1 + 1e-9)
        # Changes are left out of the bound, which the plan that ignores them has too.
        assert plan.energy_lower_bound_j == pytest.approx(ignoring.energy_lower_bound_j)

    def test_ever_dearer_changes_end_in_one_clock_a_stage(self):
        optimizer = optimizer_of(conditions_of(change_energy_j=1e4))
        plan = optimizer.plan(deadline_of(optimizer))
        assert changes(plan) == 0
        assert plan.cost.energy_j < plan.baseline.cost.energy_j


class TestLateClocks:
    def test_most_of_the_saving_is_left_where_there_are_too_many_paths(self, monkeypatch):
        # As with 32 stages and 512 microbatches, for which neither limit is enough.
        monkeypatch.setattr(run_search, "_MAX_PROGRAM_UNITS", 0)
        monkeypatch.setattr(run_search, "_PATHS", 1)
        optimizer = optimizer_of(conditions_of(change_time_s=0.01), microbatches=24)
        plan = optimizer.plan(deadline_of(optimizer, 1.0))
        blind = optimizer_of(conditions_of(), microbatches=24).plan(deadline_of(optimizer, 1.0))
        highest_j = plan.baseline.cost.energy_j
        assert highest_j - plan.cost.energy_j > 0.8 * (highest_j - blind.cost.energy_j)

    def test_a_deadline_that_they_make_impossible_is_refused(self):
        # A forward is fastest at a clock that backwards do not have, and a change takes for ever.
        profile = modelled_profile(1)
        rows = [
            (stage, kind, replace(row, frequency_mhz=row.frequency_mhz + 7 * (kind == "forward")))
            for stage, kinds in enumerate(profile.rows)
            for kind, kind_rows in kinds.items()
            for row in kind_rows
        ]
        profile = make_profile(rows, source="no clock in common")
        conditions = Conditions((80.0,), change_time_s=0.02)
        optimizer = optimizer_of(conditions, profile=profile)
        with pytest.raises(LinearProgramError, match="changes of clock of 0") as error:
            optimizer.plan(optimizer.fastest_s)
        assert "Allow more time" in str(error.value)
        relaxed = optimizer.plan(1.1 * optimizer.fastest_s)
        assert relaxed.cost.iteration_time_s <= 1.1 * optimizer.fastest_s


class TestDwell:
    def test_shorter_saves_no_less(self):
        # A plan for a longer dwell time keeps a shorter one too.
        optimizer = optimizer_of(conditions_of(), 16, read_profile(QUICKSTART), (4, 3, 1, 0))
        deadline_s = deadline_of(optimizer, 1.0)
        energies_j = [
            optimizer.plan(deadline_s, min_dwell_s=dwell_s).cost.energy_j
            for dwell_s in (0.3, 0.4, 0.5, 5.0)
        ]
        assert energies_j == sorted(energies_j)
        assert energies_j[-2] < 0.9 * energies_j[-1]  # of an iteration of 1.9 s

    @pytest.mark.parametrize("dwell_s", [-1.0, float("nan")])
    def test_that_is_no_time_is_refused(self, dwell_s):
        optimizer = optimizer_of(conditions_of())
        with pytest.raises(LinearProgramError, match="dwell"):
            optimizer.plan(deadline_of(optimizer), min_dwell_s=dwell_s)


def any_conditions(seed):
    """Few clocks, not the same for forwards and backwards, or many; and any order."""
    rng = random.Random(seed)
    job = random_job(rng)
    profile, stages, microbatches = job.profile, job.num_stages, job.num_microbatches
    if seed % 2:
        slowness = [rng.uniform(0.8, 1.2) for _ in range(stages)]
        profile = modelled_profile(stages, range(600, 1980, 120), slowness)
    schedule = builders.one_f_one_b(stages, microbatches)
    if rng.random() < 0.5:
        orders = random_orders(rng, stages, microbatches)
        schedule = Schedule("random", microbatches, 1, orders)
    unit_s = float(np.mean([row.time_s for kinds in profile.rows for row in kinds["forward"]]))
    curves = tuple(
        {f: rng.uniform(10, 150) for f in rng.sample(range(200, 2000, 15), rng.randint(1, 4))}
        for _ in range(stages)
    )
    conditions = replace(
        job.conditions,
        wait_power_w=rng.choice([None, curves]),
        change_time_s=rng.choice([0.0, rng.uniform(0, 0.3) * unit_s, 3 * unit_s]),
        change_energy_j=rng.choice([0.0, rng.uniform(0, 50) * unit_s]),
    )
    dwell_s = rng.choice([0.0, rng.uniform(0, 5) * unit_s, 1e3 * unit_s])
    optimizer = Optimizer(schedule, profile, conditions)
    deadline_s = rng.choice([1.0, 1.1, 1.5, 3.0]) * max(
        optimizer.fastest_s, all_maximum_s(schedule, profile, conditions)
    )
    return optimizer, deadline_s, dwell_s


def test_any_conditions():
    """In time, not below the bound, and the dwell time kept, or refused with a reason.

    And plans are good: how far they are above their bounds is what the planner had come to when
    this was written. A change that makes it better lowers the figures here.
    """
    above = []
    for seed in range(examples(64)):
        optimizer, deadline_s, dwell_s = any_conditions(seed)
        refused = ""
        try:
            plan = optimizer.plan(deadline_s, dwell_s)
        except LinearProgramError as error:
            refused = str(error)
        if refused:
            assert optimizer.conditions.change_time_s or dwell_s, seed
            assert "changes of clock" in refused, seed
            continue
        assert plan.cost.iteration_time_s <= deadline_s * (1 + 1e-9), seed
        assert plan.energy_lower_bound_j <= plan.cost.energy_j * (1 + 1e-9), seed
        assert shortest_dwell_s(plan) >= dwell_s * (1 - 1e-9), seed
        above.append(100 * (plan.cost.energy_j / plan.energy_lower_bound_j - 1))
    fewest, most = (59, 6.3) if asked_for("CORE") else (14, 7.5)
    assert len(above) >= fewest
    assert np.mean(above) < most


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(SEEDS)
def test_on_1f1b_a_plan_keeps_any_deadline_and_takes_no_more_than_the_baseline(seed):
    """All units at their highest clocks are a plan, so none of these is refused."""
    rng = random.Random(seed)
    job = random_job(rng)
    unit_s = job.profile.rows[0]["forward"][0].time_s
    conditions = replace(
        job.conditions,
        change_time_s=rng.choice([0.0, rng.uniform(0, 2) * unit_s]),
        change_energy_j=rng.choice([0.0, rng.uniform(0, 50) * unit_s]),
    )
    schedule = builders.one_f_one_b(job.num_stages, job.num_microbatches)
    optimizer = Optimizer(schedule, job.profile, conditions)
    baseline_s = max(optimizer.fastest_s, all_maximum_s(schedule, job.profile, conditions))
    deadline_s = rng.choice((1.0, 1.0, 1.02, 1.2, 2.0)) * baseline_s
    plan = optimizer.plan(deadline_s)
    assert plan.cost.iteration_time_s <= deadline_s * (1 + 1e-9)
    assert plan.energy_lower_bound_j <= plan.cost.energy_j * (1 + 1e-9)
    assert plan.cost.energy_j <= plan.baseline.cost.energy_j * (1 + 1e-9)
