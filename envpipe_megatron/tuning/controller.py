"""The closed loop of the planning rank: probe, plan, correct, and watch as long as the job runs.

Nothing here talks to ranks or GPUs: `Controller.run` is a generator that yields what all ranks run
next (`Command`) and is sent what they measured (`Window`). No step waits for a plan: planning runs
beside training, and the new plan is run from the next window on.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

from envpipe_megatron.core.arrays import FloatArray
from envpipe_megatron.core.plan import Plan
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.formats.energy import Phase
from envpipe_megatron.policies.optimal.optimizer import order_at_maximum_s
from envpipe_megatron.tuning.command_maker import CommandMaker
from envpipe_megatron.tuning.commands import Clocked, Command, Run, Window
from envpipe_megatron.tuning.judge import (
    WINDOW,
    Judge,
    Silence,
    larger,
    upset,
    what_drifted,
)
from envpipe_megatron.tuning.measured.store import Store
from envpipe_megatron.tuning.planner import UNPLANNED, Planner, Plans
from envpipe_megatron.tuning.probes.probe import Probe, first_probe
from envpipe_megatron.tuning.probes.slack import SlackProbe, lifted
from envpipe_megatron.tuning.replicas import Followers

#: Corrections that gain nothing end after so many. Without any, a job in which a GPU becomes slow
#: saves 0.8 points less.
_MOST_CORRECTIONS = 6
#: The framework's order runs at the highest clocks for so many iterations, each time that so many
#: others have passed: less than a hundredth of what is saved.
BASELINE_ITERATIONS, BASELINE_EVERY = 3, 500
#: So many times the iterations of a baseline pass at most before another plan is tried.
_MOST_STRETCHES = 1024
#: After so many windows a few units run at the highest clock, if no others do; after twice as many
#: each time that all is as before, up to the second number.
_LOOKS_AT_TOP, _SELDOM = 2, 8
#: What meters said counts this much less with each window.
FADES = 0.98


class Looks:
    """When looks at the highest clock are due, in windows of plans."""

    def __init__(self) -> None:
        self._every, self._at = _LOOKS_AT_TOP, _LOOKS_AT_TOP

    def are_due(self, windows: int) -> bool:
        """True if a look is, after so many windows in all."""
        return windows >= self._at

    def looked(self, windows: int, *, calm: bool) -> None:
        """Have the next look later than this one was, if all is as before."""
        self._every = min(2 * self._every, _SELDOM) if calm else _LOOKS_AT_TOP
        self._at = windows + self._every


class Controller:
    """Decides for a job, on its planning rank.

    Args:
        own: the framework's order.
        measured: the same, or with some of its backwards split: clocks are looked at in it.
        store: what is known of its units: nothing, or what a profile says.
        num_replicas: pipelines.
        planner: makes plans from that store.
    """

    def __init__(
        self, own: Schedule, measured: Schedule, store: Store, num_replicas: int, planner: Planner
    ) -> None:
        self.plan: Plan | None = None
        self._store, self._planner = store, planner
        self._everyone = range(num_replicas)
        self._top, self._measured = store.at_top(own), measured
        self._followers = Followers(num_replicas)
        self._commands = CommandMaker(store)
        self._judge = Judge(planner.limits.allowed())
        self._looks, self._since_baseline = Looks(), 0
        self._silence = Silence(own.num_stages)

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
            own = self._measured
            if own is not self._top.schedule:
                at_top = self._store.at_top(own)
                self._commands.note("profile: half of the backwards in two parts")
                self._learn(at_top, (yield self._commands.for_all(Phase.PROFILE, at_top, WINDOW)))
            yield from self._look(first_probe(own, SlackProbe(own, at_cost=True)))
        self._replan(reorder=True)
        while (plans := self._take()) is None:
            window = yield self._commands.for_all(Phase.PROFILE, self._top, 1)
            self._learn_own(window)
            if plans := self._planner.quick(self._top.schedule):
                made = "a plan that was made in seconds runs until the best one is there"
                self._commands.note(made)
                break
        if plans:
            self._adopt(plans[0])
        else:
            self._lead(self._unplanned())
        yield from self._correct()
        while True:
            yield from self._steady()

    def refuse(self, command: Command, why: str) -> Command:
        """Go back, from a command whose plan has no memory, to the plan that ran before."""
        before = self._commands.take_back(command)
        self._lead(before or self._unplanned())
        self._failed(f"the new plan does not run: {why}")
        return self._commands.make(command.phase, command.iterations, 1, *self._followers.running)

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
            if not better and new.schedule.split != self.plan.schedule.split:
                self._planner.won = ""  # it is said of the plan that runs
            # One that stays is kept with what it is known to cost by now.
            self._adopt(new if better else self.plan)
            self._commands.note(
                f"correction {correction + 1}: time {100 * time:+.2f} %, energy "
                f"{100 * energy:+.2f} % off what was predicted, "
                f"{'planned again' if better else 'nothing better is found'}"
            )
            if not better:
                return

    def _steady(self) -> Run[None]:
        """One window of the steady phase, and what follows from it."""
        judge, planner = self._judge, self._planner
        window = yield self._plan_command(Phase.STEADY, settle=1 if judge.begins else 0)
        drift = self._learn_plan(window)
        look = drift.any() or self._looks.are_due(judge.windows)
        if look and not self._harmed():
            at_top = yield from self._look_at_the_top()
            drift = larger(at_top, drift)
            self._looks.looked(judge.windows, calm=not drift.any())
        if self._harmed():
            yield from self._out_of_harm(window, what_drifted(drift, window), drift)
        elif drift.any() and planner.busy:  # it is not in the plan that is being made
            planner.begin_again(judge.windows)
        elif drift.any():
            self._commands.note(what_drifted(drift, window) + ": planning again")
            yield from self._plan_anew(drift)
        elif planner.is_due(judge.windows) and not planner.busy:
            self._replan(reorder=True)
        elif self._since_baseline >= BASELINE_EVERY:
            yield from self._at_baseline()
            eased = judge.ease()
            if not planner.busy:
                if is_upset := self._store.upset.any():
                    yield from self._look_again()
                if is_upset or eased:
                    self._replan(reorder=True)
        self._take_plans()
        self._follow()

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
        assert self.plan is not None
        own_s, judge = self._own_predicted_s(), self._judge
        late = judge.late(own_s)
        error = self._prediction_error(self._planner.repriced(self.plan))
        self._commands.billed = judge.blame(window, own_s, error, why)
        self._looks.looked(judge.windows, calm=False)
        self._commands.note(
            f"{why}, and steps {100 * late:+.1f} %: the framework's order at the highest clocks, "
            f"for {BASELINE_ITERATIONS + 1} iterations or more"
        )
        plans: Plans | None = None
        stretches = 1  # longer each time that planning fails
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
        self._judge.begin()

    # --- what is known --------------------------------------------------------------------------

    def _learn(
        self,
        clocked: Clocked,
        window: Window,
        replicas: Sequence[int] = (),
        *,
        fades: float = 1.0,
    ) -> FloatArray:
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
        """Take in a window of the framework's order at the highest clocks."""
        drift = self._learn(self._top, window)
        if drift.any():
            self._store.forget(upset(drift))
            self._planner.begin_again(self._judge.windows)
            if self.plan is not None:
                self._commands.note(what_drifted(drift, window) + ": planning again")

    def _learn_plan(self, window: Window) -> FloatArray:
        """Take in a window of the plan; by how much stages drifted."""
        self._commands.note(*self._silence.add(window))
        self._compare(window)
        drift = self._learn_usual(*self._followers.running, window)
        self._judge.add(window)
        self._since_baseline += WINDOW
        return drift

    def _learn_usual(
        self, orders: Sequence[Clocked], which: Sequence[int], window: Window
    ) -> FloatArray:
        """Take in what the usual replica measured, and all that ran the same; drifts of stages."""
        usual = which[self._followers.usual]
        replicas = [replica for replica in self._everyone if which[replica] == usual]
        drift = self._learn(orders[usual], window, replicas, fades=FADES)
        if drift.any():
            self._store.forget(upset(drift))
        return drift

    def _compare(self, window: Window, *, alike: bool = False) -> None:
        tail_s = self._store.tail_s
        self._followers.compare(window.own_s(tail_s), window.own_error(tail_s), alike=alike)

    def _measured_baseline(self, window: Window) -> None:
        self._compare(window, alike=True)
        self._judge.add_baseline(window, self._own_predicted_s())
        self._since_baseline = 0

    def _own_predicted_s(self) -> float:
        """Return what the slowest replica takes in the framework's order at the highest clocks."""
        return self._usual_own_s() * self._followers.slowest

    def _usual_own_s(self) -> float:
        return self._store.iteration_s(self._top.schedule, self._top.frequency_mhz)

    def _harmed(self) -> bool:
        return self._judge.harmed(self._own_predicted_s())

    def _prediction_error(self, plan: Plan) -> float:
        """By which share steps last longer than the plan that runs would, at what it takes now."""
        return (1 + self._judge.late(self._own_predicted_s())) / self._expected(plan) - 1

    def _expected(self, plan: Plan) -> float:
        """How many times as long as the framework's own order a plan takes, by what it says."""
        own_s = order_at_maximum_s(self._top.schedule, plan.profile, plan.conditions)
        return plan.cost.iteration_time_s / own_s

    # --- plans ----------------------------------------------------------------------------------

    def _plan_anew(self, drift: FloatArray) -> Run[None]:
        """Begin a plan after stages drifted; what was upset is looked at first."""
        if upset(drift).any():
            yield from self._look_again()
        self._replan(reorder=True)

    def _look_again(self) -> Run[None]:
        """See what clocks mean to upset stages today, where that takes no time."""
        self._store.forget(self._store.upset)
        yield from self._look(SlackProbe(self._measured, at_cost=False))

    def _replan(self, *, reorder: bool) -> None:
        order = None if reorder or self.plan is None else self.plan.schedule
        self._planner.begin(order, self._judge.faster)

    def _take(self) -> Plans | None:
        return self._planner.take(self._failed)

    def _failed(self, why: str) -> None:
        """Have it tried again, each time later."""
        self._commands.note(why)
        self._planner.failed(self._judge.windows)
        if self._has_no_plan:
            self._commands.billed = f"The framework's own order, at the highest clocks: {why}"

    @property
    def _has_no_plan(self) -> bool:
        return self.plan is None or self.plan.policy == UNPLANNED

    def _take_plans(self) -> None:
        """Turn to what was planned meanwhile, if it is better."""
        plans = self._take() or {}
        if 0 not in plans:
            self._followers.extend({level: self._planner.ready(p) for level, p in plans.items()})
        elif self._better(plans[0]):
            self._adopt(plans[0])

    def _better(self, plan: Plan) -> bool:
        assert self.plan is not None
        return self._planner.better(self._planner.ready(plan), self.plan, self._usual_own_s())

    def _adopt(self, plan: Plan) -> None:
        if plan.policy != UNPLANNED and self.plan is not None and self._has_no_plan:
            self._commands.billed = "The framework's own order ran until there was a plan"
        self._commands.won, self._planner.won = self._planner.won, ""
        self._commands.note(*filter(None, [self._commands.won]))
        self._lead(self._planner.ready(plan))
        self._commands.adopted = None if self._has_no_plan else self.plan

    def _lead(self, plan: Plan) -> None:
        self.plan = plan
        self._followers.lead(plan)
        # Where there is no deadline, one that is always as late as the last ones is none the worse.
        expected = self._expected(plan) * (1 + self._judge.faster)
        self._judge.allowed = self._planner.limits.allowed(expected)
        self._judge.begin()

    def _unplanned(self) -> Plan:
        return self._planner.unplanned(self._top.schedule, self._top.frequency_mhz)

    def _follow(self) -> None:
        assert self.plan is not None
        followers = self._followers
        note = followers.follow()
        if note:
            self._commands.note(note)
            self._judge.begin()
        if followers.missing and not self._planner.busy:
            levels, expected = followers.asked(), self._expected(self.plan)
            self._planner.begin_levels(self.plan.schedule, levels, expected)

    # --- commands -------------------------------------------------------------------------------

    def _plan_command(self, phase: Phase, settle: int = 0) -> Command:
        return self._commands.make(phase, WINDOW, settle, *self._followers.running)
