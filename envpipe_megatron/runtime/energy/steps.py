"""What an average training step takes: of one GPU, of a job's GPUs, and against a baseline.

Arithmetic alone: `TrainingEnergy` measures steps, and bills and reports compare them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import stdtrit

from envpipe_megatron.core.arrays import FloatArray
from envpipe_megatron.core.uncertainty import NORMAL_95


@dataclass(frozen=True)
class StepEnergy:
    """What a training step takes on average, on one GPU.

    Attributes:
        iterations: how many were averaged.
        time_s: time from the end of a step to the end of the next.
        time_uncertainty_s: standard uncertainty of `time_s` as the mean of such steps, by how they
            scatter; None for a single one.
        energy_j: None if the counter was not seen.
        metering_uncertainty_j: standard uncertainty of `energy_j` as read from the counter.
    """

    iterations: int
    time_s: float
    time_uncertainty_s: float | None
    energy_j: float | None
    metering_uncertainty_j: float | None

    @property
    def power_w(self) -> float | None:
        """Mean power of one GPU; None of steps in which no time passed."""
        if self.energy_j is None or not self.time_s:
            return None
        return self.energy_j / self.time_s

    @property
    def energy_uncertainty_j(self) -> float | None:
        """Standard uncertainty of `energy_j` as the mean of such steps.

        Steps shorter than ten refreshes of the counter have no energy each that could scatter:
        their energies are taken to scatter as their times do.
        """
        power_w, metering_j = self.power_w, self.metering_uncertainty_j
        if power_w is None or metering_j is None or self.time_uncertainty_s is None:
            return None
        return math.hypot(metering_j, power_w * self.time_uncertainty_s)


@dataclass(frozen=True)
class IntervalEnergy:
    """What training took between two laps, on one GPU or on an average one of the job.

    `phases` counts iterations of each phase, in the order in which they came; 0 of `plan`, whose
    time lies between iterations and is shared by the steps. `step` is None if no step ended.
    """

    phases: Mapping[str, int]
    step: StepEnergy | None


@dataclass(frozen=True)
class BaselineEnergy:
    """What a step takes in the framework's own order at the highest clock.

    On an average GPU of the job, on an average one of each stage, and on this GPU: `own` is None
    if an earlier start of the job measured it.
    """

    mean: StepEnergy
    by_stage: tuple[StepEnergy, ...]
    own: StepEnergy | None = None


@dataclass(frozen=True)
class Comparison:
    """Steps against those of a baseline, in percent; slowdown is of time.

    Uncertainties are standard ones, in percentage points, None if not known; so is the saving where
    an energy is not known.
    """

    saving_percent: float | None
    saving_uncertainty_percent: float | None
    slowdown_percent: float
    slowdown_uncertainty_percent: float | None


def compare(step: StepEnergy, baseline: StepEnergy) -> Comparison:
    """How much energy a step saves against the baseline's, and how much longer it takes."""
    saving = saving_uncertainty = slowdown_uncertainty = None
    if step.energy_j is not None and baseline.energy_j:
        ratio = step.energy_j / baseline.energy_j
        saving = 100 * (1 - ratio)
        own_j, base_j = step.energy_uncertainty_j, baseline.energy_uncertainty_j
        if own_j is not None and base_j is not None:
            saving_uncertainty = 100 * math.hypot(own_j, ratio * base_j) / baseline.energy_j
    slower = step.time_s / baseline.time_s
    own_s, base_s = step.time_uncertainty_s, baseline.time_uncertainty_s
    if own_s is not None and base_s is not None:
        slowdown_uncertainty = 100 * math.hypot(own_s, slower * base_s) / baseline.time_s
    return Comparison(saving, saving_uncertainty, 100 * (slower - 1), slowdown_uncertainty)


class RunningMean:
    """The mean of values that come one by one, and how they scatter (Welford)."""

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self._squares = 0.0

    def add(self, value: float) -> None:
        """Add one more value."""
        self.count += 1
        deviation = value - self.mean
        self.mean += deviation / self.count
        self._squares += deviation * (value - self.mean)

    @property
    def uncertainty(self) -> float | None:
        """Standard uncertainty of the mean; None of fewer than two values.

        Student's t widens it, so that twice the figure is the 95 % interval of few values too.
        """
        n = self.count
        if n < 2:
            return None
        widened = float(stdtrit(n - 1, 0.975)) / NORMAL_95
        return widened * math.sqrt(self._squares / (n - 1) / n)


class PhaseMean:
    """The mean step of all laps of one phase, each of which counts by its steps."""

    def __init__(self) -> None:
        self._times_s = RunningMean()
        self._iterations = 0
        self._duration_s = self._energy_j = self._variance_j2 = 0.0

    def add(self, lap: StepEnergy) -> None:
        """Add one more lap; one that was not metered is left out."""
        if lap.energy_j is None or lap.metering_uncertainty_j is None:
            return
        self._times_s.add(lap.time_s)
        self._iterations += lap.iterations
        self._duration_s += lap.iterations * lap.time_s
        self._energy_j += lap.iterations * lap.energy_j
        self._variance_j2 += (lap.iterations * lap.metering_uncertainty_j) ** 2
        self._last = lap

    @property
    def step(self) -> StepEnergy | None:
        """An average step; None before the first lap."""
        count = self._iterations
        if self._times_s.count < 2:
            return self._last if count else None
        return StepEnergy(
            count,
            self._duration_s / count,
            self._times_s.uncertainty,
            self._energy_j / count,
            math.sqrt(self._variance_j2) / count,
        )


def step_sums(step: StepEnergy | None) -> FloatArray:
    """[7] A rank's part of sums: GPUs, iterations, s, its uncertainty, metered GPUs, J, J^2.

    Unknown times are NaN. J, and J^2 (its squared metering uncertainty), count metered GPUs only.
    """
    if step is None:
        return np.array([1, 0, math.nan, math.nan, 0, 0, 0])
    scatter_s = math.nan if step.time_uncertainty_s is None else step.time_uncertainty_s
    metered = (0.0, 0.0, 0.0)
    if step.energy_j is not None:
        metered = (1.0, step.energy_j, (step.metering_uncertainty_j or 0.0) ** 2)
    return np.array([1, step.iterations, step.time_s, scatter_s, *metered])


def mean_over_gpus(sums: ArrayLike) -> StepEnergy | None:
    """An average step on an average GPU, from [stages, 7] sums; None if one has no step.

    A GPU without an energy is taken to be like the others of its stage, which do the same work.
    """
    by_stage = np.asarray(sums, dtype=np.float64)
    count, iterations, time_s, scatter_s = (by_stage.sum(axis=0)[:4]).tolist()
    if math.isnan(time_s):
        return None
    gpus, _, _, _, metered, energies_j, variances_j2 = by_stage.T
    energy_j = metering_j = None
    if metered.all():
        shares = gpus / metered / count
        energy_j, metering_j = float(shares @ energies_j), math.sqrt(shares**2 @ variances_j2)
    # All GPUs step together, so that a mean over them scatters no less.
    scattered_s = None if math.isnan(scatter_s) else scatter_s / count
    return StepEnergy(round(iterations / count), time_s / count, scattered_s, energy_j, metering_j)


def percent(value: float | None, standard_uncertainty: float | None) -> str:
    """A number of percent, with its 95 % interval if that is known."""
    if value is None:
        return "not known"
    if standard_uncertainty is None:
        return f"{value:z.2f} %"
    return f"{value:z.2f} +- {NORMAL_95 * standard_uncertainty:.2f} %"
