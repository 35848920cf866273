"""Order and frequencies planned together, over all families of orders that a job can have.

`families` lists them: EnvPipe's order with any extra forwards, chunks, split backwards. All are
judged by the relaxed energy of their orders at one time (`FamilySearch`); the best are planned in
full. `memory_frontier` says what each microbatch of activation memory buys.

Where only time counts, they are judged by their time at the highest clocks (`ShortestSearch`), and
no linear program is solved. A list scheduler makes orders of each family within several limits of
memory; the best is made again by more looks. Where backwards can be split and that costs time,
some split those of the last microbatches only. The framework's own order and EnvPipe's compete with
them. Of orders that take as long, the one that holds less is taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, count, islice, product, takewhile
from math import ceil, inf
from operator import itemgetter

import numpy as np

from envpipe_megatron.core.arrays import FloatArray
from envpipe_megatron.core.kinds import SPLIT, WHOLE, Kind
from envpipe_megatron.core.orders.builders import split_from, split_in_place, zero_bubble
from envpipe_megatron.core.orders.greedy import shortest
from envpipe_megatron.core.orders.job import OrderJob
from envpipe_megatron.core.plan import Plan
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.policies.frontier import FRONTIER_GAP, ObjectivePlanner
from envpipe_megatron.policies.objective import SHORTEST, Goal
from envpipe_megatron.policies.optimal.linear_program import LinearProgramError
from envpipe_megatron.policies.optimal.optimizer import Optimizer, order_at_maximum_s
from envpipe_megatron.policies.orders.families import (
    ENVPIPE,
    WORTH,
    FamilySearch,
    Judged,
    OrderFamily,
    best_by_family,
    costs_nothing,
    envpipe_orders,
    families,
    memory_worth,
    order_jobs,
)
from envpipe_megatron.policies.problem import Problem, check_own_within

#: Searches for an order at ever better times, which end sooner at times as close as this fraction.
_MOST_SEARCHES = 4
_SAME_TIME = 1e-3
#: Limits that are tried, in microbatches beyond the framework's own order; then, multiples of the
#: last.
_LIMITS = (0, 1, 2, 3, 4, 6, 8, 12, 16)
#: Limits of activations held, as `families.order_jobs` takes them: where few are tried, those that
#: most jobs need for their best order.
_MEMORY = (2.0, 0.0, 1.0, 1.5, inf)
#: How many microbatches split their backwards, the last ones, as multiples of p; or all of them.
_SPLIT_LAST = (2.0, inf, 1.0, 0.5)
#: Orders that the list scheduler looks at for each limit, and units of all of a family's.
_LOOKS, _LOOK_BUDGET = 3, 150_000
#: The best orders by their relaxed energy are rounded; what rounding costs differs a little.
_ROUNDED = 2


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
            if not problem.allows(order):
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
        if listed:  # the best is made again
            _, each, first = min(listed, key=itemgetter(0))
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


class AutoSearch:
    """The search for the order of a problem, at the time that is best for its objective.

    That time depends on the order: the first search is at the best time of the framework's own, the
    next at that of the order that was found. LinearProgramError: no order meets the deadline.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._own = problem.own_order
        self.planner = problem.planner(self._own)
        self._by_time = problem.objective == SHORTEST
        if self._by_time or problem.objective.goal == Goal.ENERGY:
            self._search_at(self.planner.longest_s)
            return
        own = problem.optimizer(self._own)
        time_s = self.planner.best_time_s(own) or self.planner.latest_time_s(own)
        for _ in range(_MOST_SEARCHES):
            self._search_at(time_s)
            better_s = self.planner.best_time_s(self.judged[0].optimizer)
            # Orders that wait more take less power: what cannot keep a cap must not set the time.
            if better_s is None or abs(better_s - time_s) <= _SAME_TIME * time_s:
                break
            time_s = better_s

    def _search_at(self, time_s: float) -> None:
        """Judge the orders of all families at a time."""
        problem, self._time_s = self.problem, time_s
        self._searches: list[FamilySearch | ShortestSearch] = []
        self._refused: LinearProgramError | None = None
        for family in families(problem):
            try:
                self._searches.append(
                    ShortestSearch(family, problem)
                    if self._by_time
                    else FamilySearch(family, problem, time_s)
                )
            except LinearProgramError as error:
                self._refused = self._refused or error
        #: The orders that meet the time, the best first.
        self.judged = self.judge(problem)

    def judge(self, problem: Problem) -> list[Judged]:
        """Return the orders that meet the time within limits, the search's or others, best first.

        LinearProgramError: there is none; the limit of microbatches is blamed if it is below what
        the framework's own order holds.
        """
        judged: list[Judged] = []
        for search in self._searches:
            judged += search.search(problem, judged)
        if not judged:
            check_own_within(self._own, problem.most_in_flight, LinearProgramError)
            own = self.problem.optimizer(self._own)
            own.relaxed(self._time_s)  # raises, and says how late even it is
            raise self._refused or LinearProgramError(
                "No order that was found keeps the limits of memory",
                value=problem.most_in_flight,
                remedy="Allow more microbatches in flight.",
            )
        return sorted(judged, key=lambda order: order.worth)

    @property
    def most_extra_forwards(self) -> int:
        """The most microbatches that limits let a stage hold beyond the framework's order."""
        own, job = self._own.peak_in_flight, self._own.num_microbatches * self._own.num_chunks
        most = self.problem.most_in_flight or [job] * len(own)
        more = max(limit - peak for limit, peak in zip(most, own, strict=True))
        return max(0, ceil(more / self._own.num_chunks))

    def plan(self) -> Plan:
        """Return the best plan; LinearProgramError: late clocks, dwell or limits leave none."""
        return best_plan(self.judged, self.planner)

    def competing(self) -> list[Optimizer]:
        """Return optimizers of the framework's order, EnvPipe's, and the best of each family."""
        orders = [self._own]
        if any(search.family == ENVPIPE for search in self._searches):
            orders += envpipe_orders(self.problem)[:1]
        orders += [order.optimizer.schedule for order in best_by_family(self.judged)]
        return [
            self.problem.optimizer(order, good_gap=FRONTIER_GAP)
            for order in {order.stages: order for order in orders}.values()
            if self.problem.allows(order)
        ]

    def bound_j(self, plan: Plan) -> float:
        """Return what no order of any family can go below in a plan's time, J."""
        time_s = plan.cost.iteration_time_s
        bounds_j = []
        for search in self._searches:
            with suppress(LinearProgramError):  # no order of that family is so fast
                if isinstance(search, FamilySearch):
                    bounds_j.append(search.any_order_bound_j(time_s))
        return min(bounds_j, default=0.0)

    def next_microbatch_percent(self) -> float | None:
        """Return what another microbatch in flight on each stage would save, before rounding.

        None without a limit of microbatches, and for other objectives than the least energy.
        """
        problem, in_flight = self.problem, self.problem.max_in_flight
        if in_flight is None or problem.objective.goal != Goal.ENERGY:
            return None
        raised = tuple(limit + problem.num_chunks for limit in in_flight)
        more, now = self.judge(replace(problem, max_in_flight=raised))[0], self.judged[0].score
        return 100 * max(0.0, 1 - more.score / now) if now else 0.0

    def _won_percent(self, score: float, plan: Plan) -> float:
        """Return what a score wins over a plan's baseline; 0 if the profile has no energies."""
        own = self.problem.objective.judged(plan.baseline.cost)
        return 100 * (1 - score / own) if own else 0.0

    def splitting(self, plan: Plan) -> str:
        """Say what splitting backwards wins for a plan; empty if only one way was judged.

        The best order that splits some is held against the best that splits none, before rounding.
        """
        best = {order.optimizer.schedule.split: order for order in reversed(self.judged)}
        if len(best) < 2:
            return ""
        split, whole = (f"{self._won_percent(best[s].score, plan):.1f} %" for s in (True, False))
        won = "less time" if self._by_time else "saved"
        if plan.schedule.split:
            return f"Split backwards: {split} {won} instead of {whole} without"
        return f"Whole backwards: {whole} {won}, and {split} with split ones"

    def notes(self, plan: Plan) -> tuple[str, ...]:
        """Return what a user should know of the search for a plan."""
        tried = sum(search.orders_tried for search in self._searches)
        splits = any(s.family.split for s in self._searches)
        of = f"of whole {'and split ' if splits else ''}backwards"
        notes = [f"{tried} orders were compared."]
        if not self._by_time:
            most = self._won_percent(self.bound_j(plan), plan)
            notes[0] += f" No order {of} can save more than {most:.2f} % at this deadline."
        if (
            self.problem.channel_capacity is not None
            and Kind.INPUT_GRADIENT in self.problem.profile.kinds
        ):
            notes.append("Orders that split backwards were left out: they have no such limit.")
        best = best_by_family(self.judged)
        if len(best) > 1:
            savings = ", ".join(
                f"{order.family} {self._won_percent(order.score, plan):.2f} % "
                f"({max(order.optimizer.schedule.microbatches_in_flight):g} in flight)"
                for order in best
            )
            notes.append(f"Families of orders by what they save before rounding: {savings}.")
        notes += filter(None, [self.splitting(plan)])
        split = self.problem.profile.assumed
        if plan.schedule.split and split is not None:
            notes.append(
                f"Assumed, not measured: a backward in two parts takes {100 * split.overhead:g} % "
                f"more, {100 * split.input_share:g} % of it for the gradient of its input."
            )
        return tuple(notes)


