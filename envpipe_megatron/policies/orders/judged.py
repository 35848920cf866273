"""Orders that a search has judged, and the best plan of them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from envpipe_megatron.core.plan import Plan
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.policies.objectives.plans import ObjectivePlanner
from envpipe_megatron.policies.optimal.linear_program import LinearProgramError
from envpipe_megatron.policies.optimal.optimizer import Optimizer

#: What a further microbatch in flight must save on the way, as a fraction of the energy: memory
#: that buys nothing is not taken.
WORTH = 2e-5
#: The best orders by their relaxed energy are rounded; what rounding costs differs a little.
ROUNDED = 2


@dataclass(frozen=True)
class Judged:
    """An order with the energy of its relaxed plan.

    Args:
        family: what the order is called among others.
        own: the framework's own order of the job.
    """

    family: str
    optimizer: Optimizer
    relaxed_energy_j: float
    own: Schedule

    @cached_property
    def memory_worth(self) -> float:
        """What a score is multiplied by to be compared: memory that buys nothing is a loss."""
        return memory_worth(self.optimizer.schedule, self.own)

    @property
    def worth_j(self) -> float:
        """The relaxed energy, with memory at its worth."""
        return self.relaxed_energy_j * self.memory_worth


def best_plan(judged: Iterable[Judged], planner: ObjectivePlanner) -> Plan:
    """The best plan of the first few orders, and of the framework's own if it is among them.

    What is gained must be worth its memory. LinearProgramError: none of them has a plan.
    """
    best: Plan | None = None
    least_j = least = math.inf
    refused: LinearProgramError | None = None
    for rank, order in enumerate(sorted(judged, key=lambda order: order.worth_j)):
        is_own = order.optimizer.schedule.stages == order.own.stages
        if (rank >= ROUNDED and not is_own) or order.worth_j >= least_j:
            continue
        try:
            plan = planner.plan(order.optimizer)
        except LinearProgramError as error:  # late clocks, the dwell time, limits
            refused = refused or error
            continue
        score = planner.score(plan) * order.memory_worth
        if score < least:
            best, least, least_j = plan, score, plan.cost.energy_j * order.memory_worth
    if best is None:
        assert refused is not None  # there is an order, and it got no plan
        raise refused
    return best


def memory_worth(schedule: Schedule, own: Schedule) -> float:
    """What the energy of an order is multiplied by, so that memory which buys nothing is a loss."""
    more = sum(schedule.peak_in_flight) - sum(own.peak_in_flight)
    return 1 + WORTH * max(0, more) / schedule.num_chunks
