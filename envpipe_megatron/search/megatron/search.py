"""The search: the best cut of each shape, the fastest by the simulator, and those planned.

What is exact: the cut of each shape without virtual stages, by the time that it forces, and the
memory of every configuration; no shape is passed over whose bound is below what is found. With
energy or cost the planner decides, for the best few by an estimate.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from envpipe_megatron.core.arrays import FloatArray
from envpipe_megatron.core.plan import Cost, Plan
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.policies.objective import Goal, Objective
from envpipe_megatron.search.configuration import Job
from envpipe_megatron.search.layer_profile import LayerProfile
from envpipe_megatron.search.megatron.candidates import Candidate
from envpipe_megatron.search.megatron.energy import alternatives, estimate_j
from envpipe_megatron.search.megatron.space import MegatronSpace, Space, shape_of

#: Configurations that are shown, and that are planned with clocks, at most.
NUM_SHOWN, NUM_PLANNED = 10, 6
#: Iteration times at which the score of a candidate is estimated.
_NUM_TIMES = 5

#: Told what is done, and how much of how many.
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Ranked:
    """A candidate with its plan, if joules are known."""

    candidate: Candidate
    plan: Plan | None

    @property
    def cost(self) -> Cost | None:
        """Of all GPUs, with the plan."""
        return None if self.plan is None else self.plan.cost

    @property
    def peak_bytes(self) -> FloatArray:
        """[num_stages] the most that a GPU holds, in the plan's order if there is one."""
        if self.plan is None:
            return self.candidate.peak_bytes
        return self.candidate.peak_bytes_of(self.plan.schedule)

    @property
    def iteration_time_s(self) -> float:
        """With the plan, if there is one."""
        return self.candidate.iteration_time_s if self.cost is None else self.cost.iteration_time_s


@dataclass(frozen=True)
class Found:
    """What a search found, the best first, and how much it looked at."""

    ranked: tuple[Ranked, ...]
    num_shapes: int
    num_cut: int


def search(
    profile: LayerProfile,
    job: Job,
    space: Space,
    objective: Objective,
    *,
    blocking_power_w: float = 0.0,
    max_slowdown: float = 0.0,
    progress: Progress = lambda *_: None,
) -> Found:
    """The best configurations of a job.

    Args:
        objective: without joules the least time alone.
        blocking_power_w: of a GPU that waits.
        max_slowdown: for other objectives than time, how much longer an iteration may take than
            that of the fastest configuration at the highest clocks, as a fraction.

    EnvPipeError: nothing fits, or energies are asked for that the profile has not.
    """
    quickest = objective.goal == Goal.TIME
    if not quickest and not profile.has_energy:
        raise EnvPipeError(
            "The layer profile has no joules, so nothing can be said of energy",
            value=str(objective.goal),
            remedy="Measure them, or model them with --power-model.",
        )
    megatron = MegatronSpace(profile, job, space)
    most = NUM_SHOWN if quickest else None
    candidates, num_cut = _simulated(megatron, max_slowdown, most, progress)
    ranked = [Ranked(candidate, None) for candidate in candidates]
    if profile.has_energy:
        longest_s = candidates[0].iteration_time_s * (1 + max_slowdown)
        if not quickest:
            candidates = _cheapest(megatron, candidates, objective, blocking_power_w, longest_s)
        ranked = []
        for done, candidate in enumerate(candidates[:NUM_PLANNED]):
            progress("planning", done, min(NUM_PLANNED, len(candidates)))
            plan = candidate.plan(blocking_power_w, None if quickest else longest_s, objective)
            ranked.append(Ranked(candidate, plan))
        ranked.sort(key=lambda each: objective.score(_known(each.cost), job.num_gpus))
    return Found(tuple(ranked), len(megatron.shapes), num_cut)


def _cheapest(
    megatron: MegatronSpace,
    candidates: list[Candidate],
    objective: Objective,
    blocking_power_w: float,
    longest_s: float,
) -> list[Candidate]:
    """The fastest candidate, then others, and other cuts of the best, by an estimated score.

    It is the least at a few iteration times, from a candidate's own to the longest.
    """

    def key(candidate: Candidate) -> float:
        times_s = np.linspace(candidate.iteration_time_s, longest_s, _NUM_TIMES).tolist()
        costs = (Cost(at_s, estimate_j(candidate, blocking_power_w, at_s)) for at_s in times_s)
        return min(objective.score(cost, megatron.job.num_gpus) for cost in costs)

    found = list(candidates)
    for candidate in sorted(candidates, key=key)[:NUM_PLANNED]:
        found += alternatives(
            megatron, shape_of(candidate.configuration), blocking_power_w, longest_s, NUM_PLANNED
        )
    unlike = {candidate.configuration: candidate for candidate in found}
    fastest = unlike.pop(candidates[0].configuration)
    return [fastest, *sorted(unlike.values(), key=key)]


def _simulated(
    megatron: MegatronSpace, max_slowdown: float, most: int | None, progress: Progress
) -> tuple[list[Candidate], int]:
    """The fastest candidates by the simulator, and how many shapes were cut for that.

    `most` of them, or all that are within the slowdown. Shapes come by their bound, which is below
    that of their cut, which is below what the simulator finds where no GPU is the faster for its
    rests. With the most that rests can save allowed for, no shape is missed.
    """
    found: list[tuple[float, int, Candidate]] = []
    num_cut = 0
    rested = megatron.profile.least_rested
    for number, shape in enumerate(megatron.shapes):
        progress("cutting", number, len(megatron.shapes))
        longest_s = found[0][0] * (1 + max_slowdown) if found else math.inf
        if most is not None:
            longest_s = found[-1][0] if len(found) == most else math.inf
        longest_s /= rested
        if megatron.bound_s(shape) > longest_s:
            break
        num_cut += 1
        if (cut := megatron.best_cut(shape, longest_s)) is None:
            continue
        candidate = Candidate(cut.configuration, megatron.profile, megatron.job)
        if cut.bound_s <= longest_s:
            insort(found, (candidate.iteration_time_s, number, candidate))
            found = found[:most]
    if not found:
        limit = megatron.job.memory_bytes
        raise EnvPipeError(
            "No configuration keeps the memory limit (GiB)",
            value=limit and limit / 2**30,
            remedy="Allow more, use more GPUs, or profile smaller microbatches, larger tensor "
            "parallel sizes or full recomputation.",
        )
    longest_s = math.inf if most else found[0][0] * (1 + max_slowdown)
    return [candidate for time_s, _, candidate in found if time_s <= longest_s], num_cut


def _known(cost: Cost | None) -> Cost:
    assert cost is not None
    return cost
