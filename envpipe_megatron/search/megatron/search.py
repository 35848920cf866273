"""The search: shapes and cuts by their estimates, the best simulated, and those planned.

What is exact: the cut of each shape without virtual stages, within the formula of `cuts`, and the
memory of every configuration. Between shapes the simulator decides, for as many as are close; with
energy or cost the planner does, for the best few by an estimate.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from envpipe_megatron.core.plan import Cost, Plan
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.policies.objectives.objective import Goal, Objective
from envpipe_megatron.search.configuration import Job
from envpipe_megatron.search.layer_profile import LayerProfile
from envpipe_megatron.search.megatron.candidates import Candidate
from envpipe_megatron.search.megatron.space import MegatronSpace, Space

#: Configurations that are shown, and that are planned with clocks, at most.
NUM_SHOWN, NUM_PLANNED = 10, 6

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
        if self.plan is None:
            return None
        return Cost(self.plan.cost.iteration_time_s, self.candidate.energy_j(self.plan))

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
            f"{profile.source} has no joules, so nothing can be said of energy",
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
            candidates.sort(key=lambda each: estimate_j(each, blocking_power_w, longest_s))
        ranked = []
        for done, candidate in enumerate(candidates[:NUM_PLANNED]):
            progress("planning", done, min(NUM_PLANNED, len(candidates)))
            plan = candidate.plan(blocking_power_w, None if quickest else longest_s)
            ranked.append(Ranked(candidate, plan))
        ranked.sort(key=lambda each: objective.score(_known(each.cost), job.num_gpus))
    return Found(tuple(ranked), len(megatron.shapes), num_cut)


def estimate_j(candidate: Candidate, blocking_power_w: float, longest_s: float) -> float:
    """Energy (J) of all GPUs if each stage runs at its cheapest clock that leaves it in time.

    In time for all its microbatches and the way of the first there and of the last back. Plans,
    which mix clocks, come close to it, so it says which candidates are worth one.
    """
    configuration, total_j, ahead_s = candidate.configuration, 0.0, 0.0
    for layout, work in zip(configuration.stages, candidate.works, strict=True):
        busy_s = configuration.num_microbatches * (work.forward_s + work.backward_s).sum(axis=0)
        busy_j = configuration.num_microbatches * (work.forward_j + work.backward_j).sum(axis=0)
        energy_j = busy_j + blocking_power_w * np.maximum(longest_s - busy_s, 0.0)
        in_time = busy_s <= max(longest_s - ahead_s, busy_s[0])
        total_j += layout.num_gpus * float(energy_j[in_time].min())
        ahead_s += float(work.forward_s[0, 0] + work.backward_s[0, 0])
    return total_j


def _simulated(
    megatron: MegatronSpace, max_slowdown: float, most: int | None, progress: Progress
) -> tuple[list[Candidate], int]:
    """The fastest candidates by the simulator, and how many shapes were cut for that.

    `most` of them, or all that are within the slowdown. Shapes come by their bound, which is below
    the estimate of their cut, which is below what the simulator finds; so none is missed.
    """
    found: list[tuple[float, int, Candidate]] = []
    num_cut = 0
    for number, shape in enumerate(megatron.shapes):
        progress("cutting", number, len(megatron.shapes))
        longest_s = found[0][0] * (1 + max_slowdown) if found else math.inf
        if most is not None:
            longest_s = found[-1][0] if len(found) == most else math.inf
        if megatron.bound_s(shape) > longest_s:
            break
        num_cut += 1
        if (cut := megatron.best_cut(shape, longest_s)) is None:
            continue
        candidate = Candidate(cut.configuration, megatron.profile, megatron.job)
        if cut.estimate_s + 2 * float(candidate.hops_s.sum()) <= longest_s:
            insort(found, (candidate.iteration_time_s, number, candidate))
            found = found[:most]
    if not found:
        raise EnvPipeError(
            "No configuration keeps the memory limit (bytes)",
            value=megatron.job.memory_bytes,
            remedy="Allow more, use more GPUs, or profile smaller microbatches, larger tensor "
            "parallel sizes or full recomputation.",
        )
    longest_s = math.inf if most else found[0][0] * (1 + max_slowdown)
    return [candidate for time_s, _, candidate in found if time_s <= longest_s], num_cut


def _known(cost: Cost | None) -> Cost:
    assert cost is not None
    return cost