def best_plan(judged: Iterable[Judged], planner: ObjectivePlanner) -> Plan:
    """Return the best plan of the first few orders, and of the framework's own if it is among them.

    What is gained must be worth its memory. LinearProgramError: none of them has a plan.
    """
    best: Plan | None = None
    least_judged = least = inf
    refused: LinearProgramError | None = None
    for rank, order in enumerate(sorted(judged, key=lambda order: order.worth)):
        always = order.optimizer.schedule.stages == order.own.stages
        if (rank >= _ROUNDED and not always) or order.worth >= least_judged:
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


@dataclass(frozen=True)
class MemoryPoint:
    """The best plan where stages hold at most a number of microbatches beyond Megatron's order."""

    max_extra_forwards: int
    plan: Plan

    @property
    def peak_in_flight(self) -> float:
        """The most microbatches that a stage holds."""
        return max(self.plan.schedule.microbatches_in_flight)


def memory_frontier(search: AutoSearch) -> list[MemoryPoint]:
    """Plan all families for rising limits, as long as the best order needs more.

    A limit that buys next to nothing (`WORTH`) is left out, and so is one within which no order
    meets the deadline. LinearProgramError: late clocks, the dwell time or limits leave no plan.
    """
    points: list[MemoryPoint] = []
    refused: LinearProgramError | None = None
    needed = search.judged[0].more_in_flight
    for most in _rising(search.most_extra_forwards):
        try:
            judged = search.judge(replace(search.problem, max_extra_forwards=most))
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
