"""Builders of schedules: GPipe, 1F1B, Megatron's interleaved order, breadth-first, EnvPipe's.

All of these warm up with some forwards, and then run forwards and backwards in turn. Of zero-bubble
orders, ZB-H1 and ZB-H2 are 1F1B with extra forwards whose backwards are split; others' backwards
are split where they are. Fewer microbatches than stages is a valid job for all.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain

import numpy as np

from envpipe_megatron.core.kinds import SPLIT, Kind, ScheduleError, Unit, unit
from envpipe_megatron.core.orders.greedy import shortest
from envpipe_megatron.core.orders.job import OrderJob
from envpipe_megatron.core.schedule import Placement, Schedule

#: About twice what 128 stages with 8,192 microbatches each need.
MAX_UNITS = 4_000_000
#: Least memory and time that planning takes per unit (measured: `envpipe plan`, 1F1B).
_UNIT_BYTES, _UNIT_S = 750, 2e-5


def gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """Return all forwards, then all backwards (Huang et al., NeurIPS'19, section 2.3).

    Backwards ascend by microbatch, so that gradients add up in the order of 1F1B and the result is
    equal to the last bit.
    """
    stages = _in_turns(num_stages, num_microbatches, lambda stage: num_microbatches)
    return Schedule("gpipe", num_microbatches, 1, stages)


def one_f_one_b(num_stages: int, num_microbatches: int) -> Schedule:
    """Return Megatron's non-interleaved 1F1B (Narayanan et al., SC'21, section 2.2)."""
    stages = _in_turns(num_stages, num_microbatches, lambda stage: num_stages - stage - 1)
    return Schedule("1f1b", num_microbatches, 1, stages)


def envpipe(num_stages: int, num_microbatches: int, extra_forwards: Sequence[int]) -> Schedule:
    """Return 1F1B with extra warm-up forwards on each stage (Choi et al., ATC'23, section 4.2).

    The last stage has none in EnvPipe, since its units are all on the envelope. No stage can have
    more than there are microbatches for.
    """
    stages = _in_turns(
        num_stages, num_microbatches, lambda stage: num_stages - stage - 1 + extra_forwards[stage]
    )
    return Schedule("envpipe", num_microbatches, 1, stages)


def interleaved(
    num_stages: int,
    num_microbatches: int,
    num_chunks: int,
    group_size: int | None = None,
    *,
    combined: bool = False,
    extra_warmup: Sequence[int] = (),
) -> Schedule:
    """Return Megatron's virtual pipeline order (Narayanan et al., SC'21, section 2.2).

    `group_size` microbatches pass a chunk before the next chunk's turn (Megatron's
    `microbatch_group_size_per_vp_stage`; the number of stages by default), fewer in the last group.
    Stage s warms up with `2 (p - s - 1) + (V - 1) group_size` forwards, or with all there are;
    overlapped communication between stages changes none of it. With `combined`, as Megatron does
    to overlap the communication of experts, each stage warms up with one more, and each forward
    that it then runs in turn with a backward is combined with it. `extra_warmup` lists for each
    stage the forwards of a chunk that it warms up with beyond Megatron's.

    Megatron wants groups, the last one too, no smaller than the pipeline. ScheduleError for less
    than that only where stages would wait in circles, and for one chunk, which is no virtual stage.
    """
    if num_chunks < 2:
        raise ScheduleError(
            "The interleaved schedule needs at least two chunks a stage",
            value=num_chunks,
            remedy="Use 1f1b for one chunk.",
        )
    if group_size is None:
        group_size = num_stages
    least = (num_chunks - 1) * min(group_size, num_microbatches) + combined
    extra = extra_warmup or (0,) * num_stages
    stages = _in_turns(
        num_stages,
        num_microbatches,
        lambda stage: 2 * (num_stages - stage - 1) + least + extra[stage],
        num_chunks,
        group_size,
        combined=combined,
    )
    name = "interleaved-combined" if combined else "interleaved"
    try:
        return Schedule(name, num_microbatches, num_chunks, stages)
    except ScheduleError as error:
        raise ScheduleError(
            f"The interleaved schedule over {num_stages} stages, in groups of "
            f"{group_size}, would deadlock with this number of microbatches",
            value=num_microbatches,
            remedy="Leave no group smaller than the pipeline: change the number of microbatches "
            f"(global batch size) or the groups' size. {error}",
        ) from error


def framework_order(
    num_stages: int, num_microbatches: int, num_chunks: int = 1, group_size: int | None = None
) -> Schedule:
    """Return Megatron's own order: 1F1B, or interleaved where stages have chunks."""
    if num_chunks == 1:
        return one_f_one_b(num_stages, num_microbatches)
    return interleaved(num_stages, num_microbatches, num_chunks, group_size)


