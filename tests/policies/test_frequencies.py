"""Clocks by rule; reconfiguring: one step by hand, why the loop ends, and what it never does."""

import random
from dataclasses import replace

import numpy as np
import pytest
from core_cases import B, F, profile_of, uniform_profile
from hypothesis import given, settings
from hypothesis import strategies as st
from on_request import examples

from envpipe_megatron.core.conditions import Conditions
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.plan import Plan, max_frequencies
from envpipe_megatron.core.profile_rows import ProfileError
from envpipe_megatron.policies import frequencies
from envpipe_megatron.policies.frequencies import (
    POLICIES,
    RECONFIGURE_POLICIES,
    Ended,
    Ladders,
    envelope,
    lower,
    reconfigure,
    step,
    uniform,
)
from envpipe_megatron.policies.problem import order_limits

GREEDY, BALANCED = RECONFIGURE_POLICIES["greedy"], RECONFIGURE_POLICIES["balanced"]
#: 1500 MHz is the highest and 1400 the fastest; the valley's bottom is 1000.
VALLEY = {1500: (1.02, 20.0), 1400: (1.0, 18.0), 1000: (1.4, 10.0), 900: (2.0, 12.0)}
#: 1.0 s at 1200 MHz to 1.4 s at 1080, the valley's bottom.
CURVE = {f: (1 + (1200 - f) / 300, 10 + (f - 1080) / 20) for f in (1200, 1170, 1140, 1110, 1080)}


def test_baseline_is_the_highest_listed_even_where_it_is_not_the_fastest():
    frequency = max_frequencies(builders.one_f_one_b(3, 4), uniform_profile(3, VALLEY))
    assert set(frequency.ravel()) == {1500}


def test_each_stage_and_kind_has_its_own_highest_and_optimum():
    profile = profile_of(
        {
            (0, F): {1500: (1, 9), 1000: (2, 5)},
            (0, B): {1400: (1, 9), 1000: (2, 5)},
            (1, F): {1300: (1, 9), 800: (2, 5)},
            (1, B): {1300: (1, 9), 1200: (1, 5), 800: (2, 9)},
        }
    )
    schedule = builders.one_f_one_b(2, 2)
    assert max_frequencies(schedule, profile).tolist() == [[1500, 1500, 1400, 1400], [1300] * 4]
    assert uniform(schedule, profile).tolist() == [[1000] * 4, [800] * 4]
    # (1 V) stage 1: 9 + 9 at 1300 MHz, 5 + 9 at 800.
    assert envelope(schedule, profile).tolist() == [[1500, 1000, 1000, 1400], [1300] * 4]


def test_envelope_of_4_by_4_by_hand():
    frequency = envelope(builders.one_f_one_b(4, 4), uniform_profile(4, VALLEY))
    inside = [1500, *[1000] * 6, 1500]
    assert frequency.tolist() == [inside, inside, inside, [1500] * 8]


@pytest.mark.parametrize("policy", [uniform, envelope])
def test_without_a_valley_there_is_no_optimum(policy):
    profile = profile_of({(0, F): {900: (1, 1)}, (0, B): {1000: (1, 1)}})
    with pytest.raises(ProfileError, match="stage 0"):
        policy(builders.one_f_one_b(1, 1), profile)


def plan_of(schedule, profile, policy="envelope", latency_s=0.0):
    frequency = POLICIES[policy](schedule, profile)
    return Plan(
        policy, schedule, frequency, profile, Conditions((0.0,) * schedule.num_stages, latency_s)
    )


def steps_of(plan, policy, *, until=1):
    """The first steps of a loop as (path, raised) by name, and the frequencies they lead to."""
    ladders, names, taken = Ladders(plan.schedule, plan.profile), plan.schedule.describe, []
    for _ in range(until):
        frequency = plan.frequency_mhz.copy()
        path = plan.timeline.critical_path()
        changes, _ = step(plan.schedule, frequency.ravel().tolist(), path, policy, ladders)
        for node, target in changes.items():
            frequency.ravel()[node] = target
        plan = replace(plan, frequency_mhz=frequency)
        raised = {names(node): target for node, target in changes.items()}
        taken.append(([names(node) for node in path], raised))
    return taken, plan


