"""In which turns each stage runs forwards and gradients: by simulation, or by building blocks.

Weight gradients are in the simulation, since they take time and free memory; where they go at last
is for `fill` to say. Entered by `take_turns`; called by `greedy`.

Blocks are of two chunks in a V (Qi et al., NeurIPS'24, section 3): all stages run the units of one
microbatch at fixed distances, and the next microbatch follows six slots later, as long as a stage
works for one if units are equal. Where memory is scarcest, no simulation keeps its stages as evenly
busy. Entered by `block_turns` and `squeezed_blocks`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate, islice, product

from envpipe_megatron.core.kinds import SPLIT
from envpipe_megatron.core.orders.job import (
    FORWARD,
    GRADIENT,
    HELD_TOLERANCE,
    WEIGHTS,
    OrderJob,
    Turns,
)
from envpipe_megatron.core.schedule import Placement

#: A weight gradient may delay another unit by no more than this part of its own duration.
_WEIGHTS_PATIENCE = 0.5

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


@dataclass(frozen=True)
class TurnRule:
    """Rule by which a stage chooses among units that are ready.

    Args:
        strict: a forward and a gradient in turn, also where the forward must wait for room that
            weight gradients make; else gradients come first.
        patience: how long a stage waits for the kind whose turn it is, in durations of the unit
            that it could run instead.
        hurried: waits no longer than the job's floor allows.
        pace: how long after a microbatch the next comes into the pipeline at the earliest, in
            times that the busiest stage works for one. Where memory is scarce, an even stream
            does more with it than one that comes in waves.
    """

    strict: bool = True
    patience: float = 0.0
    hurried: bool = False
    pace: float = 0.0


def take_turns(job: OrderJob, rule: TurnRule) -> Turns:
    """Simulate a job; at each moment an idle stage starts the best unit that is ready.

    In a V units of the oldest microbatch come first; of looped chunks a group of microbatches
    passes each before its next, as in Megatron's interleaved order. A forward is let in if the
    stage has room for it, and for what the oldest microbatch that is still on its way forward needs
    there: so that one can always go on, and no limit ever blocks the pipeline.
    """
    simulation = _Simulation(job, rule)
    simulation.run()
    return simulation.turns


class _Simulation:
    def __init__(self, job: OrderJob, rule: TurnRule) -> None:
        stages, self._chunks, self._microbatches = job.shape
        self.turns: Turns = [[] for _ in range(stages)]
        self._job, self._rule = job, rule
        self._group_size = job.group_size or stages
        #: [forward or gradient][part] how many have started.
        self._started = [[0 for _ in job.chain] for _ in (FORWARD, GRADIENT)]
        #: [forward or gradient][part][microbatch] when the input arrives, as far as known.
        self._in_s = [
            [[math.inf] * self._microbatches for _ in job.chain] for _ in (FORWARD, GRADIENT)
        ]
        pace_s = rule.pace * max(job.work_s) / self._microbatches
        self._in_s[FORWARD][job.chain[0]] = [pace_s * m for m in range(self._microbatches)]
        self._wake = [(0.0, stage) for stage in range(stages)]
        self._wake += [(in_s, 0) for in_s in self._in_s[FORWARD][job.chain[0]][1:]]
        self._pending: list[list[tuple[int, int]]] = [[] for _ in range(stages)]
        self._weights = [0] * stages  #: how many of the pending ones have started
        self._held = [0.0] * stages
        self._left_s = list(job.work_s)
        self._latest_s = [job.floor_s - after_s for after_s in job.after_s]
        self._free_s = [0.0] * stages
        self._tolerance_s = 1e-9 * job.floor_s

    def run(self) -> None:
        wake, free_s, tolerance_s = self._wake, self._free_s, self._tolerance_s
        while wake:
            now_s, stage = heappop(wake)
            if free_s[stage] <= now_s + tolerance_s:
                self._step(stage, max(now_s, free_s[stage]))

    def _step(self, stage: int, now_s: float) -> None:
        """Start what is best at this moment, if anything is."""
        turns, rule = self.turns[stage], self._rule
        gradient, gradient_in_s, _ = self._next(stage, GRADIENT, now_s + self._tolerance_s)
        forward, forward_in_s, full = self._next(stage, FORWARD, now_s + self._tolerance_s)
        weights = self._weights[stage] < len(self._pending[stage])
        forwards_turn = rule.strict and (not turns or turns[-1][0] == GRADIENT)
        if gradient >= 0 and (forward < 0 or not forwards_turn):
            room_first = forwards_turn and full and weights
            gradient_s = self._duration_s(GRADIENT, gradient)
            waits = forwards_turn and self._waits(
                stage, now_s, forward_in_s, gradient_s, rule.patience
            )
            if not (room_first or waits):
                self._start(stage, GRADIENT, gradient, now_s)
                return
        elif forward >= 0:
            forward_s = self._duration_s(FORWARD, forward)
            if gradient >= 0 or not self._waits(
                stage, now_s, gradient_in_s, forward_s, rule.patience
            ):
                self._start(stage, FORWARD, forward, now_s)
                return
        if weights:
            until_s = math.inf if full else min(gradient_in_s, forward_in_s)
            self._start_weights(stage, now_s, until_s)

    def _next(self, stage: int, kind: int, ready_s: float) -> tuple[int, float, bool]:
        """Return the part whose unit of a kind comes next, or -1; when an input of another arrives.

        And whether a forward is ready that there is no room for.
        """
        best, first, soonest_s, full = -1, math.inf, math.inf, False
        for chunk in range(self._chunks):
            part = stage * self._chunks + chunk
            microbatch = self._started[kind][part]
            if microbatch == self._microbatches:
                continue
            in_s = self._in_s[kind][part][microbatch]
            if in_s == math.inf:
                continue
            if kind == FORWARD and not self._has_room(stage, microbatch):
                full = full or in_s <= ready_s
            elif in_s > ready_s:
                soonest_s = min(soonest_s, in_s)
            elif (rank := self._rank(kind, chunk, microbatch)) < first:
                best, first = part, rank
        return best, soonest_s, full

    def _rank(self, kind: int, chunk: int, microbatch: int) -> int:
        """Return a rank, lowest first: looped chunks by groups of microbatches, others by chunk."""
        along = chunk if kind == FORWARD else self._chunks - 1 - chunk
        if self._job.placement is Placement.V:
            return -along
        return microbatch // self._group_size * self._chunks + along

    def _has_room(self, stage: int, microbatch: int) -> bool:
        room = self._job.stage_limits[stage] - self._job.least_room[stage][FORWARD] + HELD_TOLERANCE
        if self._held[stage] > room:
            return False
        started = self._started[FORWARD][stage * self._chunks : (stage + 1) * self._chunks]
        oldest = started[-1]
        needed = sum(max(1, count - oldest) for count in started)
        return microbatch == oldest or needed <= room

    def _waits(
        self, stage: int, now_s: float, until_s: float, other_s: float, patience: float
    ) -> bool:
        """Return whether to wait for an input rather than start a unit that delays its user."""
        if until_s - now_s >= patience * other_s or until_s >= now_s + other_s - self._tolerance_s:
            return False
        end_s = until_s + self._left_s[stage]
        return not self._rule.hurried or end_s <= self._latest_s[stage] + self._tolerance_s

    def _duration_s(self, kind: int, part: int) -> float:
        return self._job.durations_s[kind][part][self._started[kind][part]]

    def _start(self, stage: int, kind: int, part: int, now_s: float) -> None:
        job, microbatch = self._job, self._started[kind][part]
        end_s = self._occupy(stage, kind, now_s, self._duration_s(kind, part))
        self._started[kind][part] += 1
        self.turns[stage].append((kind, part, microbatch))
        if kind == GRADIENT and len(job.kinds) > WEIGHTS:
            self._pending[stage].append((part, microbatch))
        other = job.neighbours[kind][part]
        if other >= 0:
            in_s = self._in_s[kind][other][microbatch] = end_s + job.hops_s[kind][part]
            heappush(self._wake, (in_s, other // self._chunks))
        elif kind == FORWARD:
            self._in_s[GRADIENT][part][microbatch] = end_s

    def _start_weights(self, stage: int, now_s: float, until_s: float) -> None:
        """Start the oldest weight gradient, unless it delays another unit by too much."""
        part, microbatch = self._pending[stage][self._weights[stage]]
        duration_s = self._job.durations_s[WEIGHTS][part][microbatch]
        if not self._waits(stage, now_s, until_s, duration_s, _WEIGHTS_PATIENCE):
            self._weights[stage] += 1
            self._occupy(stage, WEIGHTS, now_s, duration_s)

    def _occupy(self, stage: int, kind: int, now_s: float, duration_s: float) -> float:
        self._held[stage] += self._job.holds[stage][kind]
        self._left_s[stage] -= duration_s
        end_s = self._free_s[stage] = now_s + duration_s
        heappush(self._wake, (end_s, stage))
        return end_s


def block_turns(job: OrderJob) -> Iterator[Turns]:
    """Yield the turns of some building blocks that the job's limits have room for.

    None for a job without split backwards, or of other chunks than two in a V.
    """
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
    in_v = job.placement is Placement.V and job.shape[1] == 2 and job.kinds is SPLIT
    for step in _STEPS if in_v else ():
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
