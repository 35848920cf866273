"""A stage's peak memory: measured in the framework's own order, predicted for any other.

A stage's memory at its peak is what it holds in any order (weights, gradients, optimizer
state, what one unit needs while it runs) and the activations of the microbatches in flight. The
framework's own order is measured: what one more microbatch in flight adds, the peak, and what the
device could still give beside it. Another order then has the peak

    measured peak + (most that its microbatches in flight hold - most that they held then),

since a peak comes while those in flight hold most, and a backward runs. Chunks of a stage may hold
unequally much: layers are laid out unevenly, and one of them may have the loss. Where backwards are
split, what waits for the weight gradient counts, too, and so does what each kind of unit needs
while it runs: both are measured in the framework's own order with some of its backwards split in
place.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from envpipe_megatron.core.kinds import Kind, Unit
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.core.timeline import RELATIVE_TOLERANCE
from envpipe_megatron.errors import plain
from envpipe_megatron.runtime.channel.carrier import StageSpecs
from envpipe_megatron.runtime.channel.collectives import (
    Collectives,
    DegradedError,
    in_words,
    on_every_rank,
)
from envpipe_megatron.runtime.memory.stage import (
    PREDICTION_ERROR,
    SAFETY_MARGIN,
    WHOLE_KINDS,
    CudaMemory,
    Reading,
    StageMemory,
    bytes_by_chunk,
    needed_by_kind,
    peaks_bytes,
)

logger = logging.getLogger(__name__)

_GIB = 2**30


class MemoryFullError(DegradedError):
    """An order that needs more memory than there is, on all ranks alike: another one goes on."""


class JobMemory:
    """Watches one rank's memory, and knows that of all stages once it was measured.

    All ranks of the job call `learn`, `predict` and `compare` at the same iterations. `source` is
    None if there is no device's memory to be watched; `say` prints what was found.
    """

    def __init__(
        self,
        source: CudaMemory | None,
        collectives: Collectives,
        say: Callable[[str], None],
    ) -> None:
        self._source, self._collectives, self._say = source, collectives, say
        self._stage = collectives.stage
        #: [num_chunks] what a weight gradient that waits is taken to hold until it is measured;
        #: None if that is no more than a microbatch in flight.
        self.waiting_bytes: tuple[float, ...] | None = None
        #: One for each stage; None until `learn`, or if memory is not known on every rank.
        self.stages: tuple[StageMemory, ...] | None = None
        #: The framework's own order, which was measured.
        self._own_order: Schedule | None = None
        #: This rank's units of the last iteration that was watched.
        self._units: list[Unit] = []
        #: Before the first of these units, and after each.
        self._readings: list[Reading] = []
        self._unusable_bytes = 0

    @property
    def peak_bytes(self) -> int:
        """Return the peak of this rank's units in the last iteration that was watched."""
        return max(reading.peak_bytes for reading in self._readings)

    def watch(self) -> Callable[[Unit], None] | None:
        """Watch the units of an iteration that begins; return what to call as each of them ends.

        None where there is no memory to watch. What the optimizer takes is not theirs.
        """
        if self._source is None:
            return None
        self._source.reset_peak()
        self._units, self._readings = [], [self._source.read()]
        return self._unit_ended

    def learn(self, schedule: Schedule, specs: StageSpecs, ran: Schedule | None = None) -> None:
        """Take in the last iteration that was watched, of the framework's own schedule.

        A stage keeps its input or what it made of it, so no microbatch holds less than a message of
        `specs`. Or the iteration was of `ran`, that schedule with some backwards of each chunk
        split in place, but not the first: it also tells what waits for weight gradients. What was
        known before is forgotten, but where that fails.
        """
        own, self._own_order = None, schedule
        try:
            own = self._own(schedule, specs, ran)
        except Exception as error:
            logger.error("This rank's memory is not known: %s", in_words(error))
        found = self._collectives.by_stage(own, _least_room)
        stages = tuple(stage for stage in found if stage is not None)
        if len(stages) < len(found):
            self.stages = None if ran is None else self.stages
            return
        self.stages = stages
        waits = [max(stage.pending_bytes) for stage in stages if stage.pending_bytes]
        pending = f", a pending weight gradient {_gib(waits)}" if waits else ""
        self._say(
            f"memory (GiB): peak {_gib(s.baseline_peak_bytes for s in stages)}, a microbatch in "
            f"flight {_gib(s.activation_bytes for s in stages)}{pending}, room for more "
            f"{_gib(s.room_bytes for s in stages)} beside {SAFETY_MARGIN:.0%} kept free"
        )

    def predict(self, schedule: Schedule) -> None:
        """Say what an order that is about to run will hold, and have it ready.

        Ready before the order's first message: an allocator that finds no memory gives back what it
        caches, which waits for all that the device does. With receives of NCCL it would wait for a
        sender that may be waiting for this stage, and both would hang when an error is due.

        Raises MemoryFullError if there is too little (what ran before goes on), DegradedError if
        the prediction failed (nothing is known from here on), both on all ranks alike.
        """
        source, stages, own = self._source, self.stages, self._own_order
        if stages is None or source is None or own is None:  # on every rank alike
            return
        peaks = schedule.peak_in_flight
        allowed = [stage.baseline_peak_bytes + stage.room_bytes for stage in stages]
        predicted: list[float] = []

        def reserve() -> bool:
            predicted.extend(peaks_bytes(stages, schedule, own))
            self._say(f"memory: in flight {plain(peaks)}, predicted peak {_gib(predicted)} GiB")
            if predicted[self._stage] > (1 + RELATIVE_TOLERANCE) * allowed[self._stage]:
                return False
            return source.reserve(math.ceil(predicted[self._stage]) + self._unusable_bytes)

        self.stages = None  # unless it is known
        ready = on_every_rank(self._collectives, reserve)
        full = [n for n, holds in enumerate(self._collectives.by_stage(ready, all)) if not holds]
        if full:  # no later plan is to hold as many
            self.stages = tuple(
                stage.with_room_below(predicted[n]) if n in full else stage
                for n, stage in enumerate(stages)
            )
            raise MemoryFullError(
                f"Stages {plain(full)} have no memory for the microbatches in flight of this "
                f"order, {_gib(predicted)} GiB at its peak, where {_gib(allowed)} GiB may be used",
                value=list(peaks),
                remedy="Let fewer be in flight, or leave their number to what memory allows.",
            )
        self.stages = tuple(
            replace(stage, in_flight=peak, predicted_peak_bytes=bytes_, measured_peak_bytes=None)
            for stage, peak, bytes_ in zip(stages, peaks, predicted, strict=True)
        )

    def compare(self) -> None:
        """Hold the prediction, if there is one, against the last iteration that was watched.

        There is none where the framework's own order runs on though too little memory was free.
        """
        if self.stages is None or self.stages[0].predicted_peak_bytes is None:
            return
        measured = self._collectives.by_stage(self.peak_bytes, max)
        self.stages = tuple(
            replace(stage, measured_peak_bytes=peak)
            for stage, peak in zip(self.stages, measured, strict=True)
        )
        pairs = zip(measured, (stage.predicted_peak_bytes for stage in self.stages), strict=True)
        errors = [peak / (predicted or math.nan) - 1 for peak, predicted in pairs]
        shown = ", ".join(f"{error:+.1%}" for error in errors)
        text = f"memory: measured peak {_gib(measured)} GiB, {shown} from the prediction"
        self._say(text)
        if max(errors) > PREDICTION_ERROR and self._collectives.is_planner:
            logger.warning("%s", text)

    def _own(
        self, schedule: Schedule, specs: StageSpecs, ran: Schedule | None
    ) -> StageMemory | None:
        if self._source is None or len(self._units) != (ran or schedule).units_per_stage:
            return None
        allocated = [reading.allocated_bytes for reading in self._readings]
        self._unusable_bytes = self._readings[int(np.argmax(allocated))].unusable_bytes
        peak, needed = self.peak_bytes, None
        if ran is not None:  # whole backwards of it run where most is held, as in the schedule
            kinds, chunks = ran.priced_kinds[self._stage], ran.chunks[self._stage]
            peaks = np.array([reading.peak_bytes for reading in self._readings[1:]])
            before, after = np.array(allocated[:-1]), np.array(allocated[1:])
            # The gradient that comes for the first of two units that run as one is the whole's.
            first = np.flatnonzero(kinds == [*Kind].index(Kind.NOTHING))
            before[first + 1] = before[first]
            peak = int(peaks[np.isin(kinds, WHOLE_KINDS)].max())
            needed = needed_by_kind(kinds, chunks, peaks - np.maximum(before, after))
        capacity = (1 - SAFETY_MARGIN) * self._source.capacity_bytes()
        # The first stage's input is assumed to be like what it sends.
        least = (specs.receives.get(Kind.FORWARD) or specs.sends[Kind.FORWARD]).num_bytes
        inputs = [float(least)] * schedule.num_chunks
        if self._stage == 0:
            inputs[0] = 0.0  # data, not a message
        one, pending = bytes_by_chunk(self._units, allocated, inputs)
        by_chunk = tuple(max(each, least) for each in one)
        if pending is None and self.waiting_bytes:
            pending = tuple(map(max, by_chunk, self.waiting_bytes))
        return StageMemory(
            schedule.peak_in_flight[self._stage],
            peak,
            max(0.0, capacity - peak - self._unusable_bytes),
            by_chunk,
            pending,
            needed,
        )

    def _unit_ended(self, unit: Unit) -> None:
        assert self._source is not None
        self._units.append(unit)
        self._readings.append(self._source.read())
        self._source.reset_peak()


def _least_room(replicas: Sequence[StageMemory | None]) -> StageMemory | None:
    """Return the most memory of a stage's replicas, and the least room; None if not all know."""
    known = [own for own in replicas if own is not None]
    if len(known) < len(replicas):
        return None
    pending = [own.pending_bytes for own in known if own.pending_bytes is not None]
    needed = [own.unit_bytes for own in known if own.unit_bytes is not None]
    return StageMemory(
        known[0].baseline_in_flight,
        max(own.baseline_peak_bytes for own in known),
        min(own.room_bytes for own in known),
        tuple(map(max, zip(*(own.chunk_bytes for own in known), strict=True))),
        tuple(map(max, zip(*pending, strict=True))) or None,
        tuple(tuple(map(max, zip(*of, strict=True))) for of in zip(*needed, strict=True)) or None,
    )


def _gib(values: Iterable[float]) -> str:
    return "[" + ", ".join(f"{value / _GIB:.2f}" for value in values) + "]"
