"""The closed loop in processes of their own, and after a restart."""

from __future__ import annotations

import re

import batch_ranks
import pytest

from envpipe_megatron.core.plan import read_plan
from envpipe_megatron.core.profile import read_profile
from envpipe_megatron.policies.request import PlanRequest
from envpipe_megatron.runtime.job.config import SessionConfig, SessionError

pytestmark = pytest.mark.xdist_group("pipeline")

LOOP = {"closed_loop": True}


def test_ranks_turn_to_plans_together_and_a_restart_looks_at_no_clock_twice(three_ranks, tmp_path):
    ranks = three_ranks.run(batch_ranks.train_kept, tmp_path, [4] * 40, {}, LOOP)
    phases = [phase for phase, _ in ranks[0]["steps"]]
    assert list(dict.fromkeys(phases)) == ["warm-up", "profile", "reconfigure", "steady"]
    profile = read_profile(tmp_path / "output" / "profile.csv")
    plan = read_plan(tmp_path / "output" / "plan.json", profile)
    assert plan.cost.saving_percent(plan.baseline.cost) > 2
    assert plan.cost.slowdown_percent(plan.baseline.cost) < 0.5
    for stage, told in enumerate(ranks):
        assert [phase for phase, _ in told["steps"]] == phases
        assert told["steps"][-1][1] == tuple(plan.frequency_mhz[stage].tolist())
        assert told["profile"].to_csv() == profile.to_csv()
    assert any("looking at" in text for text in ranks[0]["said"])

    again = three_ranks.run(batch_ranks.train_kept, tmp_path, [4] * 12, {}, LOOP)
    phases = [phase for phase, _ in again[0]["steps"]]
    assert "reconfigure" in phases
    assert not any("looking at" in text for text in again[0]["said"])

    slower = three_ranks.run(batch_ranks.train_kept, tmp_path, [4] * 12, {}, LOOP, 1.1)
    said = "".join(slower[0]["said"])
    # All kinds of units are as much slower: which of them is the worst is noise.
    told = re.search(r"is not used: at 1410 MHz stage \d \w+ takes [\d.]+ ms, \+([\d.]+) %", said)
    assert told
    assert float(told[1]) == pytest.approx(10, abs=1)
    assert "looking at" in said


@pytest.mark.parametrize(("policy", "warmup"), [("envelope", 3), ("optimal", 1)])
def test_what_goes_with_no_closed_loop_is_refused(policy, warmup):
    request = PlanRequest(4, policy=policy)
    with pytest.raises(SessionError, match="closed loop"):
        SessionConfig(request, warmup_iterations=warmup, closed_loop=True)
