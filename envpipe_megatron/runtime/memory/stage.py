"""A stage's memory: as its allocator counts it, what orders need of it, how many microbatches fit.

`JobMemory` measures and predicts (`peak`).
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from envpipe_megatron.core.arrays import FloatArray, IntArray
from envpipe_megatron.core.kinds import TRAITS, WHOLE, Kind, Unit
from envpipe_megatron.core.profile import Profile
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.core.sidecar import Sidecar
from envpipe_megatron.policies.problem import in_flight_by_memory
from envpipe_megatron.policies.request import BY_MEMORY

logger = logging.getLogger(__name__)

#: Places of whole units in `Kind`.
WHOLE_KINDS = [*map([*Kind].index, WHOLE)]
#: A prediction that is missed by more than this share is worth a warning.
PREDICTION_ERROR = 0.05
#: Share of the memory that a process could have which no extra forward is given. It covers a
#: prediction that is as wrong as it may be, and what comes into being later outside of torch's
#: allocator: communicators, workspaces, kernels that are loaded lazily, slots for messages; and the
#: messages that an order keeps, of planned orders three at most.
SAFETY_MARGIN = PREDICTION_ERROR


@dataclass(frozen=True)
class Reading:
    """One look at an allocator: what live tensors take, and the most that they took since a reset.

    What is neither live nor available are holes between live blocks, and freed blocks that another
    stream still uses.
    """

    allocated_bytes: int
    peak_bytes: int
    unusable_bytes: int = 0


class CudaMemory:
    """torch's caching allocator on the current device.

    Resetting the peak is seen by everyone who asks torch for it: `torch.cuda.max_memory_allocated`
    then counts from the last iteration that was watched.
    """

    def __init__(self) -> None:
        self._device = torch.cuda.current_device()

    def read(self) -> Reading:
        """Read by one call of the allocator; the flat `memory_stats` takes far longer."""
        stats = torch.cuda.memory.memory_stats_as_nested_dict(self._device)
        allocated = stats["allocated_bytes"]["all"]
        awaiting_streams = stats["active_bytes"]["all"]["current"] - allocated["current"]
        holes = stats["inactive_split_bytes"]["all"]["current"]
        return Reading(allocated["current"], allocated["peak"], awaiting_streams + holes)

    def reset_peak(self) -> None:
        """Call `torch.cuda.reset_peak_memory_stats`."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def capacity_bytes(self) -> int:
        """Return what the driver has free and what the allocator has reserved.

        Segments without a live block are given back before an allocation fails, so they count.
        """
        free, _ = torch.cuda.mem_get_info(self._device)
        return free + torch.cuda.memory_reserved(self._device)

    def reserve(self, count: int) -> bool:
        """Let the allocator take from the driver what it lacks, and keep it.

        What it holds already is asked for first, if it has pieces of that size.
        """
        pieces = []
        try:
            while (lacking := count - torch.cuda.memory_reserved(self._device)) > 0:
                pieces.append(torch.empty(lacking, dtype=torch.uint8, device=self._device))
        except torch.OutOfMemoryError:
            return False
        return True


