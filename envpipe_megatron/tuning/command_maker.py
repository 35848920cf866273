"""Makes a run's commands: ranks hear of orders, clocks and words only where these are new.

And of how a power budget is kept, which `Budget` knows: what operators allow, and what steps took.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from envpipe_megatron.core.arrays import FloatArray
from envpipe_megatron.core.plan import Plan
from envpipe_megatron.formats.energy import Phase
from envpipe_megatron.formats.wishes import NO_WISHES
from envpipe_megatron.tuning.commands import Clocked, Command, Run, Window
from envpipe_megatron.tuning.judge import SILENT_S
from envpipe_megatron.tuning.measured.store import Store

#: A window is above the budget if it takes more by this share.
EXCEEDS = 0.01
#: This many windows of a plan are remembered, by their mean.
_REMEMBERED = 8
_UNSEEN = "For some time no meter said what GPUs took: nobody knows if the power budget was kept"


class CommandMaker:
    """Keeps what ranks run, and what they and the bill have not heard yet.

    Args:
        store: learns what is measured of units; None where nobody measures them.

    Attributes:
        budget: counts the power of all windows, if there is or was one.
        bill: what it says: why no plan runs, what was too slow, and what runs.
    """

    def __init__(self, store: Store | None) -> None:
        self._store = store
        self.budget = Budget()
        self._running: tuple[tuple[Clocked, ...], tuple[int, ...]] = ((), ())
        #: Whether the order of the last command began with it.
        self._fresh = False
        self.bill = dict.fromkeys(("none", "late", "won"), "")
        #: What the next command says.
        self._notes = list[str]()

    def note(self, *texts: str) -> None:
        """Have the next command say something; an empty text is nothing."""
        self._notes += filter(None, texts)

    def metered(self, phase: Phase, clocked: Clocked, iterations: int, settle: int = 0) -> Command:
        """Return a command of one order on all replicas, after which the counter is waited for."""
        return replace(self.make(phase, iterations, settle, (clocked,), ()), metered=True)

    def make(
        self,
        phase: Phase,
        iterations: int,
        settle: int,
        orders: Sequence[Clocked],
        which: tuple[int, ...],
    ) -> Command:
        """Return a command; `which` is each replica's place among the orders, empty: the first."""
        running = tuple(orders), which
        same, self._running = self._running == running, running
        self._fresh = not same and not settle
        notes, self._notes = self._notes, []
        late_s, tail_s = 0.0, tuple[float, ...]()
        if self._store is not None:
            late_s, tail_s = self._store.lateness.late_s, tuple(self._store.tail_s.tolist())
        return Command(
            phase,
            iterations,
            settle,
            late_s,
            tail_s,
            () if same else running[0],
            which,
            note="\n".join(notes),
            billed="\n".join(filter(None, [*self.bill.values(), self.budget.billed])),
            power=self.budget.facts,
        )

    def run(
        self, phase: Phase, clocked: Clocked, iterations: int, settle: int = 0
    ) -> Run[tuple[Window, FloatArray]]:
        """Run one order on all replicas; its window, and what drifted, as `learn`."""
        window = yield self.make(phase, iterations, settle, (clocked,), ())
        return window, self.learn(clocked, window)

    def adopt(self, plan: Plan) -> Run[str]:
        """Have ranks turn to a plan; why they have no memory for it, else empty."""
        return (yield Command(Phase.STEADY, 0, plan=plan)).refused

    def learn(
        self, clocked: Clocked, window: Window, replicas: Sequence[int] = (), fades: float = 1.0
    ) -> FloatArray:
        """Have the store learn what some replicas ran last, by default all; as `Store.learn`."""
        assert self._store is not None
        self.note(self.budget.count(window))
        return self._store.learn(clocked, window, replicas, fresh=self._fresh, fades=fades)


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
