"""Measures the units of a job: a profile that holds, parts of backwards, how long a hop takes.

Units may cost something else today than they did: by another driver, heat, another node, or a fact
that no key has. The warm-up, at the highest clock, shows it. Where plans may
split backwards, units are measured in an order that splits some: what both parts of one take is
seen in the same iterations as all else, so that nothing is assumed of it. Called by `phases`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from envpipe_megatron.core.arrays import FloatArray
from envpipe_megatron.core.kinds import WHOLE, Kind
from envpipe_megatron.core.orders.builders import half_split
from envpipe_megatron.core.plan import NORMAL_95
from envpipe_megatron.core.profile import Profile
from envpipe_megatron.core.profile_rows import row_name
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.formats.energy import Phase
from envpipe_megatron.runtime.channel.collectives import by_planner
from envpipe_megatron.runtime.execution.executor import StageRecord
from envpipe_megatron.runtime.execution.stage_run import PhaseRun, constant_order
from envpipe_megatron.runtime.job.parts import PhaseParts, note
from envpipe_megatron.runtime.job.planning import (
    make_room_for_messages,
    splits,
)
from envpipe_megatron.runtime.memory.peak import MemoryFullError
from envpipe_megatron.runtime.memory.stage import knows_memory, with_memory

#: Between units that do not wait lies less: the host's and the stream's own work.
_WAITED_S = 1e-4
_NO_PARTS = "has no rows of input-gradient and weight-gradient"
#: A kind of units whose time differs by a larger share is not the one that was profiled, and a step
#: is not that of the baseline.
_MOST_APART = 0.03
#: Where a baseline is known less well, a step may differ by as much, up to this share.
_MOST_UNSURE = 0.1


def known_and_measured(
    job: PhaseParts, records: Sequence[StageRecord]
) -> tuple[Profile | None, Schedule]:
    """Return the profile that need not be measured, and the order whose units are looked at.

    That is the framework's, with half of its backwards split if plans may split some. Every rank
    calls it, as `known_profile`. Where only the order matters, units are always measured.
    """
    profile = None if job.options.changes_only_order else known_profile(job, records)
    schedule = measured = job.schedule
    may_split = job.options.may_split and splits(job) and job.channel.capacity is None
    may_split = may_split and job.options.plan is None  # whose order is there
    whole = schedule.unit_kinds == WHOLE and not schedule.combined.any()
    if may_split and whole and schedule.num_microbatches > 1:
        measured = half_split(schedule)
    if profile is None or measured is schedule or Kind.INPUT_GRADIENT in profile.kinds:
        return profile, measured
    if job.options.profile is not None:
        given = job.options.profile
        note(job, f"Backwards stay whole: {given} {_NO_PARTS}; measure it again (envpipe profile)")
        return profile, schedule
    job.say(f"the profile that is known is not used: it {_NO_PARTS}")
    job.folder.forget_profile()
    return None, measured


def try_parts(job: PhaseParts, measured: Schedule) -> PhaseRun[Schedule]:
    """Run the order whose units are looked at, and learn what they hold; the order to look at.

    That is the framework's where the other has no memory, and backwards are whole then.
    """
    if measured is job.schedule:
        return measured
    try:
        make_room_for_messages(job, measured)
        job.memory.predict(measured)
    except MemoryFullError as error:
        job.state.whole = str(error)
        note(job, f"Backwards stay whole: {error}")
        return job.schedule
    yield replace(constant_order(Phase.PROFILE, measured, job.top_mhz), watched=True)
    job.memory.learn(job.schedule, job.specs, measured)
    return measured


def measure_hops_s(job: PhaseParts, records: Sequence[StageRecord]) -> tuple[float, ...]:
    """Return how long a message takes between each two stages, s, by when units began to run.

    A unit that waits begins when its input has come: of those of an iteration, the one that begins
    soonest after its input was made tells. Stages share no clock: what theirs differ by makes the
    way there as much longer as the way back shorter, so the mean of both counts, and of all
    iterations and replicas the median. Where a slow stage never waits, messages take the least time
    that is seen elsewhere; 0 if no iteration ran whole. Every rank calls it.
    """
    schedule = job.schedule
    unknown = np.full((2, schedule.units_per_stage), np.nan)
    own_s = [(each.start_s, each.end_s) if each.whole else unknown for each in records] or [unknown]
    # By stage, [replicas, iterations, begin and end, units].
    times_s = job.collectives.to_planner(np.array([own_s]), np.concatenate)

    def look() -> tuple[float, ...]:
        stages, width = range(job.num_stages), schedule.units_per_stage
        sources = schedule.cross_dependency.reshape(job.num_stages, width)

        def way_s(source: int, to: int) -> FloatArray:
            fed = np.flatnonzero((sources[to] >= 0) & (sources[to] // width == source))
            made = sources[to, fed] % width
            before_s = np.where(fed, times_s[to][..., 1, fed - 1], 0.0)  # ends of units before
            waited = times_s[to][..., 0, fed] - before_s > _WAITED_S
            after_s = times_s[to][..., 0, fed] - times_s[source][..., 1, made]
            return np.asarray(np.where(waited, after_s, np.inf).min(axis=-1))

        both_s = [(way_s(a, b) + way_s(b, a)) / 2 for a, b in pairwise(stages)]
        known = [each[np.isfinite(each)] for each in both_s]
        # Of what takes no time, clocks of hosts leave some picoseconds.
        seen_s = [round(max(0.0, float(np.median(of))), 9) if of.size else None for of in known]
        least_s = min((hop_s for hop_s in seen_s if hop_s is not None), default=0.0)
        return tuple(least_s if hop_s is None else hop_s for hop_s in seen_s)

    return by_planner(job.collectives, look)


def known_profile(job: PhaseParts, records: Sequence[StageRecord]) -> Profile | None:
    """Return the profile of another batch, the user's, or an earlier start's; else None.

    An earlier start's is forgotten where the warm-up contradicts it; the user's is used all the
    same, and the log says so. Every rank calls it, with the warm-up's records.
    """
    before = job.state.profile  # what units cost does not depend on how many there are
    if before is not None and _has_all_pairs(job.state.profiled, job.schedule):
        return before
    given, (profile, _) = job.options.profile, job.state.given or (None, None)
    if given is None:
        profile = job.folder.found.profile
    if profile is None:
        return None
    apart = _contradiction(job, profile, records)
    if apart and given is None:
        job.say(f"the profile of an earlier start is not used: {apart}")
        job.folder.forget_profile()
        return None
    if apart:
        job.say(f"the profile {given} is used, but may not be one of this job: {apart}")
    pending = profile.sidecar.pending_bytes
    if given is None and pending is not None:
        job.memory.waiting_bytes = (pending[job.stage],) * job.schedule.num_chunks
    job.memory.learn(job.schedule, job.specs)
    if given is not None and knows_memory(profile.sidecar):
        return profile
    return with_memory(profile, job.memory.stages)


def baseline_holds(job: PhaseParts) -> bool:
    """True if a step of the warm-up takes as long as the baseline that is known.

    An earlier start's that it contradicts is forgotten. Every rank calls it.
    """
    baseline = job.energy.baselines.get(job.batch)
    if baseline is None or baseline.own is not None:
        return True  # this start measures it
    step_s, known = job.energy.warm_step_s(job.batch), baseline.mean
    if step_s is not None:
        unsure = NORMAL_95 * (known.time_uncertainty_s or 0.0) / known.time_s
        share = step_s / known.time_s - 1
        if abs(share) <= min(max(_MOST_APART, unsure), _MOST_UNSURE):
            return True
        job.say(
            f"the baseline of an earlier start is not used: a step takes {step_s:.4g} s, "
            f"{100 * share:+.1f} % against its {known.time_s:.4g} s"
        )
    job.energy.forget_baseline(job.batch)
    return False


def _has_all_pairs(measured: Schedule | None, schedule: Schedule) -> bool:
    """True if each stage with combined units ran some: with few microbatches there are none."""
    pairs = schedule.combined.any(axis=1)
    return measured is None or bool((measured.combined.any(axis=1) >= pairs).all())


def _contradiction(job: PhaseParts, profile: Profile, records: Sequence[StageRecord]) -> str:
    """Say how far the warm-up is from the profile; empty if no kind of units is too far.

    Medians count: over iterations and units of a kind on each rank, then over replicas. A kind that
    did not run, or has no row at the clock of the warm-up, contradicts nothing.
    """
    schedule, chunks = job.schedule, job.schedule.num_chunks
    if not records or profile.sidecar.num_chunks not in (1, chunks):
        return ""  # planning refuses other chunks
    profile = profile.for_chunks(chunks)
    parts = profile.listed_chunks
    kinds = [kind for kind in profile.kinds if kind is not Kind.NOTHING]
    keys = schedule.unit_keys(parts, kinds)[job.stage] - len(kinds) * parts * job.stage
    times_s = np.array([record.unit_time_s for record in records])
    own_s = [
        np.median(times_s[:, keys == key]) if key in keys else math.nan
        for key in range(len(kinds) * parts)
    ]
    stages_s = job.collectives.to_planner(np.array([own_s]), np.concatenate)
    top_mhz = job.top_mhz

    def look() -> str:
        rows = [(part, kind, of[kind][0]) for part, of in enumerate(profile.rows) for kind in kinds]
        seen_s = np.ravel([np.median(stage, axis=0) for stage in stages_s]).tolist()
        apart = [
            (time_s / row.time_s - 1, row_name(part, kind, parts), time_s, row.time_s)
            for (part, kind, row), time_s in zip(rows, seen_s, strict=True)
            if row.frequency_mhz == top_mhz and abs(time_s / row.time_s - 1) > _MOST_APART
        ]
        if not apart:
            return ""
        share, name, time_s, profiled_s = max(apart, key=lambda one: abs(one[0]))
        more = f"; {len(apart) - 1} more kind(s) of units differ too" if len(apart) > 1 else ""
        return (
            f"at {top_mhz} MHz {name} takes {1e3 * time_s:.4g} ms, {100 * share:+.1f} % against "
            f"its {1e3 * profiled_s:.4g} ms{more}"
        )

    return by_planner(job.collectives, look)
