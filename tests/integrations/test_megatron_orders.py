"""Our interleaved orders against megatron-core's own table and warm-ups."""

import itertools
from dataclasses import replace

import pytest
from on_request import asked_for

from envpipe_megatron.core.kinds import Kind, unit
from envpipe_megatron.core.orders import builders

# One worker imports megatron-core, which takes seconds, and none does to collect tests.
pytestmark = pytest.mark.xdist_group("megatron")


@pytest.fixture(scope="module")
def schedules():
    name = "megatron.core.pipeline_parallel.schedules"
    return pytest.importorskip(name, reason="megatron-core is not installed")


class Rank:
    """Stands in for megatron-core's communicator: the group of the pipeline, and its chunks."""

    def __init__(self, num_stages, stage, num_chunks):
        self.pp_group = self
        self.virtual_pipeline_model_parallel_size = num_chunks
        self.size, self.rank = lambda: num_stages, lambda: stage


def accepted(num_stages):
    """Microbatches and sizes of groups that `forward_backward_pipelining_with_interleaving` takes:
    neither the groups nor the last of them are smaller than the pipeline."""
    for group_size in (num_stages, num_stages + 1, 2 * num_stages - 1, 2 * num_stages):
        for num_microbatches in range(group_size, 4 * group_size + 1):
            last = num_microbatches % group_size
            if not 0 < last < num_stages:
                yield num_microbatches, group_size


def as_megatron_runs(schedules, num_microbatches, num_chunks, group_size, rank, combined):
    """Units in the order of its loops: warm-up, then one forward and one backward, the rest.

    With `combined` (overlapped communication of experts) the two in turn are one call.
    """
    table = schedules.get_schedule_table(num_microbatches, num_chunks, group_size)
    forwards = [unit(Kind.FORWARD, m, c) for m, c in table]
    # `get_model_chunk_id`: backwards follow the same table, the last chunk first.
    backwards = [unit(Kind.BACKWARD, m, num_chunks - 1 - c) for m, c in table]
    _, all_in_warmup, warmup, remaining = schedules.get_pp_rank_microbatches(
        num_microbatches,
        num_chunks,
        group_size,
        overlap_moe_expert_parallel_comm=combined,
        p2p_communicator=rank,
    )
    assert all_in_warmup == (remaining == 0)
    order = forwards[:warmup]
    for k in range(remaining):
        order += [replace(forwards[warmup + k], combined=combined), backwards[k]]
    return (*order, *backwards[remaining:])


@pytest.mark.parametrize("combined", [False, True])
@pytest.mark.parametrize("num_stages", range(2, 9))
def test_every_job_that_megatron_accepts_runs_in_its_order(schedules, num_stages, combined):
    jobs = list(accepted(num_stages))[:: 1 if asked_for("CORE") else 5]
    for (microbatches, group_size), chunks in itertools.product(jobs, (2, 3, 4)):
        ours = builders.interleaved(num_stages, microbatches, chunks, group_size, combined=combined)
        for stage, order in enumerate(ours.stages):
            rank = Rank(num_stages, stage, chunks)
            assert order == as_megatron_runs(
                schedules, microbatches, chunks, group_size, rank, combined
            )
