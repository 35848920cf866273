"""The power budget of a running job: which plan keeps it, and how it was kept."""

from __future__ import annotations

import math
from collections import deque

from envpipe_megatron.core.plan import Plan
from envpipe_megatron.formats.wishes import NO_WISHES, Wishes
from envpipe_megatron.tuning.commands import Window
from envpipe_megatron.tuning.planner import CAPPED, Planner
from envpipe_megatron.tuning.replicas import Followers, gpu_power_w

#: A window is above the budget if it takes more by this share.
EXCEEDS = 0.01
#: Plans are made again if they miss the budget by more than the first share; if they take more than
#: the second too much, clocks come down before that.
_NEAR, _AT_ONCE = 0.003, 0.006
#: The bill says so of a budget that was not kept, and is another now.
OVER = "until it was changed"
#: So many plans are kept, and so many windows of one by their mean.
_MOST_KNOWN, _REMEMBERED = 16, 8


class Allowance:
    """What operators allow, and how it was kept: mean power of a GPU in windows of iterations.

    Attributes:
        own_w: what a GPU took in the framework's own order at the highest clocks the last time.
        why: what the bill says where a budget is not kept.
    """

    def __init__(self) -> None:
        self.own_w, self.why = math.nan, ""
        self._wishes = NO_WISHES
        #: Since the first budget, as `facts` has them.
        self._sums = dict.fromkeys(
            ("time_s", "energy_j", "peak_w", "swing_w", "ramp_w_per_s", "exceeded_s"), 0.0
        )
        #: Power of the last window, and how long it lasted.
        self._last: tuple[float, float] | None = None

    @property
    def asks(self) -> bool:
        """True if there is a budget."""
        return self._wishes.power_budget is not None

    @property
    def allowed_w(self) -> float:
        """The mean power of a GPU that is allowed now."""
        share = self._wishes.power_budget_share
        return self._wishes.power_budget_w or (math.inf if share is None else share * self.own_w)

    @property
    def facts(self) -> dict[str, float | None] | None:
        """As JSON, the budget of now and figures since the first one; None if there was none.

        Mean, peak of a window, largest swing from one to the next, fastest swing (ramp), and how
        long windows took more above the budget of then than `EXCEEDS`; None before one has ended.
        """
        if not (self.asks or self._last):
            return None
        # A share of what no meter has seen is no number.
        budget_w = self.allowed_w if self.asks and not math.isnan(self.allowed_w) else None
        if self._last is None:
            return {"budget_w": budget_w, "mean_w": None, **dict.fromkeys(self._sums)}
        mean_w = self._sums["energy_j"] / self._sums["time_s"]
        return {"budget_w": budget_w, "mean_w": mean_w, **self._sums}

    def heed(self, wishes: Wishes) -> str:
        """Take in what is asked for; what is new, in words."""
        before, self._wishes = self._wishes.power_budget, wishes
        if before == wishes.power_budget:
            return ""
        if not self.asks:
            return "the power budget is lifted"
        return f"power budget: {self.allowed_w:.1f} W of a GPU, which took {self.own_w:.1f} W"

    def count(self, window: Window) -> None:
        """Add a window to the figures, if there is or was a budget."""
        if self.facts is None or math.isnan(power_w := window.power_w):
            return
        time_s = float(window.steps_s.sum())
        sums, (last_w, last_s) = self._sums, self._last or (power_w, time_s)
        swing_w = abs(power_w - last_w)
        sums["time_s"] += time_s
        sums["energy_j"] += power_w * time_s
        sums["exceeded_s"] += time_s * (power_w > self.allowed_w * (1 + EXCEEDS))
        ramp_w_per_s = swing_w / (time_s + last_s) * 2
        of_window = {"peak_w": power_w, "swing_w": swing_w, "ramp_w_per_s": ramp_w_per_s}
        sums.update({name: max(sums[name], value) for name, value in of_window.items()})
        self._last = power_w, time_s

    def fell_short(self, least_w: float) -> None:
        """Have the bill say that the budget is not kept, if the least takes too much."""
        if least_w > self.allowed_w * (1 + EXCEEDS):
            self.why = (
                f"The power budget of {self.allowed_w:.1f} W of a GPU is not kept: the least that "
                f"is reachable is {least_w:.1f} W"
            )