def framework_schedule(schedule: Schedule, group_size: int | None = None) -> Schedule:
    """Return the order that Megatron itself would run for the same job.

    With chunks in groups of `group_size` microbatches, by default of the pipeline's length unless
    the schedule is Megatron's own in others; the schedule itself where that cannot run, and of
    whole iterations.
    """
    job = schedule.num_stages, schedule.num_microbatches
    if schedule.forward_only:
        return schedule
    if schedule.num_chunks == 1:
        return one_f_one_b(*job)
    if group_size is None:
        own = _in_chunks(schedule, max(job[0], int((schedule.chunks[0] > 0).argmax())))
        if own is not None and own.stages == schedule.stages:
            return own
    return _in_chunks(schedule, group_size or job[0]) or schedule


def _in_chunks(schedule: Schedule, group_size: int) -> Schedule | None:
    """Return Megatron's order of a job with chunks, combined as this one; None: it cannot run."""
    job = schedule.num_stages, schedule.num_microbatches, schedule.num_chunks, group_size
    combined = bool((schedule.combined & ~schedule.is_backward).any())
    with suppress(ScheduleError):
        return interleaved(*job, combined=combined)
    return None


def breadth_first(num_stages: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """Return all forwards, chunk by chunk, then all backwards (Lamy-Poirier, MLSys'23, section 4).

    Each chunk's weights are used by all microbatches in turn, for all of whose activations a stage
    must have room.
    """
    all_forwards = num_microbatches * num_chunks
    stages = _in_turns(num_stages, num_microbatches, lambda stage: all_forwards, num_chunks)
    return Schedule("breadth-first", num_microbatches, num_chunks, stages)


def whole_iteration(num_stages: int) -> Schedule:
    """Return one unit a stage, the whole iteration: of a job whose units the host does not see.

    So it is where CUDA graphs hold whole iterations. The unit is written as a forward.
    """
    check_job(num_stages, 1)
    order = (unit(Kind.FORWARD, 0),)
    return Schedule("whole-iteration", 1, 1, (order,) * num_stages, Placement.APART)


def envpipe_extra_forwards(
    backward_time_s: Sequence[float], forward_time_s: Sequence[float], caps: Sequence[int]
) -> list[int]:
    """Return EnvPipe's number of extra forwards for each stage, from times and limits of each.

    Enough forwards at the optimal frequency to fill the wait for the first gradient, which is one
    backward at the maximum clock for each stage behind (Choi et al., ATC'23, section 4.2, and the
    authors' code for the caps).
    """
    extra: list[int] = []
    ahead = caps[0]
    for stage, cap in enumerate(caps):
        behind = len(caps) - stage - 1
        wanted = math.floor(backward_time_s[stage] * behind / forward_time_s[stage] + 1e-9)
        extra.append(min(wanted, cap, ahead))
        # This stage must keep ahead of the next, unless only memory or the batch holds it back;
        # and even then that one cannot warm up with more forwards than this one has sent.
        ahead = extra[-1] + (extra[-1] == cap)
    return extra


def check_job(num_stages: int, num_microbatches: int, num_chunks: int = 1) -> None:
    """Refuse (ScheduleError) a job without stages or microbatches, or one that is too large."""
    for what, count in (("stage", num_stages), ("microbatch", num_microbatches)):
        if count < 1:
            raise ScheduleError(
                f"A job needs at least one {what}",
                value=count,
                remedy="Give a positive number.",
            )
    check_size(num_stages, num_microbatches, num_chunks)  # before its units are made


def check_size(num_stages: int, num_microbatches: int, num_chunks: int) -> None:
    """Refuse (ScheduleError) a pipeline of more units than can be planned."""
    units = 2 * num_stages * num_microbatches * num_chunks
    if units > MAX_UNITS:
        chunks = f" x {num_chunks} chunks" if num_chunks > 1 else ""
        raise ScheduleError(
            f"{num_stages} stages{chunks} x {num_microbatches} microbatches are {units:,} units, "
            f"and at most {MAX_UNITS:,} are planned: these would take "
            f"{units * _UNIT_BYTES / 1e9:.3g} GB and {units * _UNIT_S / 60:.3g} minutes or more",
            remedy="Give the microbatches of one iteration on one replica.",
        )


def _in_groups(num_microbatches: int, num_chunks: int, group_size: int) -> list[tuple[int, int]]:
    """List microbatch and chunk of each forward: a group passes all chunks, then comes the next."""
    if group_size < 1:
        raise ScheduleError(
            "A group needs at least one microbatch",
            value=group_size,
            remedy="Leave it out for as many as there are stages.",
        )
    return [
        (microbatch, chunk)
        for first in range(0, num_microbatches, group_size)
        for chunk in range(num_chunks)
        for microbatch in range(first, min(first + group_size, num_microbatches))
    ]


def _in_turns(
    num_stages: int,
    num_microbatches: int,
    warmup: Callable[[int], int],
    num_chunks: int = 1,
    group_size: int | None = None,
    *,
    combined: bool = False,
) -> tuple[tuple[Unit, ...], ...]:
    """Return each stage's `warmup` forwards, then one and a backward in turn, then what is left.

    `group_size` microbatches pass a chunk before the next chunk's turn; None: all of them. With
    `combined`, a forward that is in turn with a backward runs as one with it. ScheduleError: as of
    `check_job`, or an empty group.
    """
    check_job(num_stages, num_microbatches, num_chunks)
    virtual = _in_groups(
        num_microbatches, num_chunks, num_microbatches if group_size is None else group_size
    )
    forwards = [unit(Kind.FORWARD, m, c) for m, c in virtual]
    in_turn = [unit(Kind.FORWARD, m, c, combined) for m, c in virtual]
    backwards = [unit(Kind.BACKWARD, m, num_chunks - 1 - c) for m, c in virtual]
    stages = []
    for stage in range(num_stages):
        first = min(warmup(stage), len(forwards))
        steady = chain.from_iterable(zip(in_turn[first:], backwards, strict=False))
        stages.append((*forwards[:first], *steady, *backwards[len(forwards) - first :]))
    return tuple(stages)


def zero_bubble(
    num_stages: int, num_microbatches: int, max_in_flight: int | None = None
) -> Schedule:
    """Return ZB-H1, or with more memory up to ZB-H2 (Qi et al., ICLR'24, sections 2.1 and 2.2).

    Stage s warms up with 1F1B's `p - s` forwards, and up to `p - s - 1` more as memory allows. Then
    input gradients and forwards take turns, and each weight gradient comes as much later than its
    input gradient as memory allows. `max_in_flight` microbatches are held by every stage at most:
    p by default, which stage 0 of 1F1B holds (ZB-H1); `2 p - 1` is ZB-H2, and more buys nothing.
    ScheduleError: less than p, and than there are.
    """
    most, least = max_in_flight or num_stages, min(num_stages, num_microbatches)
    if most < least:
        raise ScheduleError(
            "Zero-bubble orders hold as many microbatches as there are stages, or more",
            value=most,
            remedy=f"Allow {least} in flight.",
        )
    most = min(max(most, num_stages), 2 * num_stages - 1)
    behind = range(num_stages)[::-1]
    # Of each stage, with the forward that comes in turn with the first backward.
    warmups = [1 + each + min(each, most - num_stages) for each in behind]
    whole = _in_turns(num_stages, num_microbatches, lambda stage: warmups[stage] - 1)
    stages = (
        tuple(_split(order, most - warmup)) for order, warmup in zip(whole, warmups, strict=True)
    )
    name = "zb-h1" if most == num_stages else "zb-h2"
    return Schedule(name, num_microbatches, 1, tuple(stages))


def zero_bubble_v(
    num_stages: int, num_microbatches: int, max_in_flight: int | None = None
) -> Schedule:
    """Return two chunks a stage that lie in a V, with split backwards: ZB-V.

    (Qi et al., ICLR'24, section 6; with less memory as V-Half and V-Min of Qi et al., NeurIPS'24.)
    The first stage holds the model's first layers and its last, so all stages hold equally much.
    The order is the shortest that the list scheduler finds for units that all take as long, where
    stages end as they begin, each one unit before the next: so iterations can follow without a gap.
    `max_in_flight` counts microbatches of one chunk: 2 p by default, which is what 1F1B's first
    stage holds. ScheduleError: less than 2.
    """
    check_job(num_stages, num_microbatches, 2)
    most = 2 * num_stages if max_in_flight is None else max_in_flight
    job = OrderJob(
        dict.fromkeys(SPLIT, np.ones((num_stages, 2, num_microbatches))),
        placement=Placement.V,
        limits=[most] * num_stages,
        tail_s=range(num_stages)[::-1],
    )
    return shortest(job, "zb-v")


def split_in_place(schedule: Schedule, last: int) -> Schedule:
    """Return an order whose `last` backwards of each stage are in two parts, one after the other.

    The stage before gets their gradients earlier; no more activations are held. For the last ones,
    on the way out of the pipeline, that is nearly all that splitting gains, and it is paid for on a
    few units only.
    """
    most = schedule.num_microbatches * schedule.num_chunks
    return _with_split(schedule, "split", lambda own, seen: seen < most - last)


def split_from(schedule: Schedule, microbatch: int, of_stage: int | None = None) -> Schedule:
    """Return a split order in which the backwards of the microbatches before one are whole.

    On all stages, or on one.
    """
    stages: list[list[Unit]] = [[] for _ in schedule.stages]
    for stage, order in enumerate(schedule.stages):
        units, first = stages[stage], microbatch if of_stage in (None, stage) else 0
        for own in order:
            if own.kind is Kind.FORWARD or own.microbatch >= first:
                units.append(own)
            elif own.kind is Kind.INPUT_GRADIENT:
                units.append(unit(own.kind, own.microbatch, own.chunk, combined=True))
                units.append(unit(Kind.WEIGHT_GRADIENT, own.microbatch, own.chunk))
    return replace(schedule, stages=tuple(map(tuple, stages)))


def half_split(schedule: Schedule) -> Schedule:
    """Return an order with every other microbatch's backwards in two parts, one after the other.

    So whole backwards and both parts are measured in the same iterations and the same memory. Were
    the last half split, parts would be seen on the way out of the pipeline and whole ones before,
    where waits, and so heat, are others. Of two microbatches or more, each chunk of each stage has
    both, in whichever order backwards come.
    """
    return _with_split(schedule, "split", lambda own, seen: own.microbatch % 2 == 0)


def split_late(schedule: Schedule) -> Schedule:
    """Return an order as unlike its whole backwards as may be, to test whether a bit changes.

    Each second part waits for the first one of the backward that follows, so a microbatch more is
    held. Of more than two backwards, the middle one stays whole. Gradients keep their sequence.
    """
    most = schedule.num_microbatches * schedule.num_chunks
    return _with_split(schedule, "late", lambda own, seen: most > 2 and seen == most // 2, lag=1)


def _with_split(
    schedule: Schedule, how: str, whole: Callable[[Unit, int], bool], lag: int = 0
) -> Schedule:
    """Split the backwards in two parts, but those for which `whole` (of unit and number) holds.

    `lag` second parts wait while first parts of backwards that follow run.
    """
    stages = (tuple(_split(order, lag, whole)) for order in schedule.stages)
    return replace(schedule, name=f"{schedule.name}-{how}", stages=tuple(stages))


def _split(
    order: Sequence[Unit], lag: int, whole: Callable[[Unit, int], bool] = lambda own, seen: False
) -> Iterator[Unit]:
    waiting: deque[Unit] = deque()
    seen = 0
    for own in order:
        if own.kind is Kind.FORWARD:
            yield own
            continue
        as_one = whole(own, seen)
        seen += 1
        while as_one and waiting:
            yield waiting.popleft()
        yield unit(Kind.INPUT_GRADIENT, own.microbatch, own.chunk, as_one)
        waiting.append(unit(Kind.WEIGHT_GRADIENT, own.microbatch, own.chunk))
        if as_one or len(waiting) > lag:
            yield waiting.popleft()
    yield from waiting
