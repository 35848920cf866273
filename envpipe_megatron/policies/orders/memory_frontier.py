"""What each microbatch of activation memory buys: the best plan for each limit in flight."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, count, takewhile

from envpipe_megatron.core.plan import Plan
from envpipe_megatron.policies.optimal.linear_program import LinearProgramError
from envpipe_megatron.policies.orders.auto import AutoSearch
from envpipe_megatron.policies.orders.judged import WORTH, best_plan

#: Limits that are tried, in microbatches beyond the framework's own order; then, multiples of the
#: last.
_LIMITS = (0, 1, 2, 3, 4, 6, 8, 12, 16)


@dataclass(frozen=True)
class MemoryPoint:
    """The best plan found where stages hold so many microbatches beyond the framework's order."""

    max_extra_forwards: int
    plan: Plan

    @property
    def peak_in_flight(self) -> float:
        """The most microbatches that a stage holds."""
        return max(self.plan.schedule.microbatches_in_flight)


def memory_frontier(search: AutoSearch) -> list[MemoryPoint]:
    """Plans of all families for rising limits, as long as the best order needs more.

    A limit that buys next to nothing (`WORTH`) is left out, and so is one within which no order
    meets the deadline. LinearProgramError: late clocks, the dwell time or limits leave no plan.
    """
    points: list[MemoryPoint] = []
    refused: LinearProgramError | None = None
    needed = search.judged[0].more_in_flight
    for most in _rising(search.most_extra_forwards):
        try:
            judged = search.judge(replace(search.problem.limits, max_extra_forwards=most))
            plan = best_plan(judged, search.planner)
        except LinearProgramError as error:
            refused = error
            continue
        score = search.planner.score
        if not points or score(plan) < score(points[-1].plan) * (1 - WORTH):
            points.append(MemoryPoint(most, plan))
        if most >= needed and judged[0].more_in_flight < most:  # more memory would not be used
            break
    if not points:
        assert refused is not None
        raise refused
    return points


def _rising(most: int) -> Iterator[int]:
    last = _LIMITS[-1]
    yield from takewhile(lambda limit: limit < most, chain(_LIMITS, count(2 * last, last)))
    yield most
