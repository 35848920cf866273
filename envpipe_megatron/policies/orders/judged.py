"""Orders that a search has judged, and the best plan of them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from envpipe_megatron.core.arrays import FloatArray
from envpipe_megatron.core.orders.job import HELD_TOLERANCE
from envpipe_megatron.core.plan import Plan
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.policies.frontier import ObjectivePlanner
from envpipe_megatron.policies.optimal.linear_program import LinearProgramError
from envpipe_megatron.policies.optimal.optimizer import Optimizer

#: What a further microbatch in flight must save on the way, as a fraction of the energy: memory
#: that buys nothing is not taken.
WORTH = 2e-5
#: The best orders by their relaxed energy are rounded; what rounding costs differs a little.
ROUNDED = 2


@dataclass(frozen=True)
class Judged:
    """An order with what it is judged by.

    Args:
        family: what the order is called among others.
        score: the energy of its relaxed plan, J, or where only time counts its time, s.
        own: the framework's own order of the job.
        price: what a further microbatch in flight must win, as a fraction of the score.
    """

    family: str
    optimizer: Optimizer
    score: float
    own: Schedule
    price: float = WORTH

    @property
    def more_in_flight(self) -> int:
        """The most microbatches that a stage holds beyond the framework's own order."""
        order, shares = self.optimizer.schedule, self.optimizer.profile.weight_shares
        more = float(np.max(order.peak_held(shares) - self.own.peak_in_flight))
        return max(0, math.ceil((more - HELD_TOLERANCE) / order.num_chunks))

    @cached_property
    def memory_worth(self) -> float:
        """Factor of the score in comparisons: memory that buys nothing is a loss."""
        shares = self.optimizer.profile.weight_shares
        return memory_worth(self.optimizer.schedule, self.own, shares, self.price)

    @property
    def worth(self) -> float:
        """The score, with memory at its worth."""
        return self.score * self.memory_worth


def best_by_family(judged: Iterable[Judged]) -> list[Judged]:
    """Return the best order of each family, the best family first."""
    best: dict[str, Judged] = {}
    for order in sorted(judged, key=lambda order: order.worth):
        best.setdefault(order.family, order)
    return list(best.values())


def best_plan(judged: Iterable[Judged], planner: ObjectivePlanner) -> Plan:
    """Return the best plan of the first few orders, and of the framework's own if it is among them.

    What is gained must be worth its memory. LinearProgramError: none of them has a plan.
    """
    best: Plan | None = None
    least_judged = least = math.inf
    refused: LinearProgramError | None = None
    for rank, order in enumerate(sorted(judged, key=lambda order: order.worth)):
        always = order.optimizer.schedule.stages == order.own.stages
        if (rank >= ROUNDED and not always) or order.worth >= least_judged:
            continue
        try:
            plan = planner.plan(order.optimizer)
        except LinearProgramError as error:  # late clocks, the dwell time, limits
            refused = refused or error
            continue
        score = planner.score(plan) * order.memory_worth
        if score < least:
            best, least = plan, score
            least_judged = planner.objective.judged(plan.cost) * order.memory_worth
    if best is None:
        assert refused is not None  # there is an order, and it got no plan
        raise refused
    return best


def memory_worth(
    schedule: Schedule, own: Schedule, weight_shares: FloatArray, price: float = WORTH
) -> float:
    """Return the factor of an order's score that makes memory which buys nothing a loss.

    `weight_shares` are as `Profile` has them.
    """
    more = float(schedule.peak_held(weight_shares).sum()) - sum(own.peak_in_flight)
    return 1 + price * max(0.0, more) / schedule.num_chunks
