"""Energy of training between two log lines, of all GPUs together, and against a baseline.

An *interval* holds whole training steps, each from the end of the step before (or its own begin,
after a pause) to its own end behind the optimizer; pauses are not in it. That is what a monitor
sees that is read at log lines and paused for evaluations and checkpoints.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from scipy.special import stdtrit

from envpipe_megatron.runtime.energy.meter import EnergyMeter, MeterError

#: What is older is metered before the interval ends: a meter forgets.
_LONGEST_PENDING_S = 600.0
#: Steps whose times tell how steps scatter.
_KEPT_STEPS = 1000
#: A first step of a baseline that takes so much longer than its median loads or compiles something.
_REPRESENTATIVE = 1.2
#: Of a normal distribution, the half of the 95 % interval in standard deviations.
NORMAL_95 = 1.96


@dataclass(frozen=True)
class StepEnergy:
    """What a training step takes on average.

    Args:
        iterations: how many were averaged.
        time_s: from the end of a step to the end of the next.
        time_uncertainty_s: standard uncertainty of `time_s` as the mean of such steps, by how they
            scatter; None where a single one tells nothing.
        energy_j: of one GPU; None where the counter was not seen.
        metering_uncertainty_j: standard uncertainty of `energy_j` as read from the counter.
    """

    iterations: int
    time_s: float
    time_uncertainty_s: float | None
    energy_j: float | None
    metering_uncertainty_j: float | None

    @property
    def power_w(self) -> float | None:
        """Mean power of one GPU; None of steps in which no time passed, which only end."""
        if self.energy_j is None or not self.time_s:
            return None
        return self.energy_j / self.time_s

    @property
    def energy_uncertainty_j(self) -> float | None:
        """Standard uncertainty of `energy_j` as the mean of such steps.

        Energies of single steps cannot be told where they are shorter than ten refreshes of the
        counter: their scatter is taken to be that of their times.
        """
        power_w, metering_j = self.power_w, self.metering_uncertainty_j
        if power_w is None or metering_j is None or self.time_uncertainty_s is None:
            return None
        return math.hypot(metering_j, power_w * self.time_uncertainty_s)


@dataclass(frozen=True)
class IntervalEnergy:
    """What training took on one GPU between two laps.

    Args:
        phases: number of iterations of each phase, in the order in which they came; `plan`, whose
            time lies between iterations, has none.
        duration_s: of training, without pauses.
        energy_j: J in that time; None where the counter was not seen at an end of it.
        metering_uncertainty_j: standard uncertainty of `energy_j`.
        step: an average step; None where no step ended.
    """

    phases: Mapping[str, int]
    duration_s: float
    energy_j: float | None
    metering_uncertainty_j: float | None
    step: StepEnergy | None

    @property
    def iterations(self) -> int:
        """Number of iterations in all phases."""
        return sum(self.phases.values())


@dataclass(frozen=True)
class JobEnergy:
    """An interval over all GPUs of the job.

    Args:
        phases: as in `IntervalEnergy`.
        mean: an average step on an average GPU, those of a stage standing in for its unmetered
            ones; its energy is None where a stage has no metered GPU.
        by_stage: for each stage, an average step on an average of its GPUs.
    """

    phases: Mapping[str, int]
    mean: StepEnergy
    by_stage: tuple[StepEnergy, ...]


@dataclass(frozen=True)
class BaselineEnergy:
    """What a step takes by the framework's own order at the highest clock.

    Args:
        mean: on an average GPU of the job.
        by_stage: for each stage, on an average of its GPUs.
        own: on this GPU; None where an earlier start of the job measured it.
    """

    mean: StepEnergy
    by_stage: tuple[StepEnergy, ...]
    own: StepEnergy | None = None


@dataclass(frozen=True)
class Comparison:
    """Steps against those of a baseline; uncertainties are standard ones, None if not known.

    Args:
        saving_percent: less energy a step; None where an energy is not known.
        saving_uncertainty_percent: in percentage points, as the others.
        slowdown_percent: longer steps.
        slowdown_uncertainty_percent: of it.
    """

    saving_percent: float | None
    saving_uncertainty_percent: float | None
    slowdown_percent: float
    slowdown_uncertainty_percent: float | None

    @property
    def saves_for_sure(self) -> bool:
        """Whether there is a saving at 95 % confidence: one that may be claimed."""
        return (
            self.saving_percent is not None
            and self.saving_uncertainty_percent is not None
            and self.saving_percent > NORMAL_95 * self.saving_uncertainty_percent
        )


def compare(step: StepEnergy, baseline: StepEnergy) -> Comparison:
    """How much energy a step saves against the baseline's, and how much longer it takes."""
    saving = saving_uncertainty = slowdown_uncertainty = None
    if step.energy_j is not None and baseline.energy_j:
        ratio = step.energy_j / baseline.energy_j
        saving = 100 * (1 - ratio)
        mine, theirs = step.energy_uncertainty_j, baseline.energy_uncertainty_j
        if mine is not None and theirs is not None:
            saving_uncertainty = 100 * math.hypot(mine, ratio * theirs) / baseline.energy_j
    slower = step.time_s / baseline.time_s
    if step.time_uncertainty_s is not None and baseline.time_uncertainty_s is not None:
        slowdown_uncertainty = (
            100
            * math.hypot(step.time_uncertainty_s, slower * baseline.time_uncertainty_s)
            / baseline.time_s
        )
    return Comparison(saving, saving_uncertainty, 100 * (slower - 1), slowdown_uncertainty)


