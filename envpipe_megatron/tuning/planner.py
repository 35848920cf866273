"""Plans of a job, made beside training from what is known of its units."""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import numpy as np

from envpipe_megatron.core.conditions import known_conditions
from envpipe_megatron.core.plan import Plan
from envpipe_megatron.core.profile import Profile
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.policies.objective import LEAST_ENERGY, SHORTEST, Objective
from envpipe_megatron.policies.optimal.linear_program import LinearProgramError
from envpipe_megatron.policies.planner import Planned, solve
from envpipe_megatron.policies.problem import Problem
from envpipe_megatron.tuning.background import Background
from envpipe_megatron.tuning.command_maker import Budget
from envpipe_megatron.tuning.commands import Clocked
from envpipe_megatron.tuning.measured.store import Store
from envpipe_megatron.tuning.parking import parked, still_parked
from envpipe_megatron.tuning.replicas import gpu_power_w, level_factor

#: A new plan must be better by this share than the one that runs.
_WORTH = 5e-4
#: A plan that is nearer to a power budget than this share keeps it, and makes use of it.
NEAR = 0.004
#: Most plans for budgets that are kept: where budgets change each minute, 0.3 % less time is lost.
_MOST_KNOWN = 8
#: The policy of what runs while no plan could be made.
UNPLANNED = "baseline"

#: Says what a job plans by a profile: for an order, or the best there is.
Ask: TypeAlias = Callable[[Profile, Schedule | None], Problem]
#: Plans by level of the frontier.
Plans: TypeAlias = dict[int, Plan]
#: The same, and what splitting backwards wins by the best of them, in words.
_Made: TypeAlias = tuple[Plans, str]

logger = logging.getLogger(__name__)


def first_plans(asked: Mapping[int, Sequence[Problem]], levels: Sequence[int] = ()) -> _Made:
    """Return the first plan that there is of those asked for, by level; LinearProgramError: none.

    And of other levels of the frontier, plans in the order of that of level 0.
    """
    made: dict[int, Planned] = {}
    for level, (*others, last) in asked.items():
        for one in others:
            with suppress(LinearProgramError):
                made[level] = solve(one)
                break
        else:
            made[level] = solve(last)
    for level in levels:
        lead, problem = made[0].plan, asked[0][0]
        own_s, factor = lead.cost.iteration_time_s, level_factor(level)
        like = replace(problem, order=lead.schedule, own_s=own_s, deadline_factor=factor)
        made[level] = solve(replace(like, objective=LEAST_ENERGY))
    won = made[0].auto.splitting(made[0].plan) if made[0].auto else ""
    return {level: of.plan for level, of in made.items()}, won


