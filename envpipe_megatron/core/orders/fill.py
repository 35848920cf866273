"""How long orders take, and where weight gradients go between turns that are fixed."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from envpipe_megatron.core.orders.job import (
    FORWARD,
    GRADIENT,
    HELD_TOLERANCE,
    WEIGHTS,
    OrderJob,
    Turns,
)

#: Times closer than this fraction of themselves are equal.
TIME_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Filled:
    """Whole orders of a job.

    Args:
        orders: by stage all its units.
        end_s: by stage the end of each unit, all as early as they can.
        stage_end_s: [num_stages] when each has ended its tail; inf if stages wait in circles.
        peak_held: [num_stages] the most that each holds.
    """

    orders: Turns
    end_s: list[list[float]]
    stage_end_s: list[float]
    peak_held: list[float]

    @property
    def time_s(self) -> float:
        """How long an iteration takes."""
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
        self._end_s: list[list[float]] = [[] for _ in turns]

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
                self._wait(stage, in_s, holds=kind == FORWARD)
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

    def _wait(self, stage: int, until_s: float, *, holds: bool) -> None:
        """Run weight gradients before a unit that can start at `until_s`, and may need room."""
        job, pending, tolerance_s = self._job, self._pending[stage], TIME_TOLERANCE * until_s
        while pending:
            _, part, microbatch = pending[0]
            duration_s = job.durations_s[WEIGHTS][part][microbatch]
            gap_s = until_s - self._now_s[stage]
            full = holds and self._held[stage] + 1 > job.stage_limits[stage] + HELD_TOLERANCE
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
        held = self._held[stage] = self._held[stage] + self._job.holds[kind]
        if held > self._peak[stage]:
            self._peak[stage] = held
        self._orders[stage].append(turn)
        self._end_s[stage].append(end_s)
        return end_s

    def finish(self) -> Filled:
        """The whole orders, with the weight gradients that are left at their ends."""
        for stage, pending in enumerate(self._pending):
            while pending:
                self._run(stage, pending.popleft(), 0.0)
        stage_end_s = [
            end_s + tail_s if at == len(turns) else math.inf
            for end_s, tail_s, at, turns in zip(
                self._now_s, self._job.stage_tail_s, self._at, self._turns, strict=True
            )
        ]
        return Filled(self._orders, self._end_s, stage_end_s, self._peak)
