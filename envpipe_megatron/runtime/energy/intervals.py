"""Steps of one GPU that are metered together: a log interval, a baseline, a clock that is tried."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Iterable, Sequence

from envpipe_megatron.runtime.energy.log import Window
from envpipe_megatron.runtime.energy.meter import EnergyMeter, MeterError
from envpipe_megatron.runtime.energy.steps import IntervalEnergy, RunningMean, StepEnergy

#: A step of a baseline that takes this much longer than the median loads, compiles or captures.
_REPRESENTATIVE = 1.2
#: At one clock, one that takes this much longer was held up.
_USUAL = 1.1


class Interval:
    """Steps of one GPU that are metered together: the fewer ends, the less is interpolated."""

    def __init__(self, steps: Iterable[Window] = ()) -> None:
        self._phases: dict[str, int] = {}
        self._steps_s = RunningMean()
        #: Begin and end of steps without a pause between them.
        self.spans: list[tuple[float, float]] = []
        for step in steps:
            self.add(step)

    def add(self, step: Window) -> None:
        """Add one more step, or what lies between steps."""
        self._phases[step.phase] = self._phases.get(step.phase, 0) + step.iterations
        if step.iterations:
            self._steps_s.add(step.duration_s)
        if self.spans and self.spans[-1][1] == step.begin_s:
            self.spans[-1] = self.spans[-1][0], step.end_s
        else:
            self.spans.append((step.begin_s, step.end_s))

    def measure(self, meter: EnergyMeter, corrected_j: float = 0.0) -> IntervalEnergy:
        """What the steps took, with J to add; neither reads nor waits."""
        count = self._steps_s.count
        if not count:
            return IntervalEnergy(self._phases, None)
        energy_j = metering_j = None
        with contextlib.suppress(MeterError):
            metered = [meter.window(*span) for span in self.spans]
            energy_j = (corrected_j + math.fsum(window.energy_j for window in metered)) / count
            metering_j = math.hypot(*(window.uncertainty_j for window in metered)) / count
        time_s = math.fsum(end_s - begin_s for begin_s, end_s in self.spans) / count
        step = StepEnergy(count, time_s, self._steps_s.uncertainty, energy_j, metering_j)
        return IntervalEnergy(self._phases, step)


def usual(steps: Sequence[Window]) -> Interval:
    """Steps at one clock, without those that were held up: they say nothing of the clock."""
    median_s = statistics.median([step.duration_s for step in steps if step.iterations] or [0.0])
    return Interval(step for step in steps if step.duration_s <= _USUAL * median_s)


def measure_baseline(warmup: list[Window], meter: EnergyMeter) -> StepEnergy | None:
    """An average step of a warm-up, without the first and all up to the last that lasts longer.

    One in the second half counts, as a hiccup of training; before that, it prepares what follows:
    Megatron captures CUDA graphs ahead of its fourth step, and those before run without them. None
    if steps are too few, or together shorter than ten refreshes of the counter.
    """
    steps = warmup[1:]
    usual_s = statistics.median([step.duration_s for step in steps] or [0.0])
    first_half = range((len(steps) + 1) // 2)
    slow = [i for i in first_half if steps[i].duration_s > _REPRESENTATIVE * usual_s]
    steps = steps[slow[-1] + 1 :] if slow else steps
    if len(steps) < 2 or sum(step.duration_s for step in steps) < meter.min_window_s:
        return None
    measured = Interval(steps).measure(meter).step
    return measured if measured is not None and measured.energy_j is not None else None