class IntervalMeter:
    """Collects the steps of an interval on one GPU, and meters them when it ends.

    Args:
        meter: of the GPU.
    """

    def __init__(self, meter: EnergyMeter) -> None:
        self._meter = meter
        #: The last span of the lap before, and the energy that was told of it.
        self._told: tuple[float, float, float] | None = None
        self._begin_anew()

    def add(self, phase: str, begin_s: float, end_s: float) -> None:
        """One more step of a phase: from where its bill begins to its end."""
        self._phases[phase] = self._phases.get(phase, 0) + 1
        self._extend(begin_s, end_s)
        self._steps_s.append(end_s - begin_s)

    def add_between(self, phase: str, begin_s: float, end_s: float) -> None:
        """Time and energy that belong to no step."""
        self._phases.setdefault(phase, 0)
        self._extend(begin_s, end_s)

    def end_step(self, end_s: float) -> None:
        """The last step ends only now."""
        longer_s = end_s - self._end_s
        if longer_s > 0:
            self._extend(self._end_s, end_s)
            if self._steps_s:
                self._steps_s[-1] += longer_s

    def lap(self) -> IntervalEnergy:
        """End the interval; the next one begins where it ends. Neither reads nor waits.

        Its end was a moment ago, so the energy up to there is extrapolated from the last refresh.
        What that errs by goes into the next interval: steps end at much the same power, other than
        they have on average, so that all laps would err to the same side.
        """
        self._meter_spans(is_lap=True)
        iterations, energy_j = sum(self._phases.values()), self._energy_j
        uncertainty_j = None if energy_j is None else math.sqrt(self._variance)
        step = None
        if iterations:
            step = StepEnergy(
                iterations,
                self._duration_s / iterations,
                error_of_mean(self._steps_s),
                None if energy_j is None else energy_j / iterations,
                None if uncertainty_j is None else uncertainty_j / iterations,
            )
        ended = IntervalEnergy(self._phases, self._duration_s, energy_j, uncertainty_j, step)
        self._begin_anew()
        return ended

    def _begin_anew(self) -> None:
        self._phases: dict[str, int] = {}
        self._steps_s: deque[float] = deque(maxlen=_KEPT_STEPS)
        self._spans: list[tuple[float, float]] = []
        self._duration_s = 0.0
        self._energy_j: float | None = 0.0
        self._variance = 0.0

    def _extend(self, begin_s: float, end_s: float) -> None:
        """Spans that meet are one: the less ends, the less is interpolated."""
        if self._spans:
            (oldest_s, _), (_, newest_s) = self._spans[0], self._spans[-1]
            if newest_s - oldest_s > _LONGEST_PENDING_S and newest_s <= self._meter.last_refresh_s:
                self._meter_spans()
        if self._spans and self._spans[-1][1] == begin_s:
            self._spans[-1] = self._spans[-1][0], end_s
        else:
            self._spans.append((begin_s, end_s))
        self._end_s = end_s

    def _meter_spans(self, *, is_lap: bool = False) -> None:
        self._correct()
        for begin_s, end_s in self._spans:
            self._duration_s += end_s - begin_s
            try:
                energy = self._meter.window(begin_s, end_s)
            except MeterError:
                self._energy_j = None
                continue
            if self._energy_j is not None:
                self._energy_j += energy.energy_j
                self._variance += energy.uncertainty_j**2
                if is_lap:
                    self._told = begin_s, end_s, energy.energy_j
        self._spans = []

    def _correct(self) -> None:
        if self._told is None or not self._spans:
            return
        begin_s, end_s, told_j = self._told
        self._told = None
        with contextlib.suppress(MeterError):  # if not seen, then nothing of it is known
            corrected_j = self._meter.energy_j(begin_s, end_s) - told_j
            if self._energy_j is not None:
                self._energy_j += corrected_j


class BaselineSteps:
    """The warm-up steps of one GPU, of which those that are representative are its baseline."""

    def __init__(self) -> None:
        self._steps: list[tuple[float, float]] = []

    def add(self, begin_s: float, end_s: float) -> None:
        """One more step."""
        self._steps.append((begin_s, end_s))

    def end_step(self, end_s: float) -> None:
        """The last step ends only now."""
        self._steps[-1] = self._steps[-1][0], end_s

    def measure(self, meter: EnergyMeter) -> StepEnergy | None:
        """An average step, without the first and others at the start that take much longer.

        Returns:
            None where they are too few, or together shorter than ten refreshes of the counter.
        """
        steps = self._steps[1:]
        if not steps:
            return None
        usual_s = statistics.median(end_s - begin_s for begin_s, end_s in steps)
        while steps[0][1] - steps[0][0] > _REPRESENTATIVE * usual_s:
            steps = steps[1:]
        interval = IntervalMeter(meter)
        for begin_s, end_s in steps:
            interval.add("", begin_s, end_s)
        measured = interval.lap()
        if len(steps) < 2 or measured.duration_s < meter.min_window_s or measured.energy_j is None:
            return None
        return measured.step


