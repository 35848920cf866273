"""The stages of a list of layers as `parts`: the first layer of each, and the number of layers.

DeepSpeed's notation: with parts `[0, 3, 7]` the first of two stages has layers 0 to 2. Here layers
are all entries of the list, embeddings and heads too, and each stage has one at least.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.search.layer_file import read_layers_or_table
from envpipe_megatron.search.partition import SplitSpace, least_bottleneck, least_energy
from envpipe_megatron.search.runs import Runs, least_path, running

#: The slowest stage decides; of equal ones, the order of stages does, at a usual number of
#: microbatches for each stage.
_MICROBATCHES_PER_STAGE = 4
#: By energy, how much slower than the fastest split may be, as a fraction: as `envpipe partition`.
_TIME_TOLERANCE = 1e-3
TIME, ENERGY, _PARAMETERS = "time:", "energy:", "parameters"


def make_parts(cut: str | Sequence[int], parameters: Sequence[int], num_stages: int) -> list[int]:
    """Parts by what a user asks for.

    Args:
        cut: `parameters`, `time:FILE`, `energy:FILE` (of layers), or the parts themselves.
        parameters: of each layer.
        num_stages: p.

    Raises EnvPipeError for another cut, parts that do not fit, or as the functions below.
    """
    num_layers = len(parameters)
    if not isinstance(cut, str):
        return check_parts(cut, num_layers, num_stages)
    if cut == _PARAMETERS:
        return parts_by_weight(parameters, num_stages)
    if cut.startswith((TIME, ENERGY)):
        return parts_by_file(cut, num_layers, num_stages)
    raise EnvPipeError(
        "Layers are not cut into stages by this",
        value=cut,
        remedy=f"Use {_PARAMETERS}, {TIME}FILE or {ENERGY}FILE with a profile of layers, or give "
        "the first layer of each stage and the number of layers.",
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


def parts_by_file(cut: str, num_layers: int, num_stages: int) -> list[int]:
    """Parts by a file of layers.

    Args:
        cut: `time:FILE` for a slowest stage that is as fast as can be, or `energy:FILE` for what is
            planned with least energy, where waiting costs nothing, of all that is as fast as the
            fastest. `envpipe partition` reads such a file, and `profile_layers` of the integration
            with DeepSpeed writes one; layers are named `0` to `L-1`, as they are in the list.
        num_layers: L.
        num_stages: p.

    Raises EnvPipeError for a wrong file, another model's, one without energies to ask for, or fewer
    layers than stages.
    """
    method, _, path = cut.partition(":")
    profile = read_layers_or_table(Path(path))
    if profile.pieces != tuple(str(layer) for layer in range(num_layers)):
        raise EnvPipeError(
            f"{path} is of another model: this one has layers 0 to {num_layers - 1}",
            value=list(profile.pieces),
            remedy="Number all entries of the list of layers, embeddings too.",
        )
    space = SplitSpace(profile, num_stages, _MICROBATCHES_PER_STAGE * num_stages)
    by_energy = f"{method}:" == ENERGY
    found = least_energy(space, 0.0, _TIME_TOLERANCE) if by_energy else least_bottleneck(space)
    return list(found.cut)


def parts_by_weight(weights: Sequence[int], num_stages: int) -> list[int]:
    """Split so that the stage with the largest sum of weights has as little as can be.

    Raises EnvPipeError for fewer layers than stages.
    """
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
