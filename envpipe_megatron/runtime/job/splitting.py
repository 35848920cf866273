"""In which order a job's units are measured: with some backwards split, where plans may split some.

What both parts of a backward take is seen in the same iterations as all else, so that nothing is
assumed of it. Called by `phases`.
"""

from __future__ import annotations

from collections.abc import Sequence

from envpipe_megatron.core.kinds import WHOLE, Kind
from envpipe_megatron.core.orders.zero_bubble import half_split
from envpipe_megatron.core.profile import Profile
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.formats.energy import Phase
from envpipe_megatron.runtime.execution.executor import StageRecord
from envpipe_megatron.runtime.execution.orders import PhaseRun, constant_order
from envpipe_megatron.runtime.job.parts import PhaseParts, note
from envpipe_megatron.runtime.job.planning import capacity, make_room_for_messages, splits
from envpipe_megatron.runtime.job.restarts.known_profile import known_profile
from envpipe_megatron.runtime.memory.peak import MemoryFullError, Watch

_NO_PARTS = "has no rows of input-gradient and weight-gradient"


def known_and_measured(
    job: PhaseParts, schedule: Schedule, records: Sequence[StageRecord]
) -> tuple[Profile | None, Schedule]:
    """The profile that need not be measured, and the order whose units are looked at.

    That is the framework's, with half of its backwards split if plans may split some. Every rank
    calls it, as `known_profile`. Where only the order matters, units are always measured.
    """
    profile = None if job.config.changes_only_order else known_profile(job, schedule, records)
    measured = schedule
    may_split = job.config.may_split and splits(job) and capacity(job) is None
    may_split = may_split and job.config.plan_file is None  # whose order is there
    whole = schedule.unit_kinds == WHOLE and not schedule.combined.any()
    if may_split and whole and schedule.num_microbatches > 1:
        measured = half_split(schedule)
    if profile is None or measured is schedule or Kind.INPUT_GRADIENT in profile.kinds:
        return profile, measured
    if job.config.profile_file is not None:
        given = job.config.profile_file
        note(job, f"Backwards stay whole: {given} {_NO_PARTS}; measure it again (envpipe profile)")
        return profile, schedule
    job.say(f"the profile that is known is not used: it {_NO_PARTS}")
    job.folder.forget_profile()
    return None, measured


def try_parts(job: PhaseParts, schedule: Schedule, measured: Schedule) -> PhaseRun[Schedule]:
    """Run the order whose units are looked at, and watch what they hold; the order to look at.

    That is the framework's where the other has no memory, and backwards are whole then.
    """
    if measured is schedule:
        return schedule
    try:
        make_room_for_messages(job, measured)
        job.memory.predict(measured)
    except MemoryFullError as error:
        job.state.whole = str(error)
        note(job, f"Backwards stay whole: {error}")
        return schedule
    yield from watch_parts(job, schedule, measured)
    return measured


def watch_parts(job: PhaseParts, schedule: Schedule, measured: Schedule) -> PhaseRun[None]:
    """Learn what units hold, by an iteration of the order whose units are looked at."""
    top = max(job.gpu.supported_frequencies_mhz)
    before, job.memory.watch = job.memory.watch, Watch.UNITS
    yield constant_order(Phase.PROFILE, measured, top, top)
    job.memory.learn(schedule, job.specs, measured)
    job.memory.watch = before
