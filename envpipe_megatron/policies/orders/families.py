"""Order and frequencies planned together, family by family of orders.

What holds for all orders of a family (`any_order`) tells how long each stage's units would take in
the best of them. A list scheduler makes orders for these times, within several limits of memory;
those that come nearest to the deadline are judged by their own linear programs. In one chunk with
whole backwards, EnvPipe's counts of extra forwards compete with them (Choi et al., ATC'23, section
4.2), and those of the best order are moved by one as long as that saves energy. Where splitting a
backward costs something, orders that split their last backwards only compete too.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, product
from operator import add

import numpy as np

from envpipe_megatron.core.arrays import FloatArray
from envpipe_megatron.core.channel_model import completes
from envpipe_megatron.core.kinds import SPLIT, WHOLE, Kind
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.orders.builders import split_in_place
from envpipe_megatron.core.orders.greedy import shortest
from envpipe_megatron.core.orders.job import HELD_TOLERANCE, OrderJob
from envpipe_megatron.core.profile import Profile
from envpipe_megatron.core.profile_rows import ProfileError, ProfileRow
from envpipe_megatron.core.schedule import Placement, Schedule
from envpipe_megatron.core.timeline import RELATIVE_TOLERANCE, Timeline
from envpipe_megatron.policies.optimal.linear_program import LinearProgramError
from envpipe_megatron.policies.optimal.optimizer import Optimizer, waiting_floor_w
from envpipe_megatron.policies.orders.any_order import AnyOrder, any_order
from envpipe_megatron.policies.problem import Problem, envpipe_counts, order_limits

#: What a further microbatch in flight must save on the way, as a fraction of the energy: memory
#: that buys nothing is not taken.
WORTH = 2e-5
#: Limits of activations held that are tried, as multiples of the most that a stage holds in the
#: framework's own order; 0: what each holds there.
_MEMORY = (0.0, 1.0, 1.5, 2.0)
#: Groups of microbatches that pass a looped chunk before its next, as multiples of p.
_GROUPS = (1.0, 1.5)
#: Orders that the list scheduler looks at for each limit, and units of all of them.
_FEWEST_LOOKS, _MOST_LOOKS, _LOOK_BUDGET = 2, 4, 10_000
#: Units of all orders whose linear programs a search may solve: eight of 8 x 24 in two chunks.
_UNIT_BUDGET = 9_300
#: At most this many orders of EnvPipe's family that are near to the deadline.
_MOST_NEAR = 8
#: Multiples of EnvPipe's counts that are tried, and of even ramps: how many more than the next
#: stage each stage has.
_MULTIPLES, _RAMPS = (1.0, 1.5, 2.0), (0.5, 1.0, 2.0, 3.0)
#: Of more units one order of EnvPipe's family is planned, the best by its estimate.
_MANY_UNITS = 50_000


@dataclass(frozen=True)
class OrderFamily:
    """Orders that lay out chunks alike, and either split their backwards or do not."""

    name: str
    split: bool
    placement: Placement = Placement.LOOPED


#: EnvPipe's order, and all others of one chunk and whole backwards.
ENVPIPE = OrderFamily("envpipe", split=False)
_ONE_CHUNK = (ENVPIPE, OrderFamily("zero-bubble", split=True))
_CHUNKS = (
    OrderFamily("interleaved", split=False),
    OrderFamily("zero-bubble-interleaved", split=True),
)
_TWO_EVEN_CHUNKS = (
    OrderFamily("v-shaped", split=False, placement=Placement.V),
    OrderFamily("zero-bubble-v", split=True, placement=Placement.V),
)


def families(problem: Problem) -> tuple[OrderFamily, ...]:
    """List the families of a problem's orders; only EnvPipe's is lowered to a channel's capacity.

    Chunks with rows of their own were measured where they lie, and lie nowhere else; in a job that
    is so for all chunks.
    """
    profile, chunks = problem.profile, problem.num_chunks
    known: tuple[OrderFamily, ...] = _CHUNKS if chunks > 1 else _ONE_CHUNK
    if problem.own_order.placement is Placement.V:
        known = _TWO_EVEN_CHUNKS
    elif chunks == 2 and not problem.runnable and profile.listed_chunks == 1:
        known += _TWO_EVEN_CHUNKS
    if problem.channel_capacity is not None:
        known = (ENVPIPE,)
    return tuple(f for f in known if not f.split or Kind.INPUT_GRADIENT in profile.kinds)


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


def memory_worth(
    schedule: Schedule, own: Schedule, weight_shares: FloatArray, price: float = WORTH
) -> float:
    """Return the factor of an order's score that makes memory which buys nothing a loss.

    `weight_shares` are as `Profile` has them.
    """
    more = float(schedule.peak_held(weight_shares).sum()) - sum(own.peak_in_flight)
    return 1 + price * max(0.0, more) / schedule.num_chunks


class FamilySearch:
    """Searches the orders of one family of a problem at one deadline; see `Optimizer`.

    LinearProgramError: none meets the deadline.
    """

    def __init__(self, family: OrderFamily, problem: Problem, deadline_s: float) -> None:
        self.family, self._problem, self._deadline_s = family, problem, deadline_s
        own, profile = problem.own_order, problem.profile
        #: By their stages, orders that were looked at; None if one does not meet the deadline.
        self._judged: dict[object, Judged | None] = {}
        self._free = _freely_split(profile) if family.split else profile
        #: Of orders that split all backwards or none; None if splitting all takes too long.
        self._target: AnyOrder | None = self._limit(self._free, deadline_s)  # or raises
        if family.split:
            self._target = None
            with suppress(LinearProgramError):
                self._target = self._limit(profile, deadline_s)
        units = own.num_units * len(SPLIT if family.split else WHOLE) // len(WHOLE)
        self._most_solved = max(1, _UNIT_BUDGET // units)
        self._most_near = self._most_solved
        if family == ENVPIPE:  # whose best is moved on from
            self._most_near = max(1, min(self._most_solved // 2, _MOST_NEAR))
        self._looks = min(_MOST_LOOKS, max(_FEWEST_LOOKS, _LOOK_BUDGET // units))

    @property
    def orders_tried(self) -> int:
        """Orders whose linear program was solved."""
        return len(self._judged)

    def any_order_bound_j(self, or_at_s: float = 0.0) -> float:
        """Return what no order can go below at the deadline or a later one, J.

        Nor one that splits some backwards and others not.
        """
        return self._limit(self._free, max(or_at_s, self._deadline_s)).energy_lower_bound_j

    def search(self, problem: Problem, others: Iterable[Judged] = ()) -> list[Judged]:
        """Return the orders that meet the deadline within limits, of all that were judged.

        `problem` is the search's own, or with other limits of memory; `others` are orders of other
        families, to split the last backwards of the best.
        """
        own = problem.own_order
        always, likely = [], [*self._listed(problem)]
        if (self.family.placement, self.family.split) == (own.placement, own.split):
            always.append(own)
        if self.family == ENVPIPE:
            rule, *more = envpipe_orders(problem)
            always, likely = [*always, rule], [*more, *likely]
            if own.num_units > _MANY_UNITS:
                always, likely = [], [*always, *likely]
        if self.family.split:
            last = own.num_stages * own.num_chunks  # on the way out of the pipeline
            all_units = own.num_microbatches * own.num_chunks
            if costs_nothing(problem.profile) or last > all_units:
                last = all_units
            always += [
                split_in_place(order, last)
                for order in (other.optimizer.schedule for other in best_by_family(others))
                if not order.split and order.placement is self.family.placement
            ]
        distinct = {order.stages: order for order in likely}.values()
        for schedule in always:
            self._judge(schedule)
        for place, schedule in enumerate(sorted(distinct, key=self._estimate_j)):
            if place >= self._most_near and any(self._judged.values()):
                break
            self._judge(schedule)
        if self.family == ENVPIPE and own.num_units <= _MANY_UNITS:
            self._climb(problem)
        return self._within(problem)

    def _within(self, problem: Problem) -> list[Judged]:
        """Return the orders that were judged and hold no more than limits allow."""
        judged = (order for order in self._judged.values() if order is not None)
        return [order for order in judged if problem.allows(order.optimizer.schedule)]

    def _climb(self, problem: Problem) -> None:
        """Move extra forwards of the best order by one, as long as that saves energy.

        On single stages, front parts and rear parts of the pipeline, for as many orders again.
        """
        best = min(self._within(problem), key=lambda order: order.worth, default=None)
        if best is None:
            return
        allowed, job = problem.order_limits(), (problem.num_stages, problem.num_microbatches)
        extra = allowed.fit(best.optimizer.schedule.extra_forwards)
        directions, last = _directions(len(extra)), self.orders_tried + self._most_solved
        failed = 0  # directions in a row that led nowhere
        while failed < len(directions) and self.orders_tried < last:
            near = tuple(map(add, extra, directions[0]))
            order = self._judge(builders.envpipe(*job, near)) if allowed.allow(near) else None
            if order is not None and order.worth < best.worth:
                best, extra, failed = order, near, 0
            else:
                directions.rotate(-1)
                failed += 1

    def _judge(self, schedule: Schedule) -> Judged | None:
        """Judge an order by its linear program, which is solved once."""
        if schedule.stages not in self._judged:
            optimizer, judged = self._problem.optimizer(schedule), None
            if optimizer.fastest_s <= self._deadline_s * (1 + RELATIVE_TOLERANCE):
                relaxed_j = optimizer.relaxed(self._deadline_s).cost_j
                judged = Judged(self.family.name, optimizer, relaxed_j, self._problem.own_order)
            self._judged[schedule.stages] = judged
        return self._judged[schedule.stages]

    def _limit(self, profile: Profile, deadline_s: float) -> AnyOrder:
        problem, conditions = self._problem, self._problem.conditions
        floor_w = waiting_floor_w(problem.profile, conditions)
        job = profile, conditions, problem.num_microbatches, deadline_s, floor_w
        return any_order(*job, num_chunks=problem.num_chunks, split=self.family.split)

    def _listed(self, problem: Problem) -> Iterator[Schedule]:
        """Yield the list scheduler's orders, which split all backwards or none."""
        if self._target is None:
            return
        capacity = problem.channel_capacity
        mean_s = np.repeat(self._target.time_s[..., None], problem.num_microbatches, axis=3)
        memory = _MEMORY if problem.most_in_flight is None else (*_MEMORY, math.inf)
        for listed in order_jobs(self.family, problem, mean_s, memory):
            order = shortest(listed, self.family.name, self._looks)
            if capacity is None or completes(order, capacity):
                yield order

    def _estimate_j(self, schedule: Schedule) -> float:
        """Estimate an order's plan: the bound, and what its lateness costs to make up, J."""
        assert self._target is not None  # the order was listed for it
        problem = self._problem
        keys = schedule.unit_keys(schedule.num_chunks, schedule.unit_kinds)
        duration_s, conditions = self._target.time_s.ravel()[keys], problem.conditions
        tail_s = conditions.tail_by_stage_s
        timeline = Timeline(schedule, duration_s, conditions.latency_s, tail_s)
        late_s = max(0.0, timeline.iteration_time_s - self._deadline_s)
        bound_j = self._target.energy_lower_bound_j + late_s * self._target.price_w
        return bound_j * memory_worth(schedule, problem.own_order, problem.profile.weight_shares)


