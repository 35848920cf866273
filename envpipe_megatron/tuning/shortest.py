"""The shortest order of a job whose clocks stay as they are: planned, tried, and held against.

Units are known from the warm-up and from a few iterations in which half of the backwards are split.
The order that is predicted shortest runs on only if its steps are measured to be shorter than those
of the framework's own order, by more than noise: else the best order of whole backwards is tried,
else the framework's own runs, and there is another look later. What that takes is measured and
never predicted: units may be slow in a new order only.
"""

from __future__ import annotations

import math

import numpy as np

from envpipe_megatron.core.arrays import FloatArray
from envpipe_megatron.core.plan import Plan
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.formats.energy import Phase
from envpipe_megatron.tuning.command_maker import CommandMaker
from envpipe_megatron.tuning.commands import Clocked, Run, Window
from envpipe_megatron.tuning.judge import BASELINE_EVERY, WINDOW, Judge, what_drifted
from envpipe_megatron.tuning.measured.store import Store
from envpipe_megatron.tuning.planner import Planner, Plans

#: Iterations in which a plan is tried, and more of them if these show nothing. With one to settle,
#: and a window of the framework's order between, it is given up within twenty.
_TRIED = WINDOW, 9
#: A plan is tried if it is predicted to take this share less than what runs.
_WORTH = 3e-3
#: Iterations before another plan is made; twice as many each time that none is found to be faster,
#: up to the second number.
_PAUSE, _LONGEST_PAUSE = 64, 4096


