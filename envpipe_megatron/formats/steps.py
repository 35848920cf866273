"""An average training step: of one GPU, of a job's GPUs, and compared with a baseline.

`TrainingEnergy` measures steps, and bills and reports compare them.
"""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from scipy.special import stdtrit

from envpipe_megatron.core.plan import NORMAL_95

#: A step that takes this many times the median of steps at its clock was held up.
HELD_UP = 1.1


@dataclass(frozen=True)
class StepEnergy:
    """Time and energy of an average training step on one GPU.

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
    """Training between two laps, on one GPU or on an average one of the job.

    `phases` counts iterations of each phase, in the order in which they came; 0 of `plan`, whose
    time lies between iterations and is shared by the steps. `step` is None if no step ended;
    `saved`, of all steady steps of the job so far, unless some of the interval ended in the steady
    phase of one batch whose baseline is known.
    """

    phases: Mapping[str, int]
    step: StepEnergy | None
    saved: Comparison | None = None

    def scalars(self) -> dict[str, float]:
        """Return scalars for TensorBoard and W&B, beside Megatron's own of energy and power.

        J of a step and W of an average GPU; percent of the baseline's step.
        """
        if self.step is None:
            return {}
        values = {
            "envpipe-iter-energy/gpu": self.step.energy_j,
            "envpipe-power/gpu": self.step.power_w,
        }
        if self.saved is not None:
            values["envpipe-saving-percent"] = self.saved.saving_percent
            values["envpipe-slowdown-percent"] = self.saved.slowdown_percent
        return {name: value for name, value in values.items() if value is not None}

    def line(self) -> str:
        """Return text for Megatron's log line: J per iteration and GPU, W per GPU, the saving."""
        if self.step is None:
            return ""
        parts = [f"envpipe phase: {' '.join(self.phases)}"]
        if self.step.power_w is None:  # no meter, or only a framework's step in no emulated time
            parts.append("envpipe energy: not metered")
        else:
            parts += [
                f"envpipe energy per GPU (J/iter/GPU): {self.step.energy_j:.1f}",
                f"envpipe power per GPU (W/GPU): {self.step.power_w:.1f}",
            ]
        if self.saved is not None:
            parts.append(f"envpipe against baseline: {self.saved}")
        return "".join(f" {part} |" for part in parts)


@dataclass(frozen=True)
class BaselineEnergy:
    """A step in the framework's own order at the highest clock.

    On an average GPU of the job, on an average one of each stage, and on this GPU: `own` is None
    if an earlier start of the job measured it.
    """

    mean: StepEnergy
    by_stage: tuple[StepEnergy, ...]
    own: StepEnergy | None = None


@dataclass(frozen=True)
class Comparison:
    """An average step of a GPU, and by how many percent it differs from a baseline's.

    Slowdown is of time. Uncertainties are in percentage points: `NORMAL_95` times one reaches to
    the farther end of the 95 % interval, None if that is not known. A saving or slowdown is None
    where an energy is not known, or the baseline so uncertain that its interval has no end.
    """

    time_s: float
    energy_j: float | None
    saving_percent: float | None
    saving_uncertainty_percent: float | None
    slowdown_percent: float | None
    slowdown_uncertainty_percent: float | None
    #: How many steps were averaged; 0 if that is not known.
    iterations: int = 0

    def parts(self) -> list[str]:
        """Say how its time, and its energy if known, compare with the baseline's."""
        parts = [_against(self.slowdown_percent, self.slowdown_uncertainty_percent, "time")]
        if self.energy_j is not None:
            more = None if self.saving_percent is None else -self.saving_percent
            parts.append(_against(more, self.saving_uncertainty_percent, "energy"))
        return parts

    def __str__(self) -> str:
        return ", ".join(self.parts())


def _against(more: float | None, error: float | None, what: str) -> str:
    """Put it into words, with its 95 % interval, by how many percent there is more of something."""
    if more is None:
        return f"not known whether less {what}"
    return in_words(more, None if error is None else NORMAL_95 * error, what)


