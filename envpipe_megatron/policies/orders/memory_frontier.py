"""What each microbatch of activation memory buys: the best plan for each limit in flight."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count, takewhile

from envpipe_megatron.core.plan import Plan
from envpipe_megatron.policies.limits import OrderLimits
from envpipe_megatron.policies.objectives.plans import ObjectivePlanner
from envpipe_megatron.policies.orders.extra_forwards import Extra, OrderSearch
from envpipe_megatron.policies.orders.judged import WORTH, best_plan

#: Limits on the extra forwards of every stage; beyond them, multiples of the last.
_LIMITS = (0, 1, 2, 3, 4, 6, 8, 12, 16)


@dataclass(frozen=True)
class MemoryPoint:
    """The best plan found for a limit on the extra forwards of every stage."""

    max_extra_forwards: int
    plan: Plan

    @property
    def peak_in_flight(self) -> int:
        """The most microbatches that a stage holds."""
        return max(self.plan.schedule.peak_in_flight)


def memory_frontier(
    search: OrderSearch, limits: OrderLimits, planner: ObjectivePlanner
) -> list[MemoryPoint]:
    """Plans for rising limits, as far as more memory still saves energy.

    Every search starts from what tighter limits found, and a limit that buys next to nothing
    (`WORTH`) is left out. LinearProgramError: not even 1F1B has a plan.
    """
    points: list[MemoryPoint] = []
    best: Sequence[Extra] = ()
    for most in _rising(max(limits.most)):
        within = replace(limits, most=tuple(min(most, cap) for cap in limits.most))
        candidates = search.search(within, best)
        best = (candidates[0].extra_forwards,)
        plan = best_plan(search.judge(candidates), planner)
        if not points or plan.cost.energy_j < points[-1].plan.cost.energy_j * (1 - WORTH):
            points.append(MemoryPoint(most, plan))
        if max(best[0]) < most:  # more memory would not be used
            break
    return points


def _rising(most: int) -> Iterator[int]:
    last = _LIMITS[-1]
    yield from takewhile(lambda limit: limit < most, chain(_LIMITS, count(2 * last, last)))
    yield most
