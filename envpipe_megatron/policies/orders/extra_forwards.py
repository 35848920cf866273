"""Order and frequencies planned together: the extra forwards whose optimal plan is cheapest.

Every order is judged by its own linear program. The search starts at 1F1B, at multiples of
EnvPipe's counts (Choi et al., ATC'23, section 4.2) and at even ramps, lowered to the limits. From
the best of them it takes away what its own durations do not need, which a longest path tells in a
tenth of a linear program's time, and then moves single stages, front parts and rear parts of the
pipeline by one, as long as that saves energy.

Extra forwards matter while a pipeline fills and drains, so that long batches are searched by a
shorter one of the same pipeline, with as much time for each of its own order's seconds.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import add

import numpy as np

from envpipe_megatron.core.arrays import FloatArray
from envpipe_megatron.core.conditions import Conditions
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.profile import Profile
from envpipe_megatron.core.profile_rows import ProfileError
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.core.timeline import RELATIVE_TOLERANCE
from envpipe_megatron.policies.optimal.choices import waiting_floor_w
from envpipe_megatron.policies.optimal.linear_program import LinearProgramError
from envpipe_megatron.policies.optimal.optimizer import (
    Optimizer,
    iteration_time_s,
    order_at_maximum_s,
)
from envpipe_megatron.policies.orders.any_order import any_order
from envpipe_megatron.policies.orders.judged import ROUNDED, Judged, memory_worth
from envpipe_megatron.policies.problem import OrderLimits, envpipe_counts

Extra = tuple[int, ...]

#: Multiples of EnvPipe's counts that the search starts from.
_START_MULTIPLES = (1.0, 1.5, 2.0)
#: The same for even ramps: how many more than the next stage each stage has.
_START_RAMPS = (0.5, 1.0, 2.0, 3.0)
#: Units of all orders that a search may solve for beyond those that it starts from: five of 8 x 96.
_UNIT_BUDGET = 9_000
_FEWEST_ORDERS = 5
#: Batches of more microbatches a stage are searched by one of so many: two lose 2 points of saving.
_SEARCHED_PER_STAGE = 8
#: Of more units only the best order is planned: each takes minutes.
_MANY_UNITS = 50_000
#: Units of all orders whose longest path it may look at in between: 130 orders of 8 x 96.
_LOOK_BUDGET = 200_000


@dataclass(frozen=True)
class Candidate:
    """An order that the search looked at, with the energy of its relaxed plan.

    That is of the shorter batch if the search is by one.
    """

    extra_forwards: Extra
    relaxed_energy_j: float


@dataclass(frozen=True)
class _Solved:
    """An order with its relaxed plan: durations [num_stages, units_per_stage], and its energy."""

    schedule: Schedule
    duration_s: FloatArray
    energy_j: float


class OrderSearch:
    """Searches the orders of one job without chunks at one deadline; see `Optimizer`."""

    def __init__(
        self,
        profile: Profile,
        num_microbatches: int,
        conditions: Conditions,
        deadline_s: float,
        *,
        parking: bool = False,
    ) -> None:
        self._profile, self._conditions, self._parking = profile, conditions, parking
        self.num_microbatches, self._deadline_s = num_microbatches, deadline_s
        self._own = builders.one_f_one_b(profile.num_stages, num_microbatches)
        self._search_by(min(num_microbatches, _SEARCHED_PER_STAGE * profile.num_stages))
        #: What the search before found, perhaps within other limits: the next starts there too.
        self._best: Extra = (0,) * profile.num_stages
        #: Of EnvPipe's rule, within the limits of the last search.
        self._by_rule: Extra = self._best
        #: Of the last search.
        self._limits: OrderLimits | None = None

    def _search_by(self, microbatches: int) -> None:
        """Search by a batch of this many microbatches."""
        stages = self._profile.num_stages
        self._searched, self._searched_s = microbatches, self._deadline_s
        self._searched_own = self._own
        if self._by_shorter:
            self._searched_own = builders.one_f_one_b(stages, microbatches)
            short_s, own_s = (
                order_at_maximum_s(order, self._profile, self._conditions)
                for order in (self._searched_own, self._own)
            )
            self._searched_s *= short_s / own_s
        #: None if an order does not meet the deadline.
        self._solved: dict[Extra, _Solved | None] = {}
        units = 2 * stages * microbatches
        self._budget = max(_FEWEST_ORDERS, _UNIT_BUDGET // units)
        self._most_looks = _LOOK_BUDGET // units

    @property
    def _by_shorter(self) -> bool:
        return self._searched < self.num_microbatches

    @property
    def orders_tried(self) -> int:
        """Orders whose linear program was solved."""
        return len(self._solved)

    def search(self, limits: OrderLimits) -> list[Candidate]:
        """The orders within limits that meet the deadline, the best first.

        1F1B is among them where it does; with p2p latency other orders can be faster.
        LinearProgramError: no order that the search starts from meets the deadline.
        """
        stages, self._limits = self._profile.num_stages, limits
        caps = builders.extra_forward_caps(stages, self._searched)
        limits = replace(limits, most=tuple(map(min, limits.most, caps)))
        first = (0,) * stages
        fitted = starts(self._profile, self.num_microbatches, limits)
        self._by_rule = fitted[0]
        fitted.append(limits.fit(self._best))
        # Where memory holds the front back, what the rear may have beyond it often does harm.
        falling = [limits.fit(list(accumulate(counts, min))) for counts in fitted]
        seeds = {first, *fitted, *falling}
        best = min(seeds, key=self._score)
        if math.isinf(self._energy(best)):
            if self._by_shorter:
                self._search_by(self.num_microbatches)
                return self.search(self._limits)
            self.optimizer(first).relaxed(self._deadline_s)  # raises, and says why
        best = self._trimmed(best, limits)
        last = self.orders_tried + self._budget
        directions = _directions(self._profile.num_stages)
        failed = 0  # directions in a row that led nowhere
        while failed < len(directions) and self.orders_tried < last:
            direction = directions.popleft()
            directions.append(direction)
            failed += 1
            near = tuple(map(add, best, direction))
            while limits.allow(near) and self._score(near) < self._score(best):
                best, failed = near, 0
                near = tuple(map(add, best, direction))
        self._trimmed(best, limits)
        known = [e for e in self._solved if math.isfinite(self._energy(e)) and limits.allow(e)]
        found = [Candidate(e, self._energy(e)) for e in sorted(known, key=self._score)]
        self._best = found[0].extra_forwards
        return found

    def judge(self, candidates: Iterable[Candidate]) -> list[Judged]:
        """Those of the last search's candidates that `judged.best_plan` may plan, by all units.

        A shorter batch gains more by filling and draining faster: where only that made its orders
        meet the deadline, the whole batch is searched. LinearProgramError as of `search`.
        """
        judged: list[Judged] = []
        only_best = self._own.num_units > _MANY_UNITS
        for rank, candidate in enumerate(candidates):
            extra = candidate.extra_forwards
            by_rule = extra == self._by_rule
            if not judged or (not only_best and (rank < ROUNDED or not any(extra) or by_rule)):
                optimizer, energy_j = self.optimizer(extra), candidate.relaxed_energy_j
                with suppress(LinearProgramError):  # too late by all units
                    if self._by_shorter:
                        energy_j = optimizer.relaxed(self._deadline_s).cost_j
                    judged.append(Judged("envpipe", optimizer, energy_j, self._own, by_rule))
        if not judged and self._by_shorter and self._limits is not None:
            self._search_by(self.num_microbatches)
            return self.judge(self.search(self._limits))
        return judged

    def any_order_bound_j(self, or_at_s: float = 0.0) -> float:
        """What no order and no frequencies can go below at the deadline or a later one, J."""
        profile, conditions = self._profile, self._conditions
        floor_w = waiting_floor_w(profile, conditions, self._parking)
        deadline_s = max(self._deadline_s, or_at_s)
        job = profile, conditions, self.num_microbatches, deadline_s, floor_w
        return any_order(*job).energy_lower_bound_j

    def optimizer(self, extra_forwards: Extra, microbatches: int | None = None) -> Optimizer:
        """The optimizer of an order of the job, or of that with so many microbatches."""
        schedule = self._schedule(extra_forwards, microbatches or self.num_microbatches)
        return Optimizer(schedule, self._profile, self._conditions, parking=self._parking)

    def _schedule(self, extra_forwards: Extra, microbatches: int) -> Schedule:
        if not any(extra_forwards):
            return self._own if microbatches == self.num_microbatches else self._searched_own
        return builders.envpipe(self._profile.num_stages, microbatches, extra_forwards)

    def _solve(self, extra: Extra) -> _Solved | None:
        """The relaxed plan of an order, solved for once."""
        if extra not in self._solved:
            optimizer = self.optimizer(extra, self._searched)
            self._solved[extra] = None
            if optimizer.fastest_s <= self._searched_s * (1 + RELATIVE_TOLERANCE):
                relaxed, schedule = optimizer.relaxed(self._searched_s), optimizer.schedule
                duration_s = relaxed.duration_s.reshape(schedule.is_backward.shape)
                self._solved[extra] = _Solved(schedule, duration_s, relaxed.cost_j)
        return self._solved[extra]

    def _trimmed(self, extra: Extra, limits: OrderLimits) -> Extra:
        """As few extra forwards as the durations of the relaxed plan need, solved for.

        Where they take no more time in another order, that order takes no more energy.
        """
        solved = self._solve(extra)
        assert solved is not None  # the best of a search meets the deadline
        end_s = self._end_s(solved, solved.schedule) * (1 + RELATIVE_TOLERANCE)
        looks = self._most_looks
        directions = [d for d in _directions(len(extra)) if min(d) < 0]
        trimmed, before = extra, None
        while trimmed != before:
            before = trimmed
            for direction in sorted(directions, key=sum):
                near = tuple(map(add, trimmed, direction))
                while looks > 0 and limits.allow(near):
                    looks -= 1
                    if self._end_s(solved, self._schedule(near, self._searched)) > end_s:
                        break
                    trimmed, near = near, tuple(map(add, near, direction))
        return min(extra, trimmed, key=self._score)

    def _end_s(self, solved: _Solved, schedule: Schedule) -> float:
        """When an iteration ends whose units take what they take in a solved order."""
        duration_s = np.empty_like(solved.duration_s)
        # All orders run forwards, and backwards, as their microbatches are numbered.
        duration_s[schedule.is_backward] = solved.duration_s[solved.schedule.is_backward]
        duration_s[~schedule.is_backward] = solved.duration_s[~solved.schedule.is_backward]
        return iteration_time_s(schedule, duration_s, self._conditions)

    def _energy(self, extra: Extra) -> float:
        solved = self._solve(extra)
        return math.inf if solved is None else solved.energy_j

    def _score(self, extra: Extra) -> float:
        """What orders are compared by."""
        solved = self._solve(extra)
        if solved is None:
            return math.inf
        # What is saved is as much of a longer batch's energy as that is longer.
        longer = self.num_microbatches / self._searched
        worth = memory_worth(solved.schedule, self._searched_own)
        return solved.energy_j * (1 + longer * (worth - 1))


def starts(profile: Profile, num_microbatches: int, limits: OrderLimits) -> list[Extra]:
    """Extra forwards to begin a search with, those of EnvPipe's rule first."""
    stages = profile.num_stages
    try:
        wanted = envpipe_counts(profile, num_microbatches)
    except ProfileError:  # no energy valley, which only EnvPipe's rule needs
        wanted = [0] * stages
    scaled = [[math.ceil(m * count) for count in wanted] for m in _START_MULTIPLES]
    ramps = [[int(fall * s) for s in reversed(range(stages))] for fall in _START_RAMPS]
    return [limits.fit(counts) for counts in (*scaled, *ramps)]


def _directions(num_stages: int) -> deque[Extra]:
    """One more or one less: on one stage, on a front part, on a rear part of the pipeline."""
    # From the rear, where counts are small and EnvPipe's, rounded down, miss most.
    rearmost_first = [*reversed(range(num_stages - 1)), num_stages - 1]
    moved = [tuple(int(s == stage) for s in range(num_stages)) for stage in rearmost_first]
    for stage in range(1, num_stages):
        moved.append(tuple(int(s <= stage) for s in range(num_stages)))
        moved.append(tuple(int(s >= stage) for s in range(num_stages)))
    return deque(tuple(step * on for on in stages) for step in (1, -1) for stages in moved)
