"""A profile and a baseline that need not be measured, held against this start's warm-up.

Units may cost something else today than they did: by another driver, heat, another node, or a fact
that no key has. What was measured in the warm-up, at the highest clock, tells. Called by `phases`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.core.plan import NORMAL_95, check_stages
from envpipe_megatron.core.profile import Profile, read_profile
from envpipe_megatron.core.profile_rows import row_name
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.runtime.execution.executor import StageRecord
from envpipe_megatron.runtime.going_on import by_planner
from envpipe_megatron.runtime.job.parts import PhaseParts
from envpipe_megatron.runtime.memory.stage import knows_memory, with_memory

#: A kind of units whose time differs by a larger share is not the one that was profiled, and a step
#: is not that of the baseline.
_MOST_APART = 0.03
#: Where a baseline is known less well, a step may differ by as much, up to this share.
_MOST_UNSURE = 0.1


def known_profile(
    job: PhaseParts, schedule: Schedule, records: Sequence[StageRecord]
) -> Profile | None:
    """The profile of another batch, the user's, or an earlier start's; else None.

    An earlier start's is forgotten where the warm-up contradicts it; the user's is used all the
    same, and the log says so. Every rank calls it, with the warm-up's records.

    Raises GoesOnError on all ranks if the user's cannot be read, or is of another number of stages.
    """
    before = job.state.profile  # what units cost does not depend on how many there are
    if before is not None and _has_all_pairs(job.state.profiled, schedule):
        return before
    given, profile = job.config.profile_file, job.folder.found.profile
    if given is not None:
        profile = by_planner(job.collectives, partial(read_named, given, job.num_stages))
    if profile is None:
        return None
    apart = _contradiction(job, profile, schedule, records)
    if apart and given is None:
        job.say(f"the profile of an earlier start is not used: {apart}")
        job.folder.forget_profile()
        return None
    if apart:
        job.say(f"the profile {given} is used, but may not be one of this job: {apart}")
    pending = profile.sidecar.pending_bytes
    if given is None and pending is not None:
        job.memory.waiting_bytes = (pending[job.stage],) * schedule.num_chunks
    job.memory.learn(schedule, job.specs)
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
    step, known = job.energy.warm_step(job.batch), baseline.mean
    if step is not None:
        unsure = NORMAL_95 * (known.time_uncertainty_s or 0.0) / known.time_s
        share = step.time_s / known.time_s - 1
        if abs(share) <= min(max(_MOST_APART, unsure), _MOST_UNSURE):
            return True
        job.say(
            f"the baseline of an earlier start is not used: a step takes {step.time_s:.4g} s, "
            f"{100 * share:+.1f} % against its {known.time_s:.4g} s"
        )
    job.energy.forget_baseline(job.batch)
    return False


def read_named(path: Path, num_stages: int) -> Profile:
    """A job's profile; EnvPipeError if it cannot be read, or is of another number of stages."""
    profile = read_profile(path)
    check_stages(profile, num_stages)
    return profile


def _has_all_pairs(measured: Schedule | None, schedule: Schedule) -> bool:
    """True if each stage with combined units ran some: with few microbatches there are none."""
    pairs = schedule.combined.any(axis=1)
    return measured is None or bool((measured.combined.any(axis=1) >= pairs).all())


def _contradiction(
    job: PhaseParts, profile: Profile, schedule: Schedule, records: Sequence[StageRecord]
) -> str:
    """How far the warm-up is from the profile, in words; empty if no kind of units is too far.

    Medians count: over iterations and units of a kind on each rank, then over replicas. A kind that
    did not run, or has no row at the clock of the warm-up, contradicts nothing.
    """
    chunks = schedule.num_chunks
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
    stages_s = job.collectives.medians(np.array(own_s))
    top_mhz = max(job.gpu.supported_frequencies_mhz)

    def look() -> str:
        rows = [(part, kind, of[kind][0]) for part, of in enumerate(profile.rows) for kind in kinds]
        apart = [
            (time_s / row.time_s - 1, row_name(part, kind, parts), time_s, row.time_s)
            for (part, kind, row), time_s in zip(rows, np.ravel(stages_s).tolist(), strict=True)
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
