"""What each level of EnvPipe would save in a job, by its iterations at full clock.

Where the job's own profile has other clocks' times and joules, plans are made by it. Else both are
those of a preset's model of the GPU, from the measured times at full clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from envpipe_megatron.core.conditions import Conditions, make_conditions
from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.core.plan import Cost, Plan
from envpipe_megatron.core.profile import Profile, make_profile
from envpipe_megatron.core.profile_rows import ProfileRow
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.core.timeline import RELATIVE_TOLERANCE
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.gpu.emulated.modelled import modelled_clocks_mhz
from envpipe_megatron.gpu.emulated.presets import GpuPreset, model_for
from envpipe_megatron.policies.planner import make_plan
from envpipe_megatron.policies.request import PlanRequest
from envpipe_megatron.report.bubbles import Bubbles
from envpipe_megatron.report.facts import LevelFacts, Predicted

#: An order of so many units is planned within seconds.
_MOST_UNITS = 2_000


def predict(bubbles: Bubbles, profile: Profile | None, gpu: str) -> Predicted:
    """What the levels would save; what cannot be said of them is named.

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
        return Predicted((), None, (), (f"there is no model of this GPU ({gpu})",))
    if schedule.num_units > _MOST_UNITS:
        why = f"an order of {schedule.num_units} units takes long to plan"
        return Predicted((), waiting_w, (), (why,))
    levels, lacking = [], []
    conditions = make_conditions(profile, blocking_power_w=waiting_w or 0.0)
    for level, plan in _plans(profile, schedule, conditions):
        try:
            cost, full = plan()
        except EnvPipeError as error:
            lacking.append(f"{level}: {error}")
        else:
            levels.append(LevelFacts(level, cost.saving_percent(full), cost.slowdown_percent(full)))
    assumed = (
        f"times and joules of other clocks are {source}",
        "gradient reduction, optimizer and messages take no time",
        "clocks change at once and follow every request",
        *(() if waiting_w else ("waiting takes no power",)),
    )
    return Predicted(tuple(levels), waiting_w, assumed, tuple(lacking))


def _prices(profile: Profile, schedule: Schedule) -> bool:
    """Whether a profile has what the units of an order take."""
    try:
        profile.for_chunks(schedule.num_chunks).keys(schedule)
    except EnvPipeError:
        return False
    return profile.num_stages == schedule.num_stages


def _modelled(bubbles: Bubbles, preset: GpuPreset) -> Profile:
    """The measured times at full clock, and what the model makes of them at others.

    The GPU's highest clock stands for that of the measured times.
    """
    schedule = bubbles.schedule
    rows = []
    for part, kind, time_s in _times(bubbles):
        for mhz in modelled_clocks_mhz(preset):
            at_s = preset.unit_time_s(kind.value, mhz, time_s)
            joules = at_s * preset.busy_power_w(kind.value, mhz)
            rows.append((part, kind, ProfileRow(mhz, at_s, joules)))
    return make_profile(rows, source=f"the model {preset.name}", listed_chunks=schedule.num_chunks)


def _times(bubbles: Bubbles) -> Iterator[tuple[int, Kind, float]]:
    """Mean time of each part (a chunk of a stage) and kind."""
    schedule = bubbles.schedule
    places = {kind: schedule.kinds == list(Kind).index(kind) for kind in schedule.unit_kinds}
    for stage in range(schedule.num_stages):
        for chunk in range(schedule.num_chunks):
            of_chunk = schedule.chunks[stage] == chunk
            for kind, there in places.items():
                own_s = bubbles.unit_s[stage][of_chunk & there[stage]]
                if len(own_s):
                    yield stage * schedule.num_chunks + chunk, kind, float(own_s.mean())


def _plans(
    profile: Profile, schedule: Schedule, conditions: Conditions
) -> Iterator[tuple[str, Callable[[], tuple[Cost, Cost]]]]:
    """For each level what plans it: its cost, and that of the recorded order at the highest clocks.

    All in the time of that order.
    """

    def planned(**more: Any) -> Plan:
        request = PlanRequest(
            schedule.num_microbatches,
            num_chunks=schedule.num_chunks,
            conditions=conditions,
            runnable=True,
            **more,
        )
        return make_plan(profile, request).plan

    @cache
    def own() -> Plan:
        return planned(policy="baseline", order=schedule)

    def optimal(**order: Any) -> tuple[Cost, Cost]:
        full = own()
        factor = full.cost.iteration_time_s / full.baseline.cost.iteration_time_s
        return planned(policy="optimal", deadline_factor=factor, **order).cost, full.cost

    yield "uniform", lambda: _uniform(own())
    yield "units", lambda: optimal(order=schedule)
    yield "order", lambda: optimal(schedule="auto")


def _uniform(full: Plan) -> tuple[Cost, Cost]:
    """The clock for all units that saves the most and takes no more time."""
    stages = range(full.schedule.num_stages)
    clocks = set.intersection(*(set(full.profile.clocks_mhz(stage)) for stage in stages))
    costs = [
        replace(full, frequency_mhz=np.full_like(full.frequency_mhz, mhz)).cost for mhz in clocks
    ]
    limit_s = full.cost.iteration_time_s * (1 + RELATIVE_TOLERANCE)
    as_fast = [cost for cost in (full.cost, *costs) if cost.iteration_time_s <= limit_s]
    return min(as_fast, key=lambda cost: cost.energy_j), full.cost
