"""The figures of `envpipe report`: the bill of a run's logs, and what each level would save.

Where the job's own profile has other clocks' times and joules, levels are planned by it. Else both
are those of a preset's model of the GPU, from the measured times at full clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from envpipe_megatron.core.conditions import Conditions, make_conditions
from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.core.plan import Cost, Plan, one_clock_plans
from envpipe_megatron.core.profile import Profile, make_profile
from envpipe_megatron.core.profile_rows import ProfileRow
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.core.timeline import RELATIVE_TOLERANCE
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.formats.account import NO_TARIFF, Tariff, account_lines
from envpipe_megatron.formats.bill import Bill
from envpipe_megatron.formats.energy import (
    FRAMEWORK,
    OUTSIDE_STEPS,
    Phase,
    read_step,
)
from envpipe_megatron.formats.steps import StepEnergy, compare
from envpipe_megatron.gpu.presets import GpuPreset, model_for
from envpipe_megatron.policies.planner import make_plan
from envpipe_megatron.policies.request import PlanRequest
from envpipe_megatron.report.facts import (
    Bubbles,
    Predicted,
    ReportFacts,
    StepFacts,
    find_bubbles,
    num_gpus,
)
from envpipe_megatron.report.run_folder import RunFolder

#: An order of at most this many units is planned within seconds.
_MOST_UNITS = 2_000

_STEADY, _WARMUP = Phase.STEADY.value, Phase.WARMUP.value


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
        return Predicted({}, None, (), (f"there is no model of this GPU ({gpu})",))
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


def report_facts(folder: RunFolder, tariff: Tariff = NO_TARIFF) -> ReportFacts:
    """Add up what a run's folder tells, and predict what its bubbles are worth."""
    facts = replace(_metered_facts(folder, tariff), changed_nothing=folder.changed_nothing)
    recorded = folder.timelines.iterations
    if not recorded:
        return facts
    profile = folder.profile
    top_mhz = None if profile is None else max(profile.clocks_mhz(0))
    bubbles = find_bubbles(recorded, folder.num_stages, top_mhz)
    if bubbles is None:
        return facts
    predicted = predict(bubbles, profile, recorded[0].labels.gpu)
    return replace(facts, bubbles=bubbles, predicted=predicted)


def _metered_facts(folder: RunFolder, tariff: Tariff) -> ReportFacts:
    """Return figures of phases, from meters.

    A job is compared as in its bill: with the mean of its baselines, each as long as it was in
    force. Before it could tell one, its whole warm-up is taken.
    """
    if folder.energy is None:
        return ReportFacts()
    bill = Bill(folder.energy.lines)
    if all(window.run in bill.other_runs for window in folder.windows):
        bill.other_runs = frozenset()  # starts that have one name
    notes = [f"The bill is incomplete: {reason}" for reason in bill.missing()]
    if not folder.windows:
        return ReportFacts(notes=tuple(notes))
    if bill.other_runs:
        named = ", ".join(sorted(bill.other_runs))
        notes.append(f"Asked for something else, so these figures leave them out: starts {named}.")
    means, steady, baseline = bill.compared(), bill.steps(_STEADY), _recorded(folder, bill)
    if means:
        of_gpus = (own.compared.baseline for own in bill.of_phase(_STEADY))
        baseline = baseline or next(each for each in of_gpus if each.iterations)
        baseline = replace(means[1], iterations=baseline.iterations)
    if baseline is None and (baseline := bill.steps(_WARMUP)) is not None:
        notes.append(
            "The job recorded no baseline: its whole warm-up is taken for it, with the first "
            "step, which is slower than others."
        )
    compared = compare(*means) if means else None
    if compared is None and steady and baseline and baseline.time_s:
        compared = compare(steady, baseline)
    tokens = (folder.summary or {}).get("tokens_per_iteration")
    bill.facts = {"tokens_per_iteration": tokens, **bill.facts}

    def average(name: str, phase: str, step: StepEnergy | None) -> StepFacts | None:
        """Return an average step on all ranks of a phase."""
        return None if step is None else StepFacts(name, num_gpus(bill.of_phase(phase)), step)

    phases = dict.fromkeys(phase for _, run, phase, _ in bill.phases if run not in bill.other_runs)
    trained = [phase for phase in phases if phase not in (*OUTSIDE_STEPS, FRAMEWORK)]
    return ReportFacts(
        tuple(filter(None, (average(phase, phase, bill.steps(phase)) for phase in trained))),
        average("baseline", _WARMUP, baseline),
        average(_STEADY, _STEADY, steady),
        compared,
        tuple(account_lines(bill, tariff, {"": compared} if compared else {})),
        bill,
        tuple(notes),
    )


def _recorded(folder: RunFolder, bill: Bill) -> StepEnergy | None:
    """Return the baseline that the job measured: by its job file, summary, or agent's notes.

    The job file is the present job's; the others may be left from an earlier one.
    """
    known = [(folder.summary or {}).get("baseline"), bill.facts.get("baseline")]
    if folder.job is not None:
        mean: Any = folder.job
        for name in ("baselines", "", "mean"):  # of a file that may be damaged
            mean = mean.get(name) if isinstance(mean, dict) else None
        known = [mean]
    return next(filter(None, map(read_step, known)), None)
