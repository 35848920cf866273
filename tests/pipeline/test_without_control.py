"""Jobs that may not set a clock: another order runs, and comes to the same bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from jobs import Job
from test_bit_equality import assert_executed, assert_same_bits, ours, stock
from test_split_backward import by_plan

from envpipe_megatron.core.orders.zero_bubble import zero_bubble

pytestmark = pytest.mark.xdist_group("pipeline")
__all__ = ["ours", "stock"]


def test_a_plan_by_file_runs_in_its_order_and_asks_for_no_clock(stock, ours, tmp_path):
    job, order = Job(2, 6), zero_bubble(2, 6)
    results = ours(job, replace(by_plan(tmp_path, order), reads_only=True))
    assert_executed(job, results, order)
    assert_same_bits(results, stock(job))
    for result in results:
        assert not result.locked_mhz
        assert result.notes[0].endswith("only: the plan's order, and clocks stay as they are")
