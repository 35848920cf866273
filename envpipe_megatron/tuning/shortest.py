"""The shortest order of a job whose clocks stay as they are: planned, tried, and held against.

Units are known from the warm-up and from a few iterations in which half of the backwards are split.
The order that is predicted shortest runs on only if its steps are measured to be shorter than those
of the framework's own order, by more than noise: else the best order of whole backwards is tried,
else the framework's own runs, and there is another look later. As in the closed loop, `Command`s
are yielded and `Window`s sent. What the framework's order takes is measured and never predicted:
units may be slow in a new order only.
"""

from __future__ import annotations

from collections.abc import Generator

import numpy as np

from envpipe_megatron.core.arrays import FloatArray
from envpipe_megatron.core.plan import Plan
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.formats.energy import Phase
from envpipe_megatron.tuning.command_maker import CommandMaker
from envpipe_megatron.tuning.commands import Clocked, Command, Run, Window
from envpipe_megatron.tuning.controller import BASELINE_EVERY, FADES
from envpipe_megatron.tuning.judge import WINDOW, Judge, what_drifted
from envpipe_megatron.tuning.measured.store import Store
from envpipe_megatron.tuning.planner import Planner, PlanningError, Plans

#: A plan is tried in so many iterations, and in so many more if these do not tell. With one to
#: settle, and a window of the framework's order between, it is given up within twenty.
_TRIED = WINDOW, 9
#: A plan is tried if it is predicted to take this share less than what runs.
_WORTH = 3e-3
#: For so many iterations no other plan is made; twice as many each time that none is found to be
#: faster, up to the second number.
_PAUSE, _LONGEST_PAUSE = 64, 4096


