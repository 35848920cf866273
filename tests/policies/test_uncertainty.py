"""Drawn iterations against one draw at a time, and the saving's uncertainty against Monte Carlo."""

import itertools
import math
import random
from dataclasses import replace

import numpy as np
import pytest
from core_cases import B, F, I, W, naive_times, random_schedule, uniform_profile
from planning_cases import random_conditions, random_profile

from envpipe_megatron.core.conditions import Conditions, Spread
from envpipe_megatron.core.kinds import SPLIT, unit
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.orders.splitting import split_in_place
from envpipe_megatron.core.plan import Plan, max_frequencies, read_plan
from envpipe_megatron.core.profile_rows import ProfileError, SplitBackward
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.core.uncertainty import (
    draw,
    draw_factors,
    excess,
    expected,
    saving_uncertainty_percent,
)
from envpipe_megatron.errors import EnvPipeError

CURVE = {1400: (0.1, 40.0), 1200: (0.11, 34.0), 1000: (0.13, 31.0)}
SPREAD = Spread(0.05, 0.02)


def random_plan(rng, spread=SPREAD):
    schedule = random_schedule(rng)
    profile = random_profile(rng, schedule.num_stages)
    conditions = replace(random_conditions(rng, profile), spread=spread, change_energy_j=0.3)
    if rng.random() < 0.5:
        curve = {400: rng.uniform(20, 60), 2000: rng.uniform(60, 120)}
        conditions = replace(conditions, wait_power_w=(curve,) * schedule.num_stages)
    if schedule.split:
        profile = profile.with_split_backwards(SplitBackward(0.4, 0.1))
    profile = profile.for_chunks(schedule.num_chunks)
    clocks = max_frequencies(schedule, profile)
    for at, rows in zip(
        np.ndindex(clocks.shape),
        (profile.rows[s][u.kind] for s, order in enumerate(schedule.stages) for u in order),
        strict=True,
    ):
        clocks[at] = rng.choice(rows).frequency_mhz
    return Plan("random", schedule, clocks, profile, conditions)


def drawn_naively(plan, factor):
    """Time and energy of one iteration whose units take so many times their time and energy."""
    conditions, clocks = plan.conditions, plan.frequency_mhz
    time_s, energy_j = (factor * of_unit for of_unit in plan.profile.lookup(plan.schedule, clocks))
    ends = naive_times(plan.schedule, time_s, conditions.latency_s)
    stages, width = clocks.shape
    tail_s = conditions.tail_by_stage_s
    total_s = max(ends[stage, width - 1][1] + tail_s[stage] for stage in range(stages))
    power_w, total_j = conditions.waiting_power_w(clocks), 0.0
    for stage in range(stages):
        stage_j, before_s = energy_j[stage].sum(), 0.0
        for position in range(width):
            start_s, end_s = ends[stage, position]
            stage_j += power_w[stage, position] * (start_s - before_s)
            stage_j += 0.3 * (clocks[stage, position] != clocks[stage, position - 1])
            before_s = end_s
        stage_j += power_w[stage, 0] * (total_s - before_s)
        total_j += conditions.gpus_by_stage[stage] * stage_j
    return total_s, total_j


@pytest.mark.parametrize("seed", range(30))
def test_draws_are_as_one_at_a_time(seed):
    plan = random_plan(random.Random(seed))
    factors = draw_factors(plan, 3, seed)
    drawn = draw(plan, 6, seed)
    for at, factor in enumerate(factors.T):
        time_s, energy_j = drawn_naively(plan, factor.reshape(plan.frequency_mhz.shape))
        assert drawn.time_s.ravel()[at] == pytest.approx(time_s, rel=1e-12)
        assert drawn.energy_j.ravel()[at] == pytest.approx(energy_j, rel=1e-11)


def test_waits_that_are_parked_in_are_billed_so():
    profile = uniform_profile(2, CURVE)
    curve = {1000: 60.0, 1400: 90.0}
    conditions = Conditions((90.0, 90.0), wait_power_w=(curve, curve), change_time_s=0.001)
    order = builders.one_f_one_b(2, 3)
    parks = np.zeros((2, 6), dtype=np.int64)
    parks[0, 2], parks[1, 0] = 1000, 1000
    plan = Plan(
        "parked", order, max_frequencies(order, profile), profile, conditions, park_mhz=parks
    )
    assert draw(plan, 2, 0).energy_j == pytest.approx(plan.cost.energy_j)


