"""The shortest order of a job: against every order of small ones, limits, profiles of one clock."""

import random
from dataclasses import replace

import numpy as np
import pytest
from core_cases import B, F, I, W, profile_of, uniform_profile
from every_order import least_time_s, peak, stage_orders
from on_request import examples, on_request
from planning_cases import random_conditions

from envpipe_megatron.core.channel_model import find_stall
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.orders.builders import split_from, zero_bubble
from envpipe_megatron.core.plan import read_plan
from envpipe_megatron.core.profile_rows import SplitBackward
from envpipe_megatron.policies.objective import SHORTEST, Objective
from envpipe_megatron.policies.optimal.optimizer import order_at_maximum_s
from envpipe_megatron.policies.planner import make_memory_frontier, make_plan
from envpipe_megatron.policies.request import PlanRequest

CURVE = {1410: (0.1, 30.0), 1200: (0.112, 26.0), 1000: (0.13, 24.0), 800: (0.16, 23.5)}


def shortest(profile, microbatches, **options):
    request = PlanRequest(microbatches, "auto", "optimal", objective=SHORTEST, **options)
    return make_plan(profile, request)


def one_clock(rng, stages, overhead=0.0, energy_j=0.0, uneven=0.3):
    """A profile of the highest clock only, without meters; parts take `overhead` more together."""
    table = {}
    for stage in range(stages):
        forward_s, share = rng.uniform(1 - uneven, 1 + uneven), rng.uniform(0.4, 0.6)
        backward_s = forward_s * rng.uniform(1.8, 2.2)
        both_s = (1 + overhead) * backward_s
        times = {F: forward_s, B: backward_s, I: share * both_s, W: (1 - share) * both_s}
        table.update({(stage, kind): {1980: (s, energy_j * s)} for kind, s in times.items()})
    return profile_of(table)


@pytest.mark.parametrize(
    ("stages", "microbatches", "jobs"),
    [
        (2, 2, 30),
        (3, 2, 8),
        (2, 3, 3),
        pytest.param(2, 3, 30, marks=on_request("CORE")),
        pytest.param(2, 4, 1, marks=on_request("CORE")),
        pytest.param(3, 3, 1, marks=on_request("CORE")),
    ],
)
def test_no_order_of_a_small_job_takes_less(stages, microbatches, jobs):
    """Of whole backwards, of split ones, and of any mixture, within memory: nearly the best."""
    above = []
    for seed in range(examples(jobs)):
        rng = random.Random(seed)
        profile = one_clock(rng, stages, overhead=rng.choice([0.0, 0.01, 0.03]))
        conditions = random_conditions(rng, profile)
        most = rng.choice([None, stages, microbatches])
        every = stage_orders(microbatches, whole=True)
        least_s = least_time_s(
            [order for order in every if peak(order) <= (most or microbatches)],
            lambda stage, kind, _, rows=profile.rows: rows[stage][kind][0].time_s,
            np.broadcast_to(conditions.latency_s, (stages - 1,)),
            conditions.tail_by_stage_s,
        )
        plan = shortest(profile, microbatches, conditions=conditions, max_in_flight=most).plan
        assert most is None or max(plan.schedule.peak_in_flight) <= most
        assert plan.cost.iteration_time_s >= least_s * (1 - 1e-9), seed
        above.append(100 * (plan.cost.iteration_time_s / least_s - 1))
    print("above the shortest (%):", np.percentile(above, [50, 90, 100]).round(3))
    assert max(above) < 1


def test_split_backwards_leave_only_the_way_in():
    profile, way_in_s = one_clock(random.Random(0), 8, uneven=0.0), 7.0
    plan = shortest(profile, 24).plan
    work_s = 24 * sum(profile.rows[7][kind][0].time_s for kind in (F, B))
    assert plan.cost.iteration_time_s == pytest.approx(way_in_s + work_s, rel=0.02)
    assert plan.schedule.out_of_turn is None


