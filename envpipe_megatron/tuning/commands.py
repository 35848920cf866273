"""A `Command`, which all ranks run next, and a `Window`, what they measure in its iterations.

A `Run` yields the one and is sent the other; it knows no ranks, no GPU and no clock.

Of times, medians count, over iterations first and then over the replicas of a stage: a hiccup of
one GPU is no drift. Energies add up, by which short looks at a slow counter become a long one.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from envpipe_megatron.core.arrays import FloatArray, IntArray
from envpipe_megatron.core.plan import Plan
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.core.timeline import Timeline
from envpipe_megatron.formats.energy import Phase
from envpipe_megatron.formats.wishes import NO_WISHES, Wishes
from envpipe_megatron.tuning.measured.powers import Sums

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Parking:
    """Clocks that waits are spent at; both arrays are [num_stages, units_per_stage].

    Attributes:
        park_mhz: in the wait before a unit, asked for when the unit before has ended; 0 for none.
        own_after_s: so long after that the unit's own clock is asked for, or when the unit begins.
    """

    park_mhz: IntArray
    own_after_s: FloatArray

    def of_stage(self, stage: int) -> dict[int, tuple[int, float]]:
        """Return both, by position, of the units of a stage whose wait is parked in."""
        park_mhz = self.park_mhz[stage]
        return {
            int(position): (int(park_mhz[position]), float(self.own_after_s[stage, position]))
            for position in np.flatnonzero(park_mhz)
        }


@dataclass(frozen=True, eq=False)
class Clocked:
    """An order of units and their clocks, [num_stages, units_per_stage] MHz."""

    schedule: Schedule
    frequency_mhz: IntArray
    parking: Parking | None = None

    def asked_s(self, timeline: Timeline, *, fresh: bool) -> FloatArray:
        """Return when units' clocks are asked for, [num_stages, units_per_stage]; -inf: before.

        Args:
            timeline: of what units take.
            fresh: whether another order ran before.
        """
        frequency_mhz, parking = self.frequency_mhz, self.parking
        changes = frequency_mhz[:, 1:] != frequency_mhz[:, :-1]
        asked = np.full(frequency_mhz.shape, -np.inf)
        asked[:, 1:] = np.where(changes, timeline.end_s[:, :-1], -np.inf)
        # The first unit's clock is asked for at the end of the iteration before, or when it begins.
        first = (frequency_mhz[:, 0] != frequency_mhz[:, -1]) | fresh
        asked[:, 0] = np.where(first, timeline.start_s[:, 0], -np.inf)
        if parking is not None:
            in_wait_s = timeline.start_s - timeline.wait_s + parking.own_after_s
            asked = np.where(parking.park_mhz, np.minimum(in_wait_s, timeline.start_s), asked)
        return asked


@dataclass(frozen=True)
class Command:
    """A few iterations, after which every rank reports; or a plan, in place of them.

    Attributes:
        phase: what they are for.
        iterations: how many are measured; none of a plan, for which ranks have memory ready.
        settle: how many run before them, and are not.
        late_s: by how much a change of the clock comes late, as far as it is known.
        tail_s: for each stage, what it does after its last unit, likewise; empty for nothing.
        orders: what replicas run; empty if it is what they ran last.
        which: for each replica, its place among the orders; empty for the first.
        plan: what level 0 of the frontier is from now on, unless the window says that it is
            refused.
        note: what was seen and done, in lines; empty if there is nothing to say.
        billed: what the bill says of these steps, in lines.
        metered: whether the energy counter is waited for, so that the report says what power its
            steps drew.
        power: how a power budget was kept so far, as `Budget.facts` has it; None without one.
    """

    phase: Phase
    iterations: int
    settle: int = 0
    late_s: float = 0.0
    tail_s: tuple[float, ...] = ()
    orders: tuple[Clocked, ...] = ()
    which: tuple[int, ...] = ()
    plan: Plan | None = None
    note: str = ""
    billed: str = ""
    metered: bool = False
    power: Mapping[str, float | None] | None = None


#: Decides what a job runs: yields commands, is sent what they measured, and returns what it found.
Run: TypeAlias = Generator[Command, "Window", T]


def median_error(deviation: float, count: int) -> float:
    """Return the standard error of a median of values, from their median absolute deviation."""
    # Of normal noise 1.48 deviations are a standard deviation, and medians err by 1.25 of it.
    return 1.48 * 1.25 * deviation / float(np.sqrt(count))


@dataclass(frozen=True)
class Report:
    """One rank's part of a window; arrays of replicas have one row each.

    Attributes:
        unit_s: [replicas, units_per_stage] how long each unit took: its median over iterations that
            ran whole; NaN if none did.
        ends_s: [replicas, iterations] end of the last unit after the begin of the iteration.
        steps_s: [replicas, iterations] from begin to begin; NaN of the last one.
        waits_s: [replicas, iterations, units_per_stage] how long each unit waited for its input.
        meter: of all replicas together.
        power_w: [replicas, 2] mean power in steps that were not held up, of units only if no step
            is known, and its standard uncertainty; NaN if the meter has not seen all of them yet,
            or failed.
        problems: what is wrong with a GPU, in words; empty if nothing is.
    """

    unit_s: FloatArray
    ends_s: FloatArray
    steps_s: FloatArray
    waits_s: FloatArray
    meter: Sums
    power_w: FloatArray
    problems: tuple[str, ...] = ()

    @property
    def metered(self) -> bool:
        """True if a meter saw any of it."""
        return bool(self.meter.any())


def merged(parts: Sequence[Report]) -> Report:
    """Merge the reports of some replicas of a stage into one, in their order."""
    arrays = ("unit_s", "ends_s", "steps_s", "waits_s", "power_w")
    return Report(
        **{name: np.concatenate([getattr(part, name) for part in parts]) for name in arrays},
        meter=np.sum([part.meter for part in parts], axis=0),
        problems=tuple(dict.fromkeys(problem for part in parts for problem in part.problems)),
    )


@dataclass(frozen=True)
class Window:
    """Reports of all stages of some iterations, and what an operator asks for by now.

    After a plan, the reports are those of before; `refused` is why ranks have no memory for it.
    """

    stages: tuple[Report, ...]
    wishes: Wishes = NO_WISHES
    refused: str = ""

    def unit_s(self, replicas: Sequence[int] = ()) -> FloatArray:
        """Return medians over some replicas, by default all, [num_stages, units_per_stage].

        Of an even number the lower of the middle ones: of two replicas, one of which is slow, the
        other shows what units take. NaN where none of them ran whole.
        """
        rows = list(replicas) or slice(None)
        return np.array([_lower_median(stage.unit_s[rows]) for stage in self.stages])

    @property
    def whole(self) -> bool:
        """True if each replica of each stage ran an iteration whole."""
        return all(np.isfinite(stage.unit_s).all() for stage in self.stages)

    @property
    def waits_s(self) -> FloatArray:
        """Return waits for inputs, [iterations, num_stages, units_per_stage], medians of replicas.

        The hiccup of one of them must not look like a bubble.
        """
        return np.array([np.median(stage.waits_s, axis=0) for stage in self.stages]).swapaxes(0, 1)

    @property
    def num_iterations(self) -> int:
        """Return how many were measured."""
        return int(self.stages[0].ends_s.shape[1])

    @property
    def last_s(self) -> FloatArray:
        """Return ends of last units, and of steps, of the pipeline that ends last.

        [2, num_stages, iterations]: what lies between holds no wait for another pipeline there.
        """
        last = int(self.own_s(np.zeros(len(self.stages))).argmax())
        stages = [(stage.ends_s[last], stage.steps_s[last]) for stage in self.stages]
        return np.array(stages).swapaxes(0, 1)

    @property
    def steps_s(self) -> FloatArray:
        """Return times from begin to begin, [steps]; of units only, where none followed another."""
        known = np.isfinite(self._steps_s)
        return np.asarray(self._steps_s[known] if known.any() else self.last_s[0].max(axis=0))

    def even_steps_s(self, work: float) -> FloatArray:
        """Return `steps_s` scaled to the usual work, of which the window had `work` times."""
        known = np.isfinite(self._steps_s)
        return self.steps_s / (work * self.work[known if known.any() else slice(None)])

    @property
    def followed(self) -> bool:
        """True if any iteration followed another."""
        return bool(np.isfinite(self._steps_s).any())

    @property
    def _steps_s(self) -> FloatArray:
        steps = np.concatenate([stage.steps_s for stage in self.stages])
        return np.asarray(np.median(steps, axis=0))

    @property
    def works(self) -> FloatArray:
        """Return the work of each iteration, [replicas, iterations].

        It is how long a stage's units ran in sum, as a multiple of its median: of stages the median
        counts, since what is a GPU's own is no work.
        """
        busy_s = np.array([of.ends_s - of.waits_s.sum(axis=2) for of in self.stages])
        usual_s = np.median(busy_s, axis=2, keepdims=True)
        work = np.divide(busy_s, usual_s, out=np.ones_like(busy_s), where=usual_s > 0)
        return np.asarray(np.median(work, axis=0))

    @property
    def work(self) -> FloatArray:
        """Return the work of each iteration, [iterations].

        Of replicas the value nearest to 1 counts, or 1 where some ran longer and others shorter.
        """
        works = self.works
        return np.asarray(np.clip(1.0, works.min(axis=0), works.max(axis=0)))

    def own_s(self, tail_s: FloatArray) -> FloatArray:
        """Return how long each pipeline takes, [replicas], to the end of its last tail."""
        ends = np.array([np.median(stage.ends_s, axis=1) for stage in self.stages])
        return np.asarray((ends + tail_s[:, None]).max(axis=0))

    def own_error(self, tail_s: FloatArray) -> float:
        """Return the standard error of `own_s`, as a share, by how iterations scatter."""
        own_s = np.array(
            [stage.ends_s + tail for stage, tail in zip(self.stages, tail_s, strict=True)]
        ).max(0)
        own_s /= self.work
        usual_s = np.median(own_s, axis=1, keepdims=True)
        return median_error(float(np.median(np.abs(own_s / usual_s - 1))), own_s.shape[1])

    @property
    def power_w(self) -> float:
        """Return the mean power of a GPU of the job; NaN if a stage has no GPU whose is known."""
        known = [report.power_w[np.isfinite(report.power_w[:, 0]), 0] for report in self.stages]
        return float(np.mean([of.mean() if of.size else np.nan for of in known]))

    @property
    def problems(self) -> tuple[str, ...]:
        """Return problems of GPUs, with the stage."""
        return tuple(
            f"stage {stage}: {problem}"
            for stage, report in enumerate(self.stages)
            for problem in report.problems
        )


def _lower_median(unit_s: FloatArray) -> FloatArray:
    whole = unit_s[np.isfinite(unit_s).all(axis=1)]
    return np.quantile(whole, 0.5, axis=0, method="lower") if len(whole) else unit_s[0]


def tail_times_s(ends_s: ArrayLike, gaps_s: ArrayLike) -> FloatArray:
    """Return the tail of each stage, s: the median over iterations.

    A planner wants tails that make an iteration as long as it is: the latest of (end of a stage's
    last unit + its tail). A stage's gap until its next iteration holds its tail and, where stages
    synchronise at the end of an iteration (norm of all gradients, a barrier), its wait for the
    slowest stage. That wait is the *slack*: the latest end of all stages less its own. So the tail
    is gap - slack if the gap is as long as the slack. A shorter gap proves that the stage did
    not wait for the slowest one: it is the tail itself.

    The slowest stage has no slack, so its end and gap give the whole iteration either way. Of the
    others, what they do within their slack looks like waiting, and does not lengthen the
    iteration. Ends are compared after each stage's own begin: nodes share no clock, and where
    stages synchronise they begin together.

    Both arguments are [num_stages, iterations], as ranks measure them; the result [num_stages].
    """
    end, gap = np.asarray(ends_s), np.asarray(gaps_s)
    slack = end.max(axis=0) - end
    # Clocks of host and GPU differ by microseconds: an emulated gap is its slack, rounded.
    waited = gap >= slack - 1e-9
    tails: FloatArray = np.median(np.where(waited, gap - slack, gap), axis=1)
    return np.maximum(tails, 0.0)
