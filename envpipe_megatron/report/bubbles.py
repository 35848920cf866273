"""Where a job's pipelines wait, and what each level of EnvPipe would save of that.

Bubbles are seen in recorded iterations at full clock, in which no clock was asked for, or the
highest for all units; no clock is changed to know them. What could be saved is a prediction. Where
the job's own profile has other clocks' times and joules, levels are planned by it. Else both are
those of a preset's model of the GPU, from the measured times at full clock.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from envpipe_megatron.core.arrays import FloatArray
from envpipe_megatron.core.conditions import Conditions, make_conditions
from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.core.plan import Cost, Plan, one_clock_plans
from envpipe_megatron.core.profile import Profile, make_profile
from envpipe_megatron.core.profile_rows import ProfileRow
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.core.timeline import RELATIVE_TOLERANCE, Timeline
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.formats.energy import Phase, split_phase
from envpipe_megatron.formats.timeline import RankIteration
from envpipe_megatron.gpu.presets import GpuPreset, model_for
from envpipe_megatron.policies.planner import make_plan
from envpipe_megatron.policies.request import PlanRequest
from envpipe_megatron.report.pipelines import (
    PlacedGpu,
    by_iteration,
    gpus_of,
    marked_path,
    whole_pipelines,
)

#: Number of latest iterations at full clock that are looked at.
_LATEST = 16
#: A GPU whose units take this share longer than those of its stage's others is a straggler.
_STRAGGLES = 0.02
#: Phases of the framework's order at the highest clock.
_FULL = (Phase.WARMUP, Phase.BASELINE)
#: An order of at most this many units is planned within seconds.
_MOST_UNITS = 2_000


@dataclass(frozen=True)
class Bubbles:
    """Means over some iterations at full clock, from a pipeline's first unit to its last.

    Args:
        iterations: how many were looked at.
        pipeline_s: time of the whole pipeline.
        gpus: of all whole pipelines.
        units_s, bubbles_s, critical_s: [num_gpus] where the time of each goes; the last is that of
            units on the path that sets the pipeline's time.
        schedule: the pipeline's order.
        unit_s: [num_stages, units_per_stage] durations, means over pipelines too.
    """

    iterations: int
    pipeline_s: float
    gpus: tuple[PlacedGpu, ...]
    units_s: FloatArray
    bubbles_s: FloatArray
    critical_s: FloatArray
    schedule: Schedule
    unit_s: FloatArray

    @property
    def share(self) -> float:
        """Share of bubbles in the GPUs' time between the first unit and the last."""
        bubbles_s = float(self.bubbles_s.sum())
        return bubbles_s / (bubbles_s + float(self.units_s.sum()))

    @property
    def slowest_stage(self) -> tuple[int, float]:
        """The stage whose units take the longest, and by which share beyond the mean stage."""
        by_stage_s = self.unit_s.sum(axis=1)
        return int(by_stage_s.argmax()), float(by_stage_s.max() / by_stage_s.mean() - 1)

    @property
    def even_s(self) -> float:
        """Time of the pipeline if all stages took as long as their mean, in the same order."""
        by_stage_s = self.unit_s.sum(axis=1, keepdims=True)
        even = Timeline(self.schedule, self.unit_s * by_stage_s.mean() / by_stage_s)
        now = Timeline(self.schedule, self.unit_s)
        return self.pipeline_s - (now.iteration_time_s - even.iteration_time_s)

    @property
    def stragglers(self) -> list[tuple[PlacedGpu, float]]:
        """GPUs that are slower than their stage's others, with the share."""
        found, stages = [], np.array([gpu.stage for gpu in self.gpus])
        for stage in range(self.schedule.num_stages):
            own = np.flatnonzero(stages == stage)
            usual_s = statistics.median_low(self.units_s[own])
            slow = own[self.units_s[own] > (1 + _STRAGGLES) * usual_s]
            found += [(self.gpus[at], float(self.units_s[at] / usual_s - 1)) for at in slow]
        return found


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
        pipelines
        for reads in _at_full_clock(recorded, top_mhz)
        if (pipelines := list(whole_pipelines(reads, gpus, num_stages)))
    ]
    if not found or num_stages == 1:
        return None
    own = [each for each in found if split_phase(each[0][1][0].phase)[0] in _FULL]
    schedule = (own or found)[-1][-1][0]
    if schedule.forward_only:
        return None
    alike = [[reads for order, reads in each if order.stages == schedule.stages] for each in found]
    latest = [each for each in alike if each][-_LATEST:]
    whole = [reads for pipelines in latest for reads in pipelines]
    # [pipelines, num_stages, units_per_stage]
    unit_s = 1e-6 * np.array([[read.end_us - read.start_us for read in reads] for reads in whole])
    on_path = np.array([marked_path(Timeline(schedule, each_s)) for each_s in unit_s])
    spans_s = np.array(list(map(_span_s, whole)))
    units_s, critical_s = unit_s.sum(axis=2), (on_path * unit_s).sum(axis=2)
    bubbles_s = np.maximum(0.0, spans_s[:, None] - units_s)
    ranks = np.array([[read.labels.rank for read in reads] for reads in whole])
    own_gpus = tuple(gpu for rank, gpu in gpus.items() if rank in ranks)
    units_s, bubbles_s, critical_s = (
        np.array([of[ranks == gpu.rank].mean() for gpu in own_gpus])
        for of in (units_s, bubbles_s, critical_s)
    )
    pipeline_s, mean_s = float(spans_s.mean()), unit_s.mean(axis=0)
    return Bubbles(
        len(latest), pipeline_s, own_gpus, units_s, bubbles_s, critical_s, schedule, mean_s
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


@dataclass(frozen=True)
class Predicted:
    """Predicted savings of all levels, against the job's own order at the highest clocks.

    Args:
        levels: energy that each saves, and time that it adds, in percent.
        waiting_power_w: of each stage's GPU in its bubbles; None if not known.
        assumed: what the prediction rests on, for people.
        lacking: what cannot be predicted, and why.
    """

    levels: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    waiting_power_w: tuple[float, ...] | None = None
    assumed: tuple[str, ...] = ()
    lacking: tuple[str, ...] = ()


def predict(bubbles: Bubbles, profile: Profile | None, gpu: str) -> Predicted:
    """Predict what each level would save, and name what cannot be predicted.

    Args:
        profile: the job's own, if it measured one.
        gpu: the product's name.
    """
    schedule, preset = bubbles.schedule, model_for(gpu)
    waiting_w = None if preset is None else (preset.wait_power_w,) * schedule.num_stages
    if profile is not None and _prices(profile, schedule):
        waiting_w = profile.sidecar.blocking_power_w or waiting_w
        source = "those of the job's own profile"
    elif preset is not None:
        profile = _modelled(bubbles, preset)
        fitted = "fitted to measurements" if preset.fitted else "not fitted: a guess"
        source = f"those of the model {preset.name} ({fitted}), from the measured times"
    else:
        return Predicted(lacking=(f"there is no model of this GPU ({gpu})",))
    if schedule.num_units > _MOST_UNITS:
        why = f"an order of {schedule.num_units} units takes long to plan"
        return Predicted({}, waiting_w, (), (why,))
    conditions = make_conditions(profile, blocking_power_w=waiting_w or 0.0)
    levels, lacking = _levels(profile, schedule, conditions)
    assumed = (
        f"times and joules of other clocks are {source}",
        "gradient reduction, optimizer and messages take no time",
        "clocks change at once and follow every request",
        *(() if waiting_w else ("waiting takes no power",)),
    )
    return Predicted(levels, waiting_w, assumed, tuple(lacking))


def _prices(profile: Profile, schedule: Schedule) -> bool:
    """Say whether a profile prices all units of an order, at several clocks."""
    try:
        profile.for_chunks(schedule.num_chunks).keys(schedule)
    except EnvPipeError:
        return False
    return profile.num_stages == schedule.num_stages and len(profile.clocks_mhz(0)) > 1


def _modelled(bubbles: Bubbles, preset: GpuPreset) -> Profile:
    """Return the measured times at full clock, and what the model makes of them at others.

    The measured times are taken to be at the GPU's highest clock.
    """
    schedule = bubbles.schedule
    rows = []
    for part, kind, time_s in _times(bubbles):
        rows += [(part, kind, ProfileRow(*cost)) for cost in preset.modelled(kind, time_s)]
    return make_profile(rows, source=f"the model {preset.name}", listed_chunks=schedule.num_chunks)


def _times(bubbles: Bubbles) -> Iterator[tuple[int, Kind, float]]:
    """Yield the mean time of each part (a chunk of a stage) and kind, of units that run apart.

    Where all units of a kind run as one with another, it is theirs.
    """
    schedule = bubbles.schedule
    places = {kind: list(Kind).index(kind) for kind in schedule.unit_kinds}
    for stage in range(schedule.num_stages):
        for chunk in range(schedule.num_chunks):
            of_chunk = schedule.chunks[stage] == chunk
            for kind, place in places.items():
                own = of_chunk & (schedule.kinds[stage] == place)
                apart = own & (schedule.priced_kinds[stage] == place)
                own_s = bubbles.unit_s[stage][apart if apart.any() else own]
                if len(own_s):
                    yield stage * schedule.num_chunks + chunk, kind, float(own_s.mean())


def _levels(
    profile: Profile, schedule: Schedule, conditions: Conditions
) -> tuple[dict[str, tuple[float, float]], list[str]]:
    """Plan each level in the time of a recorded order at the highest clocks; name what fails."""

    def planned(**more: Any) -> Plan:
        request = PlanRequest(
            schedule.num_microbatches,
            num_chunks=schedule.num_chunks,
            conditions=conditions,
            runnable=True,
            **more,
        )
        return make_plan(profile, request).plan

    try:
        own = planned(policy="baseline", order=schedule)
    except EnvPipeError as error:
        return {}, [f"all levels: {error}"]
    full = own.cost
    factor = full.iteration_time_s / own.baseline.cost.iteration_time_s
    costs, lacking = {"uniform": _uniform(own)}, []
    orders: dict[str, dict[str, Any]] = {
        "units": {"order": schedule},
        "order": {"schedule": "auto"},
    }
    for level, order in orders.items():
        try:
            costs[level] = planned(policy="optimal", deadline_factor=factor, **order).cost
        except EnvPipeError as error:
            lacking.append(f"{level}: {error}")
    levels = {
        level: (cost.saving_percent(full), cost.slowdown_percent(full))
        for level, cost in costs.items()
    }
    return levels, lacking


def _uniform(full: Plan) -> Cost:
    """Return the cost at the clock for all units that saves the most and takes no more time."""
    costs = [full.cost, *(plan.cost for plan in one_clock_plans(full))]
    limit_s = full.cost.iteration_time_s * (1 + RELATIVE_TOLERANCE)
    as_fast = [cost for cost in costs if cost.iteration_time_s <= limit_s]
    return min(as_fast, key=lambda cost: cost.energy_j)