def device_memory() -> CudaMemory | None:
    """Return this device's memory; None without a CUDA device in use, or without counters."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's
        return None
    memory = CudaMemory()
    try:
        memory.read()
    except Exception as error:  # an allocator of somebody else's need not count
        logger.warning("The memory of this rank's device is not known: %s", error)
        return None
    return memory


@dataclass(frozen=True)
class StageMemory:
    """A stage's memory; of replicas, that of the one with the least room.

    Attributes:
        baseline_in_flight: microbatches in flight at the peak of the framework's own order.
        baseline_peak_bytes: the most that is allocated while that order's units run.
        room_bytes: what the device could give beyond that peak, less `SAFETY_MARGIN`; 0 if nothing.
        chunk_bytes: what one more microbatch in flight holds in each chunk.
        pending_bytes: what is held in each chunk from the first part of a backward to its second;
            None until it is measured.
        unit_bytes: by the place of a kind and by chunk, what a unit needs while it runs, beyond
            what is held before or after it; None until parts of backwards are measured.
        in_flight: at the peak of the order that is run, whose peak was to be
            `predicted_peak_bytes`, and is `measured_peak_bytes`.
    """

    baseline_in_flight: int
    baseline_peak_bytes: int
    room_bytes: float
    chunk_bytes: tuple[float, ...]
    pending_bytes: tuple[float, ...] | None = None
    unit_bytes: tuple[tuple[float, ...], ...] | None = None
    in_flight: int | None = None
    predicted_peak_bytes: float | None = None
    measured_peak_bytes: int | None = None

    @property
    def activation_bytes(self) -> float:
        """Return what one more microbatch in flight holds, of the chunk that holds most."""
        return max(self.chunk_bytes)

    @property
    def free_bytes(self) -> float:
        """Return the bytes free beside one microbatch, as a profile's sidecar has it.

        The framework's own order holds more than one at the peak that the room was measured at.
        """
        return self.room_bytes + (self.baseline_in_flight - 1) * self.activation_bytes

    def with_room_below(self, peak_bytes: float) -> StageMemory:
        """Return the same with too little room for such a peak, and for one a microbatch lower."""
        below = peak_bytes - self.baseline_peak_bytes - self.activation_bytes
        return replace(self, room_bytes=max(0.0, min(self.room_bytes, below)))


def peaks_bytes(
    stages: Sequence[StageMemory], schedule: Schedule, own: Schedule
) -> tuple[float, ...]:
    """Return the most that each stage allocates while an order's units run; of its own it is known.

    Until it was measured, a weight gradient that waits is taken to hold what a microbatch does, and
    all units to need as much while they run.
    """
    one = [stage.chunk_bytes for stage in stages]
    pending = [stage.pending_bytes or stage.chunk_bytes for stage in stages]
    unknown = ((0.0,) * schedule.num_chunks,) * len(Kind)
    needed = np.array([stage.unit_bytes or unknown for stage in stages])

    def most(order: Schedule) -> FloatArray:
        held = order.held(one, pending)  # nothing at the end, so before the first unit
        stage = np.arange(order.num_stages)[:, np.newaxis]
        beyond: FloatArray = needed[stage, order.priced_kinds, order.chunks]
        peaks: FloatArray = (np.maximum(held, np.roll(held, 1, axis=1)) + beyond).max(axis=1)
        return peaks

    known = np.array([stage.baseline_peak_bytes for stage in stages])
    return tuple((known + most(schedule) - most(own)).tolist())


def needed_by_kind(
    kinds: IntArray, chunks: IntArray, beyond_bytes: IntArray
) -> tuple[tuple[float, ...], ...]:
    """Return what a unit needs, [place in `Kind`][chunk]; arguments are of each unit.

    The median passes over what happens once, as in `bytes_by_chunk`. Of a kind that no unit of a
    chunk has, it is what the chunk's most needy one takes.
    """

    def of(kind: int, chunk: int) -> float:
        here = chunks == chunk
        own = here & (kinds == kind)
        return float(np.median(beyond_bytes[own]) if own.any() else beyond_bytes[here].max())

    return tuple(tuple(of(kind, c) for c in range(1 + chunks.max())) for kind in range(len(Kind)))


def bytes_by_chunk(
    units: Sequence[Unit], allocated_bytes: Sequence[int], input_bytes: Sequence[float]
) -> tuple[tuple[float, ...], tuple[float, ...] | None]:
    """Return what a microbatch holds in each chunk, and what a weight gradient that waits does.

    The bytes before and after each unit tell. A forward adds what a microbatch holds, and its
    backward takes it away. The median passes over what happens once: the first gradients, a
    workspace. Of such medians the largest is taken: outputs that wait for their transfer make
    forwards seem to hold more than backwards give back, and they too must fit. So it is with what
    the first part of a backward leaves to its second; None if a chunk had no backward in parts.
    Which part lets a forward's input go depends on the model's precision.

    Args:
        units: in the order in which they ran.
        allocated_bytes: before the first of them, and after each.
        input_bytes: [num_chunks] what a forward's input takes. Megatron's models keep that of their
            last forward until the next: backwards of such microbatches count only in chunks without
            others, with the input added.
    """
    changes: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    of_last: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    forwarded: dict[int, int] = {}  # the last microbatch by chunk
    outlived = set[int]()  # chunks whose last input is all that is left of its microbatch
    whole, of_first = False, 0.0
    for own, change in zip(units, np.diff(allocated_bytes).astype(float), strict=True):
        kind, chunk, counted = Kind.BACKWARD if whole else own.kind, own.chunk, changes
        change += of_first
        if kind is Kind.FORWARD:
            change += input_bytes[chunk] if chunk in outlived else 0
            outlived.discard(chunk)
            forwarded[chunk] = own.microbatch
        elif forwarded.get(chunk) == own.microbatch:
            counted = of_last
            if kind is not Kind.INPUT_GRADIENT:
                change -= input_bytes[chunk]
                outlived.add(chunk)
        if not own.combined:
            counted[kind, chunk].append(change)
        whole = own.combined
        of_first = change if whole and own.kind is Kind.INPUT_GRADIENT else 0.0
    chunks = range(1 + max(own.chunk for own in units))
    forward, backward, first, second = (
        np.array([np.median(changes[kind, c] or of_last[kind, c] or math.nan) for c in chunks])
        for kind in TRAITS
    )
    held = np.fmax(forward, np.fmax(-backward, -first - second))
    pending = np.maximum(0.0, np.fmax(held + first, -second))
    return tuple(held.tolist()), None if np.isnan(pending).any() else tuple(pending.tolist())


def knows_memory(sidecar: Sidecar) -> bool:
    """True if a profile says how many microbatches fit."""
    return sidecar.activation_bytes is not None and sidecar.free_bytes is not None


def with_memory(profile: Profile, stages: Sequence[StageMemory] | None) -> Profile:
    """Return the profile whose sidecar says what was measured, if anything was.

    What waits for weight gradients may be a bound: what an earlier start measured is kept.
    """
    if stages is None:
        return profile
    sidecar = replace(
        profile.sidecar,
        activation_bytes=tuple(stage.activation_bytes for stage in stages),
        free_bytes=tuple(stage.free_bytes for stage in stages),
    )
    pending = tuple(max(stage.pending_bytes) for stage in stages if stage.pending_bytes)
    is_bound = sidecar.pending_bytes is not None and any(s.unit_bytes is None for s in stages)
    if pending and not is_bound:
        sidecar = replace(sidecar, pending_bytes=pending)
    return replace(profile, sidecar=sidecar)


def in_flight_limit(
    asked: float | tuple[float, ...] | str | None,
    own: Schedule,
    profile: Profile,
    stages: Sequence[StageMemory] | None,
) -> tuple[float, ...] | None:
    """Return the most microbatches in flight that memory allows a plan, for each stage.

    Nothing is planned beyond what was measured, even if a file says more; the sidecar counts where
    a limit by memory is `asked` for. The framework's own order is allowed in any case: it
    runs, and where a limit is asked for of memory that is not known, no stage gets more. None if
    memory sets no limit: the user gives a number, or no limit, and nothing is known of it.
    """
    if asked not in (None, BY_MEMORY):
        return None
    profile = profile.for_chunks(own.num_chunks)
    known = [with_memory(profile, stages)] if stages is not None else []
    if asked == BY_MEMORY and knows_memory(profile.sidecar):
        known.append(profile)
    if not known:
        return own.microbatches_in_flight if asked else None
    counts = [in_flight_by_memory(each, own.num_microbatches) for each in known]
    fits = (min(of_stage) / own.num_chunks for of_stage in zip(*counts, strict=True))
    return tuple(map(max, own.microbatches_in_flight, fits))
