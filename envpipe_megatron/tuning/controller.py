"""The closed loop of the planning rank: probe, plan, correct, and watch as long as the job runs.

Nothing here talks to ranks or GPUs: `Controller.run` is a generator that yields what all ranks run
next (`Command`) and is sent what they measured (`Window`). No step waits for a plan: planning runs
beside training, and the new plan is run from the next window on.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence

import numpy as np

from envpipe_megatron.core.arrays import BoolArray, FloatArray
from envpipe_megatron.core.plan import Plan
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.formats.energy import Phase
from envpipe_megatron.policies.optimal.optimizer import order_at_maximum_s
from envpipe_megatron.tuning.command_maker import CommandMaker
from envpipe_megatron.tuning.commands import Clocked, Command, Run, Window
from envpipe_megatron.tuning.judge import Baseline, Harm, Silence, Steps
from envpipe_megatron.tuning.planner import UNPLANNED, Planner, Plans
from envpipe_megatron.tuning.probing import Probe, SlackProbe, first_probe, lifted
from envpipe_megatron.tuning.replicas import Followers
from envpipe_megatron.tuning.store import Store

#: Iterations after which ranks report: with one to settle, a fault is seen within ten.
WINDOW = 4
#: Units that last this share longer or shorter than expected have changed.
_DRIFT = 0.005
#: So large a change may be worth another order of units, not only other clocks.
_REORDERS = 0.02
#: Prediction and measurement agree within this share, of time and of energy.
_AGREE = 0.005
#: Corrections that gain nothing end after so many.
_MOST_CORRECTIONS = 6
#: The framework's order runs at the highest clocks for so many iterations, each time that so many
#: others have passed: less than a hundredth of what is saved.
BASELINE_ITERATIONS, BASELINE_EVERY = 3, 500
#: After so many windows a few units run at the highest clock, if no others do; after twice as many
#: each time that all is as before, up to the second number.
_LOOKS_AT_TOP, _SELDOM = 2, 8
#: Harm within so many windows of the last is the same harm, which is understood if it does not
#: come back more often than this.
_CALM, _UNDERSTOOD = 10, 2
#: So many times the iterations of a baseline pass at most before another plan is tried.
_MOST_STRETCHES = 1024
#: Plans are made faster than what is asked by this share at most.
_MOST_SLOWER = 0.02
_LEAST_SLOWER = 0.001
#: A stage whose units have changed by more than this share is not the one that was looked at: its
#: clock follows no more, or again. But where all stages changed as much, within the second share,
#: it is the work that has.
_UPSETS, _ALIKE = 0.1, 0.05
#: What meters said counts this much less with each window.
_FADES = 0.98

logger = logging.getLogger(__name__)


class Controller:
    """Decides for a job, on its planning rank.

    Args:
        own: the framework's order.
        store: what is known of its units: nothing, or what a profile says.
        num_replicas: pipelines.
        planner: makes plans from that store.
    """

    def __init__(self, own: Schedule, store: Store, num_replicas: int, planner: Planner) -> None:
        self.plan: Plan | None = None
        self._own, self._store = own, store
        self._everyone = range(num_replicas)
        self._planner = planner
        self._followers = Followers(num_replicas)
        top_mhz = int(store.clocks_mhz[-1])
        shape = (own.num_stages, own.units_per_stage)
        self._top = Clocked(own, np.full(shape, top_mhz, dtype=np.int64))
        self._baseline = Baseline()
        #: Since the plan that runs was swapped in.
        self._steps = Steps()
        self._latest_s = 0.0
        #: Windows of the plan, how many of them were slow in a row, and which was the last.
        self._windows, self._harms, self._harmed_at = 0, 0, -_CALM
        #: Windows between looks at the highest clock, and the one after which the next is due.
        self._look_every, self._look_at = _LOOKS_AT_TOP, _LOOKS_AT_TOP
        self._since_baseline = 0
        self._commands = CommandMaker(store, num_replicas)
        #: What the bill is to say of steps that were too slow.
        self._harm = Harm()
        self._silence = Silence(own.num_stages)
        #: How often planning failed, and the window after which it is tried again, if it is.
        self._failures, self._again_at = 0, 0
        #: Whether what is planned is the best order, not only clocks.
        self._reorders = True
        #: By which share stages changed since the last plan was begun, and in the last window, if
        #: that was of a plan.
        self._drift: FloatArray = np.zeros(own.num_stages)
        self._drift_before = self._drift
        #: By which share plans must be faster than what is asked, for they turned out slower.
        self._slower = 0.0

    def run(self) -> Run[None]:
        """Everything after the warm-up: the first window has its iterations, but for the first.

        The first value it yields is None. Raises EnvPipeError if nothing can be planned.
        """
        first = yield None
        self._learn(self._top, first)
        if first.followed:
            self._measured_baseline(first)
        else:
            yield from self._at_baseline()
        if not self._store.profiled:
            yield from self._look(first_probe(self._own))
        self._replan(reorder=True)
        while (plans := self._take()) is None:
            window = yield self._commands.for_all(Phase.PROFILE, self._top, 1)
            self._learn_own(window)
            if plans := self._planner.quick(self._own, self._usual_own_s()):
                self._commands.note(
                    "a plan that was made in seconds runs until the best one is there"
                )
                break
        if plans:
            self._adopt(plans[0])
        else:
            self._lead(self._unplanned())
        yield from self._correct()
        while True:
            yield from self._steady()

    # --- phases ---------------------------------------------------------------------------------

    def _look(self, probe: Probe) -> Run[None]:
        """Run what a probe proposes."""
        while (look := probe.next(self._store)) is not None:
            self._commands.note(look.note)
            window = yield self._commands.for_all(
                Phase.PROFILE, look.clocked, look.iterations, look.settle
            )
            self._learn(look.clocked, window)

    def _correct(self) -> Run[None]:
        """Run the plan, correct what it was made from, and plan again, until nothing improves."""
        assert self.plan is not None
        for correction in range(_MOST_CORRECTIONS):
            window = yield self._plan_command(Phase.RECONFIGURE, settle=1)
            drift = self._learn_plan(window)
            if self._harmed():
                why = "the plan is slower than expected"
                yield from self._out_of_harm(window, why, drift)
                continue
            if not self._planner.busy:  # else the best plan is on its way
                self._replan(reorder=False)
            while (plans := self._take()) is None and not self._harmed():
                window = yield self._plan_command(Phase.RECONFIGURE)
                self._learn_plan(window)
            if plans is None:
                continue
            today = self._planner.repriced(self.plan)
            time = self._prediction_error(today)
            energy = today.cost.energy_j / self.plan.cost.energy_j - 1
            new = plans.get(0, self.plan)
            better = self._better(new)
            # One that stays is kept with what it is known to cost by now.
            self._adopt(new if better else self.plan)
            self._commands.note(
                f"correction {correction + 1}: time {100 * time:+.2f} %, energy "
                f"{100 * energy:+.2f} % off what was predicted, "
                f"{'planned again' if better else 'nothing better is found'}"
            )
            if not better and max(abs(time), abs(energy)) <= _AGREE:
                return

    def _steady(self) -> Run[None]:
        """One window of the steady phase, and what follows from it."""
        window = yield self._plan_command(Phase.STEADY, settle=0 if len(self._steps) else 1)
        drift = self._learn_plan(window)
        drifted = np.abs(drift).max() > _DRIFT
        if (drifted or self._windows >= self._look_at) and not self._harmed():
            at_top = yield from self._look_at_the_top()
            drift = _larger(at_top, drift)
            calm = np.abs(drift).max() <= _DRIFT
            self._look_every = min(2 * self._look_every, _SELDOM) if calm else _LOOKS_AT_TOP
            self._look_at = self._windows + self._look_every
        # What came while a plan was being made is not in that plan.
        drift = self._drift = _larger(drift, self._drift)
        if self._harmed():
            yield from self._out_of_harm(window, self._what_drifted(drift, window), drift)
        elif np.abs(drift).max() > _DRIFT and not self._planner.busy:
            self._commands.note(self._what_drifted(drift, window) + ": planning again")
            yield from self._plan_anew(drift)
        elif 0 < self._again_at <= self._windows and not self._planner.busy:
            self._replan(reorder=True)
        elif self._since_baseline >= BASELINE_EVERY:
            yield from self._at_baseline()
            # Plans were made faster for what may have been a change of the GPUs: it is given back.
            eased = self._slower > 0
            self._slower = self._slower / 2 if self._slower > _LEAST_SLOWER else 0.0
            if not self._planner.busy:
                if upset := self._store.upset.any():
                    yield from self._look_again()
                if upset or eased:
                    self._replan(reorder=True)
        self._take_plans()
        self._follow()

    def _take(self) -> Plans | None:
        """Return what was planned, if that has ended: nothing if it failed."""
        try:
            plans = self._planner.take()
        except Exception as error:  # of any kind: there is a plan to go on with
            if not isinstance(error, EnvPipeError):
                logger.exception("Planning failed")
            self._failed(f"nothing better is planned: {type(error).__name__}: {error}")
            return {}
        if plans is not None and self._reorders:
            self._failures = 0
        return plans

    def _failed(self, why: str) -> None:
        """Have it tried again, each time later."""
        self._commands.note(why)
        self._failures += 1
        self._again_at = self._windows + min(2**self._failures, _MOST_STRETCHES)
        if self._has_no_plan:
            self._commands.billed = f"The framework's own order, at the highest clocks: {why}"

    @property
    def _has_no_plan(self) -> bool:
        return self.plan is None or self.plan.policy == UNPLANNED

    def refuse(self, command: Command, why: str) -> Command:
        """Go back, from a command whose plan has no memory, to the plan that ran before."""
        before = self._commands.take_back(command)
        self._lead(before or self._unplanned())
        self._failed(f"the new plan does not run: {why}")
        return self._commands.make(command.phase, command.iterations, 1, *self._followers.running)

    def _take_plans(self) -> None:
        """Turn to what was planned meanwhile, if it is better."""
        plans = self._take() or {}
        if 0 not in plans:
            self._followers.extend({level: self._ready(p) for level, p in plans.items()})
        elif self._better(plans[0]):
            self._adopt(plans[0])

    def _look_at_the_top(self) -> Generator[Command | None, Window, FloatArray]:
        """See what the highest clock gives today, by which harm is known; drifts of stages."""
        orders, which = self._followers.running
        looking = tuple(
            Clocked(o.schedule, lifted(o.schedule, o.frequency_mhz, self._store)) for o in orders
        )
        window = yield self._commands.make(Phase.STEADY, 1, 0, looking, which)
        return self._learn_usual(looking, which, window)

    def _out_of_harm(self, window: Window, why: str, drift: FloatArray) -> Run[None]:
        """The framework's order at the highest clocks, until there is another plan."""
        own_s = self._own_today_s()
        self._commands.billed = self._harm.add(window, own_s, why)
        late = self._latest_s / own_s - 1
        assert self.plan is not None
        error = self._prediction_error(self._planner.repriced(self.plan))
        self._slower = min(_MOST_SLOWER, self._slower + max(0.0, error))
        # A plan that fails again and again is not understood: each time it is left for longer.
        self._harms = self._harms + 1 if self._windows - self._harmed_at < _CALM else 1
        self._harmed_at = self._windows
        self._look_every, self._look_at = _LOOKS_AT_TOP, self._windows + _LOOKS_AT_TOP
        stretches = 1 if self._harms <= _UNDERSTOOD else min(2**self._harms, _MOST_STRETCHES)
        self._commands.note(
            f"{why}, and steps {100 * late:+.1f} %: the framework's order at the highest clocks, "
            f"for {stretches * (BASELINE_ITERATIONS + 1)} iterations or more"
        )
        plans: Plans | None = None
        while not plans:
            for _ in range(stretches):
                yield from self._at_baseline()
            stretches = min(2 * stretches, _MOST_STRETCHES)
            yield from self._plan_anew(drift)
            while (plans := self._take()) is None:
                window = yield self._commands.for_all(Phase.BASELINE, self._top, 1)
                self._learn_own(window)
        self._adopt(plans[0])

    def _at_baseline(self) -> Run[None]:
        """A few iterations of the framework's order at the highest clocks."""
        window = yield self._commands.for_all(
            Phase.BASELINE, self._top, BASELINE_ITERATIONS, settle=1
        )
        self._learn_own(window)
        self._measured_baseline(window)
        self._steps = Steps()

    # --- what is known --------------------------------------------------------------------------

    def _learn(
        self,
        clocked: Clocked,
        window: Window,
        replicas: Sequence[int] = (),
        *,
        fades: float = 1.0,
    ) -> FloatArray:
        # What follows a probe or a baseline is compared with what these have shown.
        self._drift_before = np.zeros(self._own.num_stages)
        return self._store.learn(
            clocked.schedule,
            clocked.frequency_mhz,
            window,
            parking=clocked.parking,
            fresh=self._commands.fresh,
            replicas=replicas or self._everyone,
            fades=fades,
        )

    def _learn_own(self, window: Window) -> None:
        """Take in a window of the framework's order at the highest clocks.

        What drifted there is known from then on, and no later window differs from it: so the plan
        that runs must answer for it.
        """
        drift = self._learn(self._top, window)
        self._drift = _larger(drift, self._drift)
        if np.abs(drift).max() > _DRIFT:
            self._store.forget(_upset(drift))

    def _learn_plan(self, window: Window) -> FloatArray:
        """Take in a window of the plan; by how much stages drifted."""
        self._commands.note(*self._silence.add(window))
        self._compare(window)
        drift = self._learn_usual(*self._followers.running, window)
        if np.abs(drift).max() > _DRIFT:
            self._steps = Steps()
        self._steps.add(window.steps_s)
        self._latest_s = float(np.median(window.steps_s))
        self._since_baseline += WINDOW
        self._windows += 1
        return drift

    def _learn_usual(
        self, orders: Sequence[Clocked], which: Sequence[int], window: Window
    ) -> FloatArray:
        """Take in what the usual replica measured, and all that ran the same; drifts of stages."""
        usual = which[self._followers.usual]
        replicas = [replica for replica in self._everyone if which[replica] == usual]
        before = self._drift_before
        drift = self._learn(orders[usual], window, replicas, fades=_FADES)
        self._drift_before = drift
        # What changes in the middle of a window is half seen there, and half in the next one.
        both = (1 + before) * (1 + drift) - 1
        drift = np.where(np.abs(drift) > _DRIFT, _larger(both, drift), drift)
        if np.abs(drift).max() > _DRIFT:
            self._store.forget(_upset(drift))
        return drift

    def _compare(self, window: Window, *, alike: bool = False) -> None:
        tail_s = self._store.tail_s
        self._followers.compare(window.own_s(tail_s), window.own_error(tail_s), alike=alike)

    def _measured_baseline(self, window: Window) -> None:
        self._compare(window, alike=True)
        self._baseline.add(window.steps_s, self._own_predicted_s())
        self._since_baseline = 0

    def _own_predicted_s(self) -> float:
        """Return what the slowest replica takes in the framework's order at the highest clocks."""
        own_s = self._store.iteration_s(self._top.schedule, self._top.frequency_mhz)
        return own_s * self._followers.slowest

    def _usual_own_s(self) -> float:
        return self._own_predicted_s() / self._followers.slowest

    def _own_today_s(self) -> float:
        return self._baseline.today_s(self._own_predicted_s())

    def _harmed(self) -> bool:
        """True if steps of the plan last longer than they may, by more than noise."""
        allowed_s = self._own_today_s() * self._planner.limits.allowed
        steps, latest_s = self._steps, self._latest_s
        for median_s, count in ((latest_s, WINDOW), (steps.median_s, len(steps))):
            noise = 2 * float(np.hypot(steps.error(count), self._baseline.error(steps)))
            if median_s > allowed_s * (1 + noise):
                return True
        return False

    def _prediction_error(self, plan: Plan) -> float:
        """By which share steps last longer than the plan that runs would, at what it takes now."""
        own_s = order_at_maximum_s(self._top.schedule, plan.profile, plan.conditions)
        predicted = plan.cost.iteration_time_s / own_s
        return self._latest_s / self._own_today_s() / predicted - 1

    # --- plans ----------------------------------------------------------------------------------

    def _plan_anew(self, drift: FloatArray) -> Run[None]:
        """Begin a plan after stages drifted; what was upset is looked at first."""
        drift = _larger(drift, self._drift)
        self._drift = np.zeros(self._own.num_stages)
        if _upset(drift).any():
            yield from self._look_again()
        self._replan(reorder=bool(np.abs(drift).max() > _REORDERS))

    def _look_again(self) -> Run[None]:
        """See what clocks mean to upset stages today, where that takes no time."""
        self._store.forget(self._store.upset)
        yield from self._look(SlackProbe(self._own, at_cost=False))

    def _replan(self, *, reorder: bool) -> None:
        if reorder:
            self._again_at = 0
        elif self._reorders and self._planner.busy:  # what is ended here is begun again soon
            self._again_at = self._windows + 1
        self._reorders = reorder
        order = None if reorder or self.plan is None else self.plan.schedule
        self._planner.begin(order, self._slower)

    def _ready(self, plan: Plan) -> Plan:
        """As it would run; it does not park if harm that is not understood has come lately."""
        unclear = self._harms > _UNDERSTOOD and self._windows - self._harmed_at < _CALM
        return self._planner.ready(plan, parks=not unclear)

    def _better(self, plan: Plan) -> bool:
        assert self.plan is not None
        return self._planner.better(self._ready(plan), self.plan, self._usual_own_s())

    def _adopt(self, plan: Plan) -> None:
        if plan.policy != UNPLANNED and self.plan is not None and self._has_no_plan:
            self._commands.billed = "The framework's own order ran until there was a plan"
        self._lead(self._ready(plan))
        self._commands.adopted = None if self._has_no_plan else self.plan

    def _lead(self, plan: Plan) -> None:
        self.plan = plan
        self._followers.lead(plan)
        self._steps = Steps()

    def _unplanned(self) -> Plan:
        return self._planner.unplanned(self._top.schedule, self._top.frequency_mhz)

    def _follow(self) -> None:
        assert self.plan is not None
        followers = self._followers
        note = followers.follow()
        if note:
            self._commands.note(note)
            self._steps = Steps()
        if followers.missing and not self._planner.busy:
            self._reorders = False
            self._planner.begin_levels(self.plan.schedule, followers.asked())

    # --- commands -------------------------------------------------------------------------------

    def _plan_command(self, phase: Phase, settle: int = 0) -> Command:
        return self._commands.make(phase, WINDOW, settle, *self._followers.running)

    def _what_drifted(self, drift: FloatArray, window: Window) -> str:
        stage = int(np.abs(drift).argmax())
        text = f"stage {stage}'s units take {100 * drift[stage]:+.1f} %"
        if np.abs(drift).max() <= _DRIFT:
            text = "steps last longer than they may, and no stage's units tell why"
        return "; ".join([text, *window.problems])


def _larger(one: FloatArray, other: FloatArray) -> FloatArray:
    """[num_stages] of two drifts that which is further from none."""
    return np.where(np.abs(one) > np.abs(other), one, other)


def _upset(drift: FloatArray) -> BoolArray:
    """[num_stages] whether clocks mean something else to a stage, by how much its units drifted."""
    return np.asarray((np.abs(drift) > _UPSETS) & (np.ptp(drift) > _ALIKE))
