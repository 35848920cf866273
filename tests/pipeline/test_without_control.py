"""Jobs that may not set a clock: another order runs, and comes to the same bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from jobs import Job, Ours, Result
from test_bit_equality import assert_executed, assert_same_bits, framework_order, ours, stock
from test_bit_equality import labels_that_run as labels
from test_split_backward import by_plan

from envpipe_megatron.core.orders.zero_bubble import zero_bubble

pytestmark = pytest.mark.xdist_group("pipeline")
__all__ = ["ours", "stock"]

#: Units at which steps take longer than what the host takes.
LOOP = Ours(
    *("auto", "optimal"),
    warmup_iterations=5,
    unit_s=0.05,
    splits=True,
    closed_loop=True,
    reads_only=True,
)


def in_other_orders(job: Job, result: Result) -> list[int]:
    """The iterations that did not run the framework's order."""
    own = labels(framework_order(job), result.stage)
    return [number for number, units in enumerate(result.executed) if units != own]


def test_a_plan_by_file_runs_in_its_order_and_asks_for_no_clock(stock, ours, tmp_path):
    job, order = Job(2, 6), zero_bubble(2, 6)
    results = ours(job, replace(by_plan(tmp_path, order), reads_only=True))
    assert_executed(job, results, order)
    assert_same_bits(results, stock(job))
    for result in results:
        assert not result.locked_mhz
        assert result.notes == (
            "A GPU is opened for reading only: the plan's order, and clocks stay as they are",
        )


def test_the_shortest_order_runs_where_no_clock_may_be_set(stock, ours):
    job = Job(2, 8, steps=60)
    results = ours(job, LOOP)
    print(results[0].notes, results[0].phases)
    assert_same_bits(results, stock(job))
    for result in results:
        assert not result.locked_mhz
        order = result.plan.schedule
        assert order.split
        assert result.executed[-10:] == [labels(order, result.stage)] * 10
        assert result.phases[-1] == "steady"
        first, kept, *_ = result.notes
        assert first.endswith(
            "only: the shortest order in place of least energy, and clocks stay as they are"
        )
        assert "% less time" in kept


@pytest.mark.parametrize("slow_from", [0, 60])
def test_a_job_whose_host_is_late_in_other_orders_runs_its_own(stock, ours, slow_from):
    """It is back within twenty iterations, and says so."""
    job = Job(2, 8, steps=100)
    results = ours(job, replace(LOOP, slow_from=slow_from))
    print(results[0].notes, results[0].phases, in_other_orders(job, results[0]))
    assert_same_bits(results, stock(job))
    for result in results:
        others = in_other_orders(job, result)
        assert (max(others) >= 50) == (slow_from > 0)
        assert max(others) < (slow_from or min(others)) + 20
        assert any(note.startswith("The framework's own order:") for note in result.notes)
