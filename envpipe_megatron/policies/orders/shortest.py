"""The shortest orders with every unit at its highest clock: no linear program is solved.

A list scheduler makes orders of each family within several limits of memory; the best are made
again by more looks. Where backwards can be split and that costs time, some split those of the last
microbatches only. The framework's own order and EnvPipe's compete with them. Of orders that take as
long, the one that holds less is taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, product
from math import inf
from operator import itemgetter

import numpy as np

from envpipe_megatron.core.arrays import FloatArray
from envpipe_megatron.core.kinds import SPLIT, WHOLE, Kind
from envpipe_megatron.core.orders.greedy import shortest
from envpipe_megatron.core.orders.job import OrderJob
from envpipe_megatron.core.orders.zero_bubble import split_from, split_in_place, zero_bubble
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.policies.optimal.optimizer import order_at_maximum_s
from envpipe_megatron.policies.orders.families import (
    ENVPIPE,
    OrderFamily,
    costs_nothing,
    envpipe_orders,
    order_jobs,
)
from envpipe_megatron.policies.orders.judged import WORTH, Judged, memory_worth, within
from envpipe_megatron.policies.problem import Problem

#: Limits of activations held, as `families.order_jobs` takes them: where few are tried, those that
#: most jobs need for their best order.
_MEMORY = (2.0, 0.0, 1.0, 1.5, inf)
#: How many microbatches split their backwards, the last ones, as multiples of p; or all of them.
_SPLIT_LAST = (2.0, inf, 1.0, 0.5)
#: Orders that the list scheduler looks at for each limit, and units of all of a family's.
_LOOKS, _LOOK_BUDGET = 3, 150_000
#: So many of the best of each family are made again.
_AGAIN = 1


class ShortestSearch:
    """Searches the orders of one family of a problem, as `FamilySearch` does for energy."""

    def __init__(self, family: OrderFamily, problem: Problem) -> None:
        self.family, self._problem = family, problem
        #: As many microbatches more as twice what 1F1B holds must win some 1e-4, of any pipeline.
        self._price = WORTH / problem.num_stages
        units = problem.own_order.num_units * len(SPLIT if family.split else WHOLE) // len(WHOLE)
        self._most_looks = _LOOK_BUDGET // units
        self.orders_tried = 0

    def search(self, problem: Problem, others: Iterable[Judged] = ()) -> list[Judged]:
        """Return the best order within limits, if any; `others` are the best of other families.

        `problem` is the search's own, or with other limits of memory.
        """
        own, most = problem.own_order, self._most_looks
        job, shares = (problem.profile, problem.conditions), problem.profile.weight_shares
        found: dict[float, Schedule] = {}

        def look(order: Schedule) -> float:
            if not within(order, problem):
                return inf
            self.orders_tried += 1
            score = order_at_maximum_s(order, *job) * memory_worth(order, own, shares, self._price)
            found.setdefault(score, order)
            return score

        for order in islice(self._made(problem, others), max(2, most)):
            look(order)
        listed: list[tuple[float, OrderJob, int]] = []
        for each, first in islice(self._jobs(problem), most // _LOOKS):
            if not found or each.floor_s < min(found):
                score = look(split_from(shortest(each, self.family.name, _LOOKS), first))
                listed.append((score, each, first))
        for _, each, first in sorted(listed, key=itemgetter(0))[:_AGAIN]:
            look(split_from(shortest(each, self.family.name, most), first))
        if not found:
            return []
        # No stage waits for a gradient of the first; others have time for whole backwards.
        few = self.family.split and own.num_units <= _LOOK_BUDGET // problem.num_stages
        for stage in range(problem.num_stages if few else 0):
            look(split_from(found[min(found)], own.num_microbatches, stage))
        order = found[min(found)]
        time_s = order_at_maximum_s(order, *job)
        return [Judged(self.family.name, problem.optimizer(order), time_s, own, self._price)]

    def _made(self, problem: Problem, others: Iterable[Judged]) -> Iterator[Schedule]:
        """Yield orders of the family by rules, and from the best of other families."""
        own, family = problem.own_order, self.family
        job = problem.num_stages, problem.num_microbatches
        if (family.placement, family.split) == (own.placement, own.split):
            yield own
        if family == ENVPIPE:
            yield from envpipe_orders(problem)
        elif family.split:
            if own.num_chunks == 1:
                room = max(job[0], min([2 * job[0], *(problem.max_in_flight or ())]))
                for most, last in product((room, job[0]), self._lasts):
                    yield split_from(zero_bubble(*job, most), job[1] - last)
            for order, last in product((o.optimizer.schedule for o in others), self._lasts):
                if order.placement is family.placement and not order.split:
                    yield split_in_place(order, last * own.num_chunks)

    @property
    def _lasts(self) -> list[int]:
        """Numbers of microbatches, the last ones, whose backwards are split."""
        problem = self._problem
        multiples = (inf,) if costs_nothing(problem.profile) else _SPLIT_LAST
        lasts = (min(m * problem.num_stages, problem.num_microbatches) for m in multiples)
        return [*dict.fromkeys(map(int, lasts))]

    def _jobs(self, problem: Problem) -> Iterator[tuple[OrderJob, int]]:
        """Yield jobs for the list scheduler, and the first microbatch with split backwards."""
        family, all_split = self.family, problem.num_microbatches
        if problem.channel_capacity is not None:
            return  # only orders by rules are lowered to it
        for last in self._lasts if family.split else [all_split]:
            time_s, first = self._time_s(SPLIT if family.split else WHOLE), all_split - last
            if first:  # until then a backward has no second part
                time_s[:, :, 1, :first] = self._time_s(WHOLE)[:, :, 1, :first]
                time_s[:, :, 2, :first] = 0.0
            yield from ((each, first) for each in order_jobs(family, problem, time_s, _MEMORY))

    def _time_s(self, kinds: Sequence[Kind]) -> FloatArray:
        """Return [num_stages, num_chunks, kinds, num_microbatches] at the highest clocks."""
        profile, own = self._problem.profile, self._problem.own_order
        top_s = np.array([[part[kind][0].time_s for kind in kinds] for part in profile.rows])
        by_part = top_s.reshape(profile.num_stages, profile.listed_chunks, len(kinds), 1)
        by_chunk = by_part.repeat(own.num_chunks // profile.listed_chunks, axis=1)
        return by_chunk.repeat(own.num_microbatches, axis=3)
