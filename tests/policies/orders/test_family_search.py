"""Families of orders in `auto`: chunks, split backwards, chunks in a V."""

import itertools
import random
from dataclasses import replace

import pytest
from core_cases import B, I, W, uniform_profile
from every_order import peak
from on_request import examples, on_request
from planning_cases import random_conditions, random_profile

from envpipe_megatron.core.conditions import Conditions
from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.orders.builders import split_in_place
from envpipe_megatron.core.plan import Plan, max_frequencies, read_plan
from envpipe_megatron.core.profile import make_profile
from envpipe_megatron.core.profile_rows import ProfileError, SplitBackward
from envpipe_megatron.core.schedule import Placement
from envpipe_megatron.core.sidecar import Sidecar
from envpipe_megatron.policies.orders.families import families
from envpipe_megatron.policies.planner import make_frontier, make_plan
from envpipe_megatron.policies.problem import Problem
from envpipe_megatron.policies.request import PlanRequest

CURVE = {1410: (0.1, 30.0), 1200: (0.112, 26.0), 1000: (0.13, 24.0), 800: (0.16, 23.5)}


def planned(profile, microbatches, **options):
    options = {"blocking_power_w": 60.0, **options}
    return make_plan(profile, PlanRequest(microbatches, "auto", "optimal", **options))


@pytest.mark.parametrize(
    ("chunks", "split", "names"),
    [
        (1, False, ["envpipe"]),
        (1, True, ["envpipe", "zero-bubble"]),
        (2, False, ["interleaved", "v-shaped"]),
        (2, True, ["interleaved", "zero-bubble-interleaved", "v-shaped", "zero-bubble-v"]),
        (4, True, ["interleaved", "zero-bubble-interleaved"]),
    ],
)
def test_families_are_those_that_the_profile_can_price(chunks, split, names):
    profile = uniform_profile(4, CURVE)
    if split:
        profile = profile.with_split_backwards(SplitBackward())
    conditions = Conditions((0.0,) * 4)
    profile = profile.for_chunks(chunks)
    problem = Problem(8, "auto", num_chunks=chunks, profile=profile, conditions=conditions)
    every = families(problem)
    assert [f.name for f in every] == names
    looped = [f for f in every if f.placement is Placement.LOOPED]
    assert [*families(replace(problem, runnable=True))] == looped


def test_chunks_with_rows_of_their_own_stay_where_they_were_measured():
    rows = [
        (2 * stage + chunk, kind, row)
        for stage, kinds in enumerate(uniform_profile(2, CURVE).rows)
        for kind, listed in kinds.items()
        for row in listed
        for chunk in range(2)
    ]
    profile = make_profile(rows, source="measured", listed_chunks=2)
    conditions = Conditions((0.0, 0.0))
    problem = Problem(4, "auto", num_chunks=2, profile=profile, conditions=conditions)
    assert [f.name for f in families(problem)] == ["interleaved"]


def test_a_split_backward_is_assumed_by_share_and_overhead():
    profile = uniform_profile(2, CURVE)
    split = profile.with_split_backwards(SplitBackward(0.4, 0.1))
    for kinds in split.rows:
        for whole, input_gradient, weight_gradient in zip(
            *(kinds[kind] for kind in (Kind.BACKWARD, I, W)), strict=True
        ):
            for name in ("time_s", "energy_j"):
                both = 1.1 * getattr(whole, name)
                assert getattr(input_gradient, name) == pytest.approx(0.4 * both)
                assert getattr(weight_gradient, name) == pytest.approx(0.6 * both)
    assert split.to_csv() == profile.to_csv()  # what is assumed is not written as measured
    with pytest.raises(ProfileError, match="has rows of split backwards"):
        split.with_split_backwards(SplitBackward())
    for wrong in ((0.0, 0.0), (1.0, 0.0), (0.5, -0.1)):
        with pytest.raises(ProfileError, match="share"):
            SplitBackward(*wrong)


