"""Which jobs measure layers, and how what they leave becomes one profile."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from test_layer_file import profile_with

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.search.layer_jobs import LayerJob, jobs_for, merged
from envpipe_megatron.search.layer_profile import Block, Sizes


def test_ranks_are_told_of_a_job_by_a_text():
    job = LayerJob("/folder", 2, 1, 4, (1, 2), (1980, 1500))
    assert LayerJob.of_text(job.to_text()) == job
    (named,) = jobs_for((1,), (1,), (1,), (1,), (), Path("/parts"), [], "train.py --bf16")
    assert LayerJob.of_text(named.to_text()).source == "train.py --bf16"
    assert job.sizes(2) == Sizes(2, 2, 1, 4)


@pytest.mark.parametrize(
    ("tensor", "context", "expert", "ranks"),
    [(2, 1, 1, 2), (2, 2, 1, 4), (1, 1, 4, 4), (2, 2, 4, 8), (2, 2, 2, 4)],
)
def test_experts_lie_on_ranks_of_data_and_context_parallelism(tensor, context, expert, ranks):
    assert LayerJob("", tensor, context, expert, (1,)).num_ranks == ranks


@pytest.mark.parametrize(
    ("tensor", "speeds", "gpus"),
    [
        (1, [7, 7, 6, 7], [2]),
        (2, [7, 7, 7, 6], [2, 3]),
        (2, [7, 7, 6], [1, 2]),
        (4, [7, 7, 6, 7], [0, 1, 2, 3]),
        (1, [7, 7], [0]),
        (1, [100.4, 102, 100], [0]),
    ],
)
def test_a_job_runs_on_the_slowest_gpu_and_its_neighbours(tensor, speeds, gpus):
    assert list(LayerJob("", tensor, 1, 1, (1,)).gpus(speeds)) == gpus


def test_what_was_measured_is_left_out():
    measured = [Sizes(1, 1), Sizes(1, 2), Sizes(2, 4)]
    jobs = jobs_for((2, 1), (1,), (1,), (4, 2, 1), (), Path("/parts"), measured)
    assert [(job.tensor_parallel, job.microbatch_sizes) for job in jobs] == [(1, (4,)), (2, (1, 2))]
    assert len({job.folder for job in jobs}) == 2
    assert jobs_for((1,), (1,), (1,), (1, 2), (), Path("/parts"), measured) == []


def test_measures_of_several_jobs_become_one_profile():
    first = profile_with()
    measures = first.measures[Sizes(1, 1)]
    more = replace(first, measures={Sizes(1, 2): measures})
    assert merged(None, first) is first
    both = merged(first, more)
    assert both.measures == {**first.measures, Sizes(1, 2): measures}
    assert both.links is first.links


@pytest.mark.parametrize(
    "other",
    [
        {"blocks": (Block(("layer",)),)},
        {"frequency_mhz": np.array([1980])},
        {"source": "another command"},
        {"gpu": "another GPU"},
    ],
)
def test_measures_of_another_model_are_refused(other):
    with pytest.raises(EnvPipeError, match="--output"):
        merged(profile_with(), profile_with(**other))