#: From the end; B1 on stage 0 waited for stage 1, B0 on stage 1 for stage 2.
PATH_OF_3_BY_3 = [
    *("B2 on stage 0", "B1 on stage 0"),
    *("B1 on stage 1", "F2 on stage 1", "B0 on stage 1"),
    *("B0 on stage 2", "F0 on stage 2", "F0 on stage 1", "F0 on stage 0"),
]


class TestOneStepOf3By3:
    """Envelope on 1F1B; inside it everything runs at 1080 MHz, F 1.4 s and B 2.8 s.

    Stage 0: F0 0-1      F1 1-2.4   F2 2.4-3.8  B0 7.8-10.6  B1 12-14.8   B2 14.8-16.8
    Stage 1: F0 1-2      F1 2.4-3.8 B0 5-7.8    F2 7.8-9.2   B1 9.2-12    B2 12.2-14.2
    Stage 2: F0 2-3      B0 3-5     F1 5-6      B1 6-8       F2 9.2-10.2  B2 10.2-12.2
    """

    @pytest.fixture
    def plan(self):
        return plan_of(builders.one_f_one_b(3, 3), uniform_profile(3, CURVE))

    def test_greedy_raises_the_last_unit_by_90(self, plan):
        [(path, raised)], _ = steps_of(plan, GREEDY)
        assert path == PATH_OF_3_BY_3
        assert raised == {"B1 on stage 0": 1170}

    def test_balanced_raises_all_lowest_by_30(self, plan):
        [(path, raised)], _ = steps_of(plan, BALANCED)
        assert path == PATH_OF_3_BY_3
        assert raised == {
            "B1 on stage 0": 1110,
            "B1 on stage 1": 1110,
            "F2 on stage 1": 1110,
            "B0 on stage 1": 1110,
        }

    def test_the_loop_makes_the_same_steps(self, plan):
        for policy in (GREEDY, BALANCED):
            result = reconfigure(plan, policy)
            _, after = steps_of(plan, policy, until=result.steps)
            assert (after.frequency_mhz == result.frequency_mhz).all()
            assert result.ended is Ended.ENVELOPE


class TestLadders:
    schedule = builders.one_f_one_b(1, 1)
    profile = uniform_profile(1, dict.fromkeys((800, 850, 1000, 1005), (1, 1)))

    @pytest.mark.parametrize(
        ("frequency", "granularity", "target"),
        [
            (800, 50, 850),  # exactly as much
            (800, 51, 1000),  # at least as much
            (1000, 30, 1005),  # the top, where no step is as large
            (1005, 30, None),
            (900, 30, 1000),  # also from a frequency that is not a rung
        ],
    )
    def test_the_lowest_rung_at_least_that_much_higher(self, frequency, granularity, target):
        ladders = Ladders(self.schedule, self.profile)
        for node in (0, 1):
            assert ladders.next_above(node, frequency, granularity) == target

    def test_all_clocks_of_a_gpu_between_those_that_were_profiled(self):
        profile = uniform_profile(1, dict.fromkeys((800, 850, 1005), (1, 1)))
        ladders = Ladders(self.schedule, profile, [[700, 800, 900, 1005, 1100]])
        climb = [ladders.next_above(0, clock, 30) for clock in (700, 800, 900, 1005)]
        assert climb == [800, 900, 1005, None]


def test_ends_when_nothing_on_the_path_can_rise():
    # Stage 1 is the bottleneck: however fast, the path goes through its inside.
    profile = uniform_profile(4, CURVE, slowness=[1.0, 2.0, 1.0, 1.0])
    plan = plan_of(builders.one_f_one_b(4, 8), profile)
    for policy in (GREEDY, BALANCED):
        result = reconfigure(plan, policy)
        assert result.ended is Ended.NOTHING_CAN_RISE
        path = replace(plan, frequency_mhz=result.frequency_mhz).timeline.critical_path()
        frequency = result.frequency_mhz.ravel().tolist()
        assert {frequency[node] for node in path} == {1200}
        last = step(plan.schedule, frequency, path, policy, Ladders(plan.schedule, profile))
        assert last == ({}, Ended.NOTHING_CAN_RISE)


