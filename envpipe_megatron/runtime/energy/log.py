"""The energy log of one GPU: windows of steps, written as training goes on.

An `Interval` meters steps together: a log interval, a baseline, a clock that is tried.
"""

from __future__ import annotations

import copy
import logging
import math
import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from envpipe_megatron.formats.energy import EnergyWindow, parse_window
from envpipe_megatron.formats.energy_sums import EnergySums, LineSums
from envpipe_megatron.formats.steps import RunningMean, StepEnergy
from envpipe_megatron.runtime.energy.meter import EnergyMeter, MeterError, WindowEnergy

logger = logging.getLogger(__name__)

#: Most windows that wait for a counter that does not move; beyond this it is taken to have failed.
_MOST_WAITING = 64
#: A step of a baseline that takes this much longer than the median loads, compiles or captures.
_REPRESENTATIVE = 1.2


@dataclass
class Window:
    """One step, or several of one phase that follow each other, on the meter's time base.

    Args:
        iterations: number of steps; 0 for the time between steps.
        compute_s: time in units.
        blocking_s: time in receives from other stages.
        baseline: the step that its steps are compared with, once it has ended.
    """

    phase: str
    first_iteration: int
    last_iteration: int
    begin_s: float
    end_s: float
    iterations: int = 1
    compute_s: float = 0.0
    blocking_s: float = 0.0
    baseline: StepEnergy | None = None

    @property
    def duration_s(self) -> float:
        """Return how long it lasted."""
        return self.end_s - self.begin_s

    def extend(self, step: Window) -> None:
        """Add the next step of the same phase."""
        self.last_iteration = step.last_iteration
        self.end_s = step.end_s
        self.iterations += step.iterations
        self.compute_s += step.compute_s
        self.blocking_s += step.blocking_s


class EnergyLog:
    """Groups steps of one phase into windows, and appends each to a file when it is metered.

    A window lasts at least ten refreshes of the counter, unless its phase ends before, and is
    metered when the counter has refreshed past its end: while the counter does not move, the window
    grows. One that cannot be metered to its end is left out, with one message, and later windows
    are written again.

    The longer a job runs, the more windows are added up in a line (`LineSums`).

    Args:
        append: takes each line, and waits for no disk: into the JSON Lines file that all ranks of a
            node may share, or to the node's agent.
        labels: what every line says of this GPU; see `envpipe_megatron.formats.energy`.
        with_counter: whether lines are for the node's agent, which adds them up: each window has
            its own, and says where the counter was: `begin_counter` and `end_counter`, each J
            and its uncertainty.
    """

    def __init__(
        self,
        meter: EnergyMeter,
        append: Callable[[dict[str, Any]], None],
        labels: Mapping[str, object],
        *,
        with_counter: bool = False,
    ) -> None:
        self._meter = meter
        self._of_gpu = parse_window({**labels, "energy_j": 0, "duration_s": 0})
        self._with_counter = with_counter
        self._append = append
        self._sums = LineSums(lambda window: append(window.line()))
        #: Windows that are not written yet, and whether steps may still be added to the last.
        self._windows: deque[Window] = deque()
        self._grows = False
        #: By phase, what its steps are compared with from now on.
        self._baselines: dict[str, StepEnergy | None] = {}
        self._failing = False
        #: For each phase, the sums of its windows; without any where none was metered.
        self.totals: defaultdict[str, EnergySums] = defaultdict(EnergySums)

    def add(self, step: Window) -> None:
        """Add a step that has ended; neither reads nor waits.

        It belongs to the window of the step before it, unless that was of another phase, a
        framework skipped or repeats iterations, or `interrupt` was called since.
        """
        seen_s, min_window_s = self._meter.last_refresh_s, self._meter.min_window_s
        self._flush(seen_s)
        if step.end_s - seen_s > min_window_s:
            silent = f"no refresh of the counter for {step.end_s - seen_s:.3g} s"
            self._warn(str(self._meter.error or silent))
        elif step.begin_s <= seen_s:
            self._failing = False
        window = self._windows[-1] if self._grows else None
        if (
            window is not None
            and window.phase == step.phase
            and window.last_iteration + 1 == step.first_iteration
            and (-math.inf < seen_s < window.end_s or window.duration_s < min_window_s)
        ):
            window.extend(step)
            return
        self.interrupt()
        self._flush(seen_s)
        self._windows.append(replace(step, baseline=self._baselines.get(step.phase)))
        self._grows = True

    def compare_with(self, phase: str, baseline: StepEnergy | None) -> None:
        """Compare steps of a phase with this GPU's baseline, from those of the open window on."""
        self._baselines[phase] = baseline
        if self._grows and self._windows[-1].phase == phase:
            self._windows[-1].baseline = baseline

    def sums(self, phase: str) -> EnergySums:
        """Return a phase's sums, with windows that are not written yet; never waits."""
        made = copy.copy(self.totals[phase]) if phase in self.totals else EnergySums()
        for window in self._windows:
            if window.phase == phase:
                energy = None
                with suppress(MeterError):
                    energy = self._meter.window(window.begin_s, window.end_s)
                self._add(made, window, energy)
        return made

    def interrupt(self) -> None:
        """End the open window: something that is not training follows, and is not billed."""
        self._grows = False

    def close(self) -> None:
        """Write what is left, after one more look at the counter."""
        self.interrupt()
        self._meter.catch_up()
        self._flush(math.inf)
        self._sums.flush()

    def _flush(self, up_to_s: float) -> None:
        """Write the windows that ended by then, and give up on those that wait in vain."""
        while (waiting := len(self._windows) - self._grows) and (
            self._windows[0].end_s <= up_to_s or waiting > _MOST_WAITING
        ):
            self._write(self._windows.popleft())

    def _write(self, window: Window) -> None:
        try:
            energy = self._meter.window(window.begin_s, window.end_s)
        except MeterError as error:
            self._warn(str(error))
            if window.baseline is not None:
                self._add(self.totals[window.phase], window, None)
            return
        metered = self._add(self.totals[window.phase], window, energy)
        if not self._with_counter:
            self._sums.add(metered)
            return
        counter = {"begin_counter": energy.begin[1:], "end_counter": energy.end[1:]}
        self._append({**metered.line(), **counter})

    def _add(self, sums: EnergySums, window: Window, energy: WindowEnergy | None) -> EnergyWindow:
        """Add a window to sums; one without energy only to what is compared."""
        parts_s = window.compute_s, window.blocking_s
        metered = replace(
            self._of_gpu,
            phase=window.phase,
            first_iteration=window.first_iteration,
            last_iteration=window.last_iteration,
            begin_s=window.begin_s,
            duration_s=window.duration_s,
            # Rounding can make the two slightly longer than the window they are parts of.
            shares_s=(*parts_s, max(0.0, window.duration_s - sum(parts_s))),
            baseline=window.baseline,
        )
        if energy is not None:
            uncertainty_j = energy.uncertainty_j
            metered = replace(metered, energy_j=energy.energy_j, energy_uncertainty_j=uncertainty_j)
            sums.add(metered)
        elif window.baseline is not None:
            sums.last = metered
            sums.compared.add(window.baseline, window.iterations, window.duration_s, None, None)
        return metered

    def _warn(self, reason: str) -> None:
        """Say once why nothing is metered, until something is again."""
        if not self._failing:
            logger.error("The energy log has a gap, training goes on: %s", reason)
        self._failing = True


