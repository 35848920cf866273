"""Layers over the stages of a 1F1B pipeline: the search in one shape, for `envpipe partition`.

The bottleneck depends on single stages, so the least one is a path through the graph of runs, and
so is the iteration time that stages force. By energy, the cheapest few cuts by the search's
estimate that are in time are planned. Messages and the optimizer are left out.

Enter at `SplitSpace` with `least_bottleneck` or `least_energy`, as `envpipe partition` does, or for
DeepSpeed's and transformers' lists of layers at `make_parts`. Its parts are DeepSpeed's notation:
with `[0, 3, 7]` the first of two stages has layers 0 to 2. There layers are all entries of the
list, embeddings and heads too, and each stage has one at least.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from envpipe_megatron.core.timeline import RELATIVE_TOLERANCE
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.policies.objective import LEAST_ENERGY
from envpipe_megatron.search.candidates import Candidate
from envpipe_megatron.search.configuration import Job, Shape
from envpipe_megatron.search.layer_file import read_layers
from envpipe_megatron.search.layer_profile import (
    LayerProfile,
    Links,
    running,
)
from envpipe_megatron.search.runs import Runs, least_path
from envpipe_megatron.search.search import Ranked, alternatives, planned
from envpipe_megatron.search.space import MegatronSpace, Space

#: Cuts that are planned at most, the most promising first.
_MAX_PLANNED = 12
_SLACK = 1 + RELATIVE_TOLERANCE

#: The slowest stage decides; of equal ones, the order of stages does, at a usual number of
#: microbatches for each stage.
_MICROBATCHES_PER_STAGE = 4
#: By energy, how much slower than the fastest split may be, as a fraction: as `envpipe partition`.
_TIME_TOLERANCE = 1e-3
_PARTS, _TIME, _ENERGY, _PARAMETERS = "parts:", "time:", "energy:", "parameters"
#: How a text begins that says a cut by something else than the layers' parameters.
METHODS = (_PARTS, _TIME, _ENERGY)

#: The first layer of each stage, and the number of layers; embedding and loss count.
Cut = tuple[int, ...]


class SplitSpace:
    """Every cut of a profile's layers into the stages of a 1F1B pipeline.

    Args:
        profile: measured at one of the sizes only.
        memory_limit_bytes: the most that a stage may hold at 1F1B's peak.

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
                "The layers were measured at several sizes, and are split at one",
                value=sorted(profile.measures),
                remedy="Leave the measures of one in, or let `envpipe search` choose.",
            )
        num_layers = len(profile.pieces)
        if num_stages > num_layers:
            raise EnvPipeError(
                f"The profile has too few layers for {num_stages} stages",
                value=num_layers,
                remedy="Each stage needs a layer; the embedding and the loss count where profiled.",
            )
        (sizes,) = profile.measures
        limit_bytes = None if memory_limit_bytes is None else memory_limit_bytes * _SLACK
        gpus = num_stages * sizes.gpus
        job = Job(gpus, gpus, num_microbatches * sizes.microbatch_size, limit_bytes)
        self.profile, space = _layers_only(profile), Space(distributed_optimizer=False)
        self.megatron = MegatronSpace(self.profile, job, space)
        self.shape = Shape(sizes, num_stages, 1, 1, num_microbatches)
        self.cuts = self.megatron.cuts(self.shape)
        if memory_limit_bytes is not None:
            self._check_memory(memory_limit_bytes)

    def candidate(self, cut: Cut) -> Candidate:
        """Return a cut as the search has it."""
        return self.megatron.candidate(self.shape, cut, [(None, 0)] * self.shape.num_stages)

    def _check_memory(self, limit_bytes: float) -> None:
        held_bytes, all_runs = [], self.cuts.runs
        static_bytes = self.megatron.static_bytes(self.shape)
        for stage, runs in enumerate(all_runs):
            in_flight = min(self.shape.num_microbatches, self.shape.num_stages - stage)
            held = runs.excess_bytes(0.0, in_flight, runs.sums(static_bytes))
            held_bytes.append(np.where(runs.inside, held, np.inf))
        least, _ = least_path(all_runs, held_bytes, largest=True)
        if least == 0:
            raise EnvPipeError(
                "The layers have no bytes for the memory limit to apply to",
                remedy="Give parameters and activation_bytes, or leave the limit out.",
            )
        if least > limit_bytes * _SLACK:
            raise EnvPipeError(
                f"No split keeps the memory limit of {limit_bytes:.6g} bytes; the least peak is "
                f"{least:.6g} bytes",
                remedy="Raise --memory-limit, use more stages, or recompute activations.",
            )


def _layers_only(profile: LayerProfile) -> LayerProfile:
    """Return the profile without links, optimizer, recomputation, and times of rested GPUs."""
    measures = {
        sizes: {
            piece: replace(measure, recomputation=(), rested_s=None)
            for piece, measure in by_piece.items()
        }
        for sizes, by_piece in profile.measures.items()
    }
    return replace(profile, measures=measures, links=Links(), optimizer_s=0.0, gradients_s=0.0)


def least_bottleneck(space: SplitSpace) -> Candidate:
    """Return the cut with the least slowest stage; of equal ones that which forces the least time.

    Then the evenest.
    """
    cuts = space.cuts
    least_s, _ = least_path(cuts.runs, cuts.time_s, largest=True)
    within = [
        np.where(time_s <= least_s * _SLACK, force, np.inf)
        for time_s, force in zip(cuts.time_s, cuts.forced_s, strict=True)
    ]
    return space.candidate(cuts.evenest(within)[1])


