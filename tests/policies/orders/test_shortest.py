"""The shortest order of a job: against every order of small ones, limits, profiles of one clock."""

import itertools
import math
import random
from dataclasses import replace

import numpy as np
import pytest
from core_cases import B, F, I, W, profile_of, uniform_profile
from on_request import examples, on_request
from planning_cases import random_conditions

from envpipe_megatron.core.channel_model import find_stall
from envpipe_megatron.core.conditions import Conditions
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.orders.zero_bubble import split_from
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


def stage_orders(microbatches):
    """Every order of one stage, each backward whole or in parts; microbatches in their order."""

    def extended(order, forwards, gradients, weights):
        if weights == microbatches:
            yield order
        if forwards < microbatches:
            yield from extended([*order, (F, forwards)], forwards + 1, gradients, weights)
        if gradients < forwards:
            yield from extended([*order, (I, gradients)], forwards, gradients + 1, weights)
            if weights == gradients:
                yield from extended([*order, (B, gradients)], forwards, gradients + 1, weights + 1)
        if weights < gradients:
            yield from extended([*order, (W, weights)], forwards, gradients, weights + 1)

    return [*extended([], 0, 0, 0)]


def peak(order):
    change = {F: 1, B: -1, I: 0, W: -1}
    return max(itertools.accumulate(change[kind] for kind, _ in order))


def time_s(orders, profile, conditions, enough_s=math.inf):
    """How long orders of all stages take, unit by unit; infinite if they wait in circles."""
    ends, at, now = {}, [0] * len(orders), [0.0] * len(orders)
    latency_s = np.broadcast_to(conditions.latency_s, (len(orders) - 1,))
    progress = True
    while progress:
        progress = False
        for stage, order in enumerate(orders):
            while at[stage] < len(order):
                kind, microbatch = order[at[stage]]
                source = stage + {F: -1, W: len(orders)}.get(kind, 1)
                arrival_s = 0.0
                if 0 <= source < len(orders):
                    if (kind is F, source, microbatch) not in ends:
                        break
                    arrival_s = ends[kind is F, source, microbatch] + latency_s[min(source, stage)]
                now[stage] = max(now[stage], arrival_s) + profile.rows[stage][kind][0].time_s
                if kind is not W:
                    ends[kind is F, stage, microbatch] = now[stage]
                at[stage] += 1
                progress = True
    if any(place < len(order) for place, order in zip(at, orders, strict=True)):
        return math.inf
    return max(end + tail for end, tail in zip(now, conditions.tail_by_stage_s, strict=True))


@pytest.mark.parametrize(
    ("stages", "microbatches", "jobs"),
    [
        (2, 2, 30),
        (3, 2, 8),
        (2, 3, 3),
        pytest.param(2, 3, 20, marks=on_request("CORE")),
        pytest.param(3, 3, 2, marks=on_request("CORE")),
    ],
)
def test_no_order_of_a_small_job_takes_less(stages, microbatches, jobs):
    """Whole backwards, split ones and both, within memory; within 1 % of the best of all."""
    above = []
    every = stage_orders(microbatches)
    for seed in range(examples(jobs)):
        rng = random.Random(seed)
        profile = one_clock(rng, stages, overhead=rng.choice([0.0, 0.02, 0.2]))
        conditions = random_conditions(rng, profile)
        most = rng.choice([None, stages, microbatches])
        fitting = [[o for o in every if peak(o) <= (most or microbatches)] for _ in range(stages)]
        if stages * microbatches > 8:  # of the first stage's all, of the others those of 1F1B's
            fitting[1:] = [[o for o in own if o[0][0] is F][:60] for own in fitting[1:]]
        least_s = min(time_s(orders, profile, conditions) for orders in itertools.product(*fitting))
        plan = shortest(profile, microbatches, conditions=conditions, max_in_flight=most).plan
        assert most is None or max(plan.schedule.peak_in_flight) <= most
        found_s = plan.cost.iteration_time_s
        if stages * microbatches <= 8:
            assert found_s >= least_s * (1 - 1e-9), seed
        above.append(100 * (found_s / least_s - 1))
    print("above the shortest (%):", np.percentile(above, [50, 90, 100]).round(3))
    assert max(above) <= 1.0