@pytest.mark.parametrize("seed", range(10))
def test_without_spread_a_draw_is_the_plan_itself(seed):
    plan = random_plan(random.Random(seed), Spread(0.0, 0.0))
    assert plan.conditions.spread is None
    drawn = draw(plan, 5, 1)
    assert drawn.time_s.shape == (2, 3)
    assert (drawn.time_s == plan.cost.iteration_time_s).all()
    assert drawn.energy_j == pytest.approx(plan.cost.energy_j, rel=1e-12)


def test_a_unit_gets_the_same_factors_in_every_order(monkeypatch):
    profile = uniform_profile(3, CURVE)
    conditions = Conditions((50.0,) * 3, spread=SPREAD)

    def factors_of(order, part=0):
        plan = Plan("test", order, max_frequencies(order, profile), profile, conditions)
        drawn = draw_factors(plan, 400, 7, part)
        units = [(stage, u) for stage, own in enumerate(order.stages) for u in own]
        return dict(zip(units, drawn, strict=True))

    own, other = factors_of(builders.one_f_one_b(3, 4)), factors_of(builders.gpipe(3, 4))
    assert all((factors == other[at]).all() for at, factors in own.items())
    listed = list(own.values())
    assert not any((a == b).any() for a, b in itertools.pairwise(listed))
    assert not (factors_of(builders.gpipe(3, 4), 1)[0, unit(F, 0)] == other[0, unit(F, 0)]).any()
    # As long in the mean, with both spreads; common to an iteration's units is the common one.
    drawn = np.array(listed)
    assert drawn.mean() == pytest.approx(1, abs=0.002)
    assert drawn.std() == pytest.approx(math.hypot(0.05, 0.02), rel=0.05)
    assert drawn.mean(axis=0).std() == pytest.approx(math.hypot(0.02, 0.05 / 24**0.5), rel=0.1)
    # Plans longer than the memory at once are drawn in parts.
    monkeypatch.setattr("envpipe_megatron.core.uncertainty._NUMBERS_AT_ONCE", 12 * 30)
    order = builders.one_f_one_b(3, 4)
    plan = Plan("test", order, max_frequencies(order, profile), profile, conditions)
    drawn = draw(plan, 100, 7)
    assert drawn.time_s.shape == (2, 50)
    assert len(np.unique(drawn.time_s)) == 100


def test_a_whole_backward_gets_the_same_factors_among_split_ones():
    profile = uniform_profile(3, CURVE).with_split_backwards(SplitBackward())
    conditions = Conditions((50.0,) * 3, spread=SPREAD)

    def factors_of(order):
        plan = Plan("test", order, max_frequencies(order, profile), profile, conditions)
        drawn = draw_factors(plan, 50, 7).reshape(3, order.units_per_stage, -1)
        return drawn, {
            (stage, u.kind, u.microbatch): drawn[stage, at]
            for stage, own in enumerate(order.stages)
            for at, u in enumerate(own)
        }

    whole = builders.one_f_one_b(3, 6)
    mixed = split_in_place(whole, 2)
    _, known = factors_of(whole)
    drawn, found = factors_of(mixed)
    assert mixed.combined.sum() == 3 * 4
    for stage, at in zip(*np.nonzero(mixed.combined), strict=True):
        own = mixed.stages[stage][at].microbatch
        assert (drawn[stage, at + 1] == known[stage, B, own]).all()
    for (stage, kind, own), factors in found.items():
        if kind is W and own >= 4:  # the split ones
            assert not (factors == found[stage, I, own]).any()


def test_a_spread_of_the_profile_is_of_each_row():
    def rows_with(kinds, share):
        return {
            kind: tuple(replace(row, time_spread_s=share[kind] * row.time_s) for row in rows)
            for kind, rows in kinds.items()
        }

    plain = uniform_profile(2, CURVE)
    profile = replace(plain, rows=tuple(rows_with(k, {F: 0.04, B: 0.0}) for k in plain.rows))
    order = builders.gpipe(2, 3)
    conditions = Conditions((50.0, 50.0), spread=Spread(None))
    plan = Plan("test", order, max_frequencies(order, profile), profile, conditions)
    spread = draw_factors(plan, 2000, 0).std(axis=1).reshape(2, 6)
    assert spread[:, :3] == pytest.approx(np.full((2, 3), 0.04), rel=0.1)
    assert (spread[:, 3:] == 0).all()
    # Half of a unit varies more, so that both together vary as the whole.
    assert profile.for_chunks(2).row(0, F, 1200).time_spread_s == pytest.approx(
        0.04 * 0.11 / math.sqrt(2)
    )
    with pytest.raises(ProfileError, match="no time_spread_s"):
        draw(replace(plan, profile=plain), 2, 0)