def envpipe_orders(problem: Problem) -> list[Schedule]:
    """Return 1F1B with extra forwards to begin a search with, those of EnvPipe's rule first.

    Multiples of its counts, and even ramps (Choi et al., ATC'23, section 4.2).
    """
    allowed, stages = problem.order_limits(), problem.num_stages
    try:
        wanted = envpipe_counts(problem.profile, order_limits(problem.own_order).most)
    except ProfileError:  # no energy valley, which only EnvPipe's rule needs
        wanted = [0] * stages
    scaled = [[math.ceil(m * count) for count in wanted] for m in _MULTIPLES]
    ramps = [[int(fall * s) for s in reversed(range(stages))] for fall in _RAMPS]
    fitted = [allowed.fit(counts) for counts in (*scaled, *ramps)]
    # Where memory holds the front back, what the rear may have beyond it often does harm.
    fitted += [allowed.fit([*accumulate(counts, min)]) for counts in fitted]
    job = stages, problem.num_microbatches
    return [builders.envpipe(*job, extra) for extra in dict.fromkeys(fitted)]


def _directions(num_stages: int) -> deque[tuple[int, ...]]:
    """List one more or one less: on one stage, on a front part, on a rear part of the pipeline."""
    # From the rear, where counts are small and EnvPipe's, rounded down, miss most.
    rearmost_first = [*reversed(range(num_stages - 1)), num_stages - 1]
    moved = [tuple(int(s == stage) for s in range(num_stages)) for stage in rearmost_first]
    for stage in range(1, num_stages):
        moved.append(tuple(int(s <= stage) for s in range(num_stages)))
        moved.append(tuple(int(s >= stage) for s in range(num_stages)))
    return deque(tuple(step * on for on in stages) for step in (1, -1) for stages in moved)