class PhaseMean:
    """The mean step of all intervals of one phase: of a job, however long it is."""

    def __init__(self) -> None:
        self._laps_s: deque[float] = deque(maxlen=_KEPT_STEPS)
        self._iterations = 0
        self._duration_s = self._energy_j = self._variance = 0.0

    def add(self, lap: StepEnergy) -> None:
        """One more interval; one that was not metered is left out."""
        if lap.energy_j is None or lap.metering_uncertainty_j is None:
            return
        self._laps_s.append(lap.time_s)
        self._iterations += lap.iterations
        self._duration_s += lap.iterations * lap.time_s
        self._energy_j += lap.iterations * lap.energy_j
        self._variance += (lap.iterations * lap.metering_uncertainty_j) ** 2
        self._only = lap

    @property
    def step(self) -> StepEnergy | None:
        """An average step; None as long as there is no interval."""
        count = self._iterations
        if not count:
            return None
        if len(self._laps_s) == 1:
            return self._only
        return StepEnergy(
            count,
            self._duration_s / count,
            error_of_mean(self._laps_s),
            self._energy_j / count,
            math.sqrt(self._variance) / count,
        )


class StepSums(NamedTuple):
    """Average steps of several GPUs, added up: a job's ranks exchange these few numbers.

    Args:
        gpus: how many.
        steps: those of them that have a step.
        iterations: of their steps.
        time_s: of them.
        certain: those whose time has an uncertainty.
        time_uncertainty_s: of these.
        metered: those whose energy is known.
        energy_j: of these.
        metering_variance_j2: of these.
    """

    gpus: float
    steps: float
    iterations: float
    time_s: float
    certain: float
    time_uncertainty_s: float
    metered: float
    energy_j: float
    metering_variance_j2: float

    @classmethod
    def of(cls, step: StepEnergy | None) -> StepSums:
        """Of one GPU."""
        if step is None:
            return cls(1, *[0] * 8)
        return cls(
            1,
            1,
            step.iterations,
            step.time_s,
            step.time_uncertainty_s is not None,
            step.time_uncertainty_s or 0.0,
            step.energy_j is not None,
            step.energy_j or 0.0,
            (step.metering_uncertainty_j or 0.0) ** 2,
        )


def mean_over_gpus(by_stage: Sequence[StepSums]) -> StepEnergy | None:
    """An average step on an average GPU; None where one has no step.

    A GPU without a figure is taken to be like the others of its stage, which do the same work.
    """
    gpus = sum(stage.gpus for stage in by_stage)
    if gpus != sum(stage.steps for stage in by_stage):
        return None
    certain = gpus == sum(stage.certain for stage in by_stage)
    energy_j = metering_uncertainty_j = None
    if all(stage.metered for stage in by_stage):
        share = [stage.gpus / stage.metered / gpus for stage in by_stage]
        energy_j = sum(part * stage.energy_j for part, stage in zip(share, by_stage, strict=True))
        metering_uncertainty_j = math.hypot(
            *(
                part * math.sqrt(stage.metering_variance_j2)
                for part, stage in zip(share, by_stage, strict=True)
            )
        )
    return StepEnergy(
        round(sum(stage.iterations for stage in by_stage) / gpus),
        sum(stage.time_s for stage in by_stage) / gpus,
        # All take their steps together, so that a mean over GPUs scatters no less.
        sum(stage.time_uncertainty_s for stage in by_stage) / gpus if certain else None,
        energy_j,
        metering_uncertainty_j,
    )


def error_of_mean(values: Sequence[float] | deque[float]) -> float | None:
    """Standard uncertainty of the mean of a few values; None where one tells nothing."""
    return standard_error(statistics.stdev(values), len(values)) if len(values) > 1 else None


def standard_error(deviation: float, count: int) -> float:
    """Standard uncertainty of the mean of two values or more, by their standard deviation.

    It is widened by Student's t, so that twice the figure is the 95 % interval of few values too.
    """
    return float(stdtrit(count - 1, 0.975)) / NORMAL_95 * deviation / math.sqrt(count)


def percent(value: float | None, standard_uncertainty: float | None) -> str:
    """A number of percent, with its 95 % interval where that is known."""
    if value is None:
        return "not known"
    if standard_uncertainty is None:
        return f"{value:.2f} %"
    return f"{value:.2f} +- {NORMAL_95 * standard_uncertainty:.2f} %"
