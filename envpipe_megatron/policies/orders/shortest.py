"""The shortest orders with every unit at its highest clock: no linear program is solved.

A list scheduler makes orders of each family within several limits of memory; the best are made
again by more looks. Where backwards can be split and that costs time, some split those of the last
microbatches only. The framework's own order and EnvPipe's compete with them. Of orders that take as
long, the one that holds less is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from envpipe_megatron.policies.optimal.optimizer import Optimizer, order_at_maximum_s
from envpipe_megatron.policies.orders.families import (
    ENVPIPE,
    Family,
    costs_nothing,
    envpipe_orders,
    families,
    order_jobs,
)
from envpipe_megatron.policies.orders.judged import WORTH, Judged, memory_worth, within
from envpipe_megatron.policies.problem import Limits, Problem

#: Limits of activations held, as `families.order_jobs` takes them: where few are tried, those that
#: most jobs need for their best order.
_MEMORY = (2.0, 0.0, 1.0, 1.5, inf)
#: How many microbatches split their backwards, the last ones, as multiples of p; or all of them.
_SPLIT_LAST = (2.0, inf, 1.0, 0.5)
#: Orders that the list scheduler looks at for each limit, and units of all of a family's.
_LOOKS, _LOOK_BUDGET = 3, 150_000
#: So many of the best are made again.
_AGAIN = 2


class ShortestSearch:
    """Searches the orders of a problem."""

    def __init__(self, problem: Problem) -> None:
        self._problem, self._own = problem, problem.own_order
        own = self._own
        first = (ENVPIPE,) if own.num_chunks == 1 else ()
        job = problem.profile, own.num_chunks
        others = families(*job, runnable=problem.runnable, placement=own.placement)
        self._families = (*first, *others)
        #: As many microbatches more as twice what 1F1B holds must win some 1e-4, of any pipeline.
        self._price = WORTH / problem.num_stages
        self.orders_tried = 0

    def search(self, limits: Limits, max_in_flight: Sequence[int] | None) -> list[Judged]:
        """The best order of each family; `max_in_flight` is as `order_jobs` takes it."""
        problem, own, shares = self._problem, self._own, self._problem.profile.weight_shares
        profile, conditions = problem.profile, problem.conditions
        best: dict[Family, tuple[float, Schedule]] = {}
        listed: list[tuple[float, Family, OrderJob, int, int]] = []

        def look(family: Family, order: Schedule) -> float:
            if not within(order, max_in_flight, shares):
                return inf
            self.orders_tried += 1
            time_s = order_at_maximum_s(order, profile, conditions)
            score = time_s * memory_worth(order, own, shares, self._price)
            if family not in best or score < best[family][0]:
                best[family] = score, order
            return score

        any_channel = limits.channel_capacity is None  # to others, orders by rules are lowered
        for family in self._families if any_channel else (ENVPIPE,):
            units = own.num_units * len(SPLIT if family.split else WHOLE) // len(WHOLE)
            most = _LOOK_BUDGET // units
            made = self._made(family, limits, [order for _, order in best.values()])
            for order in islice(made, max(2, most)):
                look(family, order)
            jobs = self._jobs(family, max_in_flight)
            for job, first in islice(jobs, most // _LOOKS if any_channel else 0):
                if family not in best or job.floor_s < best[family][0]:
                    score = look(family, split_from(shortest(job, family.name, _LOOKS), first))
                    listed.append((score, family, job, first, most))
        for _, family, job, first, most in sorted(listed, key=itemgetter(0))[:_AGAIN]:
            look(family, split_from(shortest(job, family.name, most), first))
        judged = []
        for family in best:
            # Of the first stage nobody waits for a gradient; others have time for whole backwards.
            few = family.split and own.num_units <= _LOOK_BUDGET // problem.num_stages
            for stage in range(problem.num_stages if few else 0):
                look(family, split_from(best[family][1], own.num_microbatches, stage))
            order = best[family][1]
            optimizer = Optimizer(order, profile, conditions, parking=problem.park)
            time_s = order_at_maximum_s(order, profile, conditions)
            judged.append(Judged(family.name, optimizer, time_s, own, price=self._price))
        return judged

    def _made(self, family: Family, limits: Limits, best: Sequence[Schedule]) -> Iterator[Schedule]:
        """Orders of a family by rules, and from the best of other families."""
        problem, own = self._problem, self._own
        job = problem.num_stages, problem.num_microbatches
        if (family.placement, family.split) == (own.placement, own.split):
            yield own
        if not family.split and own.num_chunks == 1:
            yield from envpipe_orders(problem, limits)
        elif family.split:
            if own.num_chunks == 1:
                room = max(job[0], min([2 * job[0], *(limits.max_in_flight or ())]))
                for most, last in product((room, job[0]), self._lasts):
                    yield split_from(zero_bubble(*job, most), job[1] - last)
            for order, last in product(best, self._lasts):
                if order.placement is family.placement and not order.split:
                    yield split_in_place(order, last * own.num_chunks)

    @property
    def _lasts(self) -> list[int]:
        """How many microbatches split their backwards, the last ones."""
        problem = self._problem
        multiples = (inf,) if costs_nothing(problem.profile) else _SPLIT_LAST
        lasts = (min(m * problem.num_stages, problem.num_microbatches) for m in multiples)
        return [*dict.fromkeys(map(int, lasts))]

    def _jobs(
        self, family: Family, max_in_flight: Sequence[int] | None
    ) -> Iterator[tuple[OrderJob, int]]:
        """Yield jobs for the list scheduler, and the first microbatch with split backwards."""
        problem, all_split = self._problem, self._problem.num_microbatches
        for last in self._lasts if family.split else [all_split]:
            time_s, first = self._time_s(SPLIT if family.split else WHOLE), all_split - last
            if first:  # until then a backward has no second part
                time_s[:, :, 1, :first] = self._time_s(WHOLE)[:, :, 1, :first]
                time_s[:, :, 2, :first] = 0.0
            job = family, self._own, time_s, problem.conditions, problem.profile.weight_shares
            yield from ((each, first) for each in order_jobs(*job, max_in_flight, _MEMORY))

    def _time_s(self, kinds: Sequence[Kind]) -> FloatArray:
        """[num_stages, num_chunks, kinds, num_microbatches] at the highest clocks."""
        profile, own = self._problem.profile, self._own
        top_s = np.array([[part[kind][0].time_s for kind in kinds] for part in profile.rows])
        by_part = top_s.reshape(profile.num_stages, profile.listed_chunks, len(kinds), 1)
        by_chunk = by_part.repeat(own.num_chunks // profile.listed_chunks, axis=1)
        return by_chunk.repeat(own.num_microbatches, axis=3)
