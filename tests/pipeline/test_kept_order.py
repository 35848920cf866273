"""Clocks under megatron-core's own orders: results are its own, units those that are planned."""

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from jobs import Job, Ours
from on_request import each_of
from test_bit_equality import (
    assert_locked,
    assert_same_bits,
    by_plan,
    ours,
    stock,
    synthetic_profile,
)

from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.plan import read_plan
from envpipe_megatron.core.profile import read_profile
from envpipe_megatron.policies.planner import make_plan
from envpipe_megatron.policies.request import PlanRequest

pytestmark = pytest.mark.xdist_group("pipeline")
__all__ = ["ours", "stock"]
F, B = Kind.FORWARD, Kind.BACKWARD


JOBS = {
    "few microbatches": Job(4, 2, tied=True),
    "no pipeline": Job(1, 3),
    "two chunks, groups of three, a last one of two": Job(2, 5, chunks=2, group=3),
    "overlapped experts": Job(2, 5, chunks=2, group=3, combined=True, evaluate_after=0),
    "recompute, lengths vary": Job(2, 4, chunks=2, recompute=True, lengths=(16, 5, 11, 2)),
    "bert, two chunks": Job(2, 4, chunks=2, bert=True),
    "reduced and evaluated": Job(2, 6, tied=True, reducer=(), evaluate_after=0),
}


#: And more of what they have.
ALL_JOBS = JOBS | {
    "four chunks": Job(2, 4, chunks=4),
    "overlapped experts, few microbatches": Job(2, 2, chunks=2, combined=True, reducer=()),
    "overlapped experts, four stages": Job(4, 8, chunks=2, combined=True),
    "overlapped experts, four chunks": Job(2, 8, chunks=4, group=3, combined=True, tied=True),
}


@pytest.mark.parametrize("name", each_of(ALL_JOBS, JOBS))
def test_every_unit_has_its_clock_and_nothing_else_changes(stock, ours, tmp_path, name):
    job = replace(ALL_JOBS[name], deallocate=ALL_JOBS[name].chunks == 1)
    schedule = job.own_order
    how = by_plan(tmp_path, schedule)
    results = ours(job, replace(how, kept_orders=(schedule,)))
    assert_same_bits(results, stock(job))
    for result in results:
        assert result.phases == ["warm-up", "steady", "steady"]
        assert result.executed == [schedule.labels()[result.stage]] * 3
    assert_locked(results, read_plan(how.plan_file, read_profile(how.profile_file)).frequency_mhz)


CHANGING = {
    "1f1b": Job(4, 6, tied=True),
    "two chunks": Job(2, 6, chunks=2, reducer=()),
    "two replicas": Job(2, 6, reducer=()),
}


@pytest.mark.parametrize("name", each_of(CHANGING, ["two replicas"]))
def test_each_number_of_microbatches_has_its_clocks(stock, ours, tmp_path, name):
    """Up, down and back; the full batch's plan is by file, others are planned when they come."""
    counts = (2, 2, 2, 6, 6, 6, 2, 4, 6, 4, 4, 2)
    job = replace(CHANGING[name], counts=counts, steps=len(counts), deallocate=name != "two chunks")
    orders = {count: replace(job, microbatches=count).own_order for count in set(counts)}
    how = by_plan(tmp_path, orders[6])
    results = ours(
        job,
        replace(how, kept_orders=tuple(orders.values()), policy="optimal", schedule=orders[6].name),
    )
    assert_same_bits(results, stock(job))
    profile = read_profile(how.profile_file)
    clocks_mhz = {6: read_plan(how.plan_file, profile).frequency_mhz}
    for count in (2, 4):
        request = PlanRequest(count, policy="optimal", order=orders[count])
        clocks_mhz[count] = make_plan(profile, request).plan.frequency_mhz
        assert len(np.unique(clocks_mhz[count])) > 1
    for result in results:
        seen: Counter[int] = Counter()
        steps = []  # number of microbatches and clocks, the highest in the warm-up of each
        for count in counts:
            seen[count] += 1
            planned = clocks_mhz[count][result.stage].tolist()
            steps.append((count, [1410] * len(planned) if seen[count] < 2 else planned))
        assert result.executed == [orders[count].labels()[result.stage] for count in counts]
        wanted = [clock for _, clocks in steps for clock in clocks]
        changes = [clock for clock, _ in itertools.groupby(wanted)]
        # Behind a last unit the clock of its iteration's first may have been set, or not.
        locked = iter(result.locked_mhz)
        assert all(clock in locked for clock in changes)
        assert len(result.locked_mhz) <= len(changes) + 2 * len(counts)


@pytest.mark.parametrize("name", each_of(["1f1b", "two chunks"], ["1f1b"]))
def test_each_number_of_microbatches_has_its_order(stock, ours, tmp_path, name):
    """The interpreter plans an order for each; the profile is by file."""
    counts = (2, 2, 6, 6, 2, 4, 4, 6, 4)
    job = replace(CHANGING[name], counts=counts, steps=len(counts), deallocate=name != "two chunks")
    profile = synthetic_profile(job.stages)
    profile.write(tmp_path / "profile_in.csv")
    results = ours(job, Ours("auto", "optimal", profile_file=tmp_path / "profile_in.csv"))
    assert_same_bits(results, stock(job))
    planned = {}
    for count in set(counts):
        request = PlanRequest(count, "auto", "optimal", num_chunks=job.chunks, runnable=True)
        planned[count] = make_plan(profile, request).plan.schedule
    if job.chunks == 1:
        assert planned[6].stages != job.own_order.stages
    seen: Counter[int] = Counter()
    wanted = []
    for count in counts:
        seen[count] += 1
        own = replace(job, microbatches=count).own_order
        wanted.append(own if seen[count] == 1 else planned[count])
    for result in results:
        assert result.executed == [order.labels()[result.stage] for order in wanted]


def test_a_job_whose_units_come_otherwise_has_no_clocks_for_them(stock, ours):
    job = Job(2, 6, steps=1)
    results = ours(job, Ours(kept_orders=(builders.gpipe(2, 6),)))
    assert_same_bits(results, stock(job))
    assert {result.failed for result in results} == {"In this iteration, B came in place of F2"}
