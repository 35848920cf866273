"""How long orders take, and where weight gradients go between turns that are fixed."""

from __future__ import annotations

import math
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


def fill(job: OrderJob, turns: Turns, target_s: float, least_gap: float = 0.0) -> Filled:
    """Place the weight gradients that turns lack, and say how long the orders take.

    A stage runs one where it fits into a wait, where memory is needed, and where the stage would
    end after the target if it waited, if the wait has `least_gap` of its duration; what is left
    comes at the end. The oldest comes first.
    """
    walk = _Walk(job, turns, target_s, least_gap)
    ready = list(range(job.num_stages))
    while ready:
        ready.extend(walk.advance(ready.pop()))
    return walk.finish()


class _Walk:
    """One walk through all turns, each stage as far as its inputs are known."""

    def __init__(self, job: OrderJob, turns: Turns, target_s: float, least_gap: float) -> None:
        stages, unknown = range(job.num_stages), [math.nan] * job.num_microbatches
        self._job, self._turns, self._least_gap = job, turns, least_gap
        self._latest_s = [target_s - tail_s for tail_s in job.stage_tail_s]
        #: [kind][part][microbatch] when the input is there; nan: not known yet.
        self._arrival_s = [[list(unknown) for _ in job.chain] for _ in (FORWARD, GRADIENT)]
        self._arrival_s[FORWARD][job.chain[0]] = [0.0] * job.num_microbatches
        missing = job.split and len(turns[0]) < job.units_per_stage
        self._pending: list[list[tuple[int, int, int]] | None] = [
            [] if missing else None for _ in stages
        ]
        self._at = [0 for _ in stages]
        self._placed = [0 for _ in stages]  #: how many of the pending ones
        self._now_s = [0.0 for _ in stages]
        self._left_s = list(job.work_s)
        self._held = [0.0 for _ in stages]
        self._peak = [0.0 for _ in stages]
        self._orders: Turns = [[] for _ in stages]
        self._end_s: list[list[float]] = [[] for _ in stages]

    def advance(self, stage: int) -> list[int]:
        """Run a stage's turns until an input is not known; the stages that got one meanwhile."""
        job, chunks, turns = self._job, self._job.num_chunks, self._turns[stage]
        durations_s, arrivals_s, hop_s = job.durations_s, self._arrival_s, job.hop_s
        following, preceding = job.following, job.preceding
        order, ends_s, pending = self._orders[stage], self._end_s[stage], self._pending[stage]
        now_s, at, fed = self._now_s[stage], self._at[stage], []
        while at < len(turns):
            turn = kind, part, microbatch = turns[at]
            arrival_s = now_s if kind == WEIGHTS else arrivals_s[kind][part][microbatch]
            if arrival_s != arrival_s:
                break
            if pending and self._placed[stage] < len(pending):
                now_s = self._wait(stage, now_s, arrival_s, kind == FORWARD, part)
            duration_s = durations_s[kind][part][microbatch]
            now_s = (arrival_s if arrival_s > now_s else now_s) + duration_s
            order.append(turn)
            ends_s.append(now_s)
            self._left_s[stage] -= duration_s
            self._hold(stage, kind, part)
            at += 1
            if kind == FORWARD:
                other, hop = following[part], hop_s[part]
                if other < 0:
                    arrivals_s[GRADIENT][part][microbatch] = now_s
            else:
                other = preceding[part] if kind == GRADIENT else -1
                hop = hop_s[other]
                if pending is not None:
                    pending.append((WEIGHTS, part, microbatch))
            if other >= 0:
                arrivals_s[kind][other][microbatch] = now_s + hop
                if other // chunks != stage:
                    fed.append(other // chunks)
        self._now_s[stage], self._at[stage] = now_s, at
        return fed

    def _wait(self, stage: int, now_s: float, until_s: float, forward: bool, part: int) -> float:
        """Run weight gradients before a unit that can start at `until_s`; the time after them."""
        job, pending, tolerance_s = self._job, self._pending[stage], TIME_TOLERANCE * until_s
        most = job.stage_limits[stage] + HELD_TOLERANCE - job.part_held[part]
        while pending and self._placed[stage] < len(pending):
            _, own, microbatch = pending[self._placed[stage]]
            duration_s, gap_s = job.weight_s[own][microbatch], until_s - now_s
            if duration_s > gap_s + tolerance_s and not (forward and self._held[stage] > most):
                late = until_s + self._left_s[stage] > self._latest_s[stage] + tolerance_s
                if not late or gap_s <= max(tolerance_s, self._least_gap * duration_s):
                    break
            now_s += duration_s
            self._place(stage, now_s)
        return now_s

    def _place(self, stage: int, end_s: float) -> None:
        pending = self._pending[stage] or []
        turn = _, part, microbatch = pending[self._placed[stage]]
        self._placed[stage] += 1
        self._left_s[stage] -= self._job.weight_s[part][microbatch]
        self._orders[stage].append(turn)
        self._end_s[stage].append(end_s)
        self._hold(stage, WEIGHTS, part)

    def _hold(self, stage: int, kind: int, part: int) -> None:
        held = self._held[stage] + self._job.holds[kind] * self._job.part_held[part]
        self._held[stage] = held
        if held > self._peak[stage]:
            self._peak[stage] = held

    def finish(self) -> Filled:
        """The whole orders, with the weight gradients that are left at their ends."""
        if self._at != [len(turns) for turns in self._turns]:
            stuck_s = [math.inf] * self._job.num_stages
            return Filled(self._orders, self._end_s, stuck_s, self._peak)
        for stage, pending in enumerate(self._pending):
            end_s = self._now_s[stage]
            for _, part, microbatch in (pending or [])[self._placed[stage] :]:
                end_s += self._job.weight_s[part][microbatch]
                self._place(stage, end_s)
        ends_s = zip(self._end_s, self._job.stage_tail_s, strict=True)
        stage_end_s = [end_s[-1] + tail_s for end_s, tail_s in ends_s]
        return Filled(self._orders, self._end_s, stage_end_s, self._peak)