def random_plan(rng):
    """Of unbalanced stages, with tails, late clocks, and profiles that make no sense.

    In these, the highest clock may not be the fastest.
    """
    p, m = rng.randint(1, 5), rng.randint(1, 9)
    own, more = builders.one_f_one_b(p, m), rng.choice([0, rng.randint(0, 5)])
    caps = order_limits(own, [peak + more for peak in own.peak_in_flight]).most
    backward_s = [rng.uniform(0.5, 3) for _ in range(p)]
    extra = builders.envpipe_extra_forwards(backward_s, [1.0] * p, caps)
    noise = rng.choice([0.0, 0.1])
    curve = {
        f: (1 + (1200 - f) / 300 + noise * rng.random(), (1 + noise * rng.random()) * f / 100)
        for f in range(900, 1201, rng.choice([15, 30, 60]))
    }
    profile = uniform_profile(
        p, curve, slowness=[rng.uniform(0.5, 1.5) for _ in range(p)], backward=rng.uniform(1, 3)
    )
    conditions = Conditions(
        tuple(rng.choice([0.0, 2.0]) for _ in range(p)),
        latency_s=tuple(rng.choice([0.0, rng.uniform(0, 0.5)]) for _ in range(p - 1)),
        tail_time_s=tuple(rng.uniform(0, 3) for _ in range(p)),
        gpus_per_stage=tuple(rng.choice([1, 2]) for _ in range(p)),
        wait_power_w=rng.choice([None, tuple({900: 1.0, 1200: 2.0} for _ in range(p))]),
        change_time_s=rng.choice([0.0, 0.05, 0.5]),
    )
    return replace(plan_of(builders.envpipe(p, m, extra), profile), conditions=conditions)


@settings(max_examples=examples(50), deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([GREEDY, BALANCED]))
def test_the_end_that_is_said_is_true_of_the_plan_with_its_tails_and_late_clocks(seed, policy):
    plan = random_plan(random.Random(seed))
    result = reconfigure(plan, policy)
    after = replace(plan, frequency_mhz=result.frequency_mhz)
    path = after.timeline.critical_path()
    last = int((after.timeline.end_s[:, -1] + plan.conditions.tail_time_s).argmax())
    assert path[0] == (last + 1) * plan.schedule.units_per_stage - 1
    if result.ended is Ended.ENVELOPE:
        assert plan.schedule.outer_envelope.flat[path].all()
    else:
        assert result.ended is Ended.NOTHING_CAN_RISE
        assert not plan.schedule.outer_envelope.flat[path].all()
        assert {int(result.frequency_mhz.flat[node]) for node in path} == {1200}


def test_ends_at_the_limit_of_steps():
    plan = plan_of(builders.one_f_one_b(4, 8), uniform_profile(4, CURVE))
    full = reconfigure(plan, GREEDY)
    cut = reconfigure(plan, replace(GREEDY, max_steps=3))
    assert (cut.steps, cut.ended) == (3, Ended.STEP_LIMIT)
    assert reconfigure(plan, replace(GREEDY, max_steps=full.steps)).ended is full.ended
    untouched = reconfigure(plan, replace(GREEDY, max_steps=0))
    assert (untouched.frequency_mhz == plan.frequency_mhz).all()


