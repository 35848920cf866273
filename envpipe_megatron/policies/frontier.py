"""Searches over the deadline of an order: the time-energy frontier, and plans for an objective.

The least energy of an order is convex in the time of its iteration, being the optimum of a linear
program in its right side. A frontier plans for deadlines from the fastest iteration to the
cheapest; where the order is free, a few orders compete at every deadline.

An objective is best at one time of that curve. Rounding to clocks that exist takes a little more
than the linear program said, and the power of a window or a node is not in it. So a plan that
breaks a limit gets more time, as little as will do. Where that keeps no power cap, waiting is
priced at the cap: there the search is a heuristic, whose result is checked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from envpipe_megatron.core.arrays import FloatArray
from envpipe_megatron.core.plan import Plan
from envpipe_megatron.core.timeline import RELATIVE_TOLERANCE
from envpipe_megatron.policies.objective import LEAST_ENERGY, Goal, Objective
from envpipe_megatron.policies.optimal.linear_program import LinearProgramError
from envpipe_megatron.policies.optimal.optimizer import Optimizer

#: Deadlines at which competing orders are compared before the others are planned.
_PROBES = 6
#: The gap that is good enough for a point of a frontier: pairs of moves take most of the time and
#: gain a hundredth of a percent.
FRONTIER_GAP = 0.01
#: Energies that are as close as this count as equal: rounding loses more.
_CLOSE = 1e-4
#: Times from the fastest to the cheapest at which an objective is looked at, and solutions for it.
_TIMES, _MOST_SOLUTIONS = 20_001, 40
#: Iteration times that differ by this fraction are as good as each other.
_SAME_TIME = 2e-4
#: Plans that are made to find the shortest time within limits.
_MOST_PLANS = 12
#: Advice where a deadline is given, or the baseline's time is one.
_MORE_TIME = ", or allow more time (--deadline-factor, --objective time)"


def plan_frontier(
    optimizers: Sequence[Optimizer], num_points: int, min_dwell_s: float = 0.0
) -> list[Plan]:
    """Return the plans that no other found beats in both time and energy, the fastest first.

    Args:
        optimizers: one for each order that competes, all for one profile and conditions.
        num_points: deadlines, evenly from the fastest iteration to the one that the least energy
            takes. Points that round to the same plan or a worse one are left out, and deadlines
            that late clocks or the dwell time leave no plan to; if that is all, the one point has
            no deadline.

    Raises LinearProgramError if there is no plan for any deadline.
    """
    fastest_s = min(optimizer.fastest_s for optimizer in optimizers)
    cheapest_s = max(optimizer.cheapest_s() for optimizer in optimizers)
    deadlines = np.linspace(fastest_s, max(fastest_s, cheapest_s), num_points)
    energy = _relaxed_energies(optimizers, deadlines)
    ranked = [optimizers[int(best)] for best in energy.argmin(axis=0)]
    plans: list[Plan] = []
    for deadline_s, optimizer in zip(deadlines.tolist(), ranked, strict=True):
        with suppress(LinearProgramError):  # late clocks and dwell times take time of their own
            plans.append(optimizer.plan(deadline_s, min_dwell_s))
    plans = plans or [ranked[-1].plan(ranked[-1].no_deadline_s, min_dwell_s)]
    kept: list[Plan] = []
    for plan in sorted(plans, key=lambda p: (p.cost.iteration_time_s, p.cost.energy_j)):
        if not kept or plan.cost.energy_j < kept[-1].cost.energy_j:
            kept.append(plan)
    return kept


def _relaxed_energies(optimizers: Sequence[Optimizer], deadlines: FloatArray) -> FloatArray:
    """Return [orders, deadlines] relaxed energy, infinite if an order is too slow.

    Energy over time is convex for each order, so between the probed deadlines it lies close to a
    line; the orders' own plans are certified one by one.
    """
    probed = np.unique(np.linspace(0, len(deadlines) - 1, _PROBES).astype(int))
    energy = np.full((len(optimizers), len(deadlines)), np.inf)
    for order, optimizer in enumerate(optimizers):
        if len(optimizers) == 1:
            energy[order] = 0.0
            continue
        meets = deadlines >= optimizer.fastest_s * (1 - RELATIVE_TOLERANCE)
        at = np.union1d(probed[meets[probed]], np.flatnonzero(meets)[:1])
        known = [optimizer.relaxed(float(deadlines[i])).cost_j for i in at]
        energy[order, meets] = np.interp(deadlines[meets], deadlines[at], known)
    return energy


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
        """Return the time that is best for an order if units ran between profiled clocks.

        None if no time up to the cheapest keeps the limits. LinearProgramError: the order takes
        longer than `longest_s` at any clocks. The highest of the known solutions' lines is nowhere
        above the energy; a solution at the time that it makes best shows whether it is that high
        there, or adds a line (Kelley's cutting planes in one dimension). Three to ten do.
        """
        objective = self.objective
        if objective.goal == Goal.ENERGY:
            return self.longest_s
        num_gpus = int(optimizer.conditions.gpus_by_stage.sum())
        limits = objective.limits(optimizer.schedule.num_stages)
        last_s = self.latest_time_s(optimizer)
        times_s = np.linspace(min(optimizer.fastest_s, last_s), last_s, _TIMES)
        energies_j = np.full(_TIMES, -np.inf)
        at, solved = 0, set[int]()
        while at not in solved and len(solved) < _MOST_SOLUTIONS:
            relaxed = optimizer.relaxed(float(times_s[at]))
            confirmed = len(solved) > 1 and relaxed.cost_j <= energies_j[at] * (1 + _CLOSE)
            solved.add(at)
            line_j = relaxed.lower_bound_j + relaxed.slope_w * (times_s - times_s[at])
            energies_j = np.maximum(energies_j, line_j)
            if confirmed:
                break
            within = np.ones(_TIMES, dtype=bool)
            for a, b, c in limits:
                within &= a * times_s + b * energies_j <= c + _CLOSE * _CLOSE * abs(c)
            if not within.any():
                return None
            scores = objective.scores(times_s, energies_j, num_gpus)
            at = int(np.where(within, scores, np.inf).argmin())
        # The curve bends where all units meet profiled times: a little before, one would not fit.
        return float(times_s[min(at + 1, _TIMES - 1) if at else 0])

    def latest_time_s(self, optimizer: Optimizer, worth_w: float | None = None) -> float:
        """Return the longest time that is worth a look: no plan needs more, or it is forbidden."""
        return min(self.longest_s, optimizer.cheapest_s(worth_w))

    def score(self, plan: Plan) -> float:
        """Return the quantity that is to be least."""
        return self.objective.score(plan.cost, int(plan.conditions.gpus_by_stage.sum()))

    def plan(self, optimizer: Optimizer) -> Plan:
        """Return the best plan found within the limits.

        LinearProgramError: none was found, or no frequencies are in time.
        """
        early_s = self.best_time_s(optimizer) or self.latest_time_s(optimizer)
        plan = self._planned(optimizer, early_s)
        if self._excess(plan) > 1:
            early_s = min(early_s, self.latest_time_s(optimizer))
            plan = self._later(optimizer, early_s, plan)
            cap_w = self.objective.power_cap_w
            if cap_w is not None and (self._excess(plan) > 1 or self.objective.power_window_s):
                worth_w = cap_w / self.objective.gpus_below_cap(optimizer.conditions)
                first = self._planned(optimizer, early_s, worth_w)
                other = self._later(optimizer, early_s, first, worth_w)
                plan = min(plan, other, key=self._rank)
        if plan is None or self._excess(plan) > 1:
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
        self,
        optimizer: Optimizer,
        early_s: float,
        early: Plan | None,
        worth_w: float | None = None,
    ) -> Plan | None:
        """Return the plan for the first time within limits; the nearest if there is none."""
        late_s, excess = self.latest_time_s(optimizer, worth_w), self._excess(early)
        in_time = early is not None and late_s <= early_s
        if excess <= 1 or in_time:
            return early
        step = _SAME_TIME
        best = min(early, self._planned(optimizer, late_s, worth_w), key=self._rank)
        if best is None:  # late clocks and dwell times take more than slower units do
            late_s = min(self.longest_s, optimizer.no_deadline_s)
            best = optimizer.plan(late_s, self.min_dwell_s, worth_w)
            late_s = best.cost.iteration_time_s
        for _ in range(_MOST_PLANS):
            if self._excess(best) > 1 or late_s <= early_s * (1 + _SAME_TIME):
                break
            # A mean power falls at least as fast as time rises; an energy may need any step.
            least = 1.0 if self.objective.power_cap_w is None else excess
            time_s = min(early_s * max(least, 1 + step), math.sqrt(early_s * late_s))
            now = self._planned(optimizer, time_s, worth_w)
            if now is None or self._excess(now) > 1:
                early_s, excess, step = time_s, self._excess(now), 3 * step
            else:
                late_s = now.cost.iteration_time_s
            best = min(best, now, key=self._rank)
        return best

    def _planned(
        self, optimizer: Optimizer, time_s: float, worth_w: float | None = None
    ) -> Plan | None:
        """Return the plan for a time; None if changes of clock leave none in time."""
        try:
            return optimizer.plan(time_s, self.min_dwell_s, worth_w)
        except LinearProgramError:
            if time_s >= self.longest_s:
                raise
            return None

    def _excess(self, plan: Plan | None) -> float:
        """Return how much of its tightest limit a plan takes."""
        return math.inf if plan is None else self.objective.excess(plan)

    def _rank(self, plan: Plan | None) -> tuple[float, float]:
        """Lower is better: within the limits by the score, beyond them by how far."""
        return max(1.0, self._excess(plan)), math.inf if plan is None else self.score(plan)
