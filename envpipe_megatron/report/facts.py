"""The figures of a report: bubbles, shares of time and energy, steps, what levels would save.

Bubbles are seen in recorded iterations at full clock, in which no clock was asked for, or the
highest for all units; no clock is changed to know them. What could be saved is a prediction
(`cli.jobs.report_facts`). Other figures come from a bill, which the caller adds up.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from envpipe_megatron.core.arrays import FloatArray
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.core.timeline import Timeline
from envpipe_megatron.formats.bill import Bill
from envpipe_megatron.formats.energy import Phase, split_phase
from envpipe_megatron.formats.energy_sums import EnergySums
from envpipe_megatron.formats.steps import Comparison, StepEnergy
from envpipe_megatron.formats.timeline import RankIteration
from envpipe_megatron.report.pipelines import PlacedGpu, by_iteration, gpus_of, whole_pipelines

#: So many of the latest iterations at full clock are looked at.
_LATEST = 16
#: A GPU whose units take this share longer than those of its stage's others is a straggler.
_STRAGGLES = 0.02
#: Phases of the framework's order at the highest clock.
_FULL = (Phase.WARMUP, Phase.BASELINE)


@dataclass(frozen=True)
class GpuTime:
    """Where the time of a GPU goes between its pipeline's first unit and last; of an iteration.

    Args:
        critical_s: in units on the path that sets the pipeline's time.
    """

    gpu: PlacedGpu
    units_s: float
    bubbles_s: float
    critical_s: float


@dataclass(frozen=True)
class Bubbles:
    """Means over some iterations at full clock.

    Args:
        iterations: how many were looked at.
        pipeline_s: from the first unit to the last.
        even_s: the same if all stages took as long as their mean, in the same order.
        schedule: the pipeline's order.
        unit_s: [num_stages, units_per_stage] durations, means over pipelines too.
        stragglers: GPUs that are slower than their stage's others, with the share.
    """

    iterations: int
    pipeline_s: float
    even_s: float
    gpus: tuple[GpuTime, ...]
    schedule: Schedule
    unit_s: FloatArray
    stragglers: tuple[tuple[PlacedGpu, float], ...]

    @property
    def share(self) -> float:
        """Share of bubbles in the GPUs' time between the first unit and the last."""
        bubbles_s = sum(each.bubbles_s for each in self.gpus)
        return bubbles_s / (bubbles_s + sum(each.units_s for each in self.gpus))

    @property
    def slowest_stage(self) -> tuple[int, float]:
        """The stage whose units take the longest, and by which share beyond the mean stage."""
        by_stage_s = self.unit_s.sum(axis=1)
        return int(by_stage_s.argmax()), float(by_stage_s.max() / by_stage_s.mean() - 1)


def find_bubbles(
    recorded: Sequence[RankIteration], num_stages: int, top_mhz: int | None = None
) -> Bubbles | None:
    """Return the bubbles of a job's own order; None without a whole pipeline at full clock.

    None, too, for one stage, and for orders of forwards only, as whole iterations are.

    Args:
        num_stages: of the job.
        top_mhz: the highest clock, if it is known; else that of warm-up and baseline is taken.
    """
    gpus = {gpu.rank: gpu for gpu in gpus_of(read.labels for read in recorded)}
    found = [
        list(whole_pipelines(reads, gpus, num_stages))
        for reads in _at_full_clock(recorded, top_mhz)
    ]
    found = [pairs for pairs in found if pairs]
    if not found or num_stages == 1:
        return None
    own = [pairs for pairs in found if split_phase(pairs[0][1][0].phase)[0] in _FULL]
    schedule = (own or found)[-1][-1][0]
    if schedule.forward_only:
        return None
    alike = [[pair for pair in pairs if pair[0].stages == schedule.stages] for pairs in found]
    latest = [pairs for pairs in alike if pairs][-_LATEST:]
    whole = [pair for pairs in latest for pair in pairs]
    times: dict[int, list[tuple[float, float, float]]] = {}
    unit_s, spans_s = [], []
    for _, reads in whole:
        own_s = np.array([1e-6 * (read.end_us - read.start_us) for read in reads])
        unit_s.append(own_s)
        timeline = Timeline(schedule, own_s)
        critical_s = np.zeros(schedule.num_units)
        path = timeline.critical_path()
        critical_s[path] = own_s.ravel()[path]
        by_stage_s = critical_s.reshape(own_s.shape).sum(axis=1)
        span_s = _span_s(reads)
        spans_s.append(span_s)
        for read, busy_s, on_path_s in zip(reads, own_s.sum(axis=1), by_stage_s, strict=True):
            times.setdefault(read.labels.rank, []).append(
                (float(busy_s), max(0.0, span_s - float(busy_s)), float(on_path_s))
            )
    means = [
        GpuTime(gpu, *(float(value) for value in np.mean(times[rank], axis=0)))
        for rank, gpu in gpus.items()
        if rank in times
    ]
    mean_s: FloatArray = np.mean(unit_s, axis=0)
    by_stage_s = mean_s.sum(axis=1, keepdims=True)
    even = Timeline(schedule, mean_s * by_stage_s.mean() / by_stage_s)
    ideal_s = Timeline(schedule, mean_s).iteration_time_s
    pipeline_s = statistics.fmean(spans_s)
    return Bubbles(
        len(latest),
        pipeline_s,
        pipeline_s - (ideal_s - even.iteration_time_s),
        tuple(means),
        schedule,
        mean_s,
        tuple(_stragglers(means)),
    )