def test_splitting_in_place_frees_the_stage_before_and_holds_no_more():
    order = builders.one_f_one_b(4, 6)
    split = split_in_place(order, 2)
    assert split.peak_in_flight == order.peak_in_flight
    told = " ".join(split.labels()[3])
    assert told == "F0 I0+ W0 F1 I1+ W1 F2 I2+ W2 F3 I3+ W3 F4 I4 W4 F5 I5 W5"
    profile = uniform_profile(4, CURVE).with_split_backwards(SplitBackward())
    conditions = random_conditions(random.Random(0), profile)
    conditions = replace(conditions, tail_time_s=None)

    def time_s(schedule):
        frequency = max_frequencies(schedule, profile)
        return Plan("x", schedule, frequency, profile, conditions).cost.iteration_time_s

    times_s = [time_s(split_in_place(order, last)) for last in (0, 1, 2, 6)]
    assert times_s[0] == pytest.approx(time_s(order))
    assert times_s == sorted(times_s, reverse=True)
    assert times_s[1] < times_s[0]


@pytest.mark.parametrize("seed", range(examples(8)))
def test_plans_keep_time_memory_and_the_bound(seed):
    rng = random.Random(seed)
    stages, chunks = rng.choice([2, 3, 4]), rng.choice([1, 2, 2, 3])
    microbatches = rng.randint(stages, 3 * stages)
    profile = random_profile(rng, stages, 4)
    in_flight = rng.choice([None, stages + 2])
    answer = planned(
        profile,
        microbatches,
        num_chunks=chunks,
        conditions=random_conditions(rng, profile),
        deadline_factor=rng.choice([1.0, 1.05]),
        split=SplitBackward(rng.uniform(0.3, 0.7), rng.choice([0.0, 0.05])),
        max_in_flight=in_flight,
        group_size=None,
    )
    plan, baseline = answer.plan, answer.plan.baseline
    slowest_s = 1.05 * baseline.cost.iteration_time_s
    assert plan.cost.iteration_time_s <= slowest_s * (1 + 1e-9)
    assert answer.auto.bound_j(plan) <= plan.cost.energy_j * (1 + 1e-9)
    assert plan.cost.energy_j <= baseline.cost.energy_j * (1 + 1e-9)
    if in_flight is not None:
        assert max(plan.schedule.peak_in_flight) <= chunks * in_flight
        assert answer.auto.next_microbatch_percent() >= 0


#: Bytes that are free beside one microbatch of 100, where stages hold what they do in 1F1B.
OF_1F1B = (300.0, 200.0, 100.0, 0.0)


def split_by_memory(share, free, chunks=1):
    """A plan of a job in which a pending weight gradient holds `share` of a microbatch in flight.

    And the most bytes that each of its stages holds.
    """
    stages = 4
    sidecar = Sidecar(
        activation_bytes=(100.0,) * stages,
        free_bytes=free,
        pending_bytes=None if share is None else (100.0 * share,) * stages,
    )
    profile = uniform_profile(stages, CURVE, sidecar=sidecar)
    plan = planned(
        profile, 12, num_chunks=chunks, split=SplitBackward(0.5, 0.0), max_in_flight="memory"
    ).plan
    most = []
    for order in plan.schedule.stages:
        units = [(B if u.combined else u.kind, u.microbatch) for u in order]
        # A whole backward stands for both of its parts.
        left = [units[0], *(b for a, b in itertools.pairwise(units) if (a[0], b[0]) != (B, W))]
        most.append(100.0 / chunks * peak(left, 1.0 if share is None else share))
    return plan, most


@pytest.mark.parametrize(
    ("share", "free", "chunks"),
    [
        (None, 0.0, 1),
        (0.3, 100.0, 1),
        (16.0, 0.0, 1),  # not one can wait
        (16.0, 1600.0, 1),
        (16.0, 3200.0, 2),
    ],
)
def test_plans_of_a_profile_with_memory_hold_its_bytes(share, free, chunks):
    free_bytes = tuple(own + free for own in OF_1F1B)
    plan, most = split_by_memory(share, free_bytes, chunks)
    assert all(held <= 100.0 + free for held, free in zip(most, free_bytes, strict=True))
    assert plan.schedule.split is not (share == 16.0 and not free)
    if share == 0.3:  # what is given back at the first part is used for more in flight
        taken = split_by_memory(None, free_bytes)[0]
        assert plan.cost.energy_j < taken.cost.energy_j
        assert plan.schedule.peak_in_flight > (4, 3, 2, 1)


