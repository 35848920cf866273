"""The bill of one GPU's training: which energy belongs to which step, and what steps save."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from envpipe_megatron.formats.energy import FRAMEWORK, PLAN, Phase
from envpipe_megatron.runtime.channel.collectives import SUM, Collectives
from envpipe_megatron.runtime.energy.intervals import (
    BaselineEnergy,
    BaselineSteps,
    IntervalEnergy,
    IntervalMeter,
    JobEnergy,
    PhaseMean,
    StepEnergy,
    StepSums,
    compare,
    mean_over_gpus,
)
from envpipe_megatron.runtime.energy.log import EnergyLog
from envpipe_megatron.runtime.energy.meter import EnergyMeter
from envpipe_megatron.runtime.execution.executor import StageRecord

logger = logging.getLogger(__name__)


class TrainingEnergy:
    """Takes what happens on one rank, and says what it took.

    A framework that tells where its steps begin and end (`begin_step`, `end_step`) has all of a
    step billed with it. One that does not is billed from the first unit of a phase to its last.

    Args:
        meter: of this rank's GPU.
        log: gets every step.
        now_s: the present instant on the meter's time base.
        collectives: to all ranks.
        baseline: what an earlier start of the job measured; this one measures none then.
        describe: told of the baseline's mean step as soon as it is known.
    """

    def __init__(
        self,
        meter: EnergyMeter,
        log: EnergyLog,
        now_s: Callable[[], float],
        collectives: Collectives,
        baseline: BaselineEnergy | None = None,
        describe: Callable[[Mapping[str, Any]], None] = lambda facts: None,
    ) -> None:
        self.log = log
        self._describe = describe
        self._meter = meter
        self._now_s = now_s
        self._collectives = collectives
        self._interval = IntervalMeter(meter)
        self._warmup: BaselineSteps | None = None if baseline else BaselineSteps()
        self._job_phases: dict[str, PhaseMean] = {}
        #: When the step began whose iteration is still to come.
        self._begun_s: float | None = None
        #: The iteration whose step has not ended yet.
        self._phase: str | None = None
        self.baseline: BaselineEnergy | None = None
        if baseline is not None:
            self._know_baseline(baseline)

    def begin_step(self) -> None:
        """The next step begins now."""
        self._begun_s = self._now_s()

    def add_between_phases(self, iteration: int, begin_s: float) -> None:
        """What ran since then prepared the next phase."""
        if self._begun_s is None:
            return
        end_s = self._now_s()
        from_s = self.log.add_between_phases(iteration, min(self._begun_s, begin_s), end_s)
        self._interval.add_between(PLAN, from_s, end_s)

    def add(
        self, phase: Phase, iteration: int, record: StageRecord, receives: NDArray[np.bool_]
    ) -> None:
        """An iteration has run: all units of its step."""
        begin_s = self.log.add(phase.value, iteration, record, receives, self._begun_s)
        self._count(phase.value, begin_s, record.end_of_iteration_s)
        self._begun_s = None

    def end_step(self, iteration: int) -> None:
        """The step ends now, whoever ran its iteration; a second call does nothing."""
        end_s = self._now_s()
        if self._begun_s is not None:
            begin_s = self.log.add_step_of_framework(iteration, self._begun_s, end_s)
            self._count(FRAMEWORK, begin_s, end_s)
            self._begun_s = None
        elif self._phase is not None:
            self.log.end_step(end_s)
            self._interval.end_step(end_s)
            if self._warmup is not None and self._phase == Phase.WARMUP:
                self._warmup.end_step(end_s)
        self._phase = None

    def pause(self) -> None:
        """Something that is not training follows, up to the next step's begin."""
        self.log.interrupt()
        self._phase = self._begun_s = None

    def settle_baseline(self) -> None:
        """Measure the baseline, once the warm-up is over; on all ranks together, and once."""
        if self._warmup is None:
            return
        own = self._warmup.measure(self._meter)
        self._warmup = None
        mean, stages = self._over_gpus(own)
        if mean is not None:
            self._know_baseline(BaselineEnergy(mean, stages, own))
        elif self._collectives.is_planner:
            logger.info(
                "The warm-up is no baseline, so no saving is told: without its first step it must "
                "have at least two, and last %.1f s",
                self._meter.min_window_s,
            )

    def _know_baseline(self, baseline: BaselineEnergy) -> None:
        self.baseline = baseline
        self._describe({"baseline": asdict(baseline.mean)})

    def lap(self) -> IntervalEnergy:
        """What training took on this GPU since the last lap; neither reads nor waits."""
        return self._interval.lap()

    def gather(self, interval: IntervalEnergy) -> JobEnergy | None:
        """The interval over all GPUs; on all ranks together."""
        mean, by_stage = self._over_gpus(interval.step)
        if mean is None:
            return None
        if len(interval.phases) == 1:
            (phase,) = interval.phases
            self._job_phases.setdefault(phase, PhaseMean()).add(mean)
        return JobEnergy(interval.phases, mean, by_stage)

    def _over_gpus(
        self, step: StepEnergy | None
    ) -> tuple[StepEnergy | None, tuple[StepEnergy, ...]]:
        """An average step on all GPUs, and on those of each stage; none where one has no step."""
        by_stage = self._collectives.by_stage(np.array(StepSums.of(step), dtype=np.float64), SUM)
        sums = [StepSums(*stage.tolist()) for stage in by_stage]
        means = [mean_over_gpus([stage]) for stage in sums]
        return mean_over_gpus(sums), tuple(mean for mean in means if mean is not None)

    def summary(self) -> dict[str, Any]:
        """What was metered so far, of this GPU and as far as it was gathered of the job.

        Returns:
            `gpu` and `job`, each with `phases` (for each, `iterations`, `time_s`, `energy_j` and
            `power_w` of a step, with uncertainties) and `comparison` of the steady phase with the
            baseline, None if not known. `gpu` and each of its phases have `total_energy_j` and
            `total_duration_s` too; its phase `plan` has no step.
            `baseline`, the mean step of all GPUs, or None.
        """
        own: dict[str, StepEnergy | None] = {
            name: StepEnergy(
                totals.iterations,
                totals.duration_s / totals.iterations,
                0.0,  # the mean of all there were, not of some that stand for others
                totals.energy_j / totals.iterations,
                totals.uncertainty_j / totals.iterations,
            )
            for name, totals in self.log.totals.items()
            if totals.iterations
        }
        job = {name: mean.step for name, mean in self._job_phases.items()}
        baseline = self.baseline
        facts = _facts(own, baseline.own if baseline else None)
        for name, totals in self.log.totals.items():
            phase = facts["phases"].setdefault(name, {"iterations": 0})
            phase["total_energy_j"] = totals.energy_j
            phase["total_duration_s"] = totals.duration_s
        return {
            "gpu": {
                "total_energy_j": sum(t.energy_j for t in self.log.totals.values()),
                "total_duration_s": sum(t.duration_s for t in self.log.totals.values()),
                **facts,
            },
            "job": _facts(job, baseline.mean if baseline else None),
            "baseline": _step_facts(baseline.mean) if baseline else None,
        }

    def _count(self, phase: str, begin_s: float, end_s: float) -> None:
        self._phase = phase
        self._interval.add(phase, begin_s, end_s)
        if self._warmup is not None and phase == Phase.WARMUP:
            self._warmup.add(begin_s, end_s)


def _facts(steps: dict[str, StepEnergy | None], baseline: StepEnergy | None) -> dict[str, Any]:
    steady = steps.get(Phase.STEADY.value)
    known = {name: _step_facts(step) for name, step in steps.items() if step is not None}
    compared = asdict(compare(steady, baseline)) if steady and baseline else None
    return {"phases": known, "comparison": compared}


def _step_facts(step: StepEnergy) -> dict[str, Any]:
    return {**asdict(step), "power_w": step.power_w}
