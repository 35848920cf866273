"""The power budget of a running job: which plan keeps it, and how it was kept."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from envpipe_megatron.core.plan import Plan
from envpipe_megatron.tuning.commands import Window
from envpipe_megatron.tuning.planner import CAPPED, Planner, gpu_power_w
from envpipe_megatron.tuning.wishes import NO_WISHES, Wishes

#: A window is above the budget if it takes more by this share: no goal is nearer than a meter.
EXCEEDS = 0.01
#: Plans are made again if they miss the budget by more than this share, so many times if they take
#: less; of a larger share clocks come down before that.
_NEAR, _MOST_TRIES, _AT_ONCE = 0.003, 4, 0.006
#: So many plans are kept, each for a budget.
_MOST_KNOWN = 16
#: Meters count by the mean of so many windows of a plan.
_REMEMBERED = 8


@dataclass
class PowerSums:
    """How budgets of a job were kept, of the mean power of a GPU in each window of iterations.

    Attributes:
        time_s: of all windows since the first budget was set.
        energy_j: of an average GPU in them.
        peak_w: of the window that took most.
        swing_w: the largest change from one window to the next.
        ramp_w_per_s: the fastest one, from the middle of one window to that of the next.
        exceeded_s: in windows that took more than the budget of then, by more than `EXCEEDS`.
    """

    time_s: float = 0.0
    energy_j: float = 0.0
    peak_w: float = 0.0
    swing_w: float = 0.0
    ramp_w_per_s: float = 0.0
    exceeded_s: float = 0.0
    #: Mean power of the last window, W, and how long it lasted, s.
    _last: tuple[float, float] | None = field(default=None, repr=False)

    def add(self, power_w: float, time_s: float, budget_w: float | None) -> None:
        """Add a window."""
        self.time_s += time_s
        self.energy_j += power_w * time_s
        self.peak_w = max(self.peak_w, power_w)
        if self._last is not None:
            swing_w, apart_s = abs(power_w - self._last[0]), (time_s + self._last[1]) / 2
            self.swing_w = max(self.swing_w, swing_w)
            self.ramp_w_per_s = max(self.ramp_w_per_s, swing_w / apart_s)
        self._last = power_w, time_s
        if budget_w is not None and power_w > budget_w * (1 + EXCEEDS):
            self.exceeded_s += time_s

    def facts(self, budget_w: float | None) -> dict[str, float | None]:
        """As JSON, with the budget of now."""
        return {
            "budget_w": budget_w,
            "mean_w": self.energy_j / self.time_s if self.time_s else None,
            **{
                name: getattr(self, name)
                for name in ("peak_w", "swing_w", "ramp_w_per_s", "time_s", "exceeded_s")
            },
        }


class Allowance:
    """What operators allow, and how it was kept.

    Attributes:
        own_w: what a GPU took in the framework's own order at the highest clocks the last time.
        why: what the bill says where a budget is not kept.
    """

    def __init__(self) -> None:
        self.own_w, self.why = math.nan, ""
        self._wishes, self._sums = NO_WISHES, PowerSums()

    @property
    def allowed_w(self) -> float | None:
        """The mean power of a GPU that is allowed now; None if any is."""
        share = self._wishes.power_budget_share
        return self._wishes.power_budget_w if share is None else share * self.own_w

    @property
    def asks(self) -> bool:
        """True if there is a budget."""
        return self._wishes.power_budget is not None

    @property
    def holds(self) -> bool:
        """True if the framework's own order may not run at the highest clocks."""
        return self.allowed_w is not None and self.allowed_w < self.own_w

    @property
    def facts(self) -> dict[str, float | None] | None:
        """As `Command.power`."""
        return self._sums.facts(self.allowed_w) if self._sums.time_s or self.asks else None

    def heed(self, wishes: Wishes) -> str:
        """Take in what is asked for; what is new, in words."""
        before, self._wishes = self._wishes.power_budget, wishes
        if before == wishes.power_budget:
            return ""
        if self.allowed_w is None:
            return "the power budget is lifted"
        return f"power budget: {self.allowed_w:.1f} W of a GPU, which took {self.own_w:.1f} W"

    def count(self, window: Window) -> bool:
        """Count a window for the bill, if there is or was a budget; True if it was metered."""
        metered = self.facts is not None and not math.isnan(window.power_w)
        if metered:
            self._sums.add(window.power_w, float(window.steps_s.sum()), self.allowed_w)
        return metered

    def fell_short(self, least_w: float) -> None:
        """Have the bill say that the budget is not kept, if the least takes too much."""
        allowed_w = self.allowed_w
        if allowed_w is not None and least_w > allowed_w * (1 + EXCEEDS):
            self.why = (
                f"The power budget of {allowed_w:.1f} W of a GPU is not kept: the least that is "
                f"reachable is {least_w:.1f} W"
            )