class ShortestOrder:
    """Decides for a job, on its planning rank, as `Controller` does.

    Args:
        own: the framework's order.
        measured: the same, or with some of its backwards split.
        store: of the highest clock only.
        num_replicas: pipelines; all run the same.
        planner: makes plans from that store.
    """

    def __init__(
        self, own: Schedule, measured: Schedule, store: Store, num_replicas: int, planner: Planner
    ) -> None:
        #: The one that ranks know of; None for the framework's order.
        self.plan: Plan | None = None
        self._store, self._planner = store, planner
        self._own, self._measured = store.at_top(own), measured
        #: What runs but for looks and trials, what ran last, and what before that.
        self._order = self._last = self._before = self._own
        self._everyone = range(num_replicas)
        self._commands, self._judge = CommandMaker(store), Judge(1.0)
        #: What a step of the framework's order took when it ran last.
        self._own_s = 0.0
        #: Iterations so far, at the last baseline, and those before which no plan is made.
        self._ran = self._baseline_at = self._plan_at = 0
        self._pause = _PAUSE
        #: Why the last plan has no memory, and what the bill says of steps that were too slow.
        self._refused = self._harm = ""

    def run(self) -> Run[None]:
        """Everything after the warm-up, as `Controller.run`."""
        yield None
        phase, changed = Phase.PROFILE, False
        while True:
            window, drift = yield from self._run_order(phase, self._order)
            changed |= bool(drift.any())
            if self._order is self._own:
                self._learn_own(window)
            else:
                self._judge.add(window)
                if self._judge.harmed():
                    yield from self._doubt(what_drifted(drift, window), window)
            if self._ran - self._baseline_at >= BASELINE_EVERY:
                yield from self._doubt()
            due = self._ran >= self._plan_at and not self._planner.busy
            if due and (changed or self._order is self._own):
                changed = False
                yield from self._plan()
            if (plans := self._take()) is not None:
                phase = Phase.STEADY
                yield from self._turn_to(plans)

    def refuse(self, command: Command, why: str) -> Command:
        """Go back, from a command whose plan has no memory, to what ran before."""
        self._commands.take_back(command)
        self._commands.note(f"the new plan does not run: {why}")
        self._refused, self._last = why, self._before
        return self._commands.for_all(command.phase, self._last, command.iterations, 1)

    # --- plans ----------------------------------------------------------------------------------

    def _plan(self) -> Run[None]:
        """Begin a plan; where no backward runs in two parts, what they take is seen first."""
        if self._order is self._own and self._measured is not self._own.schedule:
            self._commands.note("profile: half of the backwards in two parts")
            measured = self._store.at_top(self._measured)
            yield from self._run_order(Phase.PROFILE, measured, settle=1)
        self._planner.begin_shortest()

    def _take(self) -> Plans | None:
        """Return what was planned, if that has ended: nothing if it failed."""
        try:
            return self._planner.take()
        except PlanningError as error:
            self._stay(f"nothing is planned: {error}")
            return {}

    def _turn_to(self, plans: Plans) -> Run[None]:
        """Try those that are predicted to be shorter than what runs, until one is."""
        running, tried = self._order.schedule, list[str]()
        shorter = [p for p in plans.values() if self._less(p.schedule, running) > _WORTH]
        if not shorter and plans and self._order is self._own:
            self._stay("no other is predicted to take less time")
        elif shorter and self._order is not self._own:
            yield from self._at_own(anew=True)
        for plan in shorter:
            why = yield from self._try(plan)
            if not why:
                return
            tried.append(why)
        if tried:
            self._stay(f"the order that was planned was not faster ({'; '.join(tried)})")

    def _try(self, plan: Plan) -> Generator[Command | None, Window, str]:
        """Run a plan, with the framework's order between; why it does not run on, empty if it does.

        Else it is the framework's order, unless the plan was refused.
        """
        tried, self._refused = self._store.at_top(plan.schedule), ""
        predicted = 100 * self._less(plan.schedule, self._own.schedule)
        self._commands.adopted = plan
        self._judge.begin()
        for iterations in _TRIED:
            settle, before_s = int(self._judge.begins), self._own_s
            window, _ = yield from self._run_order(Phase.RECONFIGURE, tried, iterations, settle)
            if self._refused:
                return self._refused
            self.plan = plan
            self._judge.add(window)
            if self._judge.harmed():
                break
            yield from self._at_own()
            # A job that still warms up is faster behind the plan, one that heats up before it.
            between = np.median(window.steps_s) < min(before_s, self._own_s)
            if between and self._judge.gains():
                gain, self._order = 100 * self._judge.gain(), tried
                self._say(
                    f"The planned order takes {gain:.1f} % less time (predicted {predicted:.1f} %)"
                )
                self._plan_at = self._ran + _PAUSE
                return ""
        self._order = self._own
        backwards, longer = "split" if tried.schedule.split else "whole", -100 * self._judge.gain()
        return f"{backwards} backwards: {longer:+.1f} % of the time, predicted {-predicted:+.1f} %"

    def _doubt(self, cause: str = "", slow: Window | None = None) -> Run[None]:
        """Look at the framework's order, and try the plan that runs again where it is not faster.

        Args:
            cause: why it has become slow, if it has.
            slow: when that was seen.
        """
        if slow is not None:
            late = 100 * self._judge.late()
            self._commands.note(f"{cause}, and steps {late:+.1f} %: the framework's order")
        yield from self._at_own(anew=True)
        if self._order is self._own or (slow is None and self._judge.gains()):
            self._pause = _PAUSE if self._order is not self._own else self._pause
            return
        assert self.plan is not None
        if why := (yield from self._try(self.plan)):
            if slow is not None:
                self._harm = self._judge.blame(slow, 1.0, 0.0, cause)
            self._stay(f"the planned order is not faster any more ({why})")

    def _stay(self, why: str) -> None:
        """Have another plan made later, each time later; say why the framework's order runs."""
        if self._order is self._own:
            self._say(f"The framework's own order: {why}")
            if self.plan is not None:
                top = self._own
                self._commands.adopted = self._planner.unplanned(top.schedule, top.frequency_mhz)
                self.plan = None
        else:
            self._commands.note(why)
        self._plan_at = self._ran + self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    def _say(self, text: str) -> None:
        """Have log and bill say it, the bill beside what it says of steps that were too slow."""
        self._commands.note(text)
        self._commands.billed = "\n".join(filter(None, [text, self._harm]))

    # --- what is known --------------------------------------------------------------------------

    def _less(self, order: Schedule, than: Schedule) -> float:
        """Which share of the time an order is predicted to take less than another."""
        clocked = map(self._store.at_top, (order, than))
        order_s, than_s = (self._store.iteration_s(c.schedule, c.frequency_mhz) for c in clocked)
        return 1 - order_s / than_s

    def _run_order(
        self, phase: Phase, clocked: Clocked, iterations: int = WINDOW, settle: int = 0
    ) -> Generator[Command | None, Window, tuple[Window, FloatArray]]:
        """Run an order; its window, and [num_stages] drifts as of `Store.learn`.

        None is seen where another ran before: units may differ by order.
        """
        self._before, self._last = self._last, clocked
        window = yield self._commands.for_all(phase, clocked, iterations, settle)
        self._ran += settle + iterations
        drift = self._store.learn(
            self._last.schedule,
            self._last.frequency_mhz,
            window,
            replicas=self._everyone,
            fades=FADES,
        )
        return window, drift if self._last is self._before else np.zeros_like(drift)

    def _at_own(self, *, anew: bool = False) -> Run[None]:
        """Run a window of the framework's order, the new baseline."""
        window, _ = yield from self._run_order(Phase.BASELINE, self._own)
        self._learn_own(window, anew=anew)
        self._baseline_at = self._ran

    def _learn_own(self, window: Window, *, anew: bool = False) -> None:
        self._judge.add_baseline(window, anew=anew)
        self._own_s = float(np.median(window.steps_s))