def least_energy(space: SplitSpace, blocking_power_w: float, time_tolerance: float) -> list[Ranked]:
    """Plan cuts about as fast as the fastest; return them with the least planned energy first.

    They are that one and those with the lowest estimate. The 1F1B iteration time at the highest
    clocks may exceed that of the cut whose stages force the least by the fraction `time_tolerance`.

    Raises EnvPipeError for a profile without energies.
    """
    if not space.profile.has_energy:
        raise EnvPipeError(
            "The layers have no energies, so no split can be said to need less",
            remedy="Measure forward_j and backward_j, or use --objective bottleneck.",
        )
    quickest = space.candidate(space.cuts.fastest()[1])
    limit_s = quickest.iteration_time_s * (1 + time_tolerance) * _SLACK
    others = alternatives(space.megatron, quickest, blocking_power_w, limit_s, _MAX_PLANNED)
    unlike = {candidate.configuration: candidate for candidate in (quickest, *others)}
    return planned(unlike.values(), blocking_power_w, limit_s, LEAST_ENERGY)


def make_parts(cut: str | Sequence[int], parameters: Sequence[int], num_stages: int) -> list[int]:
    """Return parts by what a user asks for.

    Args:
        cut: the parts themselves, or as a text, `parts:0,3,7`; `parameters` for a stage with the
            most parameters that has as few as can be; `time:FILE` for a slowest stage that is as
            fast as can be; `energy:FILE` for what is planned with least energy, where waiting costs
            nothing, of splits about as fast as the fastest. The file is one of layers named `0` to
            `L-1`, as they are in the list: `envpipe partition` reads such a file, and
            `profile_layers` of the integration with DeepSpeed writes one.
        parameters: of each layer, L.
        num_stages: p.

    Raises EnvPipeError for another cut, parts that do not fit, a wrong file, another model's, one
    without energies to ask for, or fewer layers than stages.
    """
    num_layers = len(parameters)
    if not isinstance(cut, str):
        return _check_parts(cut, num_layers, num_stages)
    if cut == _PARAMETERS:
        return _parts_by_weight(parameters, num_stages)
    if cut.startswith(_PARTS):
        try:
            numbers = [int(number) for number in cut.removeprefix(_PARTS).split(",")]
        except ValueError:
            raise EnvPipeError(
                f"{_PARTS} takes numbers with commas between them", value=cut
            ) from None
        return _check_parts(numbers, num_layers, num_stages)
    if cut.startswith((_TIME, _ENERGY)):
        return _parts_by_file(cut, num_layers, num_stages)
    raise EnvPipeError(
        "Layers are not cut into stages by this",
        value=cut,
        remedy=f"Use {_PARAMETERS}, {_TIME}FILE or {_ENERGY}FILE with a profile of layers, or give "
        "the first layer of each stage and the number of layers.",
    )


def _check_parts(parts: Sequence[int], num_layers: int, num_stages: int) -> list[int]:
    """Return a user's parts as a list; EnvPipeError if they do not fit layers or stages."""
    given = [int(part) for part in parts]
    rising = all(first < following for first, following in pairwise(given))
    if len(given) != num_stages + 1 or (given[0], given[-1]) != (0, num_layers) or not rising:
        raise EnvPipeError(
            f"These are no parts of {num_layers} layers for {num_stages} stages",
            value=given,
            remedy="Give the first layer of each stage, 0 to begin with and rising, and then the "
            f"number of layers, {num_layers}.",
        )
    return given


def _parts_by_file(cut: str, num_layers: int, num_stages: int) -> list[int]:
    method, _, path = cut.partition(":")
    profile = read_layers(Path(path))
    if profile.pieces != tuple(str(layer) for layer in range(num_layers)):
        raise EnvPipeError(
            f"{path} is of another model: this one has layers 0 to {num_layers - 1}",
            value=list(profile.pieces),
            remedy="Number all entries of the list of layers, embeddings too.",
        )
    space = SplitSpace(profile, num_stages, _MICROBATCHES_PER_STAGE * num_stages)
    if f"{method}:" == _ENERGY:
        best = least_energy(space, 0.0, _TIME_TOLERANCE)[0].candidate
    else:
        best = least_bottleneck(space)
    return [0, *(stage.chunks[0][1] for stage in best.configuration.stages)]


def _parts_by_weight(weights: Sequence[int], num_stages: int) -> list[int]:
    """Split so that the stage with the largest sum of weights has as little as can be."""
    num_layers = len(weights)
    if not 1 <= num_stages <= num_layers:
        raise EnvPipeError(
            f"A pipeline of {num_layers} layers has 1 to {num_layers} stages", value=num_stages
        )
    nodes, sums = np.arange(num_layers + 1), running(weights)
    rows = [range(stage, num_layers - num_stages + stage + 1) for stage in range(num_stages)]
    runs = [Runs(nodes, each, num_layers) for each in rows]
    weighed = [np.where(each.inside, each.sums(sums), np.inf) for each in runs]
    _, path = least_path(runs, weighed, largest=True)
    parts: list[int] = path.tolist()
    return parts