def in_words(more: float, half: float | None, what: str) -> str:
    """Say by how many percent there is more or less; `half` of the 95 % interval, if known."""
    said = f"% {'more' if round(more, 2) > 0 else 'less'} {what}"
    if half is None:
        return f"{abs(more):.2f} {said}"
    return f"{abs(more):.2f} +- {half:.2f} {said}{', within noise' * (abs(more) <= half)}"


def compare(step: StepEnergy, baseline: StepEnergy) -> Comparison:
    """Return how much energy a step saves against the baseline's, and how much longer it takes."""
    own, base = step.energy_j, baseline.energy_j
    more: tuple[float | None, float | None] = None, None
    if own is not None and base:
        more = _more(own, step.energy_uncertainty_j, base, baseline.energy_uncertainty_j)
    saving = None if more[0] is None else -more[0]
    base_error_s = baseline.time_uncertainty_s
    slower = _more(step.time_s, step.time_uncertainty_s, baseline.time_s, base_error_s)
    return Comparison(step.time_s, own, saving, more[1], *slower, step.iterations)


def _more(
    own: float, own_error: float | None, base: float, base_error: float | None
) -> tuple[float | None, float | None]:
    """Return how many percent it exceeds a base, and the uncertainty, by Fieller's theorem."""
    ratio, base_share2 = own / base, (NORMAL_95 * (base_error or 0.0) / base) ** 2
    if base_share2 >= 1:  # the base may be as good as nothing
        return None, None
    percent = 100 * (ratio - 1)
    if own_error is None or base_error is None:
        return percent, None
    own2, kept = (NORMAL_95 * own_error / base) ** 2, 1 - base_share2
    farther = (math.sqrt(own2 * kept + ratio**2 * base_share2) + ratio * base_share2) / kept
    return percent, 100 * farther / NORMAL_95


class RunningMean:
    """The mean of values that come one by one, how they scatter (Welford) and drift."""

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self._squares = 0.0
        #: The last value, and the squares of how far each was from the one before.
        self._last = 0.0
        self._moved = 0.0

    def add(self, value: float) -> None:
        """Add one more value."""
        self._moved += (value - self._last) ** 2 if self.count else 0.0
        self._last = value
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

    @property
    def drift(self) -> float:
        """Distance of the mean from the value before the first, if values drift evenly.

        They scatter by more then than each does about the one before (von Neumann); 0 if not.
        """
        if self.count < 2:
            return 0.0
        return math.sqrt(3 * max(0.0, self._squares - self._moved / 2) / (self.count - 1))


