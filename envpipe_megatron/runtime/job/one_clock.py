"""One clock for the whole job, found while training goes on. Called by `phases`.

It is for jobs without a pipeline, and for those whose units no code on the host sees: all units of
an iteration, on all GPUs, run at the same clock, and so do gradient reduction and optimizer. Whole
training steps are measured at a few clocks, on all GPUs, with all that they wait for. Kept is the
clock of least energy among those at which a step lasts no longer than the user allows. With 0 %,
these are the clocks that a power cap makes free, and those of a job that waits for something else.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise

from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.formats.energy import Phase
from envpipe_megatron.runtime.energy.log import Window
from envpipe_megatron.runtime.energy.steps import Comparison, StepEnergy, compare, percent
from envpipe_megatron.runtime.execution.orders import PhaseRun, Stretches, constant_order
from envpipe_megatron.runtime.going_on import GoesOnError, by_planner, on_every_rank
from envpipe_megatron.runtime.job.parts import PhaseParts

#: Clocks are at least this share of the highest apart: closer ones differ by less than noise.
ONE_CLOCK_STEP = 0.0075
#: Clocks that the search first goes down at once, a power of two: some sixth of the highest.
_COARSE = 16
#: It goes no further down after this many rises of energy in a row.
_RISES_TO_STOP = 2
#: The highest clock and the best are measured this often.
_ROUNDS = 2
#: The kept clock is held against the highest when so many iterations have passed, and so many times
#: those of a measurement: less than a hundredth of what is saved.
_COMPARED_AFTER, _MEASUREMENTS_APART = 1000, 100
#: Two steps are the least whose scatter is known.
_LEAST_STEPS = 2
#: Noise may not excuse a slower clock by more, percent.
_MOST_EXCUSED_PERCENT = 0.25
#: Times that differ by no more are equal but for rounding, percent.
_ROUNDING_PERCENT = 1e-6


@dataclass(frozen=True)
class Tried:
    """The mean step at a clock, on an average GPU of the job, and how often it was measured."""

    step: StepEnergy
    rounds: int


@dataclass
class ClockSearch:
    """Which clock to measure next, and which is the best, from what was measured so far.

    Args:
        clocks_mhz: the highest first; slowdowns and savings are against it.
        slowdown_percent: what the user allows.
        tried: what was measured at each clock; to search, all energies are known.
    """

    clocks_mhz: Sequence[int]
    slowdown_percent: float
    tried: dict[int, Tried] = field(default_factory=dict)

    def next_mhz(self) -> int | None:
        """The clock to measure next; None once the best one is known.

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
        if at:
            for clock in (self.clocks_mhz[0], best):
                if self.tried[clock].rounds < _ROUNDS:
                    return clock
        return None

    def best_mhz(self) -> int:
        """The clock of least energy of those that are fast enough, as the highest always is.

        Below it, the lowest that cannot be told from it, by time nor energy: where a power cap
        holds the clock, requests above it are all alike.
        """
        fast = [clock for clock in self.tried if not self._too_slow(clock)]
        least = min(fast, key=lambda clock: self.tried[clock].step.energy_j or 0.0)
        below = [clock for clock in fast if clock <= least and not self._slower(clock, least)]
        return min(clock for clock in below if not self._takes_more(clock, least))

    def is_right(self, clock: int) -> bool:
        """True if a clock saves, and is no slower than allowed, as far as can be told."""
        return not self._too_slow(clock) and not self._takes_more(clock, self.clocks_mhz[0])

    def by_clock(self) -> list[int]:
        """The clocks that were measured, the highest first."""
        return sorted(self.tried, reverse=True)

    def told(self, clock: int) -> str:
        """Put into words what was measured at a clock."""
        step, compared = self.tried[clock].step, self._compared(clock, self.clocks_mhz[0])
        saved = percent(compared.saving_percent, compared.saving_uncertainty_percent)
        slower = percent(compared.slowdown_percent, compared.slowdown_uncertainty_percent)
        energy = "unknown energy" if step.energy_j is None else f"{step.energy_j:.1f} J"
        return (
            f"{clock} MHz: {step.time_s:.4f} s and {energy} a step on an average GPU, "
            f"saved: {saved}, slower: {slower}"
        )

    def _compared(self, clock: int, other: int) -> Comparison:
        return compare(self.tried[clock].step, self.tried[other].step)

    def _too_slow(self, clock: int) -> bool:
        return self._slower(clock, self.clocks_mhz[0], self.slowdown_percent)

    def _slower(self, clock: int, other: int, allowed_percent: float = 0.0) -> bool:
        """True if a clock's steps last longer than allowed by more than can be noise.

        That is one standard uncertainty of the two means' ratio, if it is not large.
        """
        compared = self._compared(clock, other)
        noise = min(compared.slowdown_uncertainty_percent or 0.0, _MOST_EXCUSED_PERCENT)
        more = compared.slowdown_percent or 0.0  # one that is not known is none
        return more > allowed_percent + noise + _ROUNDING_PERCENT

    def _takes_more(self, clock: int, other: int) -> bool:
        """True if a clock's steps take more energy, by more than can be noise."""
        compared = self._compared(clock, other)
        noise = (compared.saving_uncertainty_percent or 0.0) + _ROUNDING_PERCENT
        return (compared.saving_percent or 0.0) < -noise

    def _ends(self, down: Sequence[int]) -> bool:
        """True if no lower clock than these, which were tried, can be better."""
        rises = [self._takes_more(low, high) for high, low in pairwise(down)]
        past_valley = len(rises) >= _RISES_TO_STOP and all(rises[-_RISES_TO_STOP:])
        return bool(down) and (past_valley or self._too_slow(down[-1]))


