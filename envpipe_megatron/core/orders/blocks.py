"""Orders of two chunks in a V by repeating a building block (Qi et al., NeurIPS'24, section 3).

All stages run the units of one microbatch at fixed distances, and the next microbatch follows six
slots later, as long as a stage works for one if units are equal. Where memory is scarcest, no
simulation keeps its stages as evenly busy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import accumulate, islice, product

from envpipe_megatron.core.orders.job import (
    FORWARD,
    GRADIENT,
    HELD_TOLERANCE,
    WEIGHTS,
    OrderJob,
    Turns,
)

#: By stage its turns, each after its slot.
_Timed = list[list[tuple[int, tuple[int, int, int]]]]

#: Slots of one microbatch: forward, input gradient and weight gradient of two chunks.
_PERIOD = 6
#: Slots from a stage to the next on the way to the last one: of V-Min, and of V-Half.
_STEPS = (1, 2)
#: Blocks of each that are tried.
_BLOCKS = 2
#: Turns among which one is sought for an empty slot.
_REACH = 24


def block_turns(job: OrderJob) -> Iterator[Turns]:
    """Yield the turns of some building blocks that the job's limits have room for."""
    for timed in _blocks(job):
        yield [[turn for _, turn in own] for own in timed]


def squeezed_blocks(job: OrderJob) -> Iterator[Turns]:
    """Yield orders of the same blocks, whose units fill slots that the blocks leave empty.

    So it is before the first microbatch is done and after the last has come in. Weight gradients
    take the slots that stay empty, or come before that for memory's sake.
    """
    for timed in _blocks(job):
        squeeze = _Squeeze(job, timed)
        squeeze.run()
        yield squeeze.orders


def _blocks(job: OrderJob) -> Iterator[_Timed]:
    for step in _STEPS:
        yield from islice((timed for timed in _timed(job, step) if _fits(job, timed)), _BLOCKS)


def _timed(job: OrderJob, step: int) -> Iterator[_Timed]:
    """Yield the slots of all blocks in which no stage has two units at once, least waits first."""
    stages, _, microbatches = job.shape
    for waits in sorted(product(range(_PERIOD), repeat=3), key=sum):
        slots = _slots(stages, step, *waits)
        if all(len({slot % _PERIOD for slot, _, _ in own}) == len(own) for own in slots):
            yield [_repeated(own, stage, microbatches) for stage, own in enumerate(slots)]


def _slots(
    stages: int, step: int, turn: int, back: int, turn_back: int
) -> list[list[tuple[int, int, int]]]:
    """Return each stage's slot, kind and chunk of all units of microbatch 0 but weight gradients.

    The waits are before it turns at the last stage, at the first stage, and at the last again.
    """
    way = (stages - 1) * step
    up = way + 1 + turn + stages - 1  # when its forwards are back at the first stage
    last = up + 1 + back + way + 1 + turn_back  # its gradient of chunk 0 on the last stage
    return [
        [
            (s * step, FORWARD, 0),
            (up - s, FORWARD, 1),
            (up + 1 + back + s * step, GRADIENT, 1),
            (last + stages - 1 - s, GRADIENT, 0),
        ]
        for s in range(stages)
    ]


def _repeated(
    slots: list[tuple[int, int, int]], stage: int, microbatches: int
) -> list[tuple[int, tuple[int, int, int]]]:
    return sorted(
        (slot + _PERIOD * m, (kind, 2 * stage + chunk, m))
        for m in range(microbatches)
        for slot, kind, chunk in slots
    )


def _fits(job: OrderJob, timed: _Timed) -> bool:
    """Return whether there is room, if weight gradients come as soon as they must."""
    peaks = (max(accumulate(1 if turn[0] == FORWARD else -1 for _, turn in own)) for own in timed)
    rooms = zip(peaks, job.stage_limits, job.least_room, strict=True)
    return all(p - 1 + room[FORWARD] <= limit + HELD_TOLERANCE for p, limit, room in rooms)


class _Squeeze:
    """One walk through the slots of a block."""

    def __init__(self, job: OrderJob, timed: _Timed) -> None:
        microbatches = job.shape[2]
        self._job = job
        slot_of = {turn: slot for slot, turn in timed[0]}
        self._steady = range(slot_of[GRADIENT, 0, 0] + 1, slot_of[FORWARD, 0, microbatches - 1])
        #: [forward or gradient][part][microbatch] the first slot that has the input.
        self._ready = [[[math.inf] * microbatches for _ in job.chain] for _ in (FORWARD, GRADIENT)]
        self._ready[FORWARD][job.chain[0]] = [0] * microbatches
        self._left = [own[::-1] for own in timed]
        self._held = [0.0 for _ in timed]
        self._pending: Turns = [[] for _ in timed]
        self.orders: Turns = [[] for _ in timed]

    def run(self) -> None:
        slot = 0
        while any(self._left):
            for stage, pending in enumerate(self._pending):
                if turn := self._next(stage, slot):
                    self._take(stage, turn, slot)
                elif pending:
                    self._add(stage, pending.pop(0))
            slot += 1
        for order, pending in zip(self.orders, self._pending, strict=True):
            order += pending

    def _next(self, stage: int, slot: int) -> tuple[int, int, int] | None:
        """Remove and return the next turn, or the first after it that there is room for."""
        left = self._left[stage]
        room, holds = self._job.least_room[stage][FORWARD], self._job.holds[stage]
        now = most = self._held[stage] + holds[WEIGHTS] * len(self._pending[stage])
        for at in range(len(left) - 1, max(-1, len(left) - 1 - _REACH), -1):
            own_slot, (kind, part, microbatch) = left[at]
            waits = slot in self._steady and slot < own_slot
            fits = kind == GRADIENT or at == len(left) - 1
            fits = fits or most + room <= self._job.stage_limits[stage] + HELD_TOLERANCE
            if fits and not waits and self._ready[kind][part][microbatch] <= slot:
                return left.pop(at)[1]
            now += 1 if kind == FORWARD else -1
            most = max(most, now)
        return None

    def _take(self, stage: int, turn: tuple[int, int, int], slot: int) -> None:
        job, pending, (kind, part, microbatch) = self._job, self._pending[stage], turn
        limit = job.stage_limits[stage] - job.least_room[stage][kind] + HELD_TOLERANCE
        while pending and self._held[stage] > limit:
            self._add(stage, pending.pop(0))
        if kind == GRADIENT:
            pending.append((WEIGHTS, part, microbatch))
        self._add(stage, turn)
        other = job.neighbours[kind][part]
        if other >= 0:
            self._ready[kind][other][microbatch] = slot + 1
        elif kind == FORWARD:
            self._ready[GRADIENT][part][microbatch] = slot + 1

    def _add(self, stage: int, turn: tuple[int, int, int]) -> None:
        self.orders[stage].append(turn)
        self._held[stage] += self._job.holds[stage][turn[0]]