@pytest.mark.parametrize(
    "group_size", [None, 9, *(pytest.param(size, marks=on_request("CORE")) for size in (6, 12))]
)
def test_the_baseline_is_the_framework_s_order_of_the_request(group_size, tmp_path):
    profile = uniform_profile(4, CURVE)
    own = builders.interleaved(4, 12, 2, group_size)
    options = {"num_chunks": 2, "group_size": group_size}
    for wishes in (
        PlanRequest(12, "interleaved", "optimal", **options),
        PlanRequest(12, "auto", "optimal", **options),
        PlanRequest(12, "auto", "optimal", blocking_power_w=60.0, deadline_factor=1.01, **options),
    ):
        plan = make_plan(profile, wishes).plan
        plan.write(tmp_path / "plan.json")
        for of in (plan, read_plan(tmp_path / "plan.json", profile)):
            assert of.baseline.schedule == own
            assert of.baseline.cost == plan.baseline.cost


def test_orders_that_a_job_runs_lay_chunks_as_megatron_does_and_save_more():
    profile = uniform_profile(4, CURVE)
    job = {"num_chunks": 2, "blocking_power_w": 60.0}
    own = make_plan(profile, PlanRequest(12, "interleaved", "optimal", **job)).plan
    answer = planned(profile, 12, **job, runnable=True)
    freely = planned(profile, 12, **job)
    assert answer.plan.schedule.placement is Placement.LOOPED
    energies_j = [plan.cost.energy_j for plan in (freely.plan, answer.plan, own)]
    assert energies_j == sorted(energies_j)
    assert energies_j[1] < 0.995 * energies_j[2]
    bounds_j = [found.auto.bound_j(found.plan) for found in (answer, freely)]
    assert bounds_j[0] == pytest.approx(bounds_j[1])
    assert all("v-shaped" not in note for note in answer.notes)
    for frontier in make_frontier(
        profile, PlanRequest(12, "auto", "optimal", **job, runnable=True), 3
    ):
        assert frontier.schedule.placement is Placement.LOOPED


def test_auto_says_that_limits_leave_split_backwards_out():
    profile = uniform_profile(4, CURVE).with_split_backwards(SplitBackward())  # as if measured
    for limit in ({"channel_capacity": 2}, {"channel_capacity": 1}):
        answer = planned(profile, 8, **limit)
        assert not answer.plan.schedule.split
        assert any("were left out" in note for note in answer.notes)


def test_auto_says_which_family_won_and_what_was_assumed(tmp_path):
    profile = uniform_profile(4, CURVE)
    answer = planned(profile, 12, split=SplitBackward(0.5, 0.02))
    assert answer.plan.schedule.split
    told = " ".join(answer.notes)
    assert "by what they save before rounding: zero-bubble" in told
    assert "a backward in two parts takes 2 % more" in told
    whole = planned(profile, 12)
    assert answer.plan.cost.energy_j < whole.plan.cost.energy_j
    assert not whole.plan.schedule.split
    # The plan's file carries the assumption, and prices the same on the profile itself.
    answer.plan.write(tmp_path / "plan.json")
    read = read_plan(tmp_path / "plan.json", profile)
    assert read.cost == answer.plan.cost
    assert read.schedule == answer.plan.schedule


def test_costly_splits_are_made_on_the_way_out_alone():
    """Of 5 % overhead on all backwards little is left; on the last few it pays."""
    profile = uniform_profile(4, CURVE)
    answer = planned(profile, 48, split=SplitBackward(0.5, 0.06))
    order = answer.plan.schedule
    assert order.split
    assert 0 < (~order.combined & (order.kinds == list(Kind).index(I))).sum() <= 4 * 8
    assert answer.plan.cost.energy_j < planned(profile, 48).plan.cost.energy_j
