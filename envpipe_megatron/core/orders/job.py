"""What an order is built for: durations, latencies, where chunks lie, and how much may be held."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from envpipe_megatron.core.arrays import FloatArray
from envpipe_megatron.core.kinds import SPLIT, WHOLE, Kind, ScheduleError
from envpipe_megatron.core.schedule import Placement

Times = list[list[float]]
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
        latency_s: of every message, or one for each boundary between neighbouring stages.
        placement: where chunks lie.
        limits: [num_stages] the most that a stage may hold, in the unit of `held`; None: no limit.
        held: [num_stages, num_chunks] what one forward leaves on its stage until its backward.
        weight_share: how much of it stays from the input gradient to the weight gradient.
        tail_s: [num_stages] the time after each stage's last unit, or one for all.

    ScheduleError: other kinds, shapes that differ, times below zero, or a limit that is too small
    for one microbatch.
    """

    duration_s: Mapping[Kind, FloatArray]
    latency_s: float | Sequence[float] = 0.0
    placement: Placement = Placement.LOOPED
    limits: Sequence[float] | None = None
    held: FloatArray | None = None
    weight_share: float = 1.0
    tail_s: float | Sequence[float] = 0.0

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
        if not all(np.all((t >= 0) & np.isfinite(t)) for t in self.duration_s.values()):
            raise ScheduleError("A duration is not a time", remedy="Give seconds, zero or more.")
        least = np.reshape(self.part_held, (self.num_stages, -1)).sum(axis=1)
        too_small = np.flatnonzero(np.asarray(self.stage_limits) < least - 1e-9)
        if too_small.size:
            stage = int(too_small[0])
            raise ScheduleError(
                f"Stage {stage} may hold less than one microbatch",
                value=self.stage_limits[stage],
                remedy=f"One microbatch holds {least[stage]:g} there; allow at least that.",
            )

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages, p."""
        return len(self.duration_s[Kind.FORWARD])

    @property
    def num_chunks(self) -> int:
        """Chunks of each stage, V."""
        return int(np.shape(self.duration_s[Kind.FORWARD])[1])

    @property
    def num_microbatches(self) -> int:
        """Number of microbatches, M."""
        return int(np.shape(self.duration_s[Kind.FORWARD])[2])

    @property
    def split(self) -> bool:
        """Whether backwards are two units each."""
        return Kind.BACKWARD not in self.duration_s

    @cached_property
    def forward_s(self) -> Times:
        """[num_parts][num_microbatches] durations of forwards."""
        return self._by_part(Kind.FORWARD)

    @cached_property
    def gradient_s(self) -> Times:
        """The same of input gradients, or of whole backwards."""
        return self._by_part(Kind.INPUT_GRADIENT if self.split else Kind.BACKWARD)

    @cached_property
    def weight_s(self) -> Times:
        """The same of weight gradients; empty if backwards are whole."""
        return self._by_part(Kind.WEIGHT_GRADIENT) if self.split else []

    @cached_property
    def part_held(self) -> list[float]:
        """[num_parts] what one forward leaves on its stage."""
        if self.held is None:
            return [1.0] * (self.num_stages * self.num_chunks)
        parts: list[float] = np.asarray(self.held, dtype=np.float64).ravel().tolist()
        return parts

    @cached_property
    def durations_s(self) -> tuple[Times, Times, Times]:
        """The durations of all kinds."""
        return self.forward_s, self.gradient_s, self.weight_s

    @cached_property
    def holds(self) -> tuple[float, float, float]:
        """How much more its stage holds after a unit of each kind, in forwards of its part."""
        kept = self.weight_share if self.split else 0.0
        return 1.0, kept - 1.0, -kept

    @property
    def units_per_stage(self) -> int:
        """Units in each stage's order."""
        return len(self.duration_s) * self.num_chunks * self.num_microbatches

    @cached_property
    def stage_limits(self) -> list[float]:
        """[num_stages] the most that each stage may hold."""
        return [math.inf] * self.num_stages if self.limits is None else [*map(float, self.limits)]

    @cached_property
    def stage_tail_s(self) -> list[float]:
        """[num_stages] the time after each stage's last unit."""
        tails_s: list[float] = np.broadcast_to(self.tail_s, self.num_stages).tolist()
        return tails_s

    @cached_property
    def chain(self) -> list[int]:
        """The parts as a forward passes them."""
        stages = range(self.num_stages)
        return [
            stage * self.num_chunks + chunk
            for chunk in range(self.num_chunks)
            for stage in (
                reversed(stages) if self.placement is Placement.V and chunk % 2 else stages
            )
        ]

    @cached_property
    def following(self) -> list[int]:
        """[num_parts] the part that a forward passes next, or -1."""
        following = [-1] * len(self.chain)
        for part, after in zip(self.chain, self.chain[1:], strict=False):
            following[part] = after
        return following

    @cached_property
    def preceding(self) -> list[int]:
        """[num_parts] the part that a forward passes before, or -1."""
        preceding = [-1] * len(self.chain)
        for part, after in zip(self.chain, self.chain[1:], strict=False):
            preceding[after] = part
        return preceding

    @cached_property
    def hop_s(self) -> list[float]:
        """[num_parts] latency of the message from a part to the following one."""
        stages = self.num_stages
        hops = np.broadcast_to(np.asarray(self.latency_s, dtype=np.float64), max(stages - 1, 0))
        by_part = [0.0] * len(self.chain)
        for part, after in enumerate(self.following):
            stage, next_stage = part // self.num_chunks, after // self.num_chunks
            if after >= 0 and stage != next_stage:
                beside = abs(stage - next_stage) == 1 and (stage < next_stage or self._turns)
                by_part[part] = float(hops[min(stage, next_stage)] if beside else hops.max())
        return by_part

    @property
    def _turns(self) -> bool:
        return self.placement is Placement.V

    @cached_property
    def work_s(self) -> list[float]:
        """[num_stages] the durations of all units of each stage together."""
        work = sum(np.asarray(times).sum(axis=(1, 2)) for times in self.duration_s.values())
        by_stage: list[float] = np.asarray(work).tolist()
        return by_stage

    @cached_property
    def floor_s(self) -> float:
        """No order takes less: the way in, all units of a stage, its tail."""
        floor_s, way_in_s, entered = 0.0, 0.0, set[int]()
        for part in self.chain:
            stage = part // self.num_chunks
            if stage not in entered:
                entered.add(stage)
                floor_s = max(floor_s, way_in_s + self.work_s[stage] + self.stage_tail_s[stage])
            way_in_s += min(self.forward_s[part]) + self.hop_s[part]
        return floor_s

    def level(self, weight_s: float = 1.0) -> OrderJob:
        """The same with forwards and gradients that all take as long, and messages no time."""
        unit_s = dict.fromkeys(self.duration_s, 1.0) | {Kind.WEIGHT_GRADIENT: weight_s}
        level_s = {kind: np.full_like(t, unit_s[kind]) for kind, t in self.duration_s.items()}
        return replace(self, duration_s=level_s, latency_s=0.0, tail_s=0.0)

    def without_latency(self) -> OrderJob:
        """The same with messages that take no time."""
        return replace(self, latency_s=0.0)

    def _by_part(self, kind: Kind) -> Times:
        times = np.asarray(self.duration_s[kind], dtype=np.float64)
        by_part: Times = times.reshape(-1, self.num_microbatches).tolist()
        return by_part
