"""Orders of two chunks in a V by repeating a building block (Qi et al., NeurIPS'24, section 3).

All stages run the units of one microbatch at fixed distances, and the next microbatch follows six
slots later, as long as a stage works for one if units are equal. Where memory is scarcest, no
simulation keeps its stages as evenly busy.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, islice, product

from envpipe_megatron.core.orders.job import (
    FORWARD,
    GRADIENT,
    HELD_TOLERANCE,
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


def block_turns(job: OrderJob) -> Iterator[Turns]:
    """Yield the turns of some building blocks that the job's limits have room for."""
    for step in _STEPS:
        fitting = (timed for timed in _timed(job, step) if _fits(job, timed))
        for timed in islice(fitting, _BLOCKS):
            yield [[turn for _, turn in own] for own in timed]


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