def test_slack_goes_where_it_saves_most_and_a_bubble_is_left():
    """All units of 1F1B have been raised to 1200 MHz; a rung is 0.1 s of F and 0.2 s of B.

    Stage 0: F0 0-1  F1 1-2  F2 2-3  B0 7-9  B1 10-12  B2 13-15
    Stage 1: F0 1-2  F1 2-3  B0 5-7  F2 7-8  B1 8-10   B2 11-13
    Stage 2: F0 2-3  B0 3-5  F1 5-6  B1 6-8  F2 8-9    B2 9-11
    """
    curve = {
        (stage, kind): {  # stage 1 saves twice as much with each rung
            mhz: (weight * time_s, weight * (1 + (stage == 1)) * energy_j)
            for mhz, (time_s, energy_j) in CURVE.items()
        }
        for stage in range(3)
        for kind, weight in ((F, 1), (B, 2))
    }
    plan, top = plan_of(builders.one_f_one_b(3, 3), profile_of(curve)), np.full((3, 6), 1200)
    duration_s, _ = plan.profile.lookup(plan.schedule, top)
    raised = plan, top.ravel().tolist(), duration_s
    for threshold_s, clock in ((0.01, 1080), (0.31, 1170)):
        found = lower(*raised, threshold_s, Ladders(plan.schedule, plan.profile), {})
        # B1 on stages 0 and 1 have one second together, which is five rungs, or four and a bubble
        # of twice what counts as none.
        names = {plan.schedule.describe(node): mhz for node, mhz in found.items()}
        assert names["B1 on stage 1"] == clock
        assert names["F1 on stage 1"] == 1080
    (node,) = (n for n in range(18) if plan.schedule.describe(n) == "B1 on stage 1")
    # What had to be raised again stays, and others have its slack.
    again = lower(*raised, 0.01, Ladders(plan.schedule, plan.profile), {node: 1170})
    assert node not in again
    assert "B1 on stage 0" in map(plan.schedule.describe, again)
    held = plan.frequency_mhz.copy()
    held[1, 1] = 1140  # the plan's clocks are the lowest
    plan = replace(plan, frequency_mhz=held)
    assert lower(plan, *raised[1:], 0.01, Ladders(plan.schedule, plan.profile), {})[7] == 1140


def without_lowering(plan, policy):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(frequencies, "lower", lambda *arguments: {})
        return reconfigure(plan, policy)


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([GREEDY, BALANCED]))
def test_lowering_saves_energy_and_costs_no_time(seed, policy):
    """And without late clocks no plan is slower than all units at the highest clock."""
    plan = random_plan(random.Random(seed))
    result, raised = reconfigure(plan, policy), without_lowering(plan, policy)
    after, before = (replace(plan, frequency_mhz=r.frequency_mhz) for r in (result, raised))
    assert after.cost.iteration_time_s <= before.cost.iteration_time_s * (1 + 1e-8)
    assert after.cost.energy_j <= before.cost.energy_j
    assert (result.frequency_mhz >= plan.frequency_mhz).all()
    assert result.ended is not Ended.STEP_LIMIT
    if not plan.conditions.change_time_s:
        assert (result.frequency_mhz <= raised.frequency_mhz).all()
        assert (result.steps, result.ended) == (raised.steps, raised.ended)
        highest = replace(plan, frequency_mhz=np.full_like(plan.frequency_mhz, 1200))
        assert after.cost.iteration_time_s <= highest.cost.iteration_time_s * (1 + 1e-9)


@pytest.mark.parametrize(("policy", "least"), [(GREEDY, 0.04), (BALANCED, 0.02)])
def test_stages_that_differ_leave_much_to_lower(policy, least):
    profile = uniform_profile(4, CURVE, slowness=[1.0, 0.7, 0.8, 1.0])
    plan = plan_of(builders.one_f_one_b(4, 8), profile)
    result, raised = reconfigure(plan, policy), without_lowering(plan, policy)
    after, before = (replace(plan, frequency_mhz=r.frequency_mhz) for r in (result, raised))
    assert after.cost.energy_j < (1 - least) * before.cost.energy_j
    assert after.timeline.critical_path() == before.timeline.critical_path()


def test_lowering_that_late_clocks_make_longer_is_not_kept(monkeypatch):
    plan = plan_of(builders.one_f_one_b(4, 8), uniform_profile(4, CURVE))
    plan = replace(plan, conditions=Conditions((0.0,) * 4, change_time_s=0.05))
    raised = without_lowering(plan, GREEDY)
    called = []

    def lower_all(plan, frequency_mhz, *arguments):
        called.append(frequency_mhz)
        return {node: 1080 for node in range(32) if plan.frequency_mhz.flat[node] == 1080}

    monkeypatch.setattr(frequencies, "lower", lower_all)
    result = reconfigure(plan, GREEDY)
    assert called
    assert (result.frequency_mhz == raised.frequency_mhz).all()
    assert (result.steps, result.ended) == (raised.steps, raised.ended)
