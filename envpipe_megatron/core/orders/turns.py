"""In which turns each stage runs forwards and gradients: one pass through simulated time.

Weight gradients are in the simulation, since they take time and free memory; where they go at last
is for `fill` to say. Entered by `take_turns`; called by `greedy`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from heapq import heappop, heappush

from envpipe_megatron.core.orders.job import (
    FORWARD,
    GRADIENT,
    HELD_TOLERANCE,
    WEIGHTS,
    OrderJob,
    Turns,
)

#: A weight gradient may delay another unit by no more than this part of its own duration.
_FILL_PATIENCE = 0.5


@dataclass(frozen=True)
class Rule:
    """How a stage chooses among units that are ready.

    Args:
        strict: a forward and a gradient in turn, also where the forward must wait for room that
            weight gradients make; else gradients come first.
        patience: how long a stage waits for the kind whose turn it is, in durations of the unit
            that it could run instead.
        hurried: waits no longer than the job's floor allows.
        pace: how long after a microbatch the next comes into the pipeline at the earliest, in
            times that the busiest stage works for one. Where memory is scarce, an even stream
            needs less of it than one that comes in waves.
    """

    strict: bool = True
    patience: float = 0.0
    hurried: bool = False
    pace: float = 0.0


def take_turns(job: OrderJob, rule: Rule) -> Turns:
    """Simulate a job; at each moment an idle stage starts the best unit that is ready.

    Forwards of the deepest chunk and gradients of the oldest microbatch come first. A forward is
    let in if the stage has room for it, and for what the oldest microbatch that is still on its
    way forward needs there: so that one can always go on, and no limit ever blocks the pipeline.
    """
    simulation = _Simulation(job, rule)
    simulation.run()
    return simulation.turns


class _Simulation:
    def __init__(self, job: OrderJob, rule: Rule) -> None:
        parts, microbatches = len(job.chain), job.num_microbatches
        self.job, self.rule, self.chunks = job, rule, job.num_chunks
        self.turns: Turns = [[] for _ in range(job.num_stages)]
        self._forwards = [0] * parts  #: how many each part has started
        self._gradients = [0] * parts
        self._forward_in_s = [[math.inf] * microbatches for _ in range(parts)]
        self._gradient_in_s = [[math.inf] * microbatches for _ in range(parts)]
        pace_s = rule.pace * max(job.work_s) / microbatches
        self._forward_in_s[job.chain[0]] = [pace_s * m for m in range(microbatches)]
        self._pending: list[list[tuple[int, int]]] = [[] for _ in range(job.num_stages)]
        self._weights = [0] * job.num_stages  #: how many of the pending ones each stage has started
        self._held = [0.0] * job.num_stages
        self._left_s = list(job.work_s)
        self._latest_s = [job.floor_s - tail_s for tail_s in job.stage_tail_s]
        self._free_s = [0.0] * job.num_stages
        self._wake = [(0.0, stage) for stage in range(job.num_stages)]
        if pace_s:
            self._wake += [(in_s, 0) for in_s in self._forward_in_s[job.chain[0]]]
        self._tolerance_s = 1e-9 * job.floor_s

    def run(self) -> None:
        wake, free_s, tolerance_s = self._wake, self._free_s, self._tolerance_s
        while wake:
            now_s, stage = heappop(wake)
            if free_s[stage] <= now_s + tolerance_s:
                self._step(stage, max(now_s, free_s[stage]))

    def _step(self, stage: int, now_s: float) -> None:
        """Start what is best at this moment, if anything is."""
        job, turns = self.job, self.turns[stage]
        gradient, gradient_in_s = self._next_gradient(stage, now_s + self._tolerance_s)
        forward, forward_in_s, full = self._next_forward(stage, now_s + self._tolerance_s)
        weights = self._weights[stage] < len(self._pending[stage])
        forwards_turn = self.rule.strict and (not turns or turns[-1][0] == GRADIENT)
        if gradient >= 0 and (forward < 0 or not forwards_turn):
            gradient_s = job.gradient_s[gradient][self._gradients[gradient]]
            room_first = forwards_turn and full and weights
            waits = forwards_turn and self._waits(stage, now_s, forward_in_s, gradient_s)
            if not (room_first or waits):
                self._start_gradient(stage, gradient, now_s)
                return
        elif forward >= 0:
            forward_s = job.forward_s[forward][self._forwards[forward]]
            if gradient >= 0 or not self._waits(stage, now_s, gradient_in_s, forward_s):
                self._start_forward(stage, forward, now_s)
                return
        if weights:
            until_s = math.inf if full else min(gradient_in_s, forward_in_s)
            self._start_weights(stage, now_s, until_s)

    def _next_gradient(self, stage: int, ready_s: float) -> tuple[int, float]:
        """The part whose gradient comes next, or -1; when an input of another arrives."""
        in_s = math.inf
        for part in range(stage * self.chunks, (stage + 1) * self.chunks):
            microbatch = self._gradients[part]
            if microbatch < self.job.num_microbatches:
                arrival_s = self._gradient_in_s[part][microbatch]
                if arrival_s <= ready_s:
                    return part, in_s
                in_s = min(in_s, arrival_s)
        return -1, in_s

    def _next_forward(self, stage: int, ready_s: float) -> tuple[int, float, bool]:
        """The same of forwards; and whether one is ready that there is no room for."""
        in_s, full = math.inf, False
        for part in range((stage + 1) * self.chunks - 1, stage * self.chunks - 1, -1):
            microbatch = self._forwards[part]
            if microbatch < self.job.num_microbatches:
                arrival_s = self._forward_in_s[part][microbatch]
                if arrival_s >= in_s:
                    continue
                if not self._has_room(stage, part, microbatch):
                    full = full or arrival_s <= ready_s
                elif arrival_s <= ready_s:
                    return part, in_s, full
                else:
                    in_s = arrival_s
        return -1, in_s, full

    def _has_room(self, stage: int, part: int, microbatch: int) -> bool:
        job, limit = self.job, self.job.stage_limits[stage] + HELD_TOLERANCE
        if self._held[stage] + job.part_held[part] > limit:
            return False
        last = stage * self.chunks + self.chunks - 1
        oldest = self._forwards[last]
        if microbatch == oldest or limit == math.inf:
            return True
        needed = job.part_held[part]
        for own in range(last - self.chunks + 1, last + 1):
            needed += job.part_held[own] * max(1, self._forwards[own] - oldest)
        return needed <= limit

    def _waits(
        self,
        stage: int,
        now_s: float,
        until_s: float,
        other_s: float,
        patience: float | None = None,
    ) -> bool:
        """Whether to wait for an input, rather than start a unit that would delay what needs it."""
        if patience is None:
            patience = self.rule.patience
        return (
            until_s - now_s < patience * other_s
            and until_s < now_s + other_s - self._tolerance_s
            and (
                not self.rule.hurried
                or until_s + self._left_s[stage] <= self._latest_s[stage] + self._tolerance_s
            )
        )

    def _start_forward(self, stage: int, part: int, now_s: float) -> None:
        job, microbatch = self.job, self._forwards[part]
        self._forwards[part] += 1
        self._held[stage] += job.part_held[part]
        self.turns[stage].append((FORWARD, part, microbatch))
        end_s = self._occupy(stage, now_s, job.forward_s[part][microbatch])
        after = job.following[part]
        if after < 0:
            self._gradient_in_s[part][microbatch] = end_s
        else:
            self._forward_in_s[after][microbatch] = end_s + job.hop_s[part]
            heappush(self._wake, (end_s + job.hop_s[part], after // self.chunks))

    def _start_gradient(self, stage: int, part: int, now_s: float) -> None:
        job, microbatch = self.job, self._gradients[part]
        self._gradients[part] += 1
        self._held[stage] += job.holds[GRADIENT] * job.part_held[part]
        self.turns[stage].append((GRADIENT, part, microbatch))
        if job.split:
            self._pending[stage].append((part, microbatch))
        end_s = self._occupy(stage, now_s, job.gradient_s[part][microbatch])
        before = job.preceding[part]
        if before >= 0:
            self._gradient_in_s[before][microbatch] = end_s + job.hop_s[before]
            heappush(self._wake, (end_s + job.hop_s[before], before // self.chunks))

    def _start_weights(self, stage: int, now_s: float, until_s: float) -> None:
        """Start the oldest weight gradient, unless it delays another unit by too much."""
        part, microbatch = self._pending[stage][self._weights[stage]]
        duration_s = self.job.weight_s[part][microbatch]
        if not self._waits(stage, now_s, until_s, duration_s, _FILL_PATIENCE):
            self._weights[stage] += 1
            self._held[stage] += self.job.holds[WEIGHTS] * self.job.part_held[part]
            self._occupy(stage, now_s, duration_s)

    def _occupy(self, stage: int, now_s: float, duration_s: float) -> float:
        end_s = now_s + duration_s
        self._left_s[stage] -= duration_s
        self._free_s[stage] = end_s
        heappush(self._wake, (end_s, stage))
        return end_s
