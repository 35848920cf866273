"""The closed loop of the planning rank: probe, plan, correct, and watch as long as the job runs.

It talks to no rank and no GPU: `Controller.run` is a generator that yields what all ranks run next
(`Command`) and receives what they measured (`Window`). No step waits for a plan: planning runs
beside training, and the new plan is run from the next window on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from envpipe_megatron.core.arrays import FloatArray
from envpipe_megatron.core.plan import Plan
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.formats.energy import Phase
from envpipe_megatron.policies.optimal.optimizer import order_at_maximum_s
from envpipe_megatron.tuning.command_maker import EXCEEDS, CommandMaker
from envpipe_megatron.tuning.commands import Clocked, Run, Window
from envpipe_megatron.tuning.judge import (
    BASELINE_ITERATIONS,
    WINDOW,
    Due,
    Judge,
    Silence,
    drifted_far,
    larger,
    what_drifted,
)
from envpipe_megatron.tuning.measured.store import Store
from envpipe_megatron.tuning.planner import NEAR, UNPLANNED, BudgetedPlans, Planner, Plans
from envpipe_megatron.tuning.probes.probe import Look, first_probe, lifted, slack_probe
from envpipe_megatron.tuning.replicas import ReplicaLevels, gpu_power_w

#: Weight of earlier meter readings, by window of a plan.
_FADES = 0.98


class Controller:
    """Decides for a job, on its planning rank.

    Args:
        own: the framework's order.
        store: what is known of its units: nothing, or what a profile says.
        planner: makes plans from that store.
    """

    def __init__(self, own: Schedule, store: Store, planner: Planner) -> None:
        #: What runs, from the first that is planned on.
        self.plan: Plan
        self._store, self._planner = store, planner
        self._top = store.at_top(own)
        self._replicas = ReplicaLevels()
        self._commands = CommandMaker(store)
        self._budget = self._commands.budget
        self._within = BudgetedPlans(planner, self._budget)
        self._judge = Judge(planner.allowed())
        self._due, self._silence = Due(), Silence(own.num_stages)
        #: Whether the first plan is still corrected.
        self._corrects = True

    def run(self, first: Window) -> Run[None]:
        """Go on after the warm-up, forever; the first window has all of it but an iteration.

        Raises EnvPipeError if nothing can be planned.
        """
        self._commands.learn(self._top, first)
        if first.followed:
            self._measured_baseline(first)
        else:
            yield from self._at_baseline()
        if not self._store.profiled:
            own, store = self._store.schedule, self._store
            if own is not self._top.schedule:
                self._commands.note("profile: half of the backwards in two parts")
                # Settled, since a step may be over before its clock has surely come.
                yield from self._commands.run(Phase.PROFILE, store.at_top(own), WINDOW, settle=1)
            yield from self._look(first_probe(own, store))
        self._lead_own()
        yield from self._plan_anew(Phase.PROFILE)
        while True:
            yield from self._go_on()

    # --- phases ---------------------------------------------------------------------------------

    def _look(self, looks: Iterator[Look]) -> Run[None]:
        """Run what a probe proposes."""
        for look in looks:
            self._commands.note(look.note)
            yield from self._commands.run(Phase.PROFILE, look.clocked, look.iterations, look.settle)

    def _go_on(self) -> Run[None]:
        """Run a window of the plan, and do what follows from it.

        At first the plan is corrected: clocks are planned again from what units take in its order,
        or the framework's where it found no memory, until nothing is better.
        """
        due, may_run_own, correcting = self._due, not self._budget.forbids_own, self._corrects
        window, drift = yield from self._run_plan()
        look = not correcting and (drift.any() or due.look)
        # Where the budget is less, a window with a look would take 2 % more.
        if look and may_run_own and not self._harmed():
            drift = larger((yield from self._look_at_the_top()), drift)
            due.looked(calm=not drift.any())
        if self._harmed():
            yield from self._out_of_harm(what_drifted(drift, window), drift)
        elif correcting:  # what drifted is in the next plan
            if not self._planner.busy:
                self._replan(reorder=False)
        elif drift.any():
            self._commands.note(what_drifted(drift, window) + ": planning again")
            due.plan_again(far=bool(drifted_far(drift).any()))
        elif due.baseline and may_run_own:
            yield from self._at_baseline()
            far = bool(self._store.drifted_far.any())
            if self._judge.ease() or far:
                due.plan_again(far=far)
        if due.plan and not (self._corrects or self._planner.busy):
            yield from self._begin_plan()
        yield from self._take_plans()
        self._follow()
        yield from self._keep_budget(window)

    def _look_at_the_top(self) -> Run[FloatArray]:
        """Measure a few units at the highest clock, so that harm is known; drifts of stages."""
        orders, which = self._replicas.running
        looking = tuple(
            Clocked(o.schedule, lifted(o.schedule, o.frequency_mhz, self._store)) for o in orders
        )
        window = yield self._commands.make(Phase.STEADY, 1, 0, looking, which)
        return self._learn_usual(looking, which, window)

    def _out_of_harm(self, why: str, drift: FloatArray) -> Run[None]:
        """Run the framework's order at the highest clocks, until there is another plan."""
        own_s, judge = self._own_predicted_s(), self._judge
        late = judge.late(own_s)
        error = self._prediction_error(self._planner.repriced(self.plan))
        self._commands.bill["late"] = judge.blame(judge.latest_s, own_s, error, why)
        self._due.looked(calm=False)
        self._commands.note(
            f"{why}, and steps {100 * late:+.1f} %: the framework's order at the highest clocks, "
            f"for {BASELINE_ITERATIONS + 1} iterations or more"
        )
        self._lead_own()
        yield from self._at_baseline()
        self._due.plan_again(far=bool(drifted_far(drift).any()))
        yield from self._plan_anew(Phase.BASELINE)

    def _plan_anew(self, phase: Phase) -> Run[None]:
        """Run the framework's order at the highest clocks until there is a plan, and turn to it."""
        yield from self._begin_plan()
        while (plans := self._take()) is None:
            yield from self._run_own(phase, 1)
        if plans:
            yield from self._adopt(plans[0])

    def _at_baseline(self) -> Run[None]:
        """Run a few iterations of the framework's order at the highest clocks."""
        window = yield from self._run_own(Phase.BASELINE, BASELINE_ITERATIONS, settle=1)
        self._measured_baseline(window)
        self._judge.begin()

    def _run_own(self, phase: Phase, iterations: int, settle: int = 0) -> Run[Window]:
        """Run the framework's order at the highest clocks."""
        window, drift = yield from self._commands.run(phase, self._top, iterations, settle)
        if drift.any():
            self._store.forget(drifted_far(drift))
            self._due.plan_again()
            if self._due.windows:
                self._commands.note(what_drifted(drift, window) + ": planning again")
        return window

    def _run_plan(self) -> Run[tuple[Window, FloatArray]]:
        """Run a window of the plan; by how much stages drifted."""
        phase = Phase.RECONFIGURE if self._corrects else Phase.STEADY
        orders, which = self._replicas.running
        settle = int(self._judge.begins)
        window = yield self._commands.make(phase, WINDOW, settle, orders, which)
        self._commands.note(*self._silence.add(window))
        self._compare(window)
        drift = self._learn_usual(orders, which, window)
        self._budget.compare(window, self._replicas.power_w)
        if drift.any():  # what steps took before says nothing of today
            self._judge.begin()
        self._judge.add(window.even_steps_s(self._store.work.now))
        self._due.windows += 1
        return window, drift

    # --- a power budget ---------------------------------------------------------------------------

    def _keep_budget(self, window: Window) -> Run[None]:
        """Turn to what keeps the budget of now, and have the fastest such plan made."""
        budget, planner, within = self._budget, self._planner, self._within
        if math.isnan(budget.own_w) and window.wishes.power_budget is not None:
            budget.own_w = gpu_power_w(planner.unplanned(self._top))
        self._commands.note(news := budget.update(window))
        above = budget.above(running_w := self._replicas.power_w)
        was_bound = within.bound
        turns = (above > NEAR and not budget.fails) or (news and was_bound)
        # Plans that take less are made again after one, two, four, ... windows.
        less = was_bound and above < -NEAR and (budget.windows or not budget.is_set)
        if not turns and (not less or planner.busy or budget.windows & (budget.windows - 1)):
            return
        leads = gpu_power_w(self.plan) / running_w
        if turns:
            yield from self._turn_to(within.fastest(self.plan))
            leads = 1.0
            self._commands.note(budget.reach(budget.correction * self._replicas.power_w))
        if planner.busy and (self._has_no_plan or not news):
            return  # it is looked at when it is there
        if planner.busy and planner.reorders:
            self._due.plan_again()
        within.limit(leads)
        if (was_bound or within.bound) and not budget.fails:
            self._replan(reorder=self._has_no_plan or not within.bound)

    # --- what is known --------------------------------------------------------------------------

    def _learn_usual(
        self, orders: Sequence[Clocked], which: Sequence[int], window: Window
    ) -> FloatArray:
        """Take in what the usual replica measured, and all that ran the same; drifts of stages."""
        usual = which[self._replicas.usual]
        replicas = [replica for replica, place in enumerate(which) if place == usual]
        drift = self._commands.learn(orders[usual], window, replicas, _FADES)
        if drift.any():
            self._store.forget(drifted_far(drift))
        return drift

    def _compare(self, window: Window, *, alike: bool = False) -> None:
        tail_s = self._store.tail_s
        self._replicas.compare(window.own_s(tail_s), window.own_error(tail_s), alike=alike)

    def _measured_baseline(self, window: Window) -> None:
        self._compare(window, alike=True)
        steps_s = window.even_steps_s(self._store.work.now)
        self._judge.add_baseline(steps_s, self._own_predicted_s())
        self._due.baseline_at = self._due.windows
        if not math.isnan(window.power_w):
            self._budget.own_w = window.power_w

    def _own_predicted_s(self) -> float:
        """Return what the slowest replica takes in the framework's order at the highest clocks."""
        return self._usual_own_s() * self._replicas.slowest

    def _usual_own_s(self) -> float:
        return self._store.iteration_s(self._top.schedule, self._top.frequency_mhz)

    def _harmed(self) -> bool:
        # Where the framework's order takes too much power, there is no other way out of harm.
        return not self._budget.forbids_own and self._judge.harmed(self._own_predicted_s())

    def _prediction_error(self, plan: Plan) -> float:
        """Return by which share steps last longer than a plan predicts from today's times."""
        return (1 + self._judge.late(self._own_predicted_s())) / self._expected(plan) - 1

    def _expected(self, plan: Plan) -> float:
        """Return how many times as long as the framework's own order a plan says that it takes."""
        own_s = order_at_maximum_s(self._top.schedule, plan.profile, plan.conditions)
        return plan.cost.iteration_time_s / own_s

    # --- plans ----------------------------------------------------------------------------------

    def _begin_plan(self) -> Run[None]:
        """Begin the best plan; stages that drifted far are looked at first, where they have slack.

        There what was measured of clocks means nothing any more.
        """
        if self._due.far:
            self._store.forget(self._store.drifted_far)
            yield from self._look(slack_probe(self._store, at_cost=False))
        self._replan(reorder=True)

    def _replan(self, *, reorder: bool, levels: Sequence[int] = ()) -> None:
        order = None if reorder else self.plan.schedule
        if levels or self._budget.forbids_own:  # a new plan forgets those of the one before
            levels = sorted({*levels, *self._replicas.levels} - {0})
        if order is None:
            self._due.plan_at, self._due.far = math.inf, False
        self._planner.begin(order, self._judge.faster, levels)

    def _take(self) -> Plans | None:
        """Return what was planned, as it would run; nothing if that failed, None if it goes on."""
        plans = self._planner.take()
        if isinstance(plans, str):
            self._failed(plans)
            return {}
        return plans and {level: self._planner.ready(plan) for level, plan in plans.items()}

    def _failed(self, why: str) -> None:
        """Have it tried again, each time later."""
        self._commands.note(why)
        self._due.failed()
        if self._has_no_plan:
            self._commands.bill["none"] = f"The framework's own order, at the highest clocks: {why}"

    @property
    def _has_no_plan(self) -> bool:
        return self.plan.policy == UNPLANNED

    def _take_plans(self) -> Run[None]:
        """Turn to what was planned meanwhile, if it is better."""
        plans, planner = self._take(), self._planner
        if plans is None:
            return
        if not plans:  # it failed
            self._corrects = False
            return
        lead = plans.pop(0)
        better = self._has_no_plan or self._better(lead)
        if not better:
            planner.won = ""  # it is said of the plan that runs
        if self._corrects and not self._has_no_plan:
            yield from self._correct(better=better)
        elif not (better or plans or self.plan.park_mhz is None):  # waits may be shorter by now
            yield from self._adopt(self._planner.ready(self.plan))
        adopted = better and (yield from self._adopt(lead))
        self._corrects &= adopted
        if lead.schedule.stages == self.plan.schedule.stages:
            self._replicas.extend(plans)

    def _correct(self, *, better: bool) -> Run[None]:
        """Say how far a plan was off; one that stays is kept with what it is known to cost now."""
        today = self._planner.repriced(self.plan)
        time, energy = self._prediction_error(today), today.cost.energy_j / self.plan.cost.energy_j
        if not better:
            yield from self._adopt(self._planner.ready(self.plan))
        self._commands.note(
            f"correction: time {100 * time:+.2f} %, energy {100 * (energy - 1):+.2f} % "
            f"off what was predicted, {'planned again' if better else 'nothing better is found'}"
        )

    def _better(self, plan: Plan) -> bool:
        return self._planner.better(plan, self.plan, self._usual_own_s())

    def _adopt(self, plan: Plan) -> Run[bool]:
        """Have a planned plan run, if ranks have memory for it; True if it does."""
        bill, won = self._commands.bill, self._planner.won
        self._planner.won = ""
        if not (yield from self._turn_to(plan)):
            return False
        self._due.failures = 0
        if bill["none"] and not self._has_no_plan:
            bill["none"] = "The framework's own order ran until there was a plan"
        bill["won"] = won or bill["won"]
        self._commands.note(won)
        self._within.add(plan)
        return True

    def _turn_to(self, plan: Plan) -> Run[bool]:
        """Have a plan run, if ranks have memory for it; True if it does."""
        if plan.policy != UNPLANNED and (why := (yield from self._commands.adopt(plan))):
            self._failed(f"the new plan does not run: {why}")
            return False
        self._lead(plan)
        return True

    def _lead_own(self) -> None:
        """Have the framework's order run, at the highest clocks, until there is another plan."""
        self._lead(self._within.begin_with(self._planner.unplanned(self._top)))

    def _lead(self, plan: Plan) -> None:
        self.plan = plan
        self._replicas.lead(plan)
        self._budget.windows = 0
        # Where there is no deadline, one that is always as late as the last ones is none the worse.
        expected = self._expected(plan) * (1 + self._judge.faster)
        self._judge.allowed = self._planner.allowed(expected)
        self._judge.begin()

    def _follow(self) -> None:
        replicas = self._replicas
        before_w = replicas.power_w
        if note := replicas.follow():
            self._commands.note(note)
            self._judge.begin()
            if abs(replicas.power_w / before_w - 1) > EXCEEDS:
                self._budget.windows = 0
        if replicas.missing and not self._planner.busy:
            self._replan(reorder=False, levels=replicas.asked())
