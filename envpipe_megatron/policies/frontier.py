"""The time-energy frontier: from the fastest iteration to the cheapest, order and frequencies.

Each point is the optimal plan for one deadline; the linear programs of an order are solved one from
the other. Where the order is free, a few orders compete at every deadline.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from envpipe_megatron.core.arrays import FloatArray
from envpipe_megatron.core.plan import Plan
from envpipe_megatron.core.timeline import RELATIVE_TOLERANCE
from envpipe_megatron.policies.optimal.linear_program import LinearProgramError
from envpipe_megatron.policies.optimal.optimizer import Optimizer

#: Deadlines at which competing orders are compared before the others are planned.
_PROBES = 6
#: The gap that is good enough for a point of a frontier: pairs of moves take most of the time and
#: gain a hundredth of a percent.
FRONTIER_GAP = 0.01


def plan_frontier(
    optimizers: Sequence[Optimizer], num_points: int, min_dwell_s: float = 0.0
) -> list[Plan]:
    """The plans of which no other found is both as fast and as cheap, the fastest first.

    Args:
        optimizers: one for each order that competes, all for one profile and conditions.
        num_points: deadlines, evenly from the fastest iteration to the one that the least energy
            takes. Points that round to the same plan or a worse one are left out, and deadlines
            that late clocks or the dwell time leave no plan to.

    Raises LinearProgramError if there is no plan for any deadline.
    """
    fastest_s = min(optimizer.fastest_s for optimizer in optimizers)
    cheapest_s = max(optimizer.cheapest_s() for optimizer in optimizers)
    deadlines = np.linspace(fastest_s, max(fastest_s, cheapest_s), num_points)
    energy = _relaxed_energies(optimizers, deadlines)
    plans: list[Plan] = []
    refused: LinearProgramError | None = None
    for deadline_s, best in zip(deadlines, energy.argmin(axis=0), strict=True):
        try:
            plans.append(optimizers[int(best)].plan(float(deadline_s), min_dwell_s))
        except LinearProgramError as error:  # late clocks and dwell times take time of their own
            refused = error
    if not plans and refused is not None:
        raise refused
    return pareto(plans)


def _relaxed_energies(optimizers: Sequence[Optimizer], deadlines: FloatArray) -> FloatArray:
    """[orders, deadlines] relaxed energy, infinite if an order is too slow.

    Energy over time is convex for each order, so between the probed deadlines it lies close to a
    line; the orders' own plans are certified one by one.
    """
    probed = np.unique(np.linspace(0, len(deadlines) - 1, _PROBES).astype(int))
    energy = np.full((len(optimizers), len(deadlines)), np.inf)
    for order, optimizer in enumerate(optimizers):
        if len(optimizers) == 1:
            energy[order] = 0.0
            continue
        meets = deadlines >= optimizer.fastest_s * (1 - RELATIVE_TOLERANCE)
        at = np.union1d(probed[meets[probed]], np.flatnonzero(meets)[:1])
        known = [optimizer.relaxed(float(deadlines[i])).cost_j for i in at]
        energy[order, meets] = np.interp(deadlines[meets], deadlines[at], known)
    return energy


def pareto(plans: Iterable[Plan]) -> list[Plan]:
    """Those of some plans that no other beats in both time and energy, the fastest first."""
    kept: list[Plan] = []
    for plan in sorted(plans, key=lambda p: (p.cost.iteration_time_s, p.cost.energy_j)):
        if not kept or plan.cost.energy_j < kept[-1].cost.energy_j:
            kept.append(plan)
    return kept