class ShortestOrder:
    """Decides for a job, on its planning rank; the same for all replicas.

    Args as of `Controller`, but that the store has the highest clock only.
    """

    def __init__(self, own: Schedule, store: Store, planner: Planner) -> None:
        #: The one that ranks know of; None for the framework's order.
        self.plan: Plan | None = None
        self._store, self._planner = store, planner
        #: The framework's order, what runs except for looks and trials, and what ran last.
        self._own = self._order = self._last = store.at_top(own)
        self._commands = CommandMaker(store)
        self._judge = Judge(1.0)
        #: Iterations since the last baseline, and until another plan is made; the first at once.
        self._since_baseline, self._until_plan = 0, -math.inf
        self._pause = _PAUSE

    def run(self, first: Window) -> Run[None]:
        """Go on after the warm-up, as `Controller.run`."""
        changed = False
        while True:
            phase = Phase.PROFILE if self._until_plan == -math.inf else Phase.STEADY
            window, drift = yield from self._run_order(phase, self._order)
            changed |= bool(drift.any())
            slow = ""
            if self._order is not self._own:
                self._judge.add(window.steps_s)
                slow = what_drifted(drift, window) if self._judge.harmed(1.0) else ""
            if slow or self._since_baseline >= BASELINE_EVERY:
                yield from self._look(slow)
            due = self._until_plan <= 0 and not self._planner.busy
            if due and (changed or self._order is self._own):
                changed = False
                yield from self._plan()
            plans = self._planner.take()
            if isinstance(plans, str):
                yield from self._stay(plans)
            elif plans is not None:
                yield from self._turn_to(plans)

    # --- plans ----------------------------------------------------------------------------------

    def _plan(self) -> Run[None]:
        """Begin a plan; where no backward runs in two parts, what they take is seen first."""
        measured = self._store.at_top(self._store.schedule)
        if self._order is self._own and measured.schedule is not self._own.schedule:
            self._commands.note("profile: half of the backwards in two parts")
            yield from self._run_order(Phase.PROFILE, measured, settle=1)
        # A framework's own order that splits backwards has no time of whole ones.
        self._planner.begin(None, whole=not self._own.schedule.split)

    def _turn_to(self, plans: Plans) -> Run[None]:
        """Try those that are predicted to be shorter than what runs, until one is."""
        tried = list[str]()
        # The best order may be that of whole backwards.
        for plan in {plan.schedule.stages: plan for plan in plans.values()}.values():
            if self._less(plan.schedule, self._order.schedule) > _WORTH:
                tried.append((yield from self._try(plan)))
                if not tried[-1]:
                    return
        if tried:
            yield from self._stay(f"the order that was planned was not faster ({'; '.join(tried)})")
        elif plans and self._order is self._own:
            yield from self._stay("no other is predicted to take less time")

    def _look(self, slow: str) -> Run[None]:
        """Hold what runs against the framework's order again; `slow` is why steps are, if so."""
        if self.plan is None:
            yield from self._at_own()
            return
        steps_s = self._judge.latest_s
        if slow:
            late = 100 * self._judge.late(1.0)
            self._commands.note(f"{slow}, and steps {late:+.1f} %: the framework's order")
        if why := (yield from self._try(self.plan)):
            self._order = self._own  # also for want of memory
            if slow:
                self._commands.bill["late"] = self._judge.blame(steps_s, 1.0, 0.0, slow)
            yield from self._stay(f"the planned order is not faster any more ({why})")

    def _try(self, plan: Plan) -> Run[str]:
        """Run a plan between windows of the framework's order; why it does not run on, else empty.

        Then that order is to run, unless ranks have no memory for the plan. The one that runs is
        tried again only if the first window does not show it.
        """
        tried, judge = self._store.at_top(plan.schedule), self._judge
        backwards = "split" if plan.schedule.split else "whole"
        predicted = 100 * self._less(plan.schedule, self._own.schedule)
        before_s = yield from self._at_own(anew=True)
        if plan is self.plan and judge.gains() and not judge.harmed(1.0):
            self._pause = _PAUSE
            return ""
        if refused := (yield from self._commands.adopt(plan)):
            self._commands.note(f"the new plan does not run: {refused}")
            return f"{backwards} backwards: no memory"
        self.plan = plan
        judge.begin()
        for iterations in _TRIED:
            settle = int(judge.begins)
            window, _ = yield from self._run_order(Phase.RECONFIGURE, tried, iterations, settle)
            judge.add(window.steps_s)
            if judge.harmed(1.0):
                break
            after_s = yield from self._at_own()
            # A job that still warms up is faster after the plan, one that heats up before it.
            if np.median(window.steps_s) < min(before_s, after_s) and judge.gains():
                gain, self._order = 100 * judge.gain(), tried
                self._say(
                    f"The planned order takes {gain:.1f} % less time (predicted {predicted:.1f} %)"
                )
                self._until_plan = _PAUSE
                return ""
            before_s = after_s
        self._order = self._own
        took = f"{-100 * judge.gain():+.1f} % of the time, predicted {-predicted:+.1f} %"
        return f"{backwards} backwards: {took}"

    def _stay(self, why: str) -> Run[None]:
        """Have another plan made later, each time later; say why the framework's order runs."""
        if self._order is self._own:
            self._say(f"The framework's own order: {why}")
            if self.plan is not None:
                yield from self._commands.adopt(self._planner.unplanned(self._own))
                self.plan = None
        else:
            self._commands.note(why)
        self._until_plan = self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    def _say(self, text: str) -> None:
        """Have log and bill say it, the bill after what it says of steps that were too slow."""
        self._commands.note(text)
        self._commands.bill["won"] = text

    # --- what is known --------------------------------------------------------------------------

    def _less(self, order: Schedule, than: Schedule) -> float:
        """Return the share of the time that an order is predicted to take less than another."""
        clocked = map(self._store.at_top, (order, than))
        order_s, than_s = (self._store.iteration_s(c.schedule, c.frequency_mhz) for c in clocked)
        return 1 - order_s / than_s

    def _run_order(
        self, phase: Phase, clocked: Clocked, iterations: int = WINDOW, settle: int = 0
    ) -> Run[tuple[Window, FloatArray]]:
        """Run an order; its window, and [num_stages] drifts as of `Store.learn`.

        None is seen where another ran before: units may differ by order.
        """
        before, self._last = self._last, clocked
        window, drift = yield from self._commands.run(phase, clocked, iterations, settle)
        self._since_baseline += settle + iterations
        self._until_plan -= settle + iterations
        return window, drift if clocked is before else np.zeros_like(drift)

    def _at_own(self, *, anew: bool = False) -> Run[float]:
        """Run a window of the framework's order, for the baseline; what a step took, s."""
        window, _ = yield from self._run_order(Phase.BASELINE, self._own)
        self._judge.add_baseline(window.steps_s, 1.0, anew=anew)
        self._since_baseline = 0
        return float(np.median(window.steps_s))
