"""The search of divisions finds the least cost that there is, as Aceso counts it."""

import numpy as np
import pytest

from benchmarks.search.aceso_space.divide import divide
from envpipe_megatron.search.configuration import Job
from envpipe_megatron.search.layer_profile import (
    Block,
    BytesPerParameter,
    Curve,
    LayerProfile,
    Links,
    Measure,
    Recomputation,
    Sizes,
)

BATCHES = (1, 2, 4)
#: By seed, the least cost of all divisions, found by trying each with each recomputation. Nothing
#: fits; sizes that differ, microbatches too; runs that end with a block, or inside.
LEAST_S = {2: np.inf, 38: 1022.5299209659256, 47: 721.196299856837, 48: 1403.2533578717148}
_SIZES = (Sizes(1, 1), Sizes(2, 1), Sizes(1, 2), Sizes(2, 2))
_KEPT = ("head", "tail")


def random_profile(random):
    """Nine pieces in five blocks, at tensor parallel and microbatch sizes of 1 and 2."""
    blocks = (Block(("head",)), Block(("a", "b", "c"), 1), Block(("x", "y"), 2), Block(("tail",)))
    base = {piece: random.integers(1, 100, 6) for block in blocks for piece in block.pieces}
    within, across = (Curve(np.array([1.0, 20]), np.array([0.1, end])) for end in (1.0, 4.0))
    return LayerProfile(
        blocks=blocks,
        frequency_mhz=np.array([1000]),
        measures={
            sizes: {name: _measure(name, values, sizes, random) for name, values in base.items()}
            for sizes in _SIZES
        },
        bytes_per_parameter=BytesPerParameter(2, 2, 12, least_workspace=2),
        links=Links(within, across),
        workspaces_add=True,
    )


def _measure(name, values, sizes, random):
    share = sizes.microbatch_size / sizes.tensor_parallel
    slower = random.uniform(1.0, 2.0) if sizes.tensor_parallel > 1 else 1.0
    forward_s = np.array([values[0] * share * slower * random.uniform(0.8, 1.2) / 10])
    activation_bytes = float(values[1] * share)
    again = Recomputation("operator", forward_s, None, 0.0, activation_bytes)
    return Measure(
        forward_s,
        2 * forward_s,
        parameters=values[2] / 40 / sizes.tensor_parallel,
        input_bytes=values[3] / 30,
        output_bytes=values[3] / 30,
        activation_bytes=activation_bytes,
        forward_workspace_bytes=values[4] / 4,
        backward_workspace_bytes=values[5] / 4,
        recomputation=() if name in _KEPT else (again,),
    )


def test_no_division_of_small_models_costs_less():
    found = []
    for seed, least_s in LEAST_S.items():
        random = np.random.default_rng(seed)
        profile = random_profile(random)
        job = Job(4, 4, global_batch=16, memory_bytes=float(random.uniform(150, 500)))
        division = divide(profile, job, BATCHES)
        assert (np.inf if division is None else division.time_s) == pytest.approx(least_s, rel=1e-8)
        found += [] if division is None else [division.configuration]
    # What the seeds have is what makes this a test.
    assert any(way for each in found for stage in each.stages for way in stage.ways)
    assert any(len({stage.num_gpus for stage in each.stages}) > 1 for each in found)
    assert any(len(each.stages) > 2 for each in found)


def test_one_size_is_part_of_the_space():
    random = np.random.default_rng(3)
    profile = random_profile(random)
    job = Job(4, 4, global_batch=16, memory_bytes=400.0)
    any_size, one_size = (divide(profile, job, BATCHES, same_size=same) for same in (False, True))
    assert any_size is not None
    assert one_size is not None
    assert one_size.time_s >= any_size.time_s
    stages = one_size.configuration.stages
    assert len({(stage.sizes, stage.data_parallel) for stage in stages}) == 1
    assert sum(stage.num_gpus for stage in stages) == 4
    assert divide(profile, job, BATCHES, same_size=True) == one_size
