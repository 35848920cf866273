"""What each level of EnvPipe would save in a job that was only watched.

Where the job's own profile has other clocks' times and joules, plans are made by it. Else both are
those of a preset's model of the GPU, from the measured times at full clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from envpipe_megatron.core.conditions import Conditions, make_conditions
from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.core.plan import Cost, Plan
from envpipe_megatron.core.profile import Profile, make_profile
from envpipe_megatron.core.profile_rows import ProfileRow
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.gpu.emulated.modelled import modelled_clocks_mhz
from envpipe_megatron.gpu.emulated.presets import GpuPreset
from envpipe_megatron.gpu.overrides import model_for
from envpipe_megatron.policies.planner import make_plan
from envpipe_megatron.policies.request import PlanRequest
from envpipe_megatron.report.bubbles import Bubbles
from envpipe_megatron.report.facts import LevelFacts, Predicted

#: An order with more units takes more than seconds to plan.
_MOST_UNITS = 4_000
#: One clock for a stage may take this much longer: without, it saves next to nothing.
_UNIFORM_SLOWER = 1.01


def predict(bubbles: Bubbles, profile: Profile | None, gpu: str) -> Predicted | None:
    """What the levels would save; None for an order that is too long, or a GPU without a model.

    Args:
        profile: the job's own, if it measured one.
        gpu: the product's name.
    """
    if bubbles.schedule.num_units > _MOST_UNITS or bubbles.schedule.forward_only:
        return None
    assumed = [
        "gradient reduction, optimizer and messages take no time",
        "clocks change at once and follow every request",
    ]
    if profile is not None and profile.num_stages == bubbles.schedule.num_stages:
        waiting_w = profile.sidecar.blocking_power_w
        assumed.insert(0, "times and joules of other clocks are those of the job's own profile")
    else:
        preset = model_for(gpu)
        if preset is None:
            return None
        fitted = "fitted to measurements" if preset.fitted else "not fitted: a guess"
        assumed.insert(
            0,
            f"times and joules of other clocks are those of the model {preset.name} ({fitted}), "
            "from the measured times",
        )
        profile = _modelled(bubbles, preset)
        waiting_w = (preset.wait_power_w,) * bubbles.schedule.num_stages
    conditions = make_conditions(profile, blocking_power_w=waiting_w or 0.0)
    try:
        levels = tuple(_levels(profile, bubbles.schedule, conditions))
    except EnvPipeError:
        return None
    return Predicted(levels, None if waiting_w is None else tuple(waiting_w), tuple(assumed))


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


def _levels(profile: Profile, schedule: Schedule, conditions: Conditions) -> Iterator[LevelFacts]:
    """The levels that change clocks, against the recorded order at the highest ones."""

    def request(**more: Any) -> PlanRequest:
        return PlanRequest(
            schedule.num_microbatches,
            num_chunks=schedule.num_chunks,
            conditions=conditions,
            runnable=True,
            **more,
        )

    own = make_plan(profile, request(policy="baseline", order=schedule)).plan
    full = own.cost
    yield _facts("uniform", _uniform(own).cost, full)
    factor = full.iteration_time_s / own.baseline.cost.iteration_time_s
    optimal = request(policy="optimal", order=schedule, deadline_factor=factor)
    yield _facts("units", make_plan(profile, optimal).plan.cost, full)
    free = request(policy="optimal", schedule="auto", deadline_factor=factor)
    yield _facts("order", make_plan(profile, free).plan.cost, full)


def _uniform(own: Plan) -> Plan:
    """One clock for each stage: they go down, the cheapest step first, while time allows."""
    limit_s = _UNIFORM_SLOWER * own.cost.iteration_time_s
    clocks = [
        sorted(own.profile.clocks_mhz(s), reverse=True) for s in range(own.schedule.num_stages)
    ]
    at = [0] * len(clocks)
    best = own
    while True:
        steps = []
        for stage, place in enumerate(at):
            if place + 1 < len(clocks[stage]):
                lower = best.frequency_mhz.copy()
                lower[stage] = clocks[stage][place + 1]
                plan = replace(best, frequency_mhz=lower)
                if (
                    plan.cost.iteration_time_s <= limit_s
                    and plan.cost.energy_j < best.cost.energy_j
                ):
                    steps.append((plan.cost.energy_j, stage, plan))
        if not steps:
            return best
        _, stage, best = min(steps, key=lambda step: step[:2])
        at[stage] += 1


def _facts(level: str, cost: Cost, full: Cost) -> LevelFacts:
    return LevelFacts(level, cost.saving_percent(full), cost.slowdown_percent(full))
