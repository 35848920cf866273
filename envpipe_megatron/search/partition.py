"""Layers over the stages of a 1F1B pipeline: the search in one shape, for `envpipe partition`.

The bottleneck depends on single stages, so the least one is a path through the graph of runs. The
iteration time is no such maximum over stages, but one bounds it from below: cuts within the bound
are listed in the order of a sum over stages, and each is timed. Of the cheapest few by an estimate
of energy, each is planned. Messages and the optimizer are left out.

Enter at `SplitSpace` with `least_bottleneck` or `least_energy`. `envpipe partition` calls them, and
`parts` for DeepSpeed's and transformers' lists of layers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise

import numpy as np

from envpipe_megatron.core.arrays import FloatArray, IntArray
from envpipe_megatron.core.conditions import make_conditions
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.plan import Cost
from envpipe_megatron.core.profile import Profile
from envpipe_megatron.core.timeline import RELATIVE_TOLERANCE, LongestPath
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.policies.optimal.linear_program import LinearProgramError
from envpipe_megatron.policies.optimal.optimizer import Optimizer
from envpipe_megatron.policies.problem import envpipe_counts, in_flight_by_memory, order_limits
from envpipe_megatron.search.candidates import Candidate
from envpipe_megatron.search.configuration import Job, Split
from envpipe_megatron.search.cuts import Shape, ShapeCuts
from envpipe_megatron.search.layer_profile import EMBEDDING, LOSS, LayerProfile, Links
from envpipe_megatron.search.runs import cheapest_paths, least_path
from envpipe_megatron.search.space import MegatronSpace, Space

#: Cuts that are planned at most, the most promising first.
MAX_PLANNED = 12
#: Cuts that one search times at most, and units it computes for that.
_MAX_CUTS = 20_000
_MAX_UNITS = 100_000_000
#: Units of a batch of timelines in memory at once (8 bytes each).
_BATCH_UNITS = 8_000_000
_SLACK = 1 + RELATIVE_TOLERANCE

#: The first layer of each stage, and the number of layers; embedding and loss count.
Cut = tuple[int, ...]


@dataclass(frozen=True)
class Found:
    """A cut, and how sure it is the best one.

    Args:
        deadline_s: 1F1B's iteration time at the highest clocks, or by energy the longest allowed.
        num_considered: cuts that were timed.
        exact: no cut that was left out can be better.
        cost: by energy, that of its plan, no slower than the deadline.
        num_planned: cuts that were planned.
    """

    cut: Cut
    deadline_s: float
    num_considered: int
    exact: bool
    cost: Cost | None = None
    num_planned: int = 0


class SplitSpace:
    """Every cut of a profile's layers into the stages of a 1F1B pipeline.

    Args:
        profile: measured at one of the sizes only.
        memory_limit_bytes: the most that a stage may hold at 1F1B's peak.

    Lists by stage have arrays [rows, width] over `runs`; `forced_s` is the least iteration time by
    each run, infinite where it does not keep the limit.

    EnvPipeError: several sizes, fewer layers than stages, or a limit that no cut keeps.
    """

    def __init__(
        self,
        profile: LayerProfile,
        num_stages: int,
        num_microbatches: int,
        memory_limit_bytes: float | None = None,
    ) -> None:
        if num_stages < 2 or num_microbatches < 1:
            raise EnvPipeError(
                "A split needs at least two stages and one microbatch",
                value=(num_stages, num_microbatches),
            )
        if len(profile.measures) != 1:
            raise EnvPipeError(
                f"{profile.source} was measured at several sizes, and layers are split at one",
                value=sorted(profile.measures),
                remedy="Leave the measures of one in, or let `envpipe search` choose.",
            )
        num_layers = len(profile.pieces)
        if num_stages > num_layers:
            raise EnvPipeError(
                f"{profile.source} has too few layers for {num_stages} stages",
                value=num_layers,
                remedy="Each stage needs a layer; the embedding and the loss count where profiled.",
            )
        (sizes,) = profile.measures
        self.num_stages, self.num_microbatches = num_stages, num_microbatches
        self.memory_limit_bytes = memory_limit_bytes
        limit_bytes = None if memory_limit_bytes is None else memory_limit_bytes * _SLACK
        gpus = num_stages * sizes.gpus
        job = Job(gpus, gpus, num_microbatches * sizes.microbatch_size, limit_bytes)
        self.profile = _layers_only(profile)
        self._space = MegatronSpace(self.profile, job, Space(distributed_optimizer=False))
        self.shape = Shape(sizes, num_stages, 1, 1, num_microbatches)
        self.pieces = self._space.pieces(self.shape)
        static_bytes, nothing = self._space.static_bytes(self.shape), (None, 0)
        self.cuts = ShapeCuts(self.pieces, self.shape, job, static_bytes, nothing)
        self.runs, self.forced_s = self.cuts.runs, self.cuts.forced_s
        self.time_s = [
            each.sums(self.pieces.forward_s) + each.sums(self.pieces.backward_s)
            for each in self.runs
        ]
        if memory_limit_bytes is not None:
            self._check_memory(memory_limit_bytes, static_bytes)
        self._schedule = builders.one_f_one_b(num_stages, num_microbatches)

    def candidate(self, cut: Cut) -> Candidate:
        """A cut as the search has it; without the memory limit if it does not keep that."""
        configuration = self._space.configuration(self.shape, cut, [(None, 0)] * self.num_stages)
        job = replace(self._space.job, memory_bytes=self.memory_limit_bytes)
        found, limit_bytes = Candidate(configuration, self.profile, job), job.memory_bytes
        if limit_bytes is not None and (found.peak_bytes > limit_bytes * _SLACK).any():
            return replace(found, job=replace(job, memory_bytes=None))
        return found

    def bottleneck_s(self, cut: Cut) -> float:
        """The slowest stage of a cut, forward plus backward at the highest clocks."""
        at, pieces = list(cut), self.pieces
        return float((np.diff(pieces.forward_s[at]) + np.diff(pieces.backward_s[at])).max())

    def iteration_times_s(self, cuts: IntArray) -> FloatArray:
        """[num_cuts] 1F1B iteration times at the highest clocks of [num_cuts, num_stages + 1]."""
        schedule = self._schedule
        width = schedule.units_per_stage
        kinds = list(enumerate(schedule.is_backward.ravel().tolist()))
        batch = max(1, _BATCH_UNITS // schedule.num_units)
        times = []
        for some in np.array_split(cuts, max(1, -(-len(cuts) // batch))):
            by_kind_s = [
                np.diff(sums[some], axis=1).T.copy()
                for sums in (self.pieces.forward_s, self.pieces.backward_s)
            ]
            path = LongestPath(schedule, [by_kind_s[k][node // width] for node, k in kinds])
            path.find_ends(np.maximum)
            times.append(np.max(path.end_s[width - 1 :: width], axis=0))
        return np.concatenate(times)

    def cheapest(self, weights: Sequence[FloatArray]) -> tuple[list[Cut], FloatArray, bool]:
        """The cheapest cuts by a sum over stages, as many as one search times.

        Returns the cuts, cheapest first; their iteration times, s; whether these are all there are.
        """
        units = 2 * self.num_stages * self.num_microbatches
        most = min(_MAX_CUTS, max(100, _MAX_UNITS // units))
        cuts = list(islice(cheapest_paths(self.runs, weights), most + 1))
        complete = len(cuts) <= most
        return cuts[:most], self.iteration_times_s(np.array(cuts[:most])), complete

    def _check_memory(self, limit_bytes: float, static_bytes: FloatArray) -> None:
        held_bytes = []
        for stage, runs in enumerate(self.runs):
            in_flight = min(self.num_microbatches, self.num_stages - stage)
            held = runs.excess_bytes(0.0, in_flight, runs.sums(static_bytes))
            held_bytes.append(np.where(runs.inside, held, np.inf))
        if not any(
            held[runs.inside].any() for held, runs in zip(held_bytes, self.runs, strict=True)
        ):
            raise EnvPipeError(
                f"{self.profile.source} has no bytes for the memory limit to apply to",
                remedy="Add the columns memory and activation, or leave the limit out.",
            )
        least, path = least_path(self.runs, held_bytes, largest=True)
        if least > limit_bytes * _SLACK:
            stages = zip(held_bytes, self.runs, pairwise(path.tolist()), strict=True)
            tightest = int(np.argmax([held[runs.place(*run)] for held, runs, run in stages]))
            raise EnvPipeError(
                f"No split keeps the memory limit of {limit_bytes:.6g} bytes: with the least peak, "
                f"{layers_of(self.profile, path.tolist())}, stage {tightest} is the tightest and "
                f"holds {least:.6g} bytes",
                remedy="Raise --memory-limit, use more stages, or recompute activations.",
            )


def layers_of(profile: LayerProfile, cut: Sequence[int]) -> Split:
    """Transformer layers on each stage of a cut."""
    counts = np.diff(cut)
    counts[0] -= profile.pieces[0] == EMBEDDING
    counts[-1] -= profile.pieces[-1] == LOSS
    return tuple(counts.tolist())


def cut_of(profile: LayerProfile, split: Split) -> Cut:
    """The inverse of `layers_of`."""
    inner = np.cumsum(split[:-1]) + (profile.pieces[0] == EMBEDDING)
    return (0, *inner.tolist(), len(profile.pieces))


def _layers_only(profile: LayerProfile) -> LayerProfile:
    """The profile without links and optimizer, recomputation, and times of GPUs that rest."""
    measures = {
        sizes: {
            piece: replace(measure, recomputation=(), rested_s=None)
            for piece, measure in by_piece.items()
        }
        for sizes, by_piece in profile.measures.items()
    }
    return replace(profile, measures=measures, links=Links(), optimizer_s=0.0, gradients_s=0.0)


def fastest(space: SplitSpace, forced: Sequence[FloatArray]) -> Found:
    """The cut with the least 1F1B iteration time; of equal ones the evenest.

    Even means the least sum of squared stage times, hence the least standard deviation. `forced` is
    the space's `forced_s`, infinite where runs are left out.
    """
    lower_s, path = least_path(space.runs, forced, largest=True)
    cut = tuple(path.tolist())
    best_s = float(space.iteration_times_s(path[None])[0])
    num_considered = 0
    while True:
        squares = [
            np.where(force <= best_s * _SLACK, time_s**2, np.inf)
            for force, time_s in zip(forced, space.time_s, strict=True)
        ]
        cuts, times_s, complete = space.cheapest(squares)
        num_considered += len(cuts)
        found_s = min(best_s, float(times_s.min()))
        ties = np.flatnonzero(times_s <= found_s * _SLACK)
        if ties.size:
            cut = cuts[ties[0]]
        at_bound = bool(ties.size) and found_s <= lower_s * _SLACK
        if complete or at_bound or found_s >= best_s * (1 - RELATIVE_TOLERANCE):
            return Found(cut, found_s, num_considered, complete or at_bound)
        best_s = found_s  # fewer runs can lead to a better one: the list may now be complete


def least_bottleneck(space: SplitSpace) -> Found:
    """The cut with the least slowest stage; of equal ones the fastest, then the evenest.

    The bottleneck is exact always; `exact` speaks of the iteration time among equal bottlenecks.
    """
    times = [
        np.where(np.isfinite(force), time_s, np.inf)
        for force, time_s in zip(space.forced_s, space.time_s, strict=True)
    ]
    least_s, _ = least_path(space.runs, times, largest=True)
    within = [
        np.where(time_s <= least_s * _SLACK, force, np.inf)
        for force, time_s in zip(space.forced_s, space.time_s, strict=True)
    ]
    return fastest(space, within)


def least_energy(
    space: SplitSpace,
    blocking_power_w: float,
    time_tolerance: float,
    max_planned: int = MAX_PLANNED,
) -> Found:
    """The cut with the least planned energy among those as fast as the fastest.

    Args:
        time_tolerance: the 1F1B iteration time at the highest clocks may exceed the least one by
            this fraction.
        max_planned: cuts to plan at most: those with the lowest estimate. The result is exact if
            they are all there are.

    Raises EnvPipeError for a profile without energies.
    """
    if not space.profile.has_energy:
        raise EnvPipeError(
            f"{space.profile.source} has no energies, so no split can be said to need less",
            remedy="Measure the column energy, or use --objective bottleneck.",
        )
    quickest = fastest(space, space.forced_s)
    limit_s = quickest.deadline_s * (1 + time_tolerance) * _SLACK
    weights = space.cuts.energy_weights(limit_s, limit_s, blocking_power_w)
    cuts, times_s, complete = space.cheapest(weights)
    within = [cut for cut, time_s in zip(cuts, times_s, strict=True) if time_s <= limit_s]
    candidates = list(dict.fromkeys([*within[:max_planned], quickest.cut]))
    costs = [
        plan_cost(
            space.candidate(cut).stage_profile, space.num_microbatches, blocking_power_w, limit_s
        )
        for cut in candidates
    ]
    best = min(range(len(costs)), key=lambda index: costs[index].energy_j)
    return Found(
        candidates[best],
        limit_s,
        quickest.num_considered + len(cuts),
        quickest.exact and complete and len(within) <= max_planned,
        costs[best],
        len(candidates),
    )


def plan_cost(
    profile: Profile, num_microbatches: int, blocking_power_w: float, deadline_s: float
) -> Cost:
    """Time and energy of a stage profile once its order and frequencies are planned.

    The one place that says how a split is planned: optimal frequencies on 1F1B or on EnvPipe's
    order, whichever is cheaper. Activation and free bytes of the profile's sidecar limit the
    microbatches in flight. EnvPipeError: neither order meets the deadline.
    """
    stages = profile.num_stages
    conditions = make_conditions(profile, blocking_power_w=blocking_power_w)
    known = profile.sidecar.activation_bytes is not None and profile.sidecar.free_bytes is not None
    limits = order_limits(
        stages,
        num_microbatches,
        max_in_flight=in_flight_by_memory(profile, num_microbatches) if known else None,
    )
    wanted = limits.fit(envpipe_counts(profile, num_microbatches))
    costs = []
    for schedule in (
        builders.one_f_one_b(stages, num_microbatches),
        builders.envpipe(stages, num_microbatches, wanted),
    ):
        with contextlib.suppress(LinearProgramError):  # an order that is too slow is no candidate
            costs.append(Optimizer(schedule, profile, conditions).plan(deadline_s).cost)
    if not costs:
        raise EnvPipeError(
            "A split takes longer than the deadline (s) in every order",
            value=deadline_s,
            remedy="Allow more time.",
        )
    return min(costs, key=lambda cost: cost.energy_j)