def _at_full_clock(
    recorded: Sequence[RankIteration], top_mhz: int | None
) -> list[list[RankIteration]]:
    """Find the records of each iteration that ran at the highest clock, or at none asked for."""
    asked = [int(read.frequency_mhz.max()) for read in recorded if read.frequency_mhz is not None]
    highest_mhz = top_mhz or max(asked, default=0)

    def at_full(read: RankIteration) -> bool:
        if read.frequency_mhz is None:
            return True
        phase = split_phase(read.phase)[0]
        # A profile may be of the framework's order with some backwards in two parts.
        known = phase in _FULL or (top_mhz is not None and phase != Phase.PROFILE)
        return known and int(read.frequency_mhz.min()) >= highest_mhz

    return [reads for reads in by_iteration(recorded).values() if all(map(at_full, reads))]


def _span_s(reads: Sequence[RankIteration]) -> float:
    """Return the time from a pipeline's first unit to its last; nodes' clocks begin anywhere.

    The first stage has the first unit, and the last backward ends there, too. Where stages share a
    node, all of them are looked at.
    """
    node = reads[0].labels.node
    together = [read for read in reads if read.labels.node == node]
    begins_s = [read.begin_s + 1e-6 * float(read.start_us[0]) for read in together]
    ends_s = [read.begin_s + 1e-6 * float(read.end_us[-1]) for read in together]
    return max(ends_s) - min(begins_s)


def _stragglers(means: Sequence[GpuTime]) -> Iterable[tuple[PlacedGpu, float]]:
    by_stage: dict[int, list[GpuTime]] = {}
    for each in means:
        by_stage.setdefault(each.gpu.stage, []).append(each)
    for own in by_stage.values():
        usual_s = statistics.median_low([each.units_s for each in own])
        for each in own:
            if each.units_s > (1 + _STRAGGLES) * usual_s:
                yield each.gpu, each.units_s / usual_s - 1


@dataclass(frozen=True)
class StepFacts:
    """An average step of a phase, over all GPUs of the job.

    Args:
        name: the phase, or `baseline`.
        mean: the step on an average GPU.
    """

    name: str
    num_gpus: int
    mean: StepEnergy

    @property
    def energy_j(self) -> float | None:
        """On all GPUs; None if it is not known."""
        known = self.mean.energy_j is not None and self.num_gpus
        return self.num_gpus * self.mean.energy_j if known else None  # type: ignore[operator]


def num_gpus(sums: Iterable[EnergySums]) -> int:
    """Return how many members of the job sums are of: a rank may have had several GPUs."""
    return len({own.last.member for own in sums if own.last})


@dataclass(frozen=True)
class Predicted:
    """Predicted savings of all levels, against the job's own order at the highest clocks.

    Args:
        levels: energy that each saves, and time that it adds, in percent.
        waiting_power_w: of each stage's GPU in its bubbles; None if not known.
        assumed: what the prediction rests on, for people.
        lacking: what cannot be predicted, and why.
    """

    levels: Mapping[str, tuple[float, float]]
    waiting_power_w: tuple[float, ...] | None
    assumed: tuple[str, ...]
    lacking: tuple[str, ...] = ()


@dataclass(frozen=True)
class ReportFacts:
    """All figures of a run.

    Args:
        phases: an average step of each phase.
        baseline: what is compared with; None if that is not known.
        compared: the steady phase with the baseline; None if that cannot be said.
        account: what the run took and saved, in words; the last line is of all of it.
        bill: what they are of; None without metered windows.
        notes: what a reader of the figures must know.
        bubbles: None if no whole iteration at full clock was recorded.
        predicted: None without bubbles.
        changed_nothing: whether the run only measured, so that nothing was saved.
    """

    phases: tuple[StepFacts, ...] = ()
    baseline: StepFacts | None = None
    steady: StepFacts | None = None
    compared: Comparison | None = None
    account: tuple[str, ...] = ()
    bill: Bill | None = None
    notes: tuple[str, ...] = ()
    bubbles: Bubbles | None = None
    predicted: Predicted | None = None
    changed_nothing: bool = False
