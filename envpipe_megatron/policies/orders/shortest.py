"""The shortest orders with every unit at its highest clock: no linear program is solved.

A list scheduler makes orders of each family within several limits of memory; the best are made
again by more looks. Where backwards can be split and that costs time, some split those of the last
microbatches only. The framework's own order and EnvPipe's compete with them. Of orders that take as
long, the one that holds less is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, product
from math import inf

import numpy as np

from envpipe_megatron.core.arrays import FloatArray
from envpipe_megatron.core.kinds import SPLIT, WHOLE, Kind
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.orders.greedy import shortest
from envpipe_megatron.core.orders.job import OrderJob
from envpipe_megatron.core.orders.zero_bubble import split_from, split_in_place, zero_bubble
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.policies.optimal.optimizer import Optimizer, order_at_maximum_s
from envpipe_megatron.policies.orders.extra_forwards import starts
from envpipe_megatron.policies.orders.families import Family, costs_nothing, order_jobs
from envpipe_megatron.policies.orders.judged import WORTH, Judged, memory_worth, within
from envpipe_megatron.policies.problem import Limits, Problem

#: Limits of activations held, as `families.order_jobs` takes them: where few are tried, those that
#: most jobs need for their best order.
_MEMORY = (2.0, 0.0, 1.0, 1.5, inf)
#: How many microbatches split their backwards, the last ones, as multiples of p; or all of them.
_SPLIT_LAST = (2.0, inf, 1.0)
#: Orders that the list scheduler looks at for each limit, and units of all of a family's.
_FEWEST_LOOKS, _MOST_LOOKS, _LOOK_BUDGET = 2, 4, 150_000
#: So many of the best are made again.
_AGAIN = 2


@dataclass(frozen=True)
class _Try:
    """What the list scheduler is given; backwards are split from this microbatch on."""

    family: Family
    job: OrderJob
    first_split: int

    def order(self, looks: int) -> Schedule:
        """The shortest order that so many looks find."""
        order = shortest(self.job, self.family.name, looks)
        return split_from(order, self.first_split) if self.first_split else order


class ShortestSearch:
    """Searches the orders of some families of a problem."""

    def __init__(self, problem: Problem, families: Sequence[Family]) -> None:
        self._problem, self._families, self._own = problem, families, problem.own_order
        self._shares = problem.profile.weight_shares
        #: As many microbatches more as twice what 1F1B holds must win some 1e-4, of any pipeline.
        self._price = WORTH / problem.num_stages
        self._times_s: dict[object, float] = {}

    @property
    def orders_tried(self) -> int:
        """Orders whose time was computed."""
        return len(self._times_s)

    def bound(self, _: float) -> float:
        """What no order can go below, s, whichever of its backwards it splits."""
        floors_s = []
        for family in self._families:
            time_s = self._time_s(family)
            if family.split:  # whole ones take no less than the shorter of both
                share = self._top_s(WHOLE)[..., 1] / time_s[:, :, 1:, 0].sum(axis=2)
                time_s[:, :, 1:] *= np.minimum(1.0, share)[..., None, None]
            floors_s.append(next(self._jobs(family, time_s, None)).floor_s)
        return min(floors_s)

    def search(self, limits: Limits, max_in_flight: Sequence[int] | None) -> list[Judged]:
        """The best order of each family within limits.

        Args:
            max_in_flight: [num_stages] the most microbatches x chunks that a stage may hold.
        """
        best: dict[Family, tuple[float, Schedule]] = {}
        listed: list[tuple[float, int, _Try]] = []

        def look(family: Family, order: Schedule) -> float:
            score = self._score(order) if within(order, max_in_flight, self._shares) else inf
            if score < best.get(family, (inf,))[0]:
                best[family] = score, order
            return score

        for family in self._families:
            units = self._own.num_units * len(SPLIT if family.split else WHOLE) // len(WHOLE)
            most = max(1, _LOOK_BUDGET // units)
            known = self._known(family, limits, max_in_flight, [one for _, one in best.values()])
            for order in islice(known, max(_FEWEST_LOOKS, most)):
                look(family, order)
            if limits.channel_capacity is not None or most < _FEWEST_LOOKS:
                continue  # others may need more of a channel; of huge jobs one takes seconds
            tries = [*islice(self._tries(family, max_in_flight), most // _FEWEST_LOOKS)]
            looks = min(_MOST_LOOKS, max(_FEWEST_LOOKS, most // len(tries)))
            for each in tries:
                if each.job.floor_s < best.get(family, (inf,))[0]:
                    listed.append((look(family, each.order(looks)), most, each))
        for _, most, each in sorted(listed, key=lambda one: one[0])[:_AGAIN]:
            if most > _MOST_LOOKS:
                look(each.family, each.order(most))
        return [self._judged(family, order) for family, (_, order) in best.items()]

    def _judged(self, family: Family, order: Schedule) -> Judged:
        problem = self._problem
        optimizer = Optimizer(order, problem.profile, problem.conditions, parking=problem.park)
        score, price = self._order_s(order), self._price
        return Judged(family.name, optimizer, score, self._own, price=price)

    def _order_s(self, order: Schedule) -> float:
        if order.stages not in self._times_s:
            job = self._problem.profile, self._problem.conditions
            self._times_s[order.stages] = order_at_maximum_s(order, *job)
        return self._times_s[order.stages]

    def _score(self, order: Schedule) -> float:
        return self._order_s(order) * memory_worth(order, self._own, self._shares, self._price)

    def _known(
        self,
        family: Family,
        limits: Limits,
        max_in_flight: Sequence[int] | None,
        best: Sequence[Schedule],
    ) -> Iterator[Schedule]:
        """Orders of a family that are made from the framework's own, or from the best so far."""
        problem, own = self._problem, self._own
        job = problem.num_stages, problem.num_microbatches
        if (family.placement, family.split) == (own.placement, own.split):
            yield own
        if family.split:
            if own.num_chunks == 1:
                room = min([2 * job[0], *(max_in_flight or ())])
                for most, last in product(dict.fromkeys([room, job[0]]), self._lasts):
                    if most >= job[0]:
                        yield split_from(zero_bubble(*job, most), job[1] - last)
            for order, last in product(best, self._lasts):
                if order.placement is family.placement and not order.split:
                    yield split_in_place(order, last * own.num_chunks)
        elif own.num_chunks == 1:
            for extra in starts(problem.profile, job[1], problem.order_limits(limits)):
                yield builders.envpipe(*job, extra)

    @property
    def _lasts(self) -> list[int]:
        """How many microbatches split their backwards, the last ones."""
        problem = self._problem
        multiples = (inf,) if costs_nothing(problem.profile) else _SPLIT_LAST
        lasts = (min(m * problem.num_stages, problem.num_microbatches) for m in multiples)
        return [*dict.fromkeys(map(int, lasts))]

    def _tries(self, family: Family, max_in_flight: Sequence[int] | None) -> Iterator[_Try]:
        """What the list scheduler may be given, limit by limit."""
        jobs = []
        for last in self._lasts if family.split else [self._own.num_microbatches]:
            time_s, first = self._time_s(family), self._own.num_microbatches - last
            if first:
                time_s[:, :, 1, :first] = self._top_s(WHOLE)[..., 1:]
                time_s[:, :, 2, :first] = 0.0
            jobs.append([_Try(family, j, first) for j in self._jobs(family, time_s, max_in_flight)])
        yield from chain.from_iterable(zip(*jobs, strict=True))

    def _jobs(
        self, family: Family, time_s: FloatArray, max_in_flight: Sequence[int] | None
    ) -> Iterator[OrderJob]:
        job = family, self._own, time_s, self._problem.conditions, self._shares
        return order_jobs(*job, max_in_flight, _MEMORY)

    def _time_s(self, family: Family) -> FloatArray:
        """[num_stages, num_chunks, kinds, num_microbatches] at the highest clocks."""
        top_s = self._top_s(SPLIT if family.split else WHOLE)
        return np.repeat(top_s[..., None], self._own.num_microbatches, axis=3)

    def _top_s(self, kinds: Sequence[Kind]) -> FloatArray:
        """[num_stages, num_chunks, kinds] at the highest clocks."""
        profile, chunks = self._problem.profile, self._own.num_chunks
        top_s = np.array([[part[kind][0].time_s for kind in kinds] for part in profile.rows])
        by_part = top_s.reshape(profile.num_stages, profile.listed_chunks, -1)
        return by_part.repeat(chunks // profile.listed_chunks, axis=1)