@pytest.mark.parametrize("seed", range(examples(6)))
def test_orders_keep_all_limits_and_are_never_slower(seed):
    rng = random.Random(seed)
    stages, chunks = rng.choice([(2, 1), (4, 1), (3, 2)])
    profile = one_clock(rng, stages, overhead=0.01)
    conditions = random_conditions(rng, profile)
    own = builders.framework_order(stages, 4 * stages, chunks, None)
    limit = rng.choice([{}, {"max_in_flight": stages + 2}, {"max_extra_forwards": 1}])
    if chunks == 1:
        limit = rng.choice([limit, {"channel_capacity": rng.choice([1, 2])}])
    found = shortest(profile, 4 * stages, num_chunks=chunks, conditions=conditions, **limit)
    plan, order = found.plan, found.plan.schedule
    assert plan.cost.iteration_time_s <= plan.baseline.cost.iteration_time_s * (1 + 1e-9)
    assert order.out_of_turn is None
    if "max_in_flight" in limit:
        assert max(order.peak_in_flight) <= chunks * (stages + 2)
    if "max_extra_forwards" in limit:
        pairs = zip(order.peak_in_flight, own.peak_in_flight, strict=True)
        assert all(held <= least + chunks for held, least in pairs)
    if "channel_capacity" in limit:
        assert not order.split
        assert not find_stall(order, limit["channel_capacity"])


def test_a_job_without_meters_and_rights_gets_the_order_only(tmp_path):
    """One clock, no energies: no number is divided by them, and no clock is asked for."""
    profile = one_clock(random.Random(1), 2, overhead=0.01)
    found = shortest(profile, 8)
    assert set(found.plan.frequency_mhz.ravel().tolist()) == {1980}
    assert found.plan.schedule.split
    assert found.plan.cost.energy_j == 0
    assert found.plan.energy_lower_bound_j is None
    words = found.auto.splitting(found.plan)
    faster = 100 * (
        1 - found.plan.cost.iteration_time_s / found.plan.baseline.cost.iteration_time_s
    )
    assert words.startswith(f"Split backwards: {faster:.1f} % less time instead of ")
    assert found.notes
    found.plan.write(tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json", profile).cost == found.plan.cost
    whole = shortest(profile.whole(), 8)
    assert not whole.plan.schedule.split
    assert whole.auto.splitting(whole.plan) == ""
    assert whole.plan.cost.iteration_time_s >= found.plan.cost.iteration_time_s


def test_of_orders_that_take_as_long_the_one_with_less_memory_is_taken():
    """Equal units without latency: more forwards in flight than 1F1B's win nothing."""
    curve = {1980: (1.0, 0.0)}
    plan = shortest(uniform_profile(4, curve), 4).plan
    assert plan.schedule.peak_in_flight == (4, 3, 2, 1)


def test_costly_parts_are_left_to_where_they_shorten():
    profile = one_clock(random.Random(2), 4, overhead=0.05, uneven=0.0)
    order = shortest(profile, 48).plan.schedule
    whole = order.combined.sum(axis=1)
    assert order.split
    assert whole.min() > 24


def test_with_many_clocks_the_least_energy_of_the_least_time_is_planned():
    profile = uniform_profile(4, CURVE).with_split_backwards(SplitBackward())
    found = shortest(profile, 12, blocking_power_w=60.0)
    plan, order = found.plan, found.plan.schedule
    least_s = order_at_maximum_s(order, profile, plan.conditions)
    assert plan.cost.iteration_time_s == pytest.approx(least_s)
    full = np.full_like(plan.frequency_mhz, 1410)
    assert plan.cost.energy_j < replace(plan, frequency_mhz=full).cost.energy_j
    capped = make_plan(
        profile,
        PlanRequest(
            12, "auto", "optimal", blocking_power_w=60.0,
            objective=Objective("time", power_cap_w=0.8 * plan.cost.mean_power_w),
        ),
    ).plan  # fmt: skip
    assert capped.cost.iteration_time_s > plan.cost.iteration_time_s
    request = PlanRequest(12, "auto", "optimal", objective=SHORTEST, blocking_power_w=60.0)
    points = make_memory_frontier(profile, request)
    times_s = [point.plan.cost.iteration_time_s for point in points]
    assert len(times_s) > 1
    assert times_s == sorted(times_s, reverse=True)


def test_whole_backwards_before_a_microbatch_free_what_they_held():
    order = split_from(zero_bubble(2, 4), 2)
    assert " ".join(order.labels()[1]) == "F0 I0+ W0 F1 I1+ W1 F2 I2 F3 I3 W2 W3"
