"""What an order is built for: durations, latencies, where chunks lie, and how much may be held."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np

from envpipe_megatron.core.arrays import FloatArray
from envpipe_megatron.core.kinds import SPLIT, WHOLE, Kind, ScheduleError
from envpipe_megatron.core.schedule import Placement

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
        weight_share: how much of one stays from its input gradient to its weight gradient.
        tail_s: [num_stages] the time after each stage's last unit, or one for all.
        in_order: messages of a kind from one stage to another must be taken as they are sent.
        group_size: microbatches that pass a looped chunk before the next comes first; None: p.

    ScheduleError: other kinds, shapes that differ, times below zero, or a limit that is too small
    for one microbatch.
    """

    duration_s: Mapping[Kind, FloatArray]
    latency_s: float | Sequence[float] = 0.0
    placement: Placement = Placement.LOOPED
    limits: Sequence[float] | None = None
    weight_share: float = 1.0
    tail_s: float | Sequence[float] = 0.0
    in_order: bool = False
    group_size: int | None = None

    def __post_init__(self) -> None:
        shapes = [np.shape(times) for times in self.duration_s.values()]
        if set(self.duration_s) not in (set(WHOLE), set(SPLIT)):
            raise ScheduleError(
                "An order needs durations of forwards and backwards, or of forwards, input "
                "gradients and weight gradients",
                value=sorted(self.duration_s),
            )
        if len(set(shapes)) > 1 or len(shapes[0]) != 3 or min(shapes[0]) < 1:
            raise ScheduleError(
                "Durations of an order must be [num_stages, num_chunks, num_microbatches]",
                value=shapes,
            )
        if self.in_order and self.placement is not Placement.LOOPED:
            raise ScheduleError("Messages are kept in order for looped chunks alone")
        if not all(np.all((t >= 0) & np.isfinite(t)) for t in self.duration_s.values()):
            raise ScheduleError("A duration is not a time", remedy="Give seconds, zero or more.")
        for stage, limit in enumerate(self.stage_limits):
            if limit < self.shape[1] - HELD_TOLERANCE:
                raise ScheduleError(
                    f"Stage {stage} may hold less than one microbatch",
                    value=limit,
                    remedy=f"One microbatch holds {self.shape[1]} there; allow at least that.",
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
    def holds(self) -> tuple[float, float, float]:
        """By kind how many microbatches x chunks more its stage holds after a unit."""
        kept = self.weight_share if self.kinds is SPLIT else 0.0
        return 1.0, kept - 1.0, -kept

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
        """By kind, [num_parts] the part that a unit's output goes to, or -1."""
        after, before = [-1] * len(self.chain), [-1] * len(self.chain)
        for part, other in pairwise(self.chain):
            after[part], before[other] = other, part
        return after, before

    @cached_property
    def hops_s(self) -> tuple[list[float], list[float]]:
        """By kind, [num_parts] the latency of a unit's output to its neighbour."""
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
        """[num_stages] the least time from stage 0 to each along chunk 0, or back."""
        parts = self.chain[: self.shape[0]]
        steps_s = (min(self.durations_s[kind][p]) + self.hops_s[FORWARD][p] for p in parts[:-1])
        return [*accumulate(steps_s, initial=0.0)]

    def level(self, weight_s: float) -> OrderJob:
        """The same with forwards and gradients that all take as long, and messages no time."""
        unit_s = dict.fromkeys(self.duration_s, 1.0) | {Kind.WEIGHT_GRADIENT: weight_s}
        level_s = {kind: np.full(self.shape, unit_s[kind]) for kind in self.kinds}
        return replace(self, duration_s=level_s, latency_s=0.0, tail_s=0.0)
