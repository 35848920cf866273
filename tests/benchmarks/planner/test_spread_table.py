"""The benchmark of plans made without and with knowledge of a spread, on a small pipeline."""

from benchmarks.planner.spread import ALLOWED_PERCENT, ORDERS, spread_claims, spread_rows
from benchmarks.planner.workloads import preset_workload


def test_knowledge_keeps_what_is_allowed_and_the_claims_say_so():
    rows = list(spread_rows(preset_workload(2, 4), (4,)))
    assert len(rows) == len(ORDERS) * len(ALLOWED_PERCENT)
    for row in rows:
        assert row["slowdown with (%)"] <= row["allowed (%)"] + 0.03
        assert row["slowdown without (%)"] >= row["slowdown with (%)"] - 0.03
    claims = spread_claims(rows)
    assert [claim.agrees for claim in claims] == [True] * len(rows)
    assert "plans (1f1b) take in the mean" in claims[0].claim
    assert not spread_claims([{**rows[0], "slowdown with (%)": 1.0}])[0].agrees