class Planner:
    """Plans beside training from what is known now.

    Args:
        store: what is known of its units.
        ask: says what to plan.
        check: raises EnvPipeError for a plan that the job cannot run.
        background: runs one piece of planning at a time.
        objective: of new plans; `BudgetedPlans` changes it.
        max_slowdown: share by which steps may last longer than the framework's own at full clock,
            or than a plan says where no deadline is set.
        min_dwell_s: least time between two changes of a GPU's clock.
    """

    def __init__(
        self,
        store: Store,
        ask: Ask,
        check: Callable[[Plan], None],
        background: Background[_Made],
        objective: Objective,
        max_slowdown: float,
        min_dwell_s: float,
    ) -> None:
        self._store, self._ask, self._check = store, ask, check
        self.objective, self._max_slowdown = objective, max_slowdown
        self._min_dwell_s, self._background = min_dwell_s, background
        #: What splitting backwards wins by the last best plan, until somebody has said it.
        self.won = ""
        #: Why nothing could be begun.
        self._failure: Exception | None = None
        #: Whether what is planned, or was last, is the best order, not only clocks.
        self.reorders = True

    @property
    def sets_deadline(self) -> bool:
        """True if plans may take no longer than the framework's own order."""
        return self.objective == LEAST_ENERGY

    def allowed(self, expected: float = 1.0) -> float:
        """Return what steps may last where this is `expected`, both in steps of the framework's."""
        return (1.0 if self.sets_deadline else max(1.0, expected)) * (1 + self._max_slowdown)

    @property
    def busy(self) -> bool:
        """True if plans are being made, or were made and not taken."""
        return self._failure is not None or self._background.busy

    def take(self) -> Plans | str | None:
        """Return what was made, once; None if there is nothing yet; in words why it failed."""
        failure, self._failure = self._failure, None
        try:
            if failure is not None:
                raise failure
            if (made := self._background.take()) is None:
                return None
            plans, self.won = made
            for plan in plans.values():
                self._check(plan)
            return plans
        except Exception as error:  # of any kind: there is a plan to go on with
            if not isinstance(error, EnvPipeError):
                logger.exception("Planning failed")
            return f"nothing better is planned: {type(error).__name__}: {error}"

    def begin(
        self,
        order: Schedule | None,
        faster: float = 0.0,
        levels: Sequence[int] = (),
        *,
        whole: bool = False,
    ) -> None:
        """Begin a plan for an order, or for the best there is: level 0 of what `take` returns.

        Args:
            order: None for the best.
            faster: share by which it is to be faster than what is asked, if that is possible.
            levels: of the frontier, for which there are to be plans in its order too.
            whole: whether level 1 is to be the best plan without split backwards.
        """
        self.reorders = order is None
        try:
            known = self._store.profile(careful=True)
            asked = {0: [self._problem(known, order)]}
            if faster and self.sets_deadline:
                asked[0].insert(0, replace(asked[0][0], deadline_factor=1 - faster))
            if whole:
                asked[1] = [self._problem(known.whole(), None)]
            self._background.start(partial(first_plans, asked, levels))
        except Exception as error:  # of any kind: whoever takes the plans raises it
            self._failure = error

    def _problem(self, known: Profile, order: Schedule | None) -> Problem:
        return replace(self._ask(known, order), objective=self.objective)

    def unplanned(self, own: Clocked) -> Plan:
        """Return the plan of an order for which none was made; EnvPipeError without meters."""
        known = self._store.profile(careful=False)
        return Plan(UNPLANNED, own.schedule, own.frequency_mhz, known, known_conditions(known))

    def repriced(self, plan: Plan) -> Plan:
        """Return the same order and clocks, at what they take by now."""
        profile = self._store.profile(careful=False)
        plain = replace(
            plan,
            profile=profile,
            conditions=known_conditions(profile),
            park_mhz=None,
            energy_lower_bound_j=None,
        )
        return still_parked(plain, plan.park_mhz)

    def ready(self, plan: Plan) -> Plan:
        """Return a plan as it would run: repriced, and parked if that pays."""
        return parked(self.repriced(plan), self._store, self._min_dwell_s, _WORTH)

    def capped(self, plan: Plan, power_w: float) -> Plan:
        """Return a plan, ready, with all units below the clock at which GPUs take more than W.

        Where none is low enough, at the lowest that are known.
        """
        today = replace(self.repriced(plan), park_mhz=None)
        rows = [of[-1].frequency_mhz for kinds in today.profile.rows for of in kinds.values()]
        least_mhz = np.array(rows)[today.profile.keys(plan.schedule)]

        def below(limit_mhz: int) -> Plan:
            clocks_mhz = np.maximum(np.minimum(today.frequency_mhz, limit_mhz), least_mhz)
            return replace(today, frequency_mhz=clocks_mhz)

        clocks_mhz = self._store.clocks_mhz.astype(int).tolist()
        within = bisect_right(clocks_mhz, power_w, key=lambda mhz: gpu_power_w(below(mhz)))
        return self.ready(below(clocks_mhz[max(within - 1, 0)]))

    def better(self, new: Plan, running: Plan, own_s: float) -> bool:
        """True if a ready plan is better by the objective than one that runs, or that is too slow.

        The framework's own order takes `own_s` by what is known.
        """
        today = self.repriced(running)
        if self.sets_deadline and today.cost.iteration_time_s > own_s * self.allowed():
            return new.cost.iteration_time_s < today.cost.iteration_time_s
        num_gpus = int(today.conditions.gpus_by_stage.sum())
        new_score, score = (self.objective.score(plan.cost, num_gpus) for plan in (new, today))
        return new_score < score * (1 - _WORTH)


class BudgetedPlans:
    """The plan that runs without a power budget, and the last ones that were made for budgets.

    Args:
        planner: makes plans of a job; `limit` sets its objective.
        budget: of the same job.
    """

    def __init__(self, planner: Planner, budget: Budget) -> None:
        self._planner, self._budget = planner, budget
        self._objective = planner.objective
        self._usual: Plan
        self._known: deque[Plan] = deque(maxlen=_MOST_KNOWN)

    @property
    def bound(self) -> bool:
        """True if plans are made to keep the budget, which the usual one does not."""
        return self._planner.objective is not self._objective

    def begin_with(self, plan: Plan) -> Plan:
        """Have a plan be the only one, the usual; returns it."""
        self._usual = plan
        self._known.clear()
        return plan

    def add(self, plan: Plan) -> None:
        """Add what was made for the planner's objective of now."""
        if self.bound:
            self._known.append(plan)
        else:
            self._usual = plan

    def fastest(self, running: Plan) -> Plan:
        """Return the fastest plan that keeps the budget by lower clocks, of all and one that runs.

        As it would run; where none is low enough, at the lowest clocks that are known.
        """
        allowed_w = self._budget.allowed_w / self._budget.correction
        plans = self._planner.ready(self._usual), running, *self._known
        within = [self._planner.capped(plan, allowed_w) for plan in plans]
        return min(within, key=lambda plan: plan.cost.iteration_time_s)

    def limit(self, leads: float) -> None:
        """Have new plans keep the budget, if the usual one does not.

        `leads` is the power of a GPU of the plan that runs, as a share of that of all replicas.
        """
        planner, budget = self._planner, self._budget
        usual, planner.objective = planner.ready(self._usual), self._objective
        if budget.above(gpu_power_w(usual)) > NEAR:
            gpus = float(usual.conditions.gpus_by_stage.sum())
            allowed_w = budget.allowed_w / budget.correction
            # Not for least energy within the power, but for time.
            goal = SHORTEST if self._objective == LEAST_ENERGY else self._objective
            planner.objective = replace(goal, power_cap_w=gpus * leads * allowed_w)