def order_jobs(
    family: OrderFamily, problem: Problem, time_s: FloatArray, memory: Iterable[float]
) -> Iterator[OrderJob]:
    """Yield jobs for the list scheduler: a family's, within limits of memory, in groups of chunks.

    Where a pending weight gradient takes more than a microbatch in flight, there must be room for
    one; as many in flight are then as many that wait.

    Args:
        time_s: [num_stages, num_chunks, kinds, num_microbatches] what units are to take.
        memory: what is held of all stages alike, as `_MEMORY` has it; infinite for all that may be.
    """
    own, weight_shares = problem.own_order, problem.profile.weight_shares.ravel()
    kinds, peak = SPLIT if family.split else WHOLE, np.array(own.peak_in_flight)
    times = np.maximum(1.0, weight_shares) if family.split else np.ones(len(peak))
    every = times * own.num_microbatches * own.num_chunks
    most = problem.most_in_flight or every
    wanted = (np.ceil(m * max(peak)) * times if m else peak + times - 1 for m in memory)
    limits = dict.fromkeys(tuple(np.minimum(each, most).tolist()) for each in wanted)
    in_groups = own.num_chunks > 1 and family.placement is Placement.LOOPED
    for each, multiple in product(limits, _GROUPS if in_groups else _GROUPS[:1]):
        if np.all(np.array(each) >= own.num_chunks + times - 1):
            yield OrderJob(
                {kind: time_s[:, :, place] for place, kind in enumerate(kinds)},
                problem.conditions.latency_s,
                family.placement,
                each,
                weight_shares.tolist(),
                tail_s=problem.conditions.tail_by_stage_s.tolist(),
                group_size=math.ceil(multiple * own.num_stages),
            )


