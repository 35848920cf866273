"""The search of divisions finds what trying all divisions finds."""

import numpy as np
import pytest
from brute_force import least_cost_s, random_profile
from on_request import on_request

from benchmarks.search.aceso_space.divide import divide
from envpipe_megatron.search.configuration import Job

BATCHES = (1, 2, 4)
#: Nothing fits; sizes that differ, microbatches too; runs that end with a block, or inside.
SEEDS = (2, 38, 47, 48)


def _job(random):
    return Job(4, 4, global_batch=16, memory_bytes=float(random.uniform(150, 500)))


def _equal(seed):
    random = np.random.default_rng(seed)
    profile, job = random_profile(random), _job(random)
    division = divide(profile, job, BATCHES)
    least_s = least_cost_s(profile, job, BATCHES)
    assert (np.inf if division is None else division.time_s) == pytest.approx(least_s, rel=1e-8)
    return division


def test_no_division_of_small_models_costs_less():
    divisions = [_equal(seed) for seed in SEEDS]
    found = [division.configuration for division in divisions if division is not None]
    # What the seeds have is what makes this a test.
    assert any(division is None for division in divisions)
    assert any(way for each in found for stage in each.stages for way in stage.ways)
    assert any(len({stage.num_gpus for stage in each.stages}) > 1 for each in found)
    assert any(len(each.stages) > 2 for each in found)


@on_request("CORE")
def test_no_division_of_more_small_models_costs_less():
    for seed in range(200):
        _equal(seed)


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
