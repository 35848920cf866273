"""The power budget of a running job: what it allows, how it was kept, and plans that keep it."""

from __future__ import annotations

import math
from collections import deque

from envpipe_megatron.core.plan import Plan
from envpipe_megatron.formats.wishes import NO_WISHES
from envpipe_megatron.tuning.commands import Window
from envpipe_megatron.tuning.judge import SILENT_S
from envpipe_megatron.tuning.planner import Planner
from envpipe_megatron.tuning.replicas import gpu_power_w

#: A window is above the budget if it takes more by this share.
EXCEEDS = 0.01
#: A plan that is nearer to the budget than this share keeps it, and makes use of it.
NEAR = 0.004
#: So many windows of a plan are remembered, by their mean.
_REMEMBERED = 8
#: Most plans for budgets that are kept: where budgets change each minute, 0.3 % less time is lost.
_MOST_KNOWN = 8
_UNSEEN = "For some time no meter said what GPUs took: nobody knows if the power budget was kept"


class Budget:
    """Mean power of a GPU: what operators allow, and what windows of iterations took.

    Attributes:
        own_w: what a GPU took in the framework's own order at the highest clocks the last time.
        billed: what the bill says where a budget was not kept, or no meter saw it.
        fails: whether the least that is reachable takes more than the budget of now.
        correction: by which predictions of power are multiplied, from what meters saw.
        windows: of the plan that runs, in which GPUs were metered.
    """

    def __init__(self) -> None:
        self.own_w, self.billed, self.fails = math.nan, "", False
        self.correction, self.windows = 1.0, 0
        self._wishes = NO_WISHES
        #: Since the first budget, as `facts` has them.
        self._sums = dict.fromkeys(
            ("time_s", "energy_j", "peak_w", "swing_w", "ramp_w_per_s", "exceeded_s"), 0.0
        )
        #: Power of the last window, and how long it lasted; how long meters have said nothing.
        self._last: tuple[float, float] | None = None
        self._unseen_s = 0.0

    @property
    def is_set(self) -> bool:
        """True if there is a budget."""
        return self._wishes.power_budget is not None

    @property
    def allowed_w(self) -> float:
        """Return the mean power of a GPU that is allowed now; NaN: a share of what is unknown."""
        share = self._wishes.power_budget_share
        return self._wishes.power_budget_w or (math.inf if share is None else share * self.own_w)

    @property
    def forbids_own(self) -> bool:
        """True if the framework's own order may not run at the highest clocks."""
        return self.allowed_w < self.own_w

    @property
    def facts(self) -> dict[str, float | None] | None:
        """Return, as JSON, today's budget and figures since the first one; None without any.

        Mean, peak of a window, largest swing from one to the next, fastest swing (ramp), and how
        long windows took more above the budget of then than `EXCEEDS`; null if none was metered.
        """
        if not (self.is_set or self._last):
            return None
        budget_w = self.allowed_w if math.isfinite(self.allowed_w) else None
        known = self._sums if self._last else dict.fromkeys(self._sums)
        mean_w = self._sums["energy_j"] / self._sums["time_s"] if self._last else None
        return {"budget_w": budget_w, "mean_w": mean_w, **known}

    def update(self, window: Window) -> str:
        """Take what an operator asks for; returns what is new, in words."""
        before, self._wishes = self._wishes.power_budget, window.wishes
        if before == self._wishes.power_budget:
            return ""
        self.billed += ", until it was changed" if self.fails else ""
        self.fails = False
        if not self.is_set:
            return "the power budget is lifted"
        if math.isnan(self.own_w):
            return f"power budget: {self._wishes.power_budget}; full clock is not metered yet"
        return f"power budget: {self.allowed_w:.1f} W of a GPU, which took {self.own_w:.1f} W"

    def count(self, window: Window) -> str:
        """Add a window to the figures, if there is or was a budget; returns what is new."""
        if self.facts is None:
            return ""
        power_w, time_s = window.power_w, float(window.steps_s.sum())
        if math.isnan(power_w):
            self._unseen_s += time_s * self.is_set
            if self._unseen_s < SILENT_S or self.fails or self.billed == _UNSEEN:
                return ""
            self.billed = _UNSEEN
            return self.billed
        sums, (last_w, last_s) = self._sums, self._last or (power_w, time_s)
        swing_w, self._unseen_s = abs(power_w - last_w), 0.0
        sums["time_s"] += time_s
        sums["energy_j"] += power_w * time_s
        sums["exceeded_s"] += time_s * (power_w > self.allowed_w * (1 + EXCEEDS))
        of_window = (power_w, swing_w, swing_w / (time_s + last_s) * 2)
        for name, value in zip(("peak_w", "swing_w", "ramp_w_per_s"), of_window, strict=True):
            sums[name] = max(sums[name], value)
        self._last = power_w, time_s
        return ""

    def compare(self, window: Window, predicted_w: float) -> None:
        """Learn how much more a window took than was predicted."""
        if self.is_set and not math.isnan(window.power_w):
            self.windows += 1
            off = window.power_w / predicted_w - self.correction
            self.correction += off / min(self.windows, _REMEMBERED)

    def above(self, predicted_w: float) -> float:
        """Return by which share a plan that is predicted to take this power exceeds the budget."""
        return self.correction * predicted_w / self.allowed_w - 1

    def reach(self, least_w: float) -> str:
        """Take what the least that is reachable takes; returns what is new, in words."""
        if self.fails or not least_w > self.allowed_w * (1 + EXCEEDS):
            return ""
        self.fails = True
        self.billed = (
            f"The power budget of {self.allowed_w:.1f} W of a GPU is not kept: the least that "
            f"is reachable is {least_w:.1f} W"
        )
        return self.billed


class BudgetedPlans:
    """The plan that runs without a power budget, and the last ones that were made for budgets.

    Args:
        planner: makes plans of a job; `limit` sets its limits.
        budget: of the same job.
    """

    def __init__(self, planner: Planner, budget: Budget) -> None:
        self._planner, self._budget = planner, budget
        self._limits = planner.limits
        self._usual: Plan
        self._known: deque[Plan] = deque(maxlen=_MOST_KNOWN)

    @property
    def bound(self) -> bool:
        """True if plans are made to keep the budget, which the usual one does not."""
        return self._planner.limits is not self._limits

    def begin_with(self, plan: Plan) -> Plan:
        """Have a plan be the only one, the usual; returns it."""
        self._usual = plan
        self._known.clear()
        return plan

    def add(self, plan: Plan) -> None:
        """Add what was made by the planner's limits of now."""
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
        usual, planner.limits = planner.ready(self._usual), self._limits
        if budget.above(gpu_power_w(usual)) > NEAR:
            gpus = float(usual.conditions.gpus_by_stage.sum())
            allowed_w = budget.allowed_w / budget.correction
            planner.limits = planner.limits.within(gpus * leads * allowed_w)
