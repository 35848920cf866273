"""One clock for the whole job, found while training goes on: `OneClock` is the tuner.

It is for jobs without a pipeline, and for those whose units no code on the host sees: all units of
an iteration, on all GPUs, run at the same clock, and so do gradient reduction and optimizer. Whole
training steps are measured at a few clocks, on all GPUs, with all that they wait for. Kept is the
clock of least energy among those at which a step lasts no longer than the user allows. With 0 %,
these are the clocks that a power cap makes free, and those of a job that waits for something else.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.formats.energy import Phase
from envpipe_megatron.formats.steps import HELD_UP, RunningMean, StepEnergy, compare
from envpipe_megatron.tuning.command_maker import CommandMaker
from envpipe_megatron.tuning.commands import Clocked, Run, Window

#: Clocks are at least this share of the highest apart: closer ones differ by less than noise.
ONE_CLOCK_STEP = 0.0075
#: Clocks that the search first goes down at once, a power of two: some sixth of the highest.
_COARSE = 16
#: It goes no further down after this many rises of energy in a row.
_RISES_TO_STOP = 2
#: The highest clock and the best are measured this often.
_ROUNDS = 2
#: Fewest iterations until the kept clock is compared with the highest again, and as a multiple of
#: those of a measurement: it costs less than a hundredth of what is saved.
_COMPARED_AFTER, _MEASUREMENTS_APART = 1000, 100
#: Two steps are the least whose scatter is known.
_LEAST_STEPS = 2
#: Noise may not excuse a slower clock by more, percent.
_MOST_EXCUSED_PERCENT = 0.25
#: Times that differ by no more are equal except for rounding, percent.
_ROUNDING_PERCENT = 1e-6


@dataclass
class ClockSearch:
    """Which clock to measure next, and which is the best, from what was measured so far.

    Args:
        clocks_mhz: the highest first; slowdowns and savings are against it.
        slowdown_percent: what the user allows.
        windows: what was measured at each clock, round by round.
        tried: the mean step at each, on an average GPU of the job; to search, all energies are
            known.
    """

    clocks_mhz: Sequence[int]
    slowdown_percent: float
    windows: dict[int, list[Window]] = field(default_factory=lambda: defaultdict(list))
    tried: dict[int, StepEnergy] = field(default_factory=dict)

    def add(self, clock: int, window: Window) -> None:
        """Take in a round at a clock."""
        self.windows[clock].append(window)
        self.tried[clock] = _mean_step(self.windows[clock])

    def next_mhz(self) -> int | None:
        """Return the clock to measure next; None once the best one is known.

        First a sixth of the highest clock at a time, until steps last too long or energy rises;
        then, with half of that distance and so on down to the next clocks, to both sides of the
        best. Last, the highest clock and the best are measured again, next to each other: the best
        of several noisy measurements looks better than it is, and GPUs grow warm meanwhile.
        """
        coarse = self.clocks_mhz[::_COARSE]
        down = [clock for clock in coarse if clock in self.tried]
        if len(down) < len(coarse) and not self._ends(down):
            return coarse[len(down)]
        best = self.best_mhz()
        at = self.clocks_mhz.index(best)
        distance = _COARSE
        while distance := distance // 2:
            for near in (at + distance, at - distance) if at % distance == 0 else ():
                if 0 <= near < len(self.clocks_mhz) and self.clocks_mhz[near] not in self.tried:
                    return self.clocks_mhz[near]
        again = (self.clocks_mhz[0], best) if at else ()
        return next((clock for clock in again if len(self.windows[clock]) < _ROUNDS), None)

    def best_mhz(self) -> int:
        """Return the clock of least energy among those that are fast enough, as the highest is.

        Or the lowest below that differs from it neither in time nor energy: where a power cap holds
        the clock, requests above it are all alike.
        """
        fast = [clock for clock in self.tried if not self._too_slow(clock)]
        least = min(fast, key=lambda clock: self.tried[clock].energy_j or 0.0)
        below = [clock for clock in fast if clock <= least and not self._slower(clock, least)]
        return min(clock for clock in below if not self._takes_more(clock, least))

    def is_right(self, clock: int) -> bool:
        """True if a clock saves, and is no slower than allowed, as far as is known."""
        return not self._too_slow(clock) and not self._takes_more(clock, self.clocks_mhz[0])

    def in_words(self, clock: int) -> str:
        """Put into words what was measured at a clock."""
        step = self.tried[clock]
        compared = compare(step, self.tried[self.clocks_mhz[0]])
        energy = "unknown energy" if step.energy_j is None else f"{step.energy_j:.1f} J"
        return f"{clock} MHz: {step.time_s:.4f} s and {energy} a step on an average GPU, {compared}"

    def _too_slow(self, clock: int) -> bool:
        return self._slower(clock, self.clocks_mhz[0], self.slowdown_percent)

    def _slower(self, clock: int, other: int, allowed_percent: float = 0.0) -> bool:
        """True if a clock's steps last longer than allowed by more than can be noise.

        That is one standard uncertainty of the two means' ratio, if it is not large.
        """
        compared = compare(self.tried[clock], self.tried[other])
        noise = min(compared.slowdown_uncertainty_percent or 0.0, _MOST_EXCUSED_PERCENT)
        more = compared.slowdown_percent or 0.0  # one that is not known is none
        return more > allowed_percent + noise + _ROUNDING_PERCENT

    def _takes_more(self, clock: int, other: int) -> bool:
        """True if a clock's steps take more energy, by more than can be noise."""
        compared = compare(self.tried[clock], self.tried[other])
        noise = (compared.saving_uncertainty_percent or 0.0) + _ROUNDING_PERCENT
        return (compared.saving_percent or 0.0) < -noise

    def _ends(self, down: Sequence[int]) -> bool:
        """True if no lower clock than these, which were tried, can be better."""
        rises = [self._takes_more(low, high) for high, low in pairwise(down)]
        past_valley = len(rises) >= _RISES_TO_STOP and all(rises[-_RISES_TO_STOP:])
        return bool(down) and (past_valley or self._too_slow(down[-1]))