def test_what_is_expected_is_told_with_its_error():
    profile = uniform_profile(3, CURVE)
    order = builders.one_f_one_b(3, 6)
    clocks = max_frequencies(order, profile)
    clocks[0] = 1200
    conditions = Conditions((50.0,) * 3, spread=SPREAD)
    plan = Plan("test", order, clocks, profile, conditions)
    many = expected(plan, 20_000, 3)
    several = [expected(plan, 200, seed) for seed in range(40)]
    for name in ("slowdown", "saving"):
        truth = getattr(many, name).percent
        off = [(getattr(e, name).percent - truth) / getattr(e, name).error for e in several]
        assert 0.7 < np.std(off) < 1.4
    # More than at mean times: ends of units that vary are waited for.
    assert many.late_time_s[0] > many.time_s[0] > plan.cost.iteration_time_s
    one = np.array([[1.0, 2.0], [3.0, 2.0]])
    assert (excess(one, one).percent, excess(one, one).error) == (0, 0)


@pytest.mark.parametrize("value", [(1.0, 0.0), (-0.1, 0.0), (0.1, math.nan), (0.1, 3.0)])
def test_a_spread_is_a_fraction(value):
    with pytest.raises(EnvPipeError, match=r"Give 0\.03 for 3 %"):
        Spread(*value)


def test_a_plan_keeps_the_spread_that_it_was_made_for(tmp_path):
    profile = uniform_profile(2, CURVE)
    order = builders.one_f_one_b(2, 3)
    for spread in (None, SPREAD, Spread(None, 0.1)):
        conditions = Conditions((50.0, 50.0), spread=spread)
        plan = Plan("test", order, max_frequencies(order, profile), profile, conditions)
        plan.write(tmp_path / "plan.json")
        assert ("time_spread" in (tmp_path / "plan.json").read_text()) == (spread is not None)
        assert read_plan(tmp_path / "plan.json", profile).conditions == conditions


def unsure(profile, rng):
    return replace(
        profile,
        rows=tuple(
            {
                kind: tuple(
                    replace(row, energy_uncertainty_j=rng.uniform(0.005, 0.03) * row.energy_j)
                    for row in rows
                )
                for kind, rows in kinds.items()
            }
            for kinds in profile.rows
        ),
    )


@pytest.mark.parametrize("split", [False, True])
def test_the_saving_is_as_unsure_as_when_rows_are_drawn(split):
    rng = random.Random(1)
    profile = replace(unsure(uniform_profile(3, CURVE), rng), interpolates=True)
    order = builders.one_f_one_b(3, 6)
    if split:
        ways = dict(zip(SPLIT, "FIW", strict=True))
        stages = tuple(tuple(unit(kind, m) for kind in ways for m in range(6)) for _ in range(3))
        order = Schedule("split", 6, 1, stages)
    clocks = np.array([[rng.choice([1400, 1333, 1200, 1000]) for _ in s] for s in order.stages])
    conditions = Conditions((50.0,) * 3, gpus_per_stage=(1, 2, 4))

    def plan_with(priced):
        priced = priced.with_split_backwards(SplitBackward(0.3, 0.1)) if split else priced
        return Plan("test", order, clocks, priced, conditions)

    def saving(priced):
        plan = plan_with(priced)
        return plan.cost.saving_percent(plan.baseline.cost)

    normal = np.random.default_rng(0).standard_normal
    drawn = []
    for _ in range(300):
        rows = tuple(
            {
                kind: tuple(
                    replace(row, energy_j=row.energy_j + normal() * row.energy_uncertainty_j)
                    for row in listed
                )
                for kind, listed in kinds.items()
            }
            for kinds in profile.rows
        )
        drawn.append(saving(replace(profile, rows=rows)))
    told = saving_uncertainty_percent(plan_with(profile))
    assert told == pytest.approx(np.std(drawn), rel=0.1)
    # What both take from the same rows cancels.
    own = builders.one_f_one_b(3, 6)
    same = Plan("test", own, max_frequencies(own, profile), profile, conditions)
    assert saving_uncertainty_percent(same) == 0
    assert saving_uncertainty_percent(replace(same, profile=uniform_profile(3, CURVE))) is None
