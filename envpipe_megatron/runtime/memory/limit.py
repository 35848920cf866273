"""From bytes to microbatches: what memory lets a job's plan hold in flight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from envpipe_megatron.core.profile import Profile
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.core.sidecar import Sidecar, read_sidecar, sidecar_path
from envpipe_megatron.policies.problem import in_flight_by_memory
from envpipe_megatron.policies.request import BY_MEMORY, PlanRequest
from envpipe_megatron.runtime.memory.device import CudaMemory
from envpipe_megatron.runtime.memory.peak import MemoryUnknownError, StageMemory


def check_memory_is_known(
    request: PlanRequest, profile_file: Path | None, memory: CudaMemory | None
) -> None:
    """Raise MemoryUnknownError, before training, if a limit is set but memory cannot be measured.

    `profile_file` is a given profile, on a rank that reads it; `memory` what this rank can measure.
    """
    if request.max_in_flight != BY_MEMORY or memory is not None:
        return
    beside = None if profile_file is None else sidecar_path(profile_file)
    if beside is not None and beside.exists() and knows_memory(read_sidecar(beside)):
        return
    raise MemoryUnknownError(
        "The microbatches in flight cannot be limited by memory, for no CUDA device's is measured",
        value=BY_MEMORY,
        remedy="Give the limit as a number of microbatches, or a profile file whose sidecar has "
        "activation_bytes and free_bytes.",
    )


def knows_memory(sidecar: Sidecar) -> bool:
    """Whether a profile says how many microbatches fit."""
    return sidecar.activation_bytes is not None and sidecar.free_bytes is not None


def with_memory(profile: Profile, stages: Sequence[StageMemory] | None) -> Profile:
    """The profile whose sidecar says what was measured, if anything was."""
    if stages is None:
        return profile
    sidecar = replace(
        profile.sidecar,
        activation_bytes=tuple(stage.activation_bytes for stage in stages),
        free_bytes=tuple(stage.free_bytes for stage in stages),
    )
    return replace(profile, sidecar=sidecar)


def in_flight_limit(
    asked: float | tuple[float, ...] | str | None,
    own: Schedule,
    profile: Profile,
    stages: Sequence[StageMemory] | None,
) -> tuple[float, ...] | None:
    """For each stage, the most microbatches in flight that memory allows a job's plan.

    Nothing is planned beyond what was measured, whatever a file says; the profile's sidecar counts
    where a limit by memory is `asked` for. The framework's own order is allowed in any case: it
    runs. None if memory sets no limit: the user gives a number, or nothing is known of it.
    """
    if asked not in (None, BY_MEMORY):
        return None
    profile = profile.for_chunks(own.num_chunks)
    known = [with_memory(profile, stages)] if stages is not None else []
    if asked == BY_MEMORY and (not known or knows_memory(profile.sidecar)):
        known.append(profile)
    if not known:
        return None
    counts = [in_flight_by_memory(each, own.num_microbatches) for each in known]
    fits = (min(of_stage) / own.num_chunks for of_stage in zip(*counts, strict=True))
    return tuple(map(max, own.microbatches_in_flight, fits))
