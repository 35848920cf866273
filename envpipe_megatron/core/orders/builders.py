"""Builders of schedules: GPipe, 1F1B, Megatron's interleaved order, breadth-first, EnvPipe's.

Fewer microbatches than stages is a valid job for all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import chain

from envpipe_megatron.core.kinds import Kind, ScheduleError, Unit, unit
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
    check_job(num_stages, num_microbatches)
    return _from_warmups("gpipe", [num_microbatches] * num_stages, num_microbatches)


def one_f_one_b(num_stages: int, num_microbatches: int) -> Schedule:
    """Return Megatron's non-interleaved 1F1B (Narayanan et al., SC'21, section 2.2)."""
    check_job(num_stages, num_microbatches)
    return _from_warmups("1f1b", reversed(range(num_stages)), num_microbatches)


def envpipe(num_stages: int, num_microbatches: int, extra_forwards: Sequence[int]) -> Schedule:
    """Return 1F1B with extra warm-up forwards on each stage (Choi et al., ATC'23, section 4.2).

    The last stage has none in EnvPipe, since its units are all on the envelope. No stage can have
    more than there are microbatches for.
    """
    check_job(num_stages, num_microbatches)
    warmups = [num_stages - stage - 1 + extra for stage, extra in enumerate(extra_forwards)]
    return _from_warmups("envpipe", warmups, num_microbatches)


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
    check_job(num_stages, num_microbatches, num_chunks)
    if num_chunks < 2:
        raise ScheduleError(
            "The interleaved schedule needs at least two chunks a stage",
            value=num_chunks,
            remedy="Use 1f1b for one chunk.",
        )
    if group_size is None:
        group_size = num_stages
    virtual = in_groups(num_microbatches, num_chunks, group_size)
    forwards = [unit(Kind.FORWARD, m, c) for m, c in virtual]
    in_turn = [unit(Kind.FORWARD, m, c, combined) for m, c in virtual]
    backwards = [unit(Kind.BACKWARD, m, num_chunks - 1 - c) for m, c in virtual]
    least = (num_chunks - 1) * min(group_size, num_microbatches) + combined
    extra = extra_warmup or (0,) * num_stages
    warmups = [2 * (num_stages - stage - 1) + least + extra[stage] for stage in range(num_stages)]
    stages = tuple(
        _one_f_one_b_order([*forwards[:warmup], *in_turn[warmup:]], backwards, warmup)
        for warmup in warmups
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
    the schedule is Megatron's own in others; where that cannot run, the schedule itself.
    """
    job = schedule.num_stages, schedule.num_microbatches
    if schedule.num_chunks == 1:
        return (forward_only if schedule.forward_only else one_f_one_b)(*job)
    if group_size is None:
        own = _in_chunks(schedule, max(job[0], int((schedule.chunks[0] > 0).argmax())))
        if own is not None and own.stages == schedule.stages:
            return own
    return _in_chunks(schedule, group_size or job[0]) or schedule


def _in_chunks(schedule: Schedule, group_size: int) -> Schedule | None:
    """Return Megatron's order of a job with chunks, combined as this one; None: it cannot run."""
    job = schedule.num_stages, schedule.num_microbatches, schedule.num_chunks, group_size
    if schedule.forward_only:
        return forward_only(*job)
    combined = bool((schedule.combined & ~schedule.is_backward).any())
    with suppress(ScheduleError):
        return interleaved(*job, combined=combined)
    return None


def breadth_first(num_stages: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """Return all forwards, chunk by chunk, then all backwards (Lamy-Poirier, MLSys'23, section 4).

    Each chunk's weights are used by all microbatches in turn, for all of whose activations a stage
    must have room.
    """
    check_job(num_stages, num_microbatches, num_chunks)
    virtual = in_groups(num_microbatches, num_chunks, num_microbatches)
    forwards = [unit(Kind.FORWARD, m, c) for m, c in virtual]
    backwards = [unit(Kind.BACKWARD, m, num_chunks - 1 - c) for m, c in virtual]
    order = (*forwards, *backwards)
    return Schedule("breadth-first", num_microbatches, num_chunks, (order,) * num_stages)


def forward_only(
    num_stages: int, num_microbatches: int, num_chunks: int = 1, group_size: int | None = None
) -> Schedule:
    """Return forwards only, as in evaluation; with chunks in groups as `interleaved` has them."""
    check_job(num_stages, num_microbatches, num_chunks)
    virtual = in_groups(
        num_microbatches, num_chunks, num_stages if group_size is None else group_size
    )
    order = tuple(unit(Kind.FORWARD, m, c) for m, c in virtual)
    return Schedule("forward-only", num_microbatches, num_chunks, (order,) * num_stages)


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


def in_groups(num_microbatches: int, num_chunks: int, group_size: int) -> list[tuple[int, int]]:
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


def _from_warmups(name: str, warmups: Iterable[int], num_microbatches: int) -> Schedule:
    forwards = [unit(Kind.FORWARD, m) for m in range(num_microbatches)]
    backwards = [unit(Kind.BACKWARD, m) for m in range(num_microbatches)]
    stages = tuple(_one_f_one_b_order(forwards, backwards, warmup) for warmup in warmups)
    return Schedule(name, num_microbatches, 1, stages)


def _one_f_one_b_order(
    forwards: Sequence[Unit], backwards: Sequence[Unit], warmup: int
) -> tuple[Unit, ...]:
    """Return `warmup` forwards, then forwards and backwards in turn, then the backwards left."""
    warmup = min(warmup, len(forwards))
    steady = chain.from_iterable(zip(forwards[warmup:], backwards, strict=False))
    return (*forwards[:warmup], *steady, *backwards[len(forwards) - warmup :])
