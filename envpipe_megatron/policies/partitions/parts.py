"""The stages of a list of layers as `parts`: the first layer of each, and the number of layers.

DeepSpeed's notation: with parts `[0, 3, 7]` the first of two stages has layers 0 to 2. Here layers
are all entries of the list, embeddings and heads too, and each stage has one at least.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.policies.partitions.energy import least_energy
from envpipe_megatron.policies.partitions.layers import read_layers
from envpipe_megatron.policies.partitions.search import SplitSpace, least_bottleneck, minimax

#: The slowest stage decides; of equal ones, the order of stages does, at a usual number of
#: microbatches for each stage.
_MICROBATCHES_PER_STAGE = 4
#: By energy, how much slower than the fastest split may be, as a fraction: as `envpipe partition`.
_TIME_TOLERANCE = 1e-3
_TIME, _ENERGY, _PARAMETERS = "time:", "energy:", "parameters"


def make_parts(cut: str | Sequence[int], parameters: Sequence[int], num_stages: int) -> list[int]:
    """Parts by what a user asks for.

    Args:
        cut: `parameters`, `time:FILE`, `energy:FILE` (a layer CSV), or the parts themselves.
        parameters: of each layer.
        num_stages: p.

    Raises EnvPipeError for another cut, parts that do not fit, or as the functions below.
    """
    num_layers = len(parameters)
    if not isinstance(cut, str):
        return check_parts(cut, num_layers, num_stages)
    if cut == _PARAMETERS:
        return parts_by_weight(parameters, num_stages)
    for method, function in ((_TIME, parts_by_time), (_ENERGY, parts_by_energy)):
        if cut.startswith(method):
            return function(Path(cut.removeprefix(method)), num_layers, num_stages)
    raise EnvPipeError(
        "Layers are not cut into stages by this",
        value=cut,
        remedy=f"Use {_PARAMETERS}, {_TIME}FILE or {_ENERGY}FILE with a layer CSV, or give the "
        "first layer of each stage and the number of layers.",
    )


def check_parts(parts: Sequence[int], num_layers: int, num_stages: int) -> list[int]:
    """Parts that a user gave, as a list; EnvPipeError if they do not fit the layers or stages."""
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


def parts_by_time(path: Path, num_layers: int, num_stages: int) -> list[int]:
    """Split a pipeline's layers so that the slowest stage is as fast as can be.

    Args:
        path: a layer CSV (`layer,instruction,frequency,time,energy`) whose layers are `0` to `L-1`
            as they stand in the list; `layer_profile.profile_layers` writes one.
        num_layers: L.
        num_stages: p.

    Raises EnvPipeError for a wrong file, another model's file, or fewer layers than stages.
    """
    return [0, *accumulate(least_bottleneck(_space(path, num_layers, num_stages)).split)]


def parts_by_energy(path: Path, num_layers: int, num_stages: int) -> list[int]:
    """Of the splits that are as fast as the fastest, the one that is planned with least energy.

    Waiting is taken to cost nothing. Arguments and errors as `parts_by_time`, and an EnvPipeError
    for a file without energies.
    """
    space = _space(path, num_layers, num_stages)
    return [0, *accumulate(least_energy(space, 0.0, _TIME_TOLERANCE).split)]


def parts_by_weight(weights: Sequence[int], num_stages: int) -> list[int]:
    """Split so that the stage with the largest sum of weights has as little as can be.

    Raises EnvPipeError for fewer layers than stages.
    """
    num_layers = len(weights)
    if not 1 <= num_stages <= num_layers:
        raise EnvPipeError(
            f"A pipeline of {num_layers} layers has 1 to {num_layers} stages",
            value=num_stages,
        )
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(weights, dtype=float))])
    edges = np.broadcast_to(sums[None, :] - sums[:, None], (num_stages, *[num_layers + 1] * 2))
    first = np.arange(num_layers + 1)
    rising = np.broadcast_to(first[None, :] > first[:, None], edges.shape)
    return [0, *accumulate(minimax(edges, rising)[1])]


def _space(path: Path, num_layers: int, num_stages: int) -> SplitSpace:
    table = read_layers(path)
    if table.names != tuple(str(layer) for layer in range(num_layers)):
        raise EnvPipeError(
            f"{path} is of another model: this one has layers 0 to {num_layers - 1}",
            value=list(table.names),
            remedy="Number all entries of the list of layers, embeddings too.",
        )
    return SplitSpace(table, num_stages, _MICROBATCHES_PER_STAGE * num_stages)
