"""The closed loop in processes of their own, and after a restart."""

import json
import re

import pytest
import step_ranks

from envpipe_megatron.core.plan import read_plan
from envpipe_megatron.core.profile import read_profile

pytestmark = pytest.mark.xdist_group("pipeline")

LOOP = {"sweep": False}


def test_ranks_turn_to_plans_together_and_a_restart_looks_at_no_clock_twice(three_ranks, tmp_path):
    ranks = three_ranks.run(step_ranks.train_kept, tmp_path, [4] * 24, {}, LOOP)
    phases = [phase for phase, _ in ranks[0]["steps"]]
    assert list(dict.fromkeys(phases)) == ["warm-up", "profile", "reconfigure", "steady"]
    profile = read_profile(tmp_path / "output" / "profile.csv")
    plan = read_plan(tmp_path / "output" / "plan.json", profile)
    assert plan.cost.saving_percent(plan.baseline.cost) > 2
    assert plan.cost.slowdown_percent(plan.baseline.cost) < 0.5
    for stage, told in enumerate(ranks):
        assert [phase for phase, _ in told["steps"]] == phases
        *_, before, last = (clocks for _, clocks in told["steps"])
        planned = tuple(plan.frequency_mhz[stage].tolist())
        assert planned in (before, last)  # one of them may look at the highest clock
        assert all(mhz >= own_mhz for mhz, own_mhz in zip(last, planned, strict=True))
        assert told["profile"].to_csv() == profile.to_csv()
    assert any("looking at" in text for text in ranks[0]["said"])
    loop = [json.loads(line) for line in (tmp_path / "output/loop.jsonl").read_text().splitlines()]
    assert any("looking at" in entry["note"] for entry in loop)
    last = [entry for entry in loop if entry["time_s"] is not None][-1]
    assert last["time_s"] == pytest.approx(plan.cost.iteration_time_s)
    assert last["energy_j"] == pytest.approx(plan.cost.energy_j)

    again = three_ranks.run(step_ranks.train_kept, tmp_path, [4] * 12, {}, LOOP)
    phases = [phase for phase, _ in again[0]["steps"]]
    assert "reconfigure" in phases
    assert not any("looking at" in text for text in again[0]["said"])

    slower = three_ranks.run(step_ranks.train_kept, tmp_path, [4] * 12, {}, LOOP, 1.1)
    said = "".join(slower[0]["said"])
    # All kinds of units are as much slower: which of them is the worst is noise.
    told = re.search(r"is not used: at 1410 MHz stage \d \w+ takes [\d.]+ ms, \+([\d.]+) %", said)
    assert told
    assert float(told[1]) == pytest.approx(10, abs=1)
    assert "looking at" in said