class Budget(Allowance):
    """Which plan keeps what operators allow, by what is predicted, and corrected by meters.

    Args:
        planner: makes plans of least energy, and from now on those that keep a budget.
        followers: replicas, which run what is planned.

    Attributes:
        usual: the plan that runs without a budget.
        windows: of what replicas run, in which GPUs were metered.
    """

    def __init__(self, planner: Planner, followers: Followers) -> None:
        super().__init__()
        self._planner, self._limits, self._followers = planner, planner.limits, followers
        self.windows = 0
        self.usual: Plan | None = None
        #: How many times what is predicted GPUs take.
        self._off = 1.0
        #: Plans that were made for budgets since something has changed last.
        self.known: deque[Plan] = deque(maxlen=_MOST_KNOWN)

    @property
    def binds(self) -> bool:
        """True if plans are made to keep the budget, which the usual one does not."""
        return self._planner.limits is not self._limits

    @property
    def holds(self) -> bool:
        """True if the framework's own order may not run at the highest clocks."""
        return self.allowed_w < self.own_w

    def add(self, window: Window) -> None:
        """Take in a window of what replicas run."""
        if self.asks and not math.isnan(window.power_w):
            self.windows += 1
            off = window.power_w / self._followers.power_w
            self._off += (off - self._off) / min(self.windows, _REMEMBERED)

    def choose(self) -> Plan:
        """Return the fastest plan that is there at once and keeps the budget; say what to plan."""
        planner = self._planner
        assert self.usual is not None
        usual, self.why, planner.limits = planner.ready(self.usual), "", self._limits
        if self._keeps(usual):
            return usual
        self._limit()
        plans = [usual, *map(planner.ready, self.known)]
        above = [plan for plan in plans if not self._keeps(plan)]
        capped = planner.capped(min(above, key=gpu_power_w), self.allowed_w / self._off)
        self.fell_short(self._off * gpu_power_w(capped))
        plans = [capped, *filter(self._keeps, plans)]
        return min(plans, key=lambda plan: plan.cost.iteration_time_s)

    def take(self, plan: Plan, ready: Plan) -> bool:
        """Take in a plan that was made; True if it breaks the budget, and another is to run."""
        if "power_cap_w" in (plan.objective or {}):
            if plan.policy != CAPPED:
                self.known.append(ready)
            return False
        self.usual = ready
        return not self._keeps(ready)

    def missed(self) -> float:
        """By which share what runs takes more, or less, than planning again is worth; or 0.

        Plans that take less are made again after one, two, four, ... windows.
        """
        off = 0.0 if self.why else self._off * self._followers.power_w / self.allowed_w - 1
        unused = off < -_NEAR and self.binds and not self.windows & (self.windows - 1)
        metered = self.windows > 0 and (off > _NEAR or unused)
        return off if off > _AT_ONCE or metered else 0.0

    def again(self, running: Plan) -> Plan | None:
        """Say what to plan, by what meters said; a plan that takes less, if it is needed now."""
        missed = self.missed()
        self._limit(gpu_power_w(running) / self._followers.power_w)
        too_much = missed > _AT_ONCE
        return self._planner.capped(running, self.allowed_w / self._off) if too_much else None

    def _limit(self, leads: float = 1.0) -> None:
        """Have plans keep what is allowed, where the first takes so many times what all do."""
        assert self.usual is not None
        gpus = float(self.usual.conditions.gpus_by_stage.sum())
        self._planner.limits = self._limits.within(gpus * leads * self.allowed_w / self._off)

    def _keeps(self, plan: Plan) -> bool:
        most_w = self.allowed_w * (1 + _NEAR)
        return not self.asks or self._off * gpu_power_w(plan) <= most_w