class Budget(Allowance):
    """Which plan keeps what operators allow, by what is predicted, and corrected by meters.

    Args:
        planner: makes plans of least energy, and from now on those that keep a budget.

    Attributes:
        usual: the plan that runs without a budget.
        stale: whether something has changed since that was made.
        windows: of the plan that runs, in which GPUs were metered.
    """

    def __init__(self, planner: Planner) -> None:
        super().__init__()
        self._planner, self._limits = planner, planner.limits
        self.stale, self.windows = False, 0
        self.usual: Plan | None = None
        #: How many times what is predicted GPUs take, and plans more than what they are made for.
        self._off, self._careful = 1.0, 1.0
        self._tries = _MOST_TRIES
        #: Plans that were made for budgets since something has changed last, by W of a GPU.
        self._known: dict[float, Plan] = {}

    @property
    def binds(self) -> bool:
        """True if plans are made to keep the budget, which the usual one does not."""
        return self._planner.limits is not self._limits

    def add(self, window: Window, running: Plan) -> None:
        """Take in a window of the plan that runs."""
        if self.count(window):
            self.windows += 1
            off = window.power_w / gpu_power_w(self._planner.repriced(running))
            self._off += (off - self._off) / min(self.windows, _REMEMBERED)

    def choose(self) -> Plan:
        """Return the fastest plan that is there at once and keeps the budget; say what to plan."""
        planner, allowed_w = self._planner, self.allowed_w
        assert self.usual is not None
        usual, self.why, self._tries = planner.ready(self.usual), "", _MOST_TRIES
        planner.limits = self._limits
        if allowed_w is None or self._takes_w(usual) <= allowed_w * (1 + _NEAR):
            return usual
        self._limit()
        if allowed_w in self._known:
            return planner.ready(self._known[allowed_w])
        plans = [usual, *map(planner.ready, self._known.values())]
        within = [plan for plan in plans if self._takes_w(plan) <= allowed_w]
        above = min((plan for plan in plans if plan not in within), key=self._takes_w)
        capped = planner.capped(above, allowed_w / self._off)
        if not within:
            self.fell_short(self._takes_w(capped))
        return min([capped, *within], key=lambda plan: plan.cost.iteration_time_s)

    def take(self, plan: Plan, ready: Plan) -> bool:
        """Take in a plan that was made; True if it breaks the budget, and another is to run."""
        made_for, allowed_w = plan.objective or {}, self.allowed_w
        if "power_cap_w" not in made_for:
            self.usual, self.stale = ready, False
            return allowed_w is not None and self._takes_w(ready) > allowed_w * (1 + _NEAR)
        if allowed_w is not None and plan.policy != CAPPED:
            self._known[allowed_w] = ready
            if len(self._known) > _MOST_KNOWN:
                del self._known[next(iter(self._known))]
            self._careful = ready.cost.mean_power_w / plan.cost.mean_power_w
        return False

    def missed(self, running: Plan) -> float:
        """By which share the plan that runs takes more, or less, than planning again is worth."""
        allowed_w = self.allowed_w
        if allowed_w is None or not self.windows or self.why:
            return 0.0
        off = self._takes_w(self._planner.repriced(running)) / allowed_w - 1
        if off > _NEAR:
            return off
        unused = self.binds and off < -_NEAR and self.windows > 1 and self._tries > 0
        return off if unused else 0.0

    def again(self, running: Plan) -> Plan | None:
        """Say what to plan, by what meters said; a plan that takes less, if it is needed now."""
        self._tries -= 1
        missed, allowed_w = self.missed(running), self.allowed_w
        assert allowed_w is not None
        self._limit()
        if missed > _AT_ONCE:
            self._known.pop(allowed_w, None)
            return self._planner.capped(running, allowed_w / self._off)
        return None

    def changed(self) -> None:
        """Forget plans: something has changed."""
        self._known, self.stale, self._tries = {}, True, _MOST_TRIES

    def _limit(self) -> None:
        assert self.usual is not None
        assert self.allowed_w is not None
        gpus = float(self.usual.conditions.gpus_by_stage.sum())
        limit_w = gpus * self.allowed_w / (self._off * self._careful)
        self._planner.limits = self._limits.within(limit_w)

    def _takes_w(self, plan: Plan) -> float:
        return self._off * gpu_power_w(plan)
