"""A job whose own iteration shows whether another order changes anything."""

from __future__ import annotations

from dataclasses import replace

import pytest
from jobs import Job
from on_request import on_request
from test_bit_equality import assert_same_bits, by_plan, ours, stock

from envpipe_megatron.core.kinds import Kind, unit
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.schedule import Schedule

pytestmark = pytest.mark.xdist_group("pipeline")
__all__ = ["ours", "stock"]


def longer(job: Job) -> Schedule:
    if job.chunks == 1:
        return builders.envpipe(job.stages, job.microbatches, [1] * (job.stages - 1) + [0])
    more = [1] * (job.stages - 1) + [0]
    return builders.interleaved(
        job.stages, job.microbatches, job.chunks, job.group, extra_warmup=more
    )


def descending(microbatches: int) -> Schedule:
    """Gradients add up in another order: their last bits differ."""
    forwards = tuple(unit(Kind.FORWARD, m) for m in range(microbatches))
    backwards = tuple(unit(Kind.BACKWARD, m) for m in reversed(range(microbatches)))
    return Schedule("descending", microbatches, 1, ((*forwards, *backwards),) * 2)


JOBS = {
    "1f1b": Job(4, 6, tied=True),
    "dropout": Job(4, 6, dropout=0.1),
    "two chunks, all overlapped": Job(
        2,
        4,
        chunks=2,
        dropout=0.1,
        reducer=("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather"),
    ),
    "per-token loss": Job(2, 6, per_token_loss=True, reducer=("overlap_grad_reduce",)),
}


SLOW = ("1f1b", "dropout", "per-token loss")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=on_request("PIPELINE") if n in SLOW else ()) for n in JOBS]
)
def test_an_order_that_changes_nothing_passes(stock, ours, tmp_path, name):
    job = replace(JOBS[name], steps=4, deallocate=JOBS[name].chunks == 1)
    order = longer(job)
    results = ours(job, replace(by_plan(tmp_path, order), checked=order))
    # The first iteration is Megatron's, the next the check, and then the warm-up.
    assert [result.phases for result in results] == [["warm-up", "steady"]] * len(results)
    assert_same_bits(results, stock(job))
    said = [line for result in results for line in result.said]
    assert said[0] == "self-check: losses and gradients are equal to the last bit"
    assert len(said) == 2
    assert not any(result.failed for result in results)


def test_what_differs_is_named_and_training_goes_on_from_megatrons_own(stock, ours, tmp_path):
    job = Job(2, 6, steps=2, dropout=0.1)
    results = ours(job, replace(by_plan(tmp_path, longer(job)), checked=descending(6)))
    assert_same_bits(results, stock(job))
    for result in results:
        assert result.failed.startswith("its self-check: gradients of ")
        assert result.failed.endswith("of stage 0 differ from Megatron's, which repeats itself")
        assert not result.said


def test_a_job_that_does_not_repeat_itself_is_held_to_its_own_noise(ours, tmp_path):
    order = longer(Job(2, 6))
    how = replace(by_plan(tmp_path, order), checked=descending(6))
    noisy = ours(Job(2, 6, steps=2, noise=1e-4), how)
    assert not any(result.failed for result in noisy)
    (line, _) = [line for result in noisy for line in result.said]
    assert "no more than those of two runs of Megatron's do" in line
