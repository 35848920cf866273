"""The search: the best cut of each shape, the fastest by the simulator, and those planned.

What is exact: the cut of each shape without virtual stages, by the time that it forces, and the
memory of every configuration; no shape is passed over whose bound is below what is found. With
energy or cost the planner decides, for the best few by an estimate; among them are other cuts of
the best shapes, as what is even in time need not be what takes the least energy with clocks.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

import numpy as np

from envpipe_megatron.core.arrays import FloatArray
from envpipe_megatron.core.plan import Cost, Plan
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.policies.objective import Goal, Objective
from envpipe_megatron.search.candidates import Candidate
from envpipe_megatron.search.configuration import Job
from envpipe_megatron.search.cuts import least_energy_j
from envpipe_megatron.search.layer_profile import LayerProfile
from envpipe_megatron.search.runs import BETTER, cheapest_paths
from envpipe_megatron.search.space import MegatronSpace, Space

#: Configurations that are shown, and that are planned with clocks, at most.
NUM_SHOWN, NUM_PLANNED = 10, 6
#: Iteration times at which the score of a candidate is estimated.
_NUM_TIMES = 5
#: Models of more pieces are cut only for time: the list of cuts takes their square.
_MOST_PIECES = 256
#: 1F1B takes more than a stage forces: at most this many cuts are simulated for one that is wanted.
_CUTS_FOR_ONE = 8


@dataclass(frozen=True)
class Ranked:
    """A candidate with its plan, if joules are known."""

    candidate: Candidate
    plan: Plan | None

    @property
    def cost(self) -> Cost | None:
        """Time and energy of all GPUs under the plan."""
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
    """Result of a search, the best first, and how much it looked at."""

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
) -> Found:
    """Return the best configurations of a job.

    Args:
        objective: without joules only the least time.
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
    candidates, num_cut = _simulated(megatron, max_slowdown, most)
    ranked = [Ranked(candidate, None) for candidate in candidates]
    if profile.has_energy:
        longest_s = candidates[0].iteration_time_s * (1 + max_slowdown)
        if not quickest:
            candidates = _cheapest(megatron, candidates, objective, blocking_power_w, longest_s)
        within_s = None if quickest else longest_s
        ranked = planned(candidates[:NUM_PLANNED], blocking_power_w, within_s, objective)
    return Found(tuple(ranked), len(megatron.shapes), num_cut)


def planned(
    candidates: Iterable[Candidate],
    blocking_power_w: float,
    longest_s: float | None,
    objective: Objective,
) -> list[Ranked]:
    """Return candidates with their plans, as `Candidate.plan` makes them, the best first."""

    def score(each: Ranked) -> float:
        assert each.cost is not None
        return objective.score(each.cost, each.candidate.job.num_gpus)

    found = (Ranked(each, each.plan(blocking_power_w, longest_s, objective)) for each in candidates)
    return sorted(found, key=score)


def _cheapest(
    megatron: MegatronSpace,
    candidates: list[Candidate],
    objective: Objective,
    blocking_power_w: float,
    longest_s: float,
) -> list[Candidate]:
    """Return the fastest candidate, then others, and other cuts of the best, by an estimated score.

    It is the least at a few iteration times, from a candidate's own to the longest.
    """

    def key(candidate: Candidate) -> float:
        times_s = np.linspace(candidate.iteration_time_s, longest_s, _NUM_TIMES)
        energies_j = estimates_j(candidate, blocking_power_w, times_s)
        costs = map(Cost, times_s.tolist(), energies_j.tolist())
        return min(objective.score(cost, megatron.job.num_gpus) for cost in costs)

    found = list(candidates)
    for candidate in sorted(candidates, key=key)[:NUM_PLANNED]:
        found += alternatives(megatron, candidate, blocking_power_w, longest_s, NUM_PLANNED)
    unlike = {candidate.configuration: candidate for candidate in found}
    fastest = unlike.pop(candidates[0].configuration)
    return [fastest, *sorted(unlike.values(), key=key)]


def estimates_j(candidate: Candidate, blocking_power_w: float, times_s: FloatArray) -> FloatArray:
    """Return energies (J) of all GPUs at [n] iteration times (s), estimated as `energy_weights`."""
    configuration, works = candidate.configuration, candidate.works
    gpus = np.array([stage.num_gpus for stage in configuration.stages])
    first_s = np.array([work.forward_s[0, 0] + work.backward_s[0, 0] for work in works])
    window_s = times_s[:, None] - (np.cumsum(first_s) - first_s)
    units = [
        [np.array([getattr(work, f"{kind}_{of}")[chunk] for work in works]) for of in ("j", "s")]
        for chunk in range(configuration.num_chunks)
        for kind in ("forward", "backward")
    ]
    microbatches = configuration.num_microbatches
    busy_j = least_energy_j(units, window_s / microbatches, blocking_power_w)
    energies_j: FloatArray = (microbatches * busy_j + blocking_power_w * times_s[:, None]) @ gpus
    return energies_j


def alternatives(
    megatron: MegatronSpace,
    candidate: Candidate,
    blocking_power_w: float,
    longest_s: float,
    most: int,
) -> list[Candidate]:
    """Return the cheapest cuts of a candidate's shape that the simulator says are in time.

    By the same estimate, of the first ones; none with virtual stages.
    """
    shape = candidate.configuration.shape
    if shape.num_chunks > 1 or megatron.pieces(shape).num_pieces > _MOST_PIECES:
        return []
    within_s = longest_s / megatron.profile.least_rested / BETTER
    cuts = megatron.cuts(shape, megatron.alike(candidate), within_s)
    weights = cuts.energy_weights(within_s, longest_s, blocking_power_w)
    paths = islice(cheapest_paths(cuts.runs, weights), most * _CUTS_FOR_ONE)
    candidates = (megatron.candidate(shape, path, cuts.recomputed(path)) for path in paths)
    in_time = (each for each in candidates if each.iteration_time_s <= longest_s)
    return list(islice(in_time, most))


def _simulated(
    megatron: MegatronSpace, max_slowdown: float, most: int | None
) -> tuple[list[Candidate], int]:
    """Return the fastest candidates by the simulator, and how many shapes were cut for that.

    `most` of them, or all that are within the slowdown. Shapes come by their bound, which is below
    that of their cut, which is below what the simulator finds where no GPU is the faster for its
    rests. With the most that rests can save allowed for, no shape is missed.
    """
    found: list[tuple[float, int, Candidate]] = []
    num_cut = 0
    rested = megatron.profile.least_rested
    for number, shape in enumerate(megatron.shapes):
        longest_s = found[0][0] * (1 + max_slowdown) if found else math.inf
        if most is not None:
            longest_s = found[-1][0] if len(found) == most else math.inf
        longest_s /= rested
        if megatron.bound_s(shape) > longest_s:
            break
        num_cut += 1
        candidate = megatron.best_cut(shape, longest_s)
        if candidate is not None and candidate.bound_s <= longest_s:
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