class Interval:
    """Steps of one GPU that are metered together: the fewer ends, the less is interpolated."""

    def __init__(self, steps: Iterable[Window] = ()) -> None:
        #: How many steps each phase had, in the order in which they came.
        self.phases: dict[str, int] = {}
        self._steps_s = RunningMean()
        #: Begin and end of steps without a pause between them.
        self.spans: list[tuple[float, float]] = []
        for step in steps:
            self.add(step)

    def add(self, step: Window) -> None:
        """Add one more step, or what lies between steps."""
        self.phases[step.phase] = self.phases.get(step.phase, 0) + step.iterations
        if step.iterations:
            self._steps_s.add(step.duration_s)
        if self.spans and self.spans[-1][1] == step.begin_s:
            self.spans[-1] = self.spans[-1][0], step.end_s
        else:
            self.spans.append((step.begin_s, step.end_s))

    def measure(self, meter: EnergyMeter, corrected_j: float = 0.0) -> StepEnergy | None:
        """Return the mean step, with J to add to all; neither reads nor waits. None of no steps."""
        count = self._steps_s.count
        if not count:
            return None
        energy_j = metering_j = None
        with suppress(MeterError):
            metered = [meter.window(*span) for span in self.spans]
            energy_j = (corrected_j + math.fsum(window.energy_j for window in metered)) / count
            metering_j = math.hypot(*(window.uncertainty_j for window in metered)) / count
        time_s = math.fsum(end_s - begin_s for begin_s, end_s in self.spans) / count
        return StepEnergy(count, time_s, self._steps_s.uncertainty, energy_j, metering_j)


def measure_baseline(warmup: list[Window], meter: EnergyMeter) -> StepEnergy | None:
    """Return the mean step of a warm-up, after its first and the last that is longer.

    One in the second half counts, as a hiccup of training; before that, it prepares what follows:
    Megatron captures CUDA graphs ahead of its fourth step, and those before run without them. None
    if steps are too few, or together shorter than ten refreshes of the counter. Of a counter that
    was never read, times only.
    """
    steps = warmup[1:]
    usual_s = statistics.median([step.duration_s for step in steps] or [0.0])
    first_half = range((len(steps) + 1) // 2)
    slow = [i for i in first_half if steps[i].duration_s > _REPRESENTATIVE * usual_s]
    steps = steps[slow[-1] + 1 :] if slow else steps
    if len(steps) < 2 or sum(step.duration_s for step in steps) < meter.min_window_s:
        return None
    measured = Interval(steps).measure(meter)
    unread = meter.last_refresh_s == -math.inf
    return measured if measured and (unread or measured.energy_j is not None) else None
