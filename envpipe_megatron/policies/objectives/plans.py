"""Plans of one order for an objective: in the best time, and within its limits by the evaluator.

Rounding to clocks that exist takes a little more than the linear program said, and what a window or
a node takes it does not know. So a plan that breaks a limit gets more time, as little as will do.
Where time alone does not help, a ceiling on all clocks may: there the search is a heuristic, whose
result is checked.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from envpipe_megatron.core.plan import Plan
from envpipe_megatron.policies.objectives.objective import LEAST_ENERGY, Goal, Objective
from envpipe_megatron.policies.objectives.trade_off import best_time_s
from envpipe_megatron.policies.optimal.linear_program import LinearProgramError
from envpipe_megatron.policies.optimal.optimizer import Optimizer

#: Iteration times that differ by this fraction are as good as each other.
_SAME_TIME = 2e-4
#: Plans that are made to find the shortest time within limits.
_MOST_PLANS = 12
#: Advice where a deadline is given, or the baseline's time is one.
_MORE_TIME = ", or allow more time (--deadline-factor, --objective time)"


@dataclass(frozen=True)
class _Found:
    """What was found for an order.

    Args:
        plan: None if there was none.
        excess: how much of its tightest limit it takes.
        score: what is to be least.
    """

    plan: Plan | None = None
    excess: float = math.inf
    score: float = math.inf


def _rank(found: _Found) -> tuple[float, float]:
    """Lower is better: within the limits by the score, beyond them by how far."""
    return max(1.0, found.excess), found.score


@dataclass(frozen=True)
class ObjectivePlanner:
    """Makes plans of orders for an objective.

    Args:
        longest_s: no iteration may take longer; infinite for no such limit.
        min_dwell_s: as `Optimizer.plan` takes it.
    """

    objective: Objective
    longest_s: float
    min_dwell_s: float = 0.0

    def best_time_s(self, optimizer: Optimizer) -> float | None:
        """As `trade_off.best_time_s`."""
        return best_time_s(self.objective, optimizer, self.longest_s)

    def latest_time_s(self, optimizer: Optimizer, worth_w: float | None = None) -> float:
        """The longest time that is worth a look: no plan needs more, or it is forbidden."""
        return min(self.longest_s, optimizer.cheapest_s(worth_w))

    def score(self, plan: Plan) -> float:
        """What is to be least."""
        return self.objective.score(plan.cost, int(plan.conditions.gpus_by_stage.sum()))

    def plan(self, optimizer: Optimizer) -> Plan:
        """The best plan found within the limits.

        LinearProgramError: none was found, or no frequencies are in time.
        """
        early_s = self.best_time_s(optimizer) or self.latest_time_s(optimizer)
        found = self._found(optimizer, early_s)
        if found.excess > 1:
            found = self._later(optimizer, early_s, found)
            cap_w = self.objective.power_cap_w
            if cap_w is not None and (found.excess > 1 or self.objective.power_window_s):
                gpus = self.objective.gpus_below_cap(optimizer.conditions)
                first = self._found(optimizer, early_s, cap_w / gpus)
                found = min(found, self._later(optimizer, early_s, first, cap_w / gpus), key=_rank)
        plan = found.plan
        if plan is None or found.excess > 1:
            raise LinearProgramError(
                f"No plan of schedule '{optimizer.schedule.name}' was found within the limits",
                value=self.objective.to_json(),
                remedy="Raise the limits (in W and J) or allow more time."
                if plan is None
                else f"The nearest takes {plan.cost.iteration_time_s:.6g} s, "
                f"{plan.cost.energy_j:.6g} J and {self.objective.power_w(plan):.6g} W: raise the "
                f"limits, in W and J{'' if math.isinf(self.longest_s) else _MORE_TIME}.",
            )
        if self.objective != LEAST_ENERGY:
            plan = replace(plan, objective=self.objective.to_json())
        return plan

    def _later(
        self, optimizer: Optimizer, early_s: float, early: _Found, worth_w: float | None = None
    ) -> _Found:
        """The plan for the first time within limits, from one on; the nearest if there is none."""
        late_s = self.latest_time_s(optimizer, worth_w)
        if early.excess <= 1 or late_s <= early_s or self.objective.goal == Goal.ENERGY:
            return early
        excess, step = early.excess, _SAME_TIME
        best = min(early, self._found(optimizer, late_s, worth_w), key=_rank)
        for _ in range(_MOST_PLANS):
            if best.excess > 1 or late_s <= early_s * (1 + _SAME_TIME):
                break
            # A mean power falls at least as fast as time rises; an energy may need any step.
            least = 1.0 if self.objective.power_cap_w is None else excess
            time_s = min(early_s * max(least, 1 + step), math.sqrt(early_s * late_s))
            now = self._found(optimizer, time_s, worth_w)
            if now.plan is None or now.excess > 1:
                early_s, excess, step = time_s, now.excess, 3 * step
            else:
                late_s = now.plan.cost.iteration_time_s
            best = min(best, now, key=_rank)
        return best

    def _found(self, optimizer: Optimizer, time_s: float, worth_w: float | None = None) -> _Found:
        """The plan for a time; none if changes of clock leave none in time."""
        try:
            plan = optimizer.plan(time_s, self.min_dwell_s, worth_w)
        except LinearProgramError:
            if time_s >= self.longest_s:
                raise
            return _Found()
        return _Found(plan, self.objective.excess(plan), self.score(plan))
