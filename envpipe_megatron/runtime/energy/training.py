"""The bill of one GPU's training: which energy belongs to which step, and what steps save.

Each step is written down once, when it has ended, and counted three times: in a window of the
energy log, in the lap that the next log line reports, and, of the warm-up, in the baseline.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from envpipe_megatron.core.arrays import FloatArray
from envpipe_megatron.formats.energy import FRAMEWORK, PLAN, Phase, phase_in_batch, split_phase
from envpipe_megatron.formats.energy_sums import EnergySums
from envpipe_megatron.formats.steps import (
    HELD_UP,
    BaselineEnergy,
    IntervalEnergy,
    StepEnergy,
    compare,
    mean_steps,
    step_sums,
)
from envpipe_megatron.runtime.channel.collectives import SUM, Collectives
from envpipe_megatron.runtime.energy.log import EnergyLog, Interval, Window, measure_baseline
from envpipe_megatron.runtime.energy.meter import EnergyMeter, MeterError
from envpipe_megatron.runtime.execution.executor import StageRecord

logger = logging.getLogger(__name__)


class TrainingEnergy:
    """Records what happens on one rank, and gives its time and energy.

    Steps follow each other without a gap in the bill: what runs between two of them (`end_step`,
    `begin_step`) is billed with the later one, except for pauses.

    Args:
        now_s: the present instant on the meter's time base.
        baselines: what an earlier start of the job measured, by batch; see `phase_in_batch`. This
            one measures none of these batches.
        describe: called with the full batch's baseline, its mean step, as soon as it is known.
        compares: whether the job is to save anything; else what differs is chance.
    """

    def __init__(
        self,
        meter: EnergyMeter,
        log: EnergyLog,
        now_s: Callable[[], float],
        collectives: Collectives,
        baselines: Mapping[str, BaselineEnergy],
        describe: Callable[[Mapping[str, Any]], None],
        compares: bool = True,
    ) -> None:
        self.log = log
        self._describe = describe
        self._compares = compares
        self._meter = meter
        self._now_s = now_s
        self._collectives = collectives
        self._lap = Interval()
        #: When the last lap ended, and where the counter was taken to be then (J).
        self._lap_end: tuple[float, float] | None = None
        #: By phase, steps of warm-ups and stretches of `baseline` that nobody has looked at yet.
        #: All ranks have the same phases, also one on which no step did the work of its phase.
        self._warmups: dict[str, list[Window]] = {}
        #: By phase, those of stretches that were too short, except for their first steps.
        self._short: dict[str, list[Window]] = {}
        #: When the step began whose iteration is still to come; infinite if none has.
        self._begun_s = math.inf
        #: When the last step since a pause ended; None if there is none.
        self._end_s: float | None = None
        #: The last iteration's step, record and receives, until its times may be read.
        self._unread: tuple[Window, StageRecord, NDArray[np.bool_]] | None = None
        self.baselines: dict[str, BaselineEnergy] = {}
        for batch, baseline in baselines.items():
            self._know_baseline(batch, baseline)

    def begin_step(self) -> None:
        """Begin the next step now."""
        self._begun_s = self._now_s()

    def add_between_phases(self, iteration: int, begin_s: float) -> None:
        """Bill what ran since then, which prepared the phase that the iteration begins."""
        self.catch_up()
        begin_s = min(self._begun_s, begin_s)
        self._count(Window(PLAN, iteration, iteration, begin_s, self._now_s(), 0))

    def add(
        self,
        phase: str,
        iteration: int,
        record: StageRecord,
        receives: NDArray[np.bool_],
        same_work: bool,
    ) -> None:
        """Add an iteration, all units of its step. Its record is read in `catch_up`.

        `receives` is [units_per_stage], whether a unit's input comes from another stage: the wait
        before it is blocking, the wait before another is idle. Without `same_work`, it did other
        work than the phase is about, and is billed as phase `framework`.
        """
        self.catch_up()
        if split_phase(phase)[0] in (Phase.WARMUP, Phase.BASELINE):
            self._warmups.setdefault(phase, [])
        billed = str(phase) if same_work else FRAMEWORK
        step = Window(billed, iteration, iteration, self._begun_s, -math.inf)
        self._unread, self._begun_s = (step, record, receives), math.inf

    def catch_up(self) -> None:
        """Bill the last iteration, as all that ask for energy do; waits for the last unit."""
        if self._unread is None:
            return
        (step, record, receives), self._unread = self._unread, None
        step.begin_s = min(step.begin_s, record.begin_s)
        step.end_s = max(step.end_s, record.begin_s + record.iteration_time_s)
        step.compute_s = float(record.unit_time_s.sum())
        step.blocking_s = float(record.receive_wait_s[receives].sum())
        self._count(step)

    def end_step(self, iteration: int) -> None:
        """End the step now, whoever ran its iteration; a second call does nothing."""
        end_s = self._now_s()
        if self._begun_s < math.inf:
            self.catch_up()
            begin_s, self._begun_s = self._begun_s, math.inf
            self._count(Window(FRAMEWORK, iteration, iteration, begin_s, end_s))
        elif self._unread is not None:
            step, *_ = self._unread
            step.end_s = end_s if step.end_s == -math.inf else step.end_s

    def pause(self) -> None:
        """Bill nothing up to the next step's begin: what follows is not training."""
        self.catch_up()
        self.log.interrupt()
        self._end_s, self._begun_s = None, math.inf

    def close(self) -> None:
        """Write what is left of the log, after one more look at the counter.

        An iteration whose times are not read is left out: nobody may be left to wait for.
        """
        self.log.close()

    def settle_baseline(self, batch: str = "") -> None:
        """Measure a batch's baseline, once its warm-up is over; on all ranks together.

        And again after each stretch of phase `baseline`: savings are against the job as it is. One
        that is too short to be metered is measured with the next.
        """
        warm_up, phase = (phase_in_batch(of, batch) for of in (Phase.WARMUP, Phase.BASELINE))
        first = warm_up in self._warmups
        if not first and phase not in self._warmups:
            return
        self.catch_up()
        steps = [*self._warmups.pop(warm_up, []), *self._warmups.pop(phase, [])]
        steps[1:1] = self._short.pop(phase, [])
        own = measure_baseline(steps, self._meter)
        mean, stages = self._over_gpus(own)
        if mean is not None:
            self._know_baseline(batch, BaselineEnergy(mean, stages, own))
        elif not first:
            short = sum(step.duration_s for step in steps[1:]) < self._meter.min_window_s
            self._short[phase] = steps[1:] if short else []
        elif self._collectives.is_planner:
            logger.info(
                "The warm-up gave no baseline, so no saving is reported: after its slow first "
                "steps it needs at least two more, lasting %.1f s together",
                self._meter.min_window_s,
            )

    def forget_baseline(self, batch: str) -> None:
        """Have a batch's baseline measured: an earlier start's is of no use."""
        del self.baselines[batch]
        self.log.compare_with(phase_in_batch(Phase.STEADY, batch), None)

    def warm_step_s(self, batch: str) -> float | None:
        """Return how long a usual step of a batch's warm-up took, whose baseline was known.

        It is one without the first and those that were held up, of an average GPU of the job, on
        all ranks together; None if a rank has no step.
        """
        self.catch_up()
        steps = self._warmups.pop(phase_in_batch(Phase.WARMUP, batch), [])[1:]
        times_s = np.array([step.duration_s for step in steps])
        usual_s = times_s[times_s <= HELD_UP * np.median(times_s)].mean() if steps else None
        step = None if usual_s is None else StepEnergy(1, float(usual_s), None, None, None)
        mean, _ = self._over_gpus(step)
        return None if mean is None else mean.time_s

    def lap(self) -> IntervalEnergy:
        """Return what training took on this GPU since the last lap; does not wait for the meter.

        Its end was a moment ago, so the energy up to there is extrapolated from the last refresh.
        What that errs by goes into the next lap: steps end at much the same power, other than they
        have on average, so that all laps would err to the same side.
        """
        self.catch_up()
        lap, self._lap = self._lap, Interval()
        if not lap.spans:
            return IntervalEnergy(lap.phases, None)
        corrected_j = 0.0
        if self._lap_end is not None:
            with contextlib.suppress(MeterError):  # if not seen, then nothing of it is known
                corrected_j = self._counter_j(self._lap_end[0]) - self._lap_end[1]
        end_s, self._lap_end = lap.spans[-1][1], None
        with contextlib.suppress(MeterError):
            self._lap_end = end_s, self._counter_j(end_s)
        return IntervalEnergy(lap.phases, lap.measure(self._meter, corrected_j))

    def gather(self, interval: IntervalEnergy) -> IntervalEnergy:
        """Return the interval on an average GPU of the job; all ranks call it together.

        Unmetered GPUs are taken to be like others. None has a step if a rank has none in its
        interval. What all steady steps so far have saved is `saved` if some are of this interval.
        """
        steady = [phase_in_batch(Phase.STEADY, batch) for batch in sorted(self.baselines)]
        own = [step_sums(interval.step), *(self.log.sums(phase).compared.sums for phase in steady)]
        step, *of_job = SUM(self._collectives.by_stage(np.array(own), SUM))
        of_interval = [
            sums for phase, sums in zip(steady, of_job, strict=True) if phase in interval.phases
        ]
        found = mean_steps(of_interval[0]) if len(of_interval) == 1 else None
        mean, _ = mean_steps(step) or (None, None)
        return IntervalEnergy(interval.phases, mean, compare(*found) if found else None)

    def sums(self) -> dict[str, EnergySums]:
        """Return each phase's sums, if it was metered or compared by time; see `EnergyLog.sums`."""
        return {phase: self.log.sums(phase) for phase in self.log.totals}

    def _count(self, step: Window) -> None:
        """Count a step, which begins where the one before has ended."""
        if self._end_s is not None:
            step.begin_s = self._end_s
        self._end_s = step.end_s
        self.log.add(step)
        self._lap.add(step)
        if step.phase in self._warmups:
            self._warmups[step.phase].append(step)

    def _counter_j(self, time_s: float) -> float:
        return self._meter.window(time_s, time_s).end.energy_j

    def _know_baseline(self, batch: str, baseline: BaselineEnergy) -> None:
        self.baselines[batch] = baseline
        if self._compares:
            own = baseline.own or (*baseline.by_stage[self._collectives.stage :], baseline.mean)[0]
            self.log.compare_with(phase_in_batch(Phase.STEADY, batch), own)
        if not batch:
            self._describe({"baseline": asdict(baseline.mean)})

    def _over_gpus(
        self, step: StepEnergy | None
    ) -> tuple[StepEnergy | None, tuple[StepEnergy, ...]]:
        """Return the mean step on all GPUs, and on each stage's; none if a GPU has no step.

        Each GPU counts once: some leave out more of their first steps than others.
        """
        one, steps = step and replace(step, iterations=1), step.iterations if step else 0
        by_stage = self._collectives.by_stage(np.array([*step_sums(one), steps]), SUM)

        def mean_of(sums: FloatArray) -> StepEnergy | None:
            means = mean_steps(sums[:-1])
            return means and replace(means[0], iterations=round(sums[-1] / sums[0]))

        mean, *stages = map(mean_of, (SUM(by_stage), *by_stage))
        return mean, tuple(each for each in stages if each is not None)
