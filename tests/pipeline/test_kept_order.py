"""Clocks under megatron-core's own orders: results are its own, units those that are planned."""

from __future__ import annotations

from dataclasses import replace

import pytest
from jobs import Job, Ours
from test_bit_equality import assert_locked, assert_same_bits, by_plan, ours, stock

from envpipe_megatron.core import builders
from envpipe_megatron.core.plan import read_plan
from envpipe_megatron.core.profile import read_profile
from envpipe_megatron.core.schedule import Schedule

pytestmark = pytest.mark.xdist_group("pipeline")
__all__ = ["ours", "stock"]


def kept(job: Job) -> Schedule:
    if job.chunks == 1:
        return builders.one_f_one_b(job.stages, job.microbatches)
    return builders.interleaved(job.stages, job.microbatches, job.chunks)


JOBS = {
    "1f1b": Job(4, 6),
    "few microbatches": Job(4, 2, tied=True),
    "no pipeline": Job(1, 3),
    "two chunks": Job(2, 6, chunks=2),
    "four chunks": Job(2, 4, chunks=4),
    "four stages": Job(4, 8, chunks=2),
    "recompute": Job(2, 4, chunks=2, recompute=True),
    "reduced and evaluated": Job(2, 6, tied=True, reducer=(), evaluate_after=1),
}


@pytest.mark.parametrize("name", JOBS)
def test_every_unit_has_its_clock_and_nothing_else_changes(stock, ours, tmp_path, name):
    job = replace(JOBS[name], steps=5, deallocate=JOBS[name].chunks == 1)
    schedule = kept(job)
    how = by_plan(tmp_path, schedule)
    results = ours(job, replace(how, kept_order=schedule))
    assert_same_bits(results, stock(job))
    for result in results:
        # The first iteration is Megatron's, and the next the warm-up.
        assert result.phases == ["warm-up", *["steady"] * 3]
        assert result.executed == [schedule.labels()[result.stage]] * 4
    assert_locked(results, read_plan(how.plan_file, read_profile(how.profile_file)).frequency_mhz)


def test_a_job_whose_units_come_otherwise_is_left_alone(stock, ours):
    job = Job(2, 6)
    results = ours(job, Ours(kept_order=builders.gpipe(2, 6)))
    assert_same_bits(results, stock(job))
    assert [(result.phases, result.locked_mhz) for result in results] == [([], [])] * 4
