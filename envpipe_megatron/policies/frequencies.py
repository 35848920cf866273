"""Clocks by EnvPipe's rules, and how they are raised (Choi et al., ATC'23, section 4).

A policy is a function of a schedule and a profile that returns a frequency in MHz for each unit,
[num_stages, units_per_stage], each of them profiled. Another package adds its own by an entry point
of the group `envpipe_megatron.policies`, as `added_functions` reads it.

Reconfiguring raises frequencies on the critical path until it is the envelope (section 4.3, with
the rules of the authors' code). The path comes from a computed timeline or from measured receives.
What was raised and has slack in the end is lowered again (`lower`), which is not EnvPipe's.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from heapq import heappop, heappush
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NamedTuple

import numpy as np

from envpipe_megatron.core.arrays import FloatArray, IntArray
from envpipe_megatron.core.plan import Plan, max_frequencies
from envpipe_megatron.core.profile import Profile
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.core.timeline import RELATIVE_TOLERANCE, LongestPath
from envpipe_megatron.errors import EnvPipeError

#: A unit that takes this much longer at a lower clock, s, takes as long.
_LEAST_S = 1e-12


def uniform(schedule: Schedule, profile: Profile) -> IntArray:
    """Return all units at their stage's optimal frequency; ProfileError if a stage has none."""
    optimal = np.array(profile.optimal_frequency_mhz, dtype=np.int64)[:, None]
    return np.repeat(optimal, schedule.units_per_stage, axis=1)


def envelope(schedule: Schedule, profile: Profile) -> IntArray:
    """Return maximum clocks on the outer envelope, optimal ones inside; errors as `uniform`."""
    inside = uniform(schedule, profile)
    return np.where(schedule.outer_envelope, max_frequencies(schedule, profile), inside)


def added_functions(group: str, known: Collection[str]) -> dict[str, Callable[..., Any]]:
    """Return functions of installed packages by name; each is imported when it is called.

    A package adds one by an entry point in its `pyproject.toml`, after which commands and the
    options of a job take its name. None can replace a `known` one.

        [project.entry-points."envpipe_megatron.schedules"]
        mine = "my_package.orders:mine"
    """
    found = entry_points(group=group)
    return {entry.name: partial(_call, entry) for entry in found if entry.name not in known}


def _call(entry: EntryPoint, *arguments: Any) -> Any:
    try:
        function = entry.load()
    except Exception as error:
        raise EnvPipeError(
            f"'{entry.name}' of {entry.group} cannot be imported: {error}",
            value=entry.value,
            remedy="Fix or remove the package that adds it.",
        ) from error
    return function(*arguments)


_OWN = {"baseline": max_frequencies, "uniform": uniform, "envelope": envelope}
#: By name, our own and those that packages add.
POLICIES: dict[str, Callable[[Schedule, Profile], IntArray]] = {
    **_OWN,
    **added_functions("envpipe_megatron.policies", _OWN),
}


class Ended(StrEnum):
    """Why reconfiguring ended."""

    ENVELOPE = "the critical path is the outer envelope"
    NOTHING_CAN_RISE = "nothing on the critical path can rise"
    STEP_LIMIT = "the limit of steps was reached"


@dataclass(frozen=True)
class ReconfigurePolicy:
    """Choice of the units on the critical path that one step raises.

    Args:
        granularity_mhz: a raised unit gets the lowest clock that is at least this much higher.
        max_steps: steps after which the loop gives up.
        together: whether all nodes with the lowest frequency rise, or only the path's last.
    """

    name: str
    granularity_mhz: int
    max_steps: int
    together: bool


#: Greedy raises one unit by 90 MHz, balanced all units with the lowest frequency by 30 MHz (V100
#: and RTX 3090). Greedy needs a step for each of thousands of units, so it has its own limit.
RECONFIGURE_POLICIES = {
    "greedy": ReconfigurePolicy("greedy", 90, 50_000, together=False),
    "balanced": ReconfigurePolicy("balanced", 30, 5_000, together=True),
}


@dataclass(frozen=True)
class Reconfigured:
    """The outcome of the whole loop."""

    frequency_mhz: IntArray
    steps: int
    ended: Ended


class Rung(NamedTuple):
    """A lower frequency of a unit, against its present one.

    Args:
        longer: by what share of its time the unit takes longer.
        saved_j: what one GPU saves in an iteration that takes as long.
    """

    frequency_mhz: int
    longer: float
    saved_j: float