def costs_nothing(profile: Profile) -> bool:
    """Return whether both parts of a backward take no longer than a whole one, at full clock."""
    return all(
        sum(kinds[kind][0].time_s for kind in SPLIT[1:])
        <= kinds[Kind.BACKWARD][0].time_s * (1 + RELATIVE_TOLERANCE)
        for kinds in profile.rows
    )


def _freely_split(profile: Profile) -> Profile:
    """Return the profile whose parts of a backward may also be the two parts of a whole one.

    A whole backward then is an I and a W that together take exactly what it takes. So an order that
    splits some backwards is one that splits all, in the same time: that it sends a gradient only
    after the W makes it slower than it had to be. This holds for any shares. Those of the parts at
    the nearest clocks keep the limit high, for there is nothing to gain from a part of the one
    kind with a part of the other.
    """
    parts = []
    for kinds in profile.rows:
        free = {kind: list(kinds[kind]) for kind in SPLIT[1:]}
        for whole in kinds[Kind.BACKWARD]:
            pair = {kind: _nearest(kinds[kind], whole.frequency_mhz) for kind in free}
            both_s = sum(row.time_s for row in pair.values())
            both_j = sum(row.energy_j for row in pair.values()) or 1.0  # or nothing to share
            for kind, row in pair.items():
                time_s = whole.time_s * (row.time_s / both_s)
                energy_j = whole.energy_j * (row.energy_j / both_j)
                free[kind].append(ProfileRow(whole.frequency_mhz, time_s, energy_j))
        parts.append({**kinds, **{kind: tuple(rows) for kind, rows in free.items()}})
    return replace(profile, rows=tuple(parts))


def _nearest(rows: Sequence[ProfileRow], frequency_mhz: int) -> ProfileRow:
    return min(rows, key=lambda row: abs(row.frequency_mhz - frequency_mhz))
