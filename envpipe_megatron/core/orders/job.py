"""An order's job: durations, latencies, where chunks lie, memory; and how long orders of it take.

`fill` also places the weight gradients between turns that are fixed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np

from envpipe_megatron.core.arrays import FloatArray
from envpipe_megatron.core.kinds import SPLIT, WHOLE, Kind, ScheduleError
from envpipe_megatron.core.schedule import Placement
from envpipe_megatron.core.timeline import RELATIVE_TOLERANCE

#: Kinds as numbers: whole backwards and input gradients are both `GRADIENT`.
FORWARD, GRADIENT, WEIGHTS = range(3)
#: Units by stage in order, each as its kind, part and microbatch.
Turns = list[list[tuple[int, int, int]]]
#: Holdings that differ by less are equal: sums of fractions differ by rounding.
HELD_TOLERANCE = 1e-6


@dataclass(frozen=True)
class OrderJob:
    """A pipeline whose order is wanted. *Part* `stage * num_chunks + chunk` is a stage's chunk.

    Args:
        duration_s: [num_stages, num_chunks, num_microbatches] of each kind: forward and backward,
            or forward, input gradient and weight gradient.
        latency_s: of every message, or one for each boundary between neighbouring stages; between
            the last stage and the first it is the longest of them.
        placement: where chunks lie.
        limits: [num_stages] the most microbatches x chunks that a stage may hold; None: no limit.
        weight_share: how much of one is held from its input gradient to its weight gradient, on
            each stage or on all: above 1 where little is kept of a microbatch in flight.
        tail_s: [num_stages] the time after each stage's last unit, or one for all.
        group_size: microbatches that pass a looped chunk before the next comes first; None: p.

    ScheduleError: a limit that is too small for one microbatch, or for what its first backward
    leaves to the second part.
    """

    duration_s: Mapping[Kind, FloatArray]
    latency_s: float | Sequence[float] = 0.0
    placement: Placement = Placement.LOOPED
    limits: Sequence[float] | None = None
    weight_share: float | Sequence[float] = 1.0
    tail_s: float | Sequence[float] = 0.0
    group_size: int | None = None

    def __post_init__(self) -> None:
        for stage, limit in enumerate(self.stage_limits):
            least = self.shape[1] + self.least_room[stage][FORWARD] - 1
            if limit < least - HELD_TOLERANCE:
                raise ScheduleError(
                    f"Stage {stage} may hold less than one microbatch",
                    value=limit,
                    remedy=f"One microbatch holds {least:g} there; allow at least that.",
                )

    @cached_property
    def shape(self) -> tuple[int, int, int]:
        """Stages p, chunks of each stage V, and microbatches M."""
        stages, chunks, microbatches = np.shape(self.duration_s[Kind.FORWARD])
        return stages, chunks, microbatches

    @property
    def num_per_kind(self) -> int:
        """Units of each kind on each stage."""
        return self.shape[1] * self.shape[2]

    @cached_property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of units, as they are numbered."""
        return WHOLE if Kind.BACKWARD in self.duration_s else SPLIT

    @cached_property
    def durations_s(self) -> list[list[list[float]]]:
        """[num_kinds][num_parts][num_microbatches] how long each unit takes."""
        times = (np.asarray(self.duration_s[kind], dtype=np.float64) for kind in self.kinds)
        return [t.reshape(-1, self.shape[2]).tolist() for t in times]

    @cached_property
    def holds(self) -> list[tuple[float, float, float]]:
        """[num_stages] by kind how many microbatches x chunks more its stage holds after a unit."""
        kept = self.weight_share if self.kinds is SPLIT else 0.0
        shares = np.broadcast_to(kept, self.shape[:1]).tolist()
        return [(1.0, share - 1.0, -share) for share in shares]

    @cached_property
    def least_room(self) -> list[tuple[float, float, float]]:
        """[num_stages] by kind what a stage must have room for before a unit.

        A forward is let in only where its gradient has room, too, once no weight gradient waits.
        """
        return [(max(1.0, 1.0 + more), max(0.0, more), 0.0) for _, more, _ in self.holds]

    @cached_property
    def stage_limits(self) -> list[float]:
        """[num_stages] the most that each stage may hold."""
        return [*map(float, [math.inf] * self.shape[0] if self.limits is None else self.limits)]

    @cached_property
    def stage_tail_s(self) -> list[float]:
        """[num_stages] the time after each stage's last unit."""
        return [*map(float, np.broadcast_to(self.tail_s, self.shape[:1]))]

    @cached_property
    def chain(self) -> list[int]:
        """The parts as a forward passes them."""
        stages, chunks, _ = self.shape
        there = range(stages)
        back = there[::-1] if self.placement is Placement.V else there
        return [s * chunks + c for c in range(chunks) for s in (back if c % 2 else there)]

    @cached_property
    def neighbours(self) -> tuple[list[int], list[int]]:
        """[kind][num_parts] the part that a unit's output goes to, or -1."""
        after, before = [-1] * len(self.chain), [-1] * len(self.chain)
        for part, other in pairwise(self.chain):
            after[part], before[other] = other, part
        return after, before

    @cached_property
    def hops_s(self) -> tuple[list[float], list[float]]:
        """[kind][num_parts] the latency of a unit's output to its neighbour."""
        stages, chunks, _ = self.shape
        hop_s = np.broadcast_to(np.asarray(self.latency_s, dtype=np.float64), stages - 1)
        after, before = [0.0] * len(self.chain), [0.0] * len(self.chain)
        for part, other in pairwise(self.chain):
            near, far = sorted((part // chunks, other // chunks))
            if near < far:
                wraps = far - near > 1 or (part > other and self.placement is Placement.LOOPED)
                after[part] = before[other] = float(hop_s.max() if wraps else hop_s[near])
        return after, before

    @cached_property
    def work_s(self) -> list[float]:
        """[num_stages] the durations of all units of each stage together."""
        by_part = np.sum([np.sum(times, axis=1) for times in self.durations_s], axis=0)
        return [*map(float, by_part.reshape(self.shape[:2]).sum(axis=1))]

    @cached_property
    def after_s(self) -> list[float]:
        """[num_stages] the least time from a stage's last unit to the end of the iteration.

        Its tail; or the way out, if its last unit is a backward that has yet to reach stage 0.
        """
        after_s = list(self.stage_tail_s)
        if self.kinds is WHOLE:
            for stage, way_s in enumerate(self._ways_s(GRADIENT)):
                after_s[stage] = max(after_s[stage], way_s + self.stage_tail_s[0])
        return after_s

    @cached_property
    def floor_s(self) -> float:
        """No order takes less: the way in, all units of a stage, and what is after them."""
        return max(map(sum, zip(self._ways_s(FORWARD), self.work_s, self.after_s, strict=True)))

    def _ways_s(self, kind: int) -> list[float]:
        """Return [num_stages] the least time from stage 0 to each along chunk 0, or back."""
        parts = self.chain[: self.shape[0]]
        steps_s = (min(self.durations_s[kind][p]) + self.hops_s[FORWARD][p] for p in parts[:-1])
        return [*accumulate(steps_s, initial=0.0)]

    def level(self, weight_s: float) -> OrderJob:
        """Return the job with equal forwards and gradients, and messages that take no time."""
        unit_s = dict.fromkeys(self.duration_s, 1.0) | {Kind.WEIGHT_GRADIENT: weight_s}
        level_s = {kind: np.full(self.shape, unit_s[kind]) for kind in self.kinds}
        return replace(self, duration_s=level_s, latency_s=0.0, tail_s=0.0)


@dataclass(frozen=True)
class Filled:
    """Whole orders of a job.

    Args:
        orders: by stage all its units.
        stage_end_s: [num_stages] when each has ended its tail, its units all as early as they can;
            inf if stages wait in circles.
        peak_held: [num_stages] the most that each holds.
    """

    orders: Turns
    stage_end_s: list[float]
    peak_held: list[float]

    @property
    def time_s(self) -> float:
        """Iteration time."""
        return max(self.stage_end_s)


def fill(
    job: OrderJob,
    turns: Turns,
    target_s: float,
    least_gap: float = 0.0,
    rising: bool = False,
) -> Filled:
    """Place the weight gradients that turns lack, and say how long the orders take.

    A stage runs one where it fits into a wait, where memory is needed, and where the stage would
    end after the target if it waited, if the wait has `least_gap` of its duration; what is left
    comes at the end. The oldest comes first. A rising target is never before the end that some
    stage cannot avoid any more.
    """
    walk = _Walk(job, turns, target_s, least_gap, rising)
    ready = list(range(len(turns)))
    while ready:
        ready.extend(walk.advance(ready.pop()))
    return walk.finish()


class _Walk:
    """One walk through all turns, each stage as far as its inputs are known."""

    def __init__(
        self, job: OrderJob, turns: Turns, target_s: float, least_gap: float, rising: bool
    ) -> None:
        stages, _, microbatches = job.shape
        self._job, self._turns, self._least_gap = job, turns, least_gap
        self._target_s, self._rising = target_s, rising
        #: [forward or gradient][part][microbatch] when the input is there; nan: not known yet.
        self._in_s = [[[math.nan] * microbatches for _ in job.chain] for _ in (FORWARD, GRADIENT)]
        self._in_s[FORWARD][job.chain[0]] = [0.0] * microbatches
        self._at = [0] * stages
        self._now_s = [0.0] * stages
        self._left_s = list(job.work_s)
        self._held = [0.0] * stages
        self._peak = [0.0] * stages
        #: Turns lack the weight gradients of their gradients.
        self._lacking = len(turns[0]) < len(job.kinds) * job.num_per_kind
        self._pending: list[deque[tuple[int, int, int]]] = [deque() for _ in turns]
        self._orders: Turns = [[] for _ in turns]

    def advance(self, stage: int) -> list[int]:
        """Run a stage's turns until an input is not known; the stages that got one meanwhile."""
        job, turns, inputs_s, fed = self._job, self._turns[stage], self._in_s, []
        chunks, neighbours, hops_s = job.shape[1], job.neighbours, job.hops_s
        while self._at[stage] < len(turns):
            turn = kind, part, microbatch = turns[self._at[stage]]
            in_s = 0.0 if kind == WEIGHTS else inputs_s[kind][part][microbatch]
            if in_s != in_s:
                break
            if self._pending[stage]:
                self._wait(stage, in_s, job.least_room[stage][kind])
            end_s = self._run(stage, turn, in_s)
            self._at[stage] += 1
            if kind == WEIGHTS:
                continue
            if kind == GRADIENT and self._lacking:
                self._pending[stage].append((WEIGHTS, part, microbatch))
            other = neighbours[kind][part]
            if other >= 0:
                inputs_s[kind][other][microbatch] = end_s + hops_s[kind][part]
                if other // chunks != stage:
                    fed.append(other // chunks)
            elif kind == FORWARD:
                inputs_s[GRADIENT][part][microbatch] = end_s
        return fed

    def _wait(self, stage: int, until_s: float, room: float) -> None:
        """Run weight gradients before a unit that can start at `until_s`, and needs room."""
        job, pending, tolerance_s = self._job, self._pending[stage], RELATIVE_TOLERANCE * until_s
        while pending:
            _, part, microbatch = pending[0]
            duration_s = job.durations_s[WEIGHTS][part][microbatch]
            gap_s = until_s - self._now_s[stage]
            full = self._held[stage] + room > job.stage_limits[stage] + HELD_TOLERANCE
            if duration_s > gap_s + tolerance_s and not full:
                late_s = until_s + self._left_s[stage] + job.stage_tail_s[stage] - self._target_s
                if late_s <= tolerance_s or gap_s <= max(tolerance_s, self._least_gap * duration_s):
                    break
            self._run(stage, pending.popleft(), 0.0)

    def _run(self, stage: int, turn: tuple[int, int, int], in_s: float) -> float:
        """Run a unit as soon as its stage is free and its input there; its end."""
        kind, part, microbatch = turn
        duration_s, now_s = self._job.durations_s[kind][part][microbatch], self._now_s[stage]
        end_s = self._now_s[stage] = (in_s if in_s > now_s else now_s) + duration_s
        left_s = self._left_s[stage] = self._left_s[stage] - duration_s
        if self._rising:
            unavoidable_s = end_s + left_s + self._job.stage_tail_s[stage]
            self._target_s = max(self._target_s, unavoidable_s)
        held = self._held[stage] = self._held[stage] + self._job.holds[stage][kind]
        if held > self._peak[stage]:
            self._peak[stage] = held
        self._orders[stage].append(turn)
        return end_s

    def finish(self) -> Filled:
        """Return the whole orders, with the weight gradients that are left at their ends."""
        for stage, pending in enumerate(self._pending):
            while pending:
                self._run(stage, pending.popleft(), 0.0)
        stage_end_s = [
            end_s + tail_s if at == len(turns) else math.inf
            for end_s, tail_s, at, turns in zip(
                self._now_s, self._job.stage_tail_s, self._at, self._turns, strict=True
            )
        ]
        return Filled(self._orders, stage_end_s, self._peak)