class OneClock:
    """Finds the clock to keep, in MHz, and looks whether it is still right; the same on every rank.

    A measurement takes the profiler's iterations, a second and two steps at least, and those in
    which clock and counter settle: seven steps or more, by default.

    Args:
        job: this rank's parts; its configuration allows a slowdown.
        schedule: the framework's order, in which all iterations run.
        swept_mhz: the clocks to choose from, beside the highest.
    """

    def __init__(self, job: PhaseParts, schedule: Schedule, swept_mhz: Sequence[int]) -> None:
        limit_percent = job.config.one_clock_slowdown_percent
        assert limit_percent is not None
        self._job, self._schedule, self._limit_percent = job, schedule, limit_percent
        self._top = max(job.gpu.supported_frequencies_mhz)
        self._clocks_mhz = [self._top, *(clock for clock in swept_mhz if clock < self._top)]
        self._stretches = Stretches(
            job.config.profiler.settle_iterations, job.config.profiler.min_window_s, job.collectives
        )
        #: Iterations after which to ask whether the clock is still right.
        self.compared_after = _COMPARED_AFTER

    def find_or_keep(self) -> PhaseRun[int]:
        """Return what an earlier start of the job found; else as `find`."""
        job = self._job
        kept = job.folder.found.one_clock_mhz
        if kept and job.collectives.on_all(kept in job.gpu.supported_frequencies_mhz):
            job.state.notes = (f"One clock for the whole job: {kept} MHz, as found before",)
            job.say(job.state.notes[0])
            return kept
        return (yield from self.find())

    def find(self) -> PhaseRun[int]:
        """Measure a few clocks; the one to keep.

        There are six to 18 measurements. In one to three of them steps last longer than allowed, by
        what a clock lower by a sixth, a twelfth and a 25th costs: about two steps' time in all.

        Raises GoesOnError on all ranks if a meter or the control of a clock failed on one.
        """
        job = self._job
        search = ClockSearch(self._clocks_mhz, self._limit_percent)
        steps: dict[int, list[Window]] = defaultdict(list)
        while (clock := by_planner(job.collectives, search.next_mhz)) is not None:
            job.say(f"one clock: measuring {clock} MHz")
            yield from self._measure(Phase.PROFILE, clock, search, steps)
        best = by_planner(job.collectives, search.best_mhz)
        why = f"at most {self._limit_percent:g} % slower was allowed"
        if not job.collectives.on_all(job.gpu.changes_clock):
            best = self._top
            why = "a dry run changes no clock, so what was measured shows the loop alone"
        choice = f"One clock for the whole job: {best} MHz; {why}"
        told = by_planner(
            job.collectives, lambda: [search.told(clock) for clock in search.by_clock()]
        )
        job.state.notes = (choice, *told)
        for note in job.state.notes:
            job.say(note)
        if job.collectives.is_planner:
            clocks = [
                {"frequency_mhz": clock, **asdict(search.tried[clock].step)}
                for clock in search.by_clock()
            ]
            job.folder.append("one_clock", {"chosen_mhz": best, "clocks": clocks})
        job.folder.keep_one_clock(best)
        return best

    def is_right(self, kept_mhz: int) -> PhaseRun[bool]:
        """Measure the kept clock and the highest: whether it still saves and is no slower than may.

        What speaks against it must do so twice. Where a meter has failed, times alone tell. Raises
        GoesOnError on all ranks if the control of a clock failed on one.
        """
        if kept_mhz == self._top:
            return True
        job = self._job
        search = ClockSearch(self._clocks_mhz, self._limit_percent)
        steps: dict[int, list[Window]] = defaultdict(list)
        for _ in range(_ROUNDS):
            yield from self._measure(Phase.BASELINE, self._top, search, steps)
            yield from self._measure(Phase.STEADY, kept_mhz, search, steps)
            if by_planner(job.collectives, lambda: search.is_right(kept_mhz)):
                return True
        job.say(f"one clock: not right any more, {search.told(kept_mhz)}")
        return False

    def _measure(
        self, phase: Phase, clock: int, search: ClockSearch, steps: dict[int, list[Window]]
    ) -> PhaseRun[None]:
        """Add a round at a clock to a search, and its steps to those of the rounds before."""
        job = self._job
        order = constant_order(phase, self._schedule, clock, clock)
        yield from self._stretches.settle(order)
        before = len(steps[clock])
        job.energy.measure_into(steps[clock])
        at_least = max(_LEAST_STEPS, job.config.profiler.measured_iterations)
        records = yield from self._stretches.measure(order, at_least)
        job.energy.measure_into(None)
        del steps[clock][before : -len(records)]  # of iterations that did not run whole
        self.compared_after = max(_COMPARED_AFTER, _MEASUREMENTS_APART * len(records))
        yield from self._stretches.settle(order)  # the counter passes the last step's end
        rounds = search.tried[clock].rounds + 1 if clock in search.tried else 1
        needs_energy = phase is Phase.PROFILE
        search.tried[clock] = Tried(_mean_step(job, steps[clock], needs_energy), rounds)


def _mean_step(job: PhaseParts, steps: Sequence[Window], needs_energy: bool) -> StepEnergy:
    """Return the mean step of all GPUs at a clock; GoesOnError on all ranks if one has none."""
    mean = job.energy.mean_step(steps)

    def checked() -> StepEnergy:
        if job.clock.error is not None:
            raise GoesOnError(f"Clock control ended while measuring: {job.clock.error}")
        if mean is None or (needs_energy and mean.energy_j is None):
            raise GoesOnError("The energy counter failed while clocks were measured")
        return mean

    return on_every_rank(job.collectives, checked)
