"""What the benchmark of power caps says of its ways to keep one."""

import pytest
from on_request import on_request

from benchmarks.planner.power_caps import SHARES, WAYS, capped_rows
from benchmarks.planner.workloads import preset_workload


@pytest.mark.parametrize("window_s", [None, pytest.param(0.5, marks=on_request("FIGURES"))])
def test_order_and_clocks_lose_least_within_a_cap(window_s):
    rows = list(capped_rows(preset_workload(3, 6), window_s))
    assert [row["cap (%)"] for row in rows] == [round(100 * share) for share in SHARES]
    for row in rows:
        one_clock, own, joint = (row[way] for way in WAYS)
        assert joint <= own + 0.05
        assert own <= one_clock + 0.05
    assert rows[-1]["one clock"] > 1