class ComparedSteps:
    """Steps of one GPU beside what baselines expect in their place, of each the one in force then.

    All that is said to be saved rests on `sums`, which add up over the GPUs and starts of a job.

    Attributes:
        baseline: the one in force; of no iterations before the first.
    """

    def __init__(self) -> None:
        self.baseline = StepEnergy(0, 0.0, 0.0, 0.0, 0.0)
        #: Steps since that is in force.
        self._alike = 0
        #: Of windows' times to the baselines', of all and of these: what baselines do not tell.
        self._ratios, self._own_ratios = RunningMean(), RunningMean()
        #: Steps, s, J and error^2; s and J that baselines expect.
        self._sums: tuple[float, ...] = (0.0,) * 6
        #: Errors of earlier baselines: s^2 and J^2, and s by drift.
        self._errors: tuple[float, ...] = (0.0,) * 3

    def __copy__(self) -> ComparedSteps:
        """Return one that stays as this is now."""
        made = ComparedSteps()
        made.__dict__ |= self.__dict__
        made._ratios, made._own_ratios = copy.copy(self._ratios), copy.copy(self._own_ratios)
        return made

    def add(self, baseline: StepEnergy, steps: int, time_s: float, *metered: float | None) -> None:
        """Add a window of steps: s, J, and its uncertainty of metering in J.

        One without J is left out, but where there is no meter, so that the baseline has none.
        """
        if metered[0] is None and baseline.energy_j is not None:
            return
        if baseline != self.baseline:
            self._errors = self._errors_now()
            self.baseline, self._alike, self._own_ratios = baseline, 0, RunningMean()
        self._alike += steps
        for ratios in (self._ratios, self._own_ratios):
            ratios.add(time_s / steps / baseline.time_s)
        energy_j, error_j, base_j = map(_or_nan, (*metered, baseline.energy_j))
        more = steps, time_s, energy_j, error_j**2, steps * baseline.time_s, steps * base_j
        self._sums = tuple(map(operator.add, self._sums, more))

    def _errors_now(self) -> tuple[float, ...]:
        """Return all errors so far, as `_errors`; steps share those of the baseline in force.

        It was measured in a few steps before: as a job drifts (GPUs get warm), it is off theirs.
        """
        base, alike = self.baseline, self._alike
        shared = map(_or_nan, (base.time_uncertainty_s, base.metering_uncertainty_j))
        drift_s = base.time_s * self._own_ratios.drift
        own = *((alike * error) ** 2 for error in shared), alike * drift_s
        return tuple(map(operator.add, self._errors, own))

    @property
    def sums(self) -> list[float]:
        """[12] What `mean_steps` averages: of GPUs, starts and jobs they add up.

        GPUs; steps; those whose scatter is known; s, error; metered steps; their J, error^2; and of
        what baselines expect s, error, J, error.

        Steps scatter on all GPUs alike, and errors of baselines are taken to: these add up. Errors
        of metering are independent: their squares do, except for those of what is expected. Jobs
        mostly drift one way: so do errors by drift, of one baseline after another.
        """
        steps, time_s, energy_j, error_j2, base_s, base_j = self._sums
        base_error_s2, base_error_j2, drift_s = self._errors_now()
        scatter = self._ratios.uncertainty
        known = (0.0, 0.0) if scatter is None else (steps, base_s * scatter)
        metered = (0.0, 0.0, 0.0) if math.isnan(energy_j) else (steps, energy_j, error_j2)
        own = known[0], time_s, known[1], *metered
        base = base_s, math.hypot(base_error_s2**0.5, drift_s), base_j, base_error_j2**0.5
        return [float(steps > 0), steps, *own, *base]


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def step_sums(step: StepEnergy | None) -> list[float]:
    """Return `ComparedSteps.sums` of one GPU's mean step, in whose place nothing is expected.

    They are NaN without a step.
    """
    if step is None:
        return [1.0, math.nan, *[0.0] * 10]
    count, error_s, energy_j = step.iterations, step.time_uncertainty_s, step.energy_j
    known = (0.0, 0.0) if error_s is None else (count, count * error_s)
    metered = (0.0, 0.0, 0.0)
    if energy_j is not None:
        metered = count, count * energy_j, (count * _or_nan(step.metering_uncertainty_j)) ** 2
    return [1.0, count, known[0], count * step.time_s, known[1], *metered, *[0.0] * 4]


def mean_steps(sums: Iterable[float]) -> tuple[StepEnergy, StepEnergy] | None:
    """Return the average step on an average GPU, and the one expected, by `ComparedSteps.sums`.

    None without steps, or if a GPU has none. GPUs without an energy are taken to be like others.
    """
    gpus, steps, known, time_s, scatter_s, metered, energy_j, error_j2, *expected = map(float, sums)
    if not steps > 0:
        return None
    of_known = steps / known if known else math.nan
    of_metered = steps / metered if metered else math.nan
    energies_j = of_metered * energy_j, of_metered * math.sqrt(error_j2)
    totals = [[time_s, of_known * scatter_s, *energies_j], expected]
    own, base = ([None if math.isnan(v) else v / steps for v in each] for each in totals)
    count = round(steps / gpus)
    return StepEnergy(count, *own), StepEnergy(count, *base)  # type: ignore[arg-type]