@dataclass
class OneClock:
    """Finds a clock for a job, keeps it while it is right, and finds another then.

    Args:
        schedule: the framework's order, in which all iterations run.
        clocks_mhz: those to choose from, the highest first.
        slowdown_percent: what the user allows.
        steps_at_clock: returns how many steps of a length in s a measurement has, or two if fewer.
        follows: whether clocks change; in a dry run they do not, and the highest is kept.
        found_mhz: the clock that an earlier start of the job found, if one did.
        keep: called with each clock that is found, and the mean step at all that were measured.
    """

    schedule: Schedule
    clocks_mhz: Sequence[int]
    slowdown_percent: float
    steps_at_clock: Callable[[float], int]
    follows: bool
    found_mhz: int | None
    keep: Callable[[int, Mapping[int, StepEnergy]], None]

    def __post_init__(self) -> None:
        self._steps = 0
        self._commands = CommandMaker(None)
        self._budget = self._commands.budget
        #: W of an average GPU at each clock, as they were metered last.
        self._powers_w: dict[int, float] = {}

    def run(self, first: Window) -> Run[None]:
        """Go on after the `first` window, of the highest clock, forever.

        Raises EnvPipeError if a meter failed in a search: whether a clock is right, times show
        without.
        """
        self._fill(first)
        self._commands.note(self._budget.update(first))
        if self.found_mhz is not None:
            choice = f"One clock for the whole job: {self.found_mhz} MHz, as found before"
            yield from self._stay(self.found_mhz, choice)
        while True:
            yield from self._stay(*(yield from self._find()))

    def _find(self) -> Run[tuple[int, str]]:
        """Return the clock to keep, and what the bill is to say of it.

        There are six to 18 measurements. In one to three of them steps last longer than allowed, by
        what a clock lower by a sixth, a twelfth and a 25th costs: about two steps' time in all.
        """
        search = ClockSearch(self.clocks_mhz, self.slowdown_percent)
        while (clock := search.next_mhz()) is not None:
            self._commands.note(f"one clock: measuring {clock} MHz")
            yield from self._measure(search, Phase.PROFILE, clock)
            if search.tried[clock].energy_j is None:
                raise EnvPipeError("The energy counter failed while clocks were measured")
        best, why = search.best_mhz(), f"at most {self.slowdown_percent:g} % slower was allowed"
        if not self.follows:
            best = self.clocks_mhz[0]
            why = "a dry run changes no clock, so what was measured shows only the loop"
        steps = dict(sorted(search.tried.items(), reverse=True))
        self.keep(best, steps)
        choice = f"One clock for the whole job: {best} MHz; {why}"
        return best, "\n".join([choice, *map(search.in_words, steps)])

    def _stay(self, kept: int, choice: str) -> Run[None]:
        """Keep a clock until two comparisons in a row speak against it; `choice` is billed.

        Where there is a power budget, a lower one that keeps it runs, and none is compared.
        """
        top, self._commands.bill["won"] = self.clocks_mhz[0], choice
        self._commands.note(choice)
        while True:
            if self._budget.is_set:
                yield from self._keep_budget(kept)
            search = ClockSearch(self.clocks_mhz, self.slowdown_percent)
            settle = max(_COMPARED_AFTER, _MEASUREMENTS_APART * self._steps)
            for _ in range(_ROUNDS):
                yield from self._measure(search, Phase.STEADY, kept, settle=settle)
                settle = 1
                if self._budget.is_set:
                    break
                if kept != top:
                    yield from self._measure(search, Phase.BASELINE, top)
                if search.is_right(kept):
                    break
            else:
                self._commands.note(f"one clock: not right any more, {search.in_words(kept)}")
                return

    def _keep_budget(self, kept: int) -> Run[None]:
        """Run clocks that keep the power budget, until it is lifted."""
        budget, ran = self._budget, self.clocks_mhz[0]
        if ran not in self._powers_w:  # of a clock that was found before
            yield from self._run(Phase.BASELINE, ran)
        while budget.is_set:
            clock = self._within(kept)
            window = yield from self._run(Phase.STEADY, clock, settle=int(clock != ran))
            self._commands.note(budget.count(window))
            ran = clock
            if clock == min(self.clocks_mhz):
                self._commands.note(budget.reach(self._powers_w.get(clock, 0.0)))

    def _within(self, kept: int) -> int:
        """Return the highest clock that keeps the budget and is no higher than the one to keep.

        By what was metered at clocks, and between them; below them, power follows the clock.
        """
        clocks = [clock for clock in self.clocks_mhz if clock <= kept] if self.follows else [kept]
        known = {0: 0.0, **self._powers_w}
        at = sorted(known)
        powers_w = np.interp(clocks, at, [known[clock] for clock in at])
        allowed_w = self._budget.allowed_w
        within = (c for c, w in zip(clocks, powers_w, strict=True) if not w > allowed_w)
        return next(within, clocks[-1])

    def _measure(self, search: ClockSearch, phase: Phase, clock: int, settle: int = 1) -> Run[None]:
        """Add a round to a search: steps at a clock, and the begin of another, which ends them."""
        window = yield from self._run(phase, clock, settle)
        search.add(clock, window)
        if clock == self.clocks_mhz[0]:
            self._fill(window)

    def _run(self, phase: Phase, clock: int, settle: int = 1) -> Run[Window]:
        """Run steps at a clock, and hear what GPUs take there, and what is asked for."""
        clocks_mhz = np.full((self.schedule.num_stages, self.schedule.units_per_stage), clock)
        clocked = Clocked(self.schedule, clocks_mhz)
        window = yield self._commands.metered(phase, clocked, self._steps + 1, settle)
        if not math.isnan(window.power_w):
            self._powers_w[clock] = window.power_w
            self._budget.own_w = self._powers_w.get(self.clocks_mhz[0], math.nan)
        self._commands.note(self._budget.update(window))
        return window

    def _fill(self, window: Window) -> None:
        """Let measurements last long enough, by what steps took at the highest clock."""
        count = self.steps_at_clock(float(np.median(window.steps_s)))
        self._steps = max(_LEAST_STEPS, count)


def _mean_step(windows: Sequence[Window]) -> StepEnergy:
    """Return the mean of an average GPU's steps at one clock, without those that were held up."""
    time_s, steps_s = RunningMean(), np.concatenate([window.steps_s for window in windows])
    for step_s in steps_s[steps_s <= HELD_UP * np.median(steps_s)].tolist():
        time_s.add(step_s)
    power_w = np.array([[report.power_w for report in window.stages] for window in windows])
    metered = np.isfinite(power_w).all(axis=-1)
    # A GPU without a meter is taken to be like the others of its stage, which do the same work.
    of_stage = metered.sum(axis=-1, keepdims=True)
    energy_j = metering_j = None
    if of_stage.all():
        shares = (metered / of_stage / of_stage.size)[..., np.newaxis]
        each_j = (time_s.mean * shares * np.nan_to_num(power_w)).reshape(-1, 2).T
        energy_j, metering_j = math.fsum(each_j[0]), math.hypot(*each_j[1])
    return StepEnergy(time_s.count, time_s.mean, time_s.uncertainty, energy_j, metering_j)
