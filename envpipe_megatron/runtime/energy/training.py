"""The bill of one GPU's training: which energy belongs to which step, and what steps save.

Each step is written down once, when it has ended, and counted three times: in a window of the
energy log, in the lap that the next log line reports, and, of the warm-up, in the baseline.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from envpipe_megatron.formats.energy import FRAMEWORK, PLAN, Phase, phase_in_batch, split_phase
from envpipe_megatron.runtime.channel.collectives import SUM, Collectives
from envpipe_megatron.runtime.energy.intervals import Interval, measure_baseline, usual
from envpipe_megatron.runtime.energy.log import EnergyLog, Window
from envpipe_megatron.runtime.energy.meter import EnergyMeter, MeterError
from envpipe_megatron.runtime.energy.steps import (
    BaselineEnergy,
    IntervalEnergy,
    PhaseMean,
    StepEnergy,
    compare,
    mean_over_gpus,
    step_sums,
)
from envpipe_megatron.runtime.execution.executor import StageRecord

logger = logging.getLogger(__name__)


class TrainingEnergy:
    """Records what happens on one rank, and gives its time and energy.

    A framework that says where its steps begin and end (`begin_step`, `end_step`) has all of a step
    billed with it. One that does not is billed from the first unit of a phase to its last. Steps
    follow each other without a gap in the bill: what runs between two of them is billed with the
    later one, but for pauses.

    Args:
        now_s: the present instant on the meter's time base.
        baselines: what an earlier start of the job measured, by batch; see `phase_in_batch`. This
            one measures none of these batches.
        describe: called with the full batch's baseline, its mean step, as soon as it is known.
    """

    def __init__(
        self,
        meter: EnergyMeter,
        log: EnergyLog,
        now_s: Callable[[], float],
        collectives: Collectives,
        baselines: Mapping[str, BaselineEnergy],
        describe: Callable[[Mapping[str, Any]], None],
    ) -> None:
        self.log = log
        self._describe = describe
        self._meter = meter
        self._now_s = now_s
        self._collectives = collectives
        self._lap = Interval()
        #: When the last lap ended, and where the counter was taken to stand then (J).
        self._lap_end: tuple[float, float] | None = None
        #: Of batches whose baseline is to be measured, the warm-up or a stretch of `baseline`.
        self._warmups: dict[str, list[Window]] = {}
        self._settled = set(baselines)
        #: What the steps of the present measurement are added to as well.
        self._measured: list[Window] | None = None
        self._job_phases: dict[str, PhaseMean] = {}
        #: When the step began whose iteration is still to come.
        self._begun_s: float | None = None
        #: The last step since a pause, whether it is over, and whether it is counted.
        self._last: Window | None = None
        self._over = self._counted = False
        #: Calls that wait until the times of an iteration may be read.
        self._held_back: list[Callable[[], None]] = []
        self.baselines: dict[str, BaselineEnergy] = {}
        for batch, baseline in baselines.items():
            self._know_baseline(batch, baseline)

    def begin_step(self) -> None:
        """The next step begins now."""
        self._in_turn(partial(self._begin_step, self._now_s()))

    def _begin_step(self, now_s: float) -> None:
        self._begun_s = now_s

    def add_between_phases(self, iteration: int, begin_s: float) -> None:
        """What ran since then prepared the phase that the iteration begins."""
        self.catch_up()
        if self._begun_s is None:
            return
        begin_s = min(self._begun_s, begin_s)
        self._put(Window(PLAN, iteration, iteration, begin_s, self._now_s(), 0), over=True)

    def add(
        self, phase: str, iteration: int, record: StageRecord, receives: NDArray[np.bool_]
    ) -> None:
        """An iteration has run: all units of its step. Its record is looked at in `catch_up`.

        `receives` is [units_per_stage], whether a unit's input comes from another stage: the wait
        before it is blocking, the wait before another is idle.
        """
        self.catch_up()
        self._held_back.append(partial(self._add, phase, iteration, record, receives))

    def catch_up(self) -> None:
        """Bill what is held back, as whatever asks for energy does; waits for the last unit."""
        held_back, self._held_back = self._held_back, []
        for call in held_back:
            call()

    def _in_turn(self, call: Callable[[], None]) -> None:
        if self._held_back:
            self._held_back.append(call)
        else:
            call()

    def _add(
        self, phase: str, iteration: int, record: StageRecord, receives: NDArray[np.bool_]
    ) -> None:
        begin_s = record.begin_s if self._begun_s is None else min(self._begun_s, record.begin_s)
        self._begun_s = None
        self._put(
            Window(
                str(phase),
                iteration,
                iteration,
                begin_s,
                record.end_of_iteration_s,
                compute_s=float(record.unit_time_s.sum()),
                blocking_s=float(record.receive_wait_s[receives].sum()),
            )
        )

    def end_step(self, iteration: int) -> None:
        """The step ends now, whoever ran its iteration; a second call does nothing."""
        self._in_turn(partial(self._end_step, iteration, self._now_s()))

    def _end_step(self, iteration: int, end_s: float) -> None:
        if self._begun_s is not None:
            begin_s, self._begun_s = self._begun_s, None
            self._put(Window(FRAMEWORK, iteration, iteration, begin_s, end_s), over=True)
        elif self._last is not None and not self._over:
            if not self._counted:
                self._last.end_s = max(self._last.end_s, end_s)
            self._over = True
            self._count()

    def pause(self) -> None:
        """Something that is not training follows, up to the next step's begin."""
        self.catch_up()
        self._count()
        self.log.interrupt()
        self._last = self._begun_s = None

    def close(self) -> None:
        """Write what is left of the log, after one more look at the counter.

        What is held back is left out: nobody may be left to wait for.
        """
        self._count()
        self.log.close()

    def settle_baseline(self, batch: str = "") -> None:
        """Measure a batch's baseline, once its warm-up is over; on all ranks together.

        And again after each stretch of phase `baseline`: savings are against the job as it is.
        """
        first = batch not in self._settled
        if not first and batch not in self._warmups:
            return
        self.catch_up()
        self._settled.add(batch)
        own = measure_baseline(self._warmups.pop(batch, []), self._meter)
        mean, stages = self._over_gpus(own)
        if mean is not None:
            self._know_baseline(batch, BaselineEnergy(mean, stages, own))
        elif first and self._collectives.is_planner:
            logger.info(
                "The warm-up gave no baseline, so no saving is reported: after its slow first "
                "steps it needs at least two more, lasting %.1f s together",
                self._meter.min_window_s,
            )

    def baseline_of(self, phases: Iterable[str]) -> BaselineEnergy | None:
        """What steps of these phases compare with; None if they are not all of one batch."""
        # A batch's first step is the framework's alone, which does not say of which batch it is.
        batches = {p if p == FRAMEWORK else split_phase(p)[1] for p in phases if p != PLAN}
        return self.baselines.get(batches.pop()) if len(batches) == 1 else None

    def measure_into(self, steps: list[Window] | None) -> None:
        """Add each step that ends from now on to these, until the next call."""
        self.catch_up()
        self._count()
        self._measured = steps

    def mean_step(self, steps: Sequence[Window]) -> StepEnergy | None:
        """A usual step of those that all ranks measured; on all ranks together.

        It is that of an average GPU of the job; None if a rank has no step. Waits for a look at the
        counter if there was none since the last step.
        """
        self.catch_up()
        if steps and self._meter.last_refresh_s < steps[-1].end_s:
            self._meter.catch_up()
        return self._over_gpus(usual(steps).measure(self._meter).step)[0]

    def lap(self) -> IntervalEnergy:
        """What training took on this GPU since the last lap; the meter is not waited for.

        Its end was a moment ago, so the energy up to there is extrapolated from the last refresh.
        What that errs by goes into the next lap: steps end at much the same power, other than they
        have on average, so that all laps would err to the same side.
        """
        self.catch_up()
        self._count()
        lap, self._lap = self._lap, Interval()
        if not lap.spans:
            return lap.measure(self._meter)
        corrected_j = 0.0
        if self._lap_end is not None:
            with contextlib.suppress(MeterError):  # if not seen, then nothing of it is known
                corrected_j = self._counter_j(self._lap_end[0]) - self._lap_end[1]
        end_s, self._lap_end = lap.spans[-1][1], None
        with contextlib.suppress(MeterError):
            self._lap_end = end_s, self._counter_j(end_s)
        return lap.measure(self._meter, corrected_j)

    def gather(self, interval: IntervalEnergy) -> IntervalEnergy | None:
        """The interval on an average GPU of the job; on all ranks together.

        GPUs of a stage stand in for its unmetered ones. Without a metered one, there is no energy.
        None if a rank has no step in its interval.
        """
        mean, _ = self._over_gpus(interval.step)
        if mean is None:
            return None
        if len(interval.phases) == 1:
            (phase,) = interval.phases
            self._job_phases.setdefault(phase, PhaseMean()).add(mean)
        return IntervalEnergy(interval.phases, mean)

    def summary(self) -> dict[str, Any]:
        """What was metered so far, of this GPU and as far as it was gathered of the job.

        Returns:
            `gpu` and `job`, each with `phases` (for each, `_step_facts` of an average step; `job`
                knows of laps of one phase alone) and `comparison` of the steady phase with the
                baseline, None if not known, and likewise `other_batches`, by batch, of those of
                another size than the full one; `gpu` and each of its phases have `total_energy_j`
                and `total_duration_s` too, its phases `total_units_s`, and its phase `plan` no
                step. `baseline`, the mean step of all GPUs, or None.
        """
        totals = self.log.totals
        own: dict[str, StepEnergy | None] = {
            name: StepEnergy(
                total.iterations,
                total.duration_s / total.iterations,
                0.0,  # the mean of all there were, not of some that stand for others
                total.energy_j / total.iterations,
                total.uncertainty_j / total.iterations,
            )
            for name, total in totals.items()
            if total.iterations
        }
        job = {name: mean.step for name, mean in self._job_phases.items()}
        baseline = self.baselines.get("")
        facts = _facts(own, {batch: b.own for batch, b in self.baselines.items() if b.own})
        for name, total in totals.items():
            phase = facts["phases"].setdefault(name, {"iterations": 0})
            phase["total_energy_j"] = total.energy_j
            phase["total_duration_s"] = total.duration_s
            phase["total_units_s"] = total.compute_s
        return {
            "gpu": {
                "total_energy_j": sum(total.energy_j for total in totals.values()),
                "total_duration_s": sum(total.duration_s for total in totals.values()),
                **facts,
            },
            "job": _facts(job, {batch: b.mean for batch, b in self.baselines.items()}),
            "baseline": _step_facts(baseline.mean) if baseline else None,
        }

    def _put(self, step: Window, *, over: bool = False) -> None:
        """The next step: the one before has ended, and it begins where that one did."""
        last = self._last
        self._count()
        if last is not None and (self._over or last.phase == step.phase):
            step.begin_s = last.end_s
        self._last, self._over, self._counted = step, over, False
        if over:
            self._count()

    def _count(self) -> None:
        """Count the last step, whose end is known."""
        step = self._last
        if step is None or self._counted:
            return
        self._counted = True
        self.log.add(step)
        self._lap.add(step)
        if self._measured is not None:
            self._measured.append(step)
        phase, batch = split_phase(step.phase)
        if phase == Phase.BASELINE or (phase == Phase.WARMUP and batch not in self._settled):
            self._warmups.setdefault(batch, []).append(step)

    def _counter_j(self, time_s: float) -> float:
        return self._meter.window(time_s, time_s).end.energy_j

    def _know_baseline(self, batch: str, baseline: BaselineEnergy) -> None:
        self.baselines[batch] = baseline
        if not batch:
            self._describe({"baseline": asdict(baseline.mean)})

    def _over_gpus(
        self, step: StepEnergy | None
    ) -> tuple[StepEnergy | None, tuple[StepEnergy, ...]]:
        """An average step on all GPUs, and on those of each stage; none if one has no step."""
        sums = self._collectives.by_stage(step_sums(step), SUM)
        means = [mean_over_gpus([stage]) for stage in sums]
        return mean_over_gpus(sums), tuple(mean for mean in means if mean is not None)


def _facts(
    steps: Mapping[str, StepEnergy | None], baselines: Mapping[str, StepEnergy]
) -> dict[str, Any]:
    known = {name: _step_facts(step) for name, step in steps.items() if step is not None}
    compared = {
        batch: asdict(compare(steady, baseline))
        for batch, baseline in baselines.items()
        if (steady := steps.get(phase_in_batch(Phase.STEADY, batch)))
    }
    full = compared.pop("", None)
    return {"phases": known, "comparison": full, "other_batches": compared}


def _step_facts(step: StepEnergy) -> dict[str, Any]:
    return {**asdict(step), "power_w": step.power_w}