class Ladders:
    """The frequencies that each unit of a schedule can be raised and lowered through.

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
        self._curves = profile.curves

    def next_above(self, node: int, frequency_mhz: int, granularity_mhz: int) -> int | None:
        """Return the frequency to raise a node to, or None at the top."""
        rungs = self._rungs[self._keys[node]]
        if not rungs or frequency_mhz >= rungs[-1]:
            return None
        at = bisect_left(rungs, frequency_mhz + granularity_mhz)
        return rungs[min(at, len(rungs) - 1)]

    def next_below(self, node: int, frequency_mhz: int, waiting_w: float) -> Rung | None:
        """Return the next lower rung of a node that saves energy, or None; its frequency is a rung.

        The unit's time and energy are the profile's, and a wait that it fills took `waiting_w`.
        """
        key = self._keys[node]
        rungs = self._rungs[key][: bisect_left(self._rungs[key], frequency_mhz) + 1]
        clocks, times_s, energies_j = self._curves[key]
        time_s = np.interp(rungs, clocks, times_s)
        cost_j = np.interp(rungs, clocks, energies_j - waiting_w * times_s)
        cheaper = np.flatnonzero(cost_j < cost_j[-1])
        if not cheaper.size:
            return None
        at = cheaper[-1]
        return Rung(rungs[at], float(time_s[at] / time_s[-1]) - 1, float(cost_j[-1] - cost_j[at]))


def step(
    schedule: Schedule,
    frequency_mhz: Sequence[int],
    path: list[int],
    policy: ReconfigurePolicy,
    ladders: Ladders,
) -> tuple[dict[int, int], Ended | None]:
    """Take one reconfigure step on a critical path (nodes, from its end).

    Returns the units to raise, node -> new frequency in MHz, or none and why reconfiguring has
    ended. `frequency_mhz`, [num_units], is the current frequency of each node. Units that run
    as one have one clock, that of the last of them.
    """
    if schedule.outer_envelope.ravel()[path].all():
        return {}, Ended.ENVELOPE
    combined = schedule.combined.ravel()
    targets = {
        node: target
        for node in path
        if not combined[node]
        and (target := ladders.next_above(node, frequency_mhz[node], policy.granularity_mhz))
    }
    if not targets:
        return {}, Ended.NOTHING_CAN_RISE
    if not policy.together:
        return dict(list(targets.items())[:1]), None
    lowest = min(frequency_mhz[node] for node in targets)
    raised = {node: clock for node, clock in targets.items() if frequency_mhz[node] == lowest}
    return raised, None


def lower(
    plan: Plan,
    frequency_mhz: Sequence[int],
    duration_s: FloatArray,
    threshold_s: float,
    ladders: Ladders,
    lowered: Mapping[int, int],
) -> dict[int, int]:
    """Return the units to slow down where nothing is to be raised: node -> frequency in MHz.

    They were raised, but others wait for them only later, so the iteration keeps its time. Slack
    goes, rung by rung, to whom it saves most for its time. As much is left of it as makes a wait on
    the path, which therefore stays the same. Units that had to be raised again are not lowered, so
    that a loop of raising and lowering ends.

    Args:
        plan: what the loop began with; no unit gets a clock below the plan's.
        frequency_mhz: [num_units] present frequencies.
        duration_s: [num_stages, units_per_stage] what units take at these.
        threshold_s: the longest wait that counts as none.
        lowered: of all units that were lowered before, the frequencies that they got.
    """
    schedule, conditions, width = plan.schedule, plan.conditions, plan.schedule.units_per_stage
    times_s, tail_s = duration_s.ravel().tolist(), conditions.tail_by_stage_s
    path = LongestPath(schedule, times_s, conditions.latency_s, tail_s)
    path.find_ends()
    path.find_latest_ends(max(path.stage_end_s))
    least: list[int] = plan.frequency_mhz.ravel().tolist()
    waiting: list[tuple[float, int, Rung]] = []

    def push(node: int, clock: int) -> None:
        stage = node // width
        rung = ladders.next_below(node, clock, conditions.blocking_power_w[stage])
        if rung and rung.frequency_mhz >= least[node]:
            longer_s = max(path.duration_s[node] * rung.longer, _LEAST_S)
            saved_j = float(conditions.gpus_by_stage[stage]) * rung.saved_j
            heappush(waiting, (-saved_j / longer_s, node, rung))

    for node, clock in enumerate(frequency_mhz):
        if least[node] < clock <= lowered.get(node, clock):
            push(node, clock)
    found: dict[int, int] = {}
    while waiting:
        _, node, rung = heappop(waiting)
        longer_s = path.duration_s[node] * rung.longer
        # Without slack none is lowered, even if the profile has it faster at a lower clock.
        if path.latest_end_s[node] - path.end_s[node] - max(longer_s, 0.0) > 2 * threshold_s:
            path.change(node, path.duration_s[node] + longer_s)
            found[node] = rung.frequency_mhz
            push(node, rung.frequency_mhz)
    return found


def reconfigure(plan: Plan, policy: ReconfigurePolicy) -> Reconfigured:
    """Repeat a policy's step offline, until the path that the evaluator gives the plan is done.

    Late clocks are left out until nothing else is on the path: a unit that rises by itself
    comes late, and raising those around it one by one would end with whole stages at the top. Then
    units are lowered and, where late clocks bring one onto the path, raised again, as long as the
    evaluator finds that it saves energy and costs no time.
    """
    schedule, ladders = plan.schedule, Ladders(plan.schedule, plan.profile)
    frequency: list[int] = plan.frequency_mhz.ravel().tolist()
    conditions = replace(plan.conditions, change_time_s=0.0)
    steps, lowered = 0, dict[int, int]()
    best: tuple[Plan, Reconfigured] | None = None
    while True:
        frequency_mhz = np.array(frequency).reshape(plan.frequency_mhz.shape)
        now = replace(plan, frequency_mhz=frequency_mhz, conditions=conditions)
        path = now.timeline.critical_path()
        changes, ended = step(schedule, frequency, path, policy, ladders)
        if not ended and steps < policy.max_steps:
            steps += 1
        elif conditions != plan.conditions:
            conditions = plan.conditions
            continue
        elif best and not _better(now, best[0]):
            return best[1]
        else:
            best = now, Reconfigured(frequency_mhz, steps, ended or Ended.STEP_LIMIT)
            threshold_s = RELATIVE_TOLERANCE * now.cost.iteration_time_s
            duration_s = now.timeline.duration_s
            changes = lower(plan, frequency, duration_s, threshold_s, ladders, lowered)
            if not ended or not changes:
                return best[1]
            lowered |= changes
        for node, target in changes.items():
            frequency[node] = target


def _better(plan: Plan, other: Plan) -> bool:
    """Return whether a plan takes less energy than another, and no more time."""
    longest_s = other.cost.iteration_time_s * (1 + RELATIVE_TOLERANCE)
    return plan.cost.energy_j < other.cost.energy_j and plan.cost.iteration_time_s <= longest_s
