"""What a job measures beside its profile: parts of backwards, and how long a hop takes.

Where plans may split backwards, units are measured in an order that splits some: what both parts of
one take is seen in the same iterations as all else, so that nothing is assumed of it. Called by
`phases`.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch

from envpipe_megatron.core.kinds import WHOLE, Kind, unit
from envpipe_megatron.core.orders.zero_bubble import half_split
from envpipe_megatron.core.profile import Profile
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.formats.energy import Phase
from envpipe_megatron.runtime.channel.carrier import StageSpecs
from envpipe_megatron.runtime.channel.p2p import P2PChannel
from envpipe_megatron.runtime.execution.executor import Executor, StageRecord
from envpipe_megatron.runtime.execution.orders import PhaseRun, constant_order
from envpipe_megatron.runtime.job.parts import PhaseParts, note
from envpipe_megatron.runtime.job.planning import capacity, make_room_for_messages, splits
from envpipe_megatron.runtime.job.restarts.known_profile import known_profile
from envpipe_megatron.runtime.memory.peak import MemoryFullError, Watch

#: Round trips that count; those before them bring buffers and routes into use.
_ROUND_TRIPS = 11
_WARMUPS = 3
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


def measure_p2p_latency_s(
    stage: int, num_stages: int, channel: P2PChannel, specs: StageSpecs, executor: Executor
) -> float:
    """Half the median round trip, in s, of a message between this stage and the next.

    Run by all stages between two iterations. A message of the size of training goes to the next
    stage over the activations' link and one comes back over the gradients', so the figure is the
    mean of both directions. It holds what a hop costs on the host, too.

    A stage serves the boundary before it first, then measures the one after it, so boundaries are
    measured one after another without any barrier. Of the two stages of a boundary each sends only
    what the other expects next: with any channel that training runs on, no order of arrival can
    stop it.

    It is 0 on the last stage, which has no next one, and where messages take no time.
    """
    rounds = _WARMUPS + _ROUND_TRIPS
    executor.meet()
    if stage > 0:
        payload = specs.sends[Kind.BACKWARD].make(torch.zeros)
        comes = [unit(Kind.FORWARD, number) for number in range(rounds)]
        channel.expect(comes, specs)
        for number, own in enumerate(comes):
            channel.receive(own)
            channel.send(unit(Kind.BACKWARD, number), payload)
            executor.wait_for_messages()
        channel.end_step()
    if stage + 1 == num_stages:
        return 0.0
    trips_s = []
    payload = specs.sends[Kind.FORWARD].make(torch.zeros)
    comes = [unit(Kind.BACKWARD, number) for number in range(rounds)]
    channel.expect(comes, specs)
    for number, own in enumerate(comes):
        sent_s = executor.now_s()
        channel.send(unit(Kind.FORWARD, number), payload)
        channel.receive(own)
        executor.wait_for_messages()
        trips_s.append(executor.now_s() - sent_s)
    channel.end_step()
    return statistics.median(trips_s[_WARMUPS:]) / 2
