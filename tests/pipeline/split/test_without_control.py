"""Jobs that may not set a clock: another order runs, and comes to the same bits."""

from dataclasses import replace

import pytest
from jobs import Job, Ours
from on_request import on_request
from test_bit_equality import (
    assert_same_bits,
    by_plan,
    labels_that_run,
    ours,
    stock,
    trained_alike,
)

from envpipe_megatron.core.orders.builders import half_split, zero_bubble

pytestmark = pytest.mark.xdist_group("pipeline")
__all__ = ["ours", "stock"]

LOOP = Ours(
    *("auto", "optimal"),
    warmup_iterations=3,
    unit_s=0.05,
    splits=True,
    closed_loop=True,
    reads_only=True,
)


def test_a_plan_by_file_runs_in_its_order_and_asks_for_no_clock(stock, ours, tmp_path):
    job, order = Job(2, 6), zero_bubble(2, 6)
    results = trained_alike(
        stock, ours, job, replace(by_plan(tmp_path, order), reads_only=True), order
    )
    for result in results:
        assert not result.locked_mhz
        assert result.notes == (
            "A GPU is opened for reading only: the plan's order, and clocks stay as they are",
        )


@pytest.mark.parametrize("slow_from", [30, pytest.param(0, marks=on_request("PIPELINE"))])
def test_the_shortest_order_runs_until_the_host_is_late_in_it(stock, ours, slow_from):
    """No clock is asked for, and the job is back at its own order within twenty iterations."""
    job = Job(2, 4, steps=60)
    results = ours(job, replace(LOOP, slow_from=slow_from))
    assert_same_bits(results, stock(job))
    own, measured = job.own_order, half_split(job.own_order)
    for result in results:
        assert not result.locked_mhz
        units = [labels_that_run(order, result.stage) for order in (own, measured)]
        planned = [n for n, ran in enumerate(result.executed) if ran not in units]
        assert set(range(27, 30)) <= {*planned} or slow_from == 0
        assert (slow_from or planned[0]) < planned[-1] < (slow_from or planned[0]) + 20
        assert result.executed[-1] == units[0]
        assert result.phases[-1] == "steady"
        first, *others = result.notes
        assert first == (
            "A GPU is opened for reading only: the shortest order in place of least energy, and "
            "clocks stay as they are"
        )
        said = "\n".join(["", *others])
        assert "\nThe framework's own order: the " in said
        assert "\nToo slow: 4 steps took" in said or slow_from == 0
