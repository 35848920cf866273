"""The split of layers over stages that needs the least energy once it is planned, at equal time."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import numpy as np

from envpipe_megatron.core.arrays import BoolArray, FloatArray
from envpipe_megatron.core.conditions import make_conditions
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.plan import Cost
from envpipe_megatron.core.profile import Profile
from envpipe_megatron.core.timeline import RELATIVE_TOLERANCE
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.policies.optimal.linear_program import LinearProgramError
from envpipe_megatron.policies.optimal.optimizer import Optimizer
from envpipe_megatron.policies.partitions.layers import stage_profile
from envpipe_megatron.policies.partitions.search import (
    Found,
    SplitSpace,
    fastest,
    list_splits,
)
from envpipe_megatron.policies.problem import envpipe_counts, in_flight_by_memory, order_limits

#: Splits that are planned at most, the most promising first.
MAX_PLANNED = 12
#: Prices of time, W, as multiples of the largest power of a layer, that the estimate tries.
_TIME_PRICES = np.concatenate([[0.0], np.geomspace(1e-3, 1e2, 48)])


@dataclass(frozen=True)
class FoundEnergy(Found):
    """A split with the cost of its plan, no slower than the deadline."""

    cost: Cost
    deadline_s: float
    num_planned: int


def plan_cost(
    profile: Profile, num_microbatches: int, blocking_power_w: float, deadline_s: float
) -> Cost:
    """Time and energy of a stage profile once its order and frequencies are planned.

    The one place that says how a split is planned: optimal frequencies on 1F1B or on EnvPipe's
    order, whichever is cheaper. Activation and free bytes of the profile's sidecar limit the
    microbatches in flight. EnvPipeError: neither order meets the deadline.
    """
    stages = profile.num_stages
    conditions = make_conditions(profile, blocking_power_w=blocking_power_w)
    known = profile.sidecar.activation_bytes is not None and profile.sidecar.free_bytes is not None
    limits = order_limits(
        stages,
        num_microbatches,
        max_in_flight=in_flight_by_memory(profile, num_microbatches) if known else None,
    )
    wanted = limits.fit(envpipe_counts(profile, num_microbatches))
    costs = []
    for schedule in (
        builders.one_f_one_b(stages, num_microbatches),
        builders.envpipe(stages, num_microbatches, wanted),
    ):
        with contextlib.suppress(LinearProgramError):  # an order that is too slow is no candidate
            costs.append(Optimizer(schedule, profile, conditions).plan(deadline_s).cost)
    if not costs:
        raise EnvPipeError(
            "A split takes longer than the deadline (s) in every order",
            value=deadline_s,
            remedy="Allow more time.",
        )
    return min(costs, key=lambda cost: cost.energy_j)


def least_energy(
    space: SplitSpace,
    blocking_power_w: float,
    time_tolerance: float,
    max_planned: int = MAX_PLANNED,
) -> FoundEnergy:
    """The split with the least planned energy among those as fast as the fastest.

    Args:
        time_tolerance: the 1F1B iteration time at the highest clocks may exceed the least one by
            this fraction.
        max_planned: splits to plan at most: those with the lowest estimate. The result is exact
            if they are all there are.

    Raises EnvPipeError for a table without energies.
    """
    if not space.table.has_energy:
        raise EnvPipeError(
            f"{space.table.source} has no energies, so no split can be said to need less",
            remedy="Measure the column energy, or use --objective bottleneck.",
        )
    quickest = fastest(space, space.allowed)
    limit_s = quickest.iteration_time_s * (1 + time_tolerance) * (1 + RELATIVE_TOLERANCE)
    allowed = space.allowed & (space.bound_s <= limit_s)
    estimate_j = _energy_estimate_j(space, allowed, limit_s, blocking_power_w)
    splits, times_s, complete = list_splits(space, estimate_j, allowed)
    within = [
        (split, float(time_s))
        for split, time_s in zip(splits, times_s, strict=True)
        if time_s <= limit_s
    ]
    candidates = within[:max_planned]
    if all(split != quickest.split for split, _ in candidates):
        candidates.append((quickest.split, quickest.iteration_time_s))
    costs = [
        plan_cost(
            stage_profile(space.table, split, space.memory_limit_bytes),
            space.num_microbatches,
            blocking_power_w,
            limit_s,
        )
        for split, _ in candidates
    ]
    best = min(range(len(costs)), key=lambda index: costs[index].energy_j)
    return FoundEnergy(
        *candidates[best],
        num_considered=quickest.num_considered + len(splits),
        exact=quickest.exact and complete and len(within) <= max_planned,
        cost=costs[best],
        deadline_s=limit_s,
        num_planned=len(candidates),
    )


def _energy_estimate_j(
    space: SplitSpace, allowed: BoolArray, limit_s: float, blocking_power_w: float
) -> FloatArray:
    """[num_stages, L + 1, L + 1] energy above waiting of a microbatch on each allowed edge.

    A stage can spread its microbatches over the iteration less the way of the first forward there
    and of the last backward back. The least energy for that mean time, mixing frequencies freely,
    is the largest value over prices of time of the Lagrangian dual, and any price gives a bound.
    """
    window_s = (limit_s - space.before_s()) / space.num_microbatches
    stage, first, _ = edges = np.nonzero(allowed)
    window_s = window_s[stage, first, 0]
    units = [
        (space.edge_sums(space.table.energy_j[kind], edges), space.edge_sums(time_s, edges))
        for kind, time_s in space.table.time_s.items()
    ]  # of each edge at each frequency
    power_w = max(float((energy_j / time_s).max()) for energy_j, time_s in units)
    least_j = np.full(window_s.shape, -np.inf)
    for price_w in power_w * _TIME_PRICES:
        dual_j = -price_w * window_s
        for energy_j, time_s in units:
            dual_j += (energy_j + (price_w - blocking_power_w) * time_s).min(axis=1)
        np.maximum(least_j, dual_j, out=least_j)
    estimate_j = np.zeros(allowed.shape)
    estimate_j[edges] = least_j
    return estimate_j
