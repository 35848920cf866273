"""EnvPipe's reconfiguring: raise frequencies on the critical path until it is the envelope.

Choi et al., ATC'23, section 4.3, with the rules of the authors' code. The path comes from a
computed timeline or from measured receives.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from envpipe_megatron.core.plan import Plan
from envpipe_megatron.core.profile import Profile
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.core.timeline import is_envelope
from envpipe_megatron.policies.frequencies import Frequencies


class Ended(StrEnum):
    """Why reconfiguring ended."""

    ENVELOPE = "the critical path is the outer envelope"
    NOTHING_CAN_RISE = "nothing on the critical path can rise"
    STEP_LIMIT = "the limit of steps was reached"


@dataclass(frozen=True)
class ReconfigurePolicy:
    """Which units on the critical path one step raises.

    Args:
        granularity_mhz: a raised unit gets the lowest clock that is at least this much higher.
        max_steps: steps after which the loop gives up.
        select: from the path's nodes that can rise, in order from the end of the path, and their
            frequencies, the nodes to raise together.
    """

    name: str
    granularity_mhz: int
    max_steps: int
    select: Callable[[Sequence[int], Mapping[int, int]], Sequence[int]]


def _last_on_path(path: Sequence[int], frequency_mhz: Mapping[int, int]) -> Sequence[int]:
    return path[:1]


def _lowest_on_path(path: Sequence[int], frequency_mhz: Mapping[int, int]) -> Sequence[int]:
    lowest = min(frequency_mhz[node] for node in path)
    return [node for node in path if frequency_mhz[node] == lowest]


#: Greedy raises one unit by 90 MHz, balanced all units with the lowest frequency by 30 MHz (V100
#: and RTX 3090). Greedy needs a step for each of thousands of units, so it has its own limit.
RECONFIGURE_POLICIES = {
    "greedy": ReconfigurePolicy("greedy", 90, 50_000, _last_on_path),
    "balanced": ReconfigurePolicy("balanced", 30, 5_000, _lowest_on_path),
}


@dataclass(frozen=True)
class Step:
    """One look at an iteration.

    Args:
        path: nodes of the critical path, from its end.
        raised: node -> new frequency in MHz; empty when reconfiguring has ended.
        ended: why, if it has.
    """

    path: list[int]
    raised: dict[int, int]
    ended: Ended | None


@dataclass(frozen=True)
class Reconfigured:
    """The outcome of the whole loop."""

    frequency_mhz: Frequencies
    steps: int
    ended: Ended


class Ladders:
    """The frequencies that each unit of a schedule can be raised through.

    `clocks_mhz` lists for each stage all that its GPUs have; by default the profiled ones count,
    and never any beyond those.
    """

    def __init__(
        self,
        schedule: Schedule,
        profile: Profile,
        clocks_mhz: Sequence[Iterable[int]] | None = None,
    ) -> None:
        self._rungs: list[list[int]] = []
        for part, kinds in enumerate(profile.rows):
            for rows in kinds.values():
                rungs = profiled = sorted(row.frequency_mhz for row in rows)
                if clocks_mhz is not None:
                    known = sorted(clocks_mhz[part // profile.listed_chunks])
                    rungs = [c for c in known if profiled[0] <= c <= profiled[-1]]
                self._rungs.append(rungs)
        self._keys = profile.keys(schedule).ravel().tolist()

    def next_above(self, node: int, frequency_mhz: int, granularity_mhz: int) -> int | None:
        """The frequency to raise a node to, or None at the top."""
        rungs = self._rungs[self._keys[node]]
        if not rungs or frequency_mhz >= rungs[-1]:
            return None
        at = bisect_left(rungs, frequency_mhz + granularity_mhz)
        return rungs[min(at, len(rungs) - 1)]


def step(
    schedule: Schedule,
    frequency_mhz: Sequence[int],
    path: list[int],
    policy: ReconfigurePolicy,
    ladders: Ladders,
) -> Step:
    """One reconfigure step on a critical path (nodes, from its end).

    `frequency_mhz`, [num_units], is the current frequency of each node. Units that run
    as one have one clock, that of the last of them.
    """
    if is_envelope(schedule, path):
        return Step(path, {}, Ended.ENVELOPE)
    combined = schedule.combined.ravel()
    targets = {
        node: target
        for node in path
        if not combined[node]
        and (target := ladders.next_above(node, frequency_mhz[node], policy.granularity_mhz))
    }
    if not targets:
        return Step(path, {}, Ended.NOTHING_CAN_RISE)
    chosen = policy.select(list(targets), {node: frequency_mhz[node] for node in targets})
    return Step(path, {node: targets[node] for node in chosen}, None)


def reconfigure(plan: Plan, policy: ReconfigurePolicy) -> Reconfigured:
    """Repeat a policy's step offline, until the path that the evaluator gives the plan is done.

    Late clocks are left out until nothing else is on the path: a unit that rises alone comes late
    itself, and raising those around it one by one would end with whole stages at the top.
    """
    schedule, conditions = plan.schedule, plan.conditions
    ladders = Ladders(schedule, plan.profile)
    frequency: list[int] = plan.frequency_mhz.ravel().tolist()
    steps = 0
    for change_time_s in sorted({0.0, conditions.change_time_s}):
        conditions = replace(conditions, change_time_s=change_time_s)
        while True:
            frequency_mhz = np.array(frequency).reshape(plan.frequency_mhz.shape)
            now = replace(plan, frequency_mhz=frequency_mhz, conditions=conditions)
            taken = step(schedule, frequency, now.timeline.critical_path(), policy, ladders)
            if taken.ended or steps >= policy.max_steps:
                break
            for node, target in taken.raised.items():
                frequency[node] = target
            steps += 1
    return Reconfigured(frequency_mhz, steps, taken.ended or Ended.STEP_LIMIT)
