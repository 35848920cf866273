"""A job whose own iteration shows whether another order changes anything."""

from dataclasses import replace
from typing import Any

import pytest
from jobs import ALIGNED, ALL, OVERLAP, Job, Ours
from on_request import each_of
from test_bit_equality import assert_same_bits, by_plan, ours, stock
from test_split_features import DEFERRED, EXPERTS

from envpipe_megatron.core.kinds import Kind, unit
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.orders.builders import split_in_place, split_late
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
    "two chunks, all overlapped": Job(2, 4, chunks=2, dropout=0.1, reducer=ALL),
    "per-token loss": Job(2, 6, per_token_loss=True, reducer=OVERLAP),
}


@pytest.mark.parametrize("name", each_of(JOBS, ["two chunks, all overlapped"]))
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


#: Jobs whose backwards are split, and how EnvPipe runs them.
SPLIT_JOBS = {
    "tied": Job(4, 8, tied=True),
    "two replicas, overlapped": Job(2, 6, reducer=OVERLAP),
    "two chunks": Job(2, 6, chunks=2, deallocate=False),
    "two chunks, two replicas, tied": Job(
        2, 4, chunks=2, deallocate=False, tied=True, reducer=ALIGNED
    ),
    "recomputed, with dropout": Job(2, 6, recompute=True, dropout=0.1),
    "experts": Job(2, 6, reducer=(), options=EXPERTS),
    "fp16": Job(2, 6, half="fp16", reducer=()),
    "fused, two replicas, overlapped": Job(2, 6, fused=True, reducer=OVERLAP),
}


def split_plan(folder, job: Job, **how: Any) -> Ours:
    """A plan whose backwards are split runs behind the check of an order of more forwards."""
    own = longer(job)
    plan = by_plan(folder, split_in_place(own, job.microbatches))
    return replace(plan, checked=own, splits=True, **how)


@pytest.mark.parametrize("name", each_of(SPLIT_JOBS, ["tied"]))
def test_split_backwards_that_change_nothing_pass(stock, ours, tmp_path, name):
    job = replace(SPLIT_JOBS[name], steps=4)
    results = ours(job, split_plan(tmp_path, job))
    assert_same_bits(results, stock(job))
    assert not any(result.failed or result.whole for result in results)
    said = [line for result in results for line in result.said]
    assert said[0] == "self-check: losses and gradients are equal to the last bit"
    assert said[1].endswith("3 times, at last with split backwards")
    checked = split_late(longer(job))
    for result in results:
        late = sum(unit.kind is Kind.WEIGHT_GRADIENT for unit in checked.stages[result.stage]) - 1
        steady = job.microbatches * result.phases.count("steady")
        assert len(result.put_off) == late + steady > late


FAULTY = {
    "slightly wrong": Job(2, 6, dropout=0.1),
    "twice": Job(2, 6, tied=True),
    "missing": Job(2, 6, reducer=OVERLAP),
    "error": Job(2, 6, reducer=OVERLAP),
    "error in a first part": Job(4, 6, tied=True),
}


@pytest.mark.parametrize("needed", each_of([True, False], [False]))
@pytest.mark.parametrize("fault", each_of(FAULTY, ["missing"]))
def test_where_splitting_goes_wrong_backwards_stay_whole(stock, ours, tmp_path, fault, needed):
    job = replace(FAULTY[fault], steps=4)
    results = ours(job, split_plan(tmp_path, job, fault=fault, check_needed=needed))
    assert_same_bits(results, stock(job))
    (why,) = {result.whole for result in results}
    if "error" in fault:
        assert why.endswith(f"part of a test, on stage {job.stages - 1}")
    else:
        stage = 0 if job.tied else job.stages - 1  # the first holds the head's weight, too
        assert why.startswith("gradients of ")
        assert why.endswith(f"of stage {stage} differ from Megatron's, which repeats itself")
    assert not any(result.failed for result in results)
    said = [line for result in results for line in result.said]
    assert said[0] == "self-check: losses and gradients are equal to the last bit"
    assert said[1].endswith("4 times")
    for result in results:  # the plan splits backwards, so it is not run
        assert result.plan is None
        assert result.executed
        assert not any(unit.startswith("W") for units in result.executed for unit in units)


@pytest.mark.parametrize("needed", each_of([True, False], [False]))
def test_where_any_order_goes_wrong_the_level_falls(stock, ours, tmp_path, needed):
    job = Job(2, 6, steps=2, tied=True)
    how = split_plan(tmp_path, job, fault="wrong in any order", check_needed=needed)
    results = ours(job, how)
    assert_same_bits(results, stock(job))
    for result in results:
        differ = "of stage 0 differ from Megatron's, which repeats itself"
        assert result.whole.endswith(differ)
        assert result.failed.startswith("its self-check: gradients of ")
        assert result.failed.endswith(differ)
        assert not result.said


@pytest.mark.parametrize(
    ("fault", "job"),
    each_of(
        [
            ("error in a whole backward", Job(2, 6, steps=2, reducer=OVERLAP)),
            ("error behind the last whole backward", Job(2, 6, steps=2, reducer=OVERLAP)),
            ("error behind the last whole backward", Job(2, 6, steps=2, reducer=ALIGNED)),
            (
                "error in a whole backward",
                Job(2, 6, steps=2, fused=True, reducer=(), options=DEFERRED),
            ),
        ],
        [("error in a whole backward", Job(2, 6, steps=2, reducer=OVERLAP))],
    ),
)
def test_an_error_ends_no_job_whose_replicas_wait(stock, ours, tmp_path, fault, job):
    """Megatron wants each gradient reduced, and reducers and hooks are its own."""
    order = longer(job)
    results = ours(job, replace(by_plan(tmp_path, order), checked=order, fault=fault))
    assert_same_bits(results, stock(job))
    for result in results:
        assert result.failed.endswith("the whole backward of a test, on stage 1")
