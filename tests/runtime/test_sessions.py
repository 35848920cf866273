"""Sessions that cannot go on as wished: they train on, or refuse, in the same way on every rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import session_ranks
from rank_pool import RankPool

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.policies.planner import PlanRequest
from envpipe_megatron.profile import ProfileRow, make_profile
from envpipe_megatron.runtime.session import SessionConfig
from envpipe_megatron.schedule import Kind

pytestmark = pytest.mark.xdist_group("pipeline")


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({"request": PlanRequest(4, reconfigure="balancd")}, "balancd"),
        ({"request": PlanRequest(4, policy="uniform", reconfigure="balanced")}, "envelope"),
        ({"request": PlanRequest(4, schedule="zero-bubble")}, "zero-bubble"),
        (
            {
                "request": PlanRequest(4, policy="envelope", reconfigure="greedy"),
                "warmup_iterations": 1,
            },
            "warm-up",
        ),
        ({"request": PlanRequest(4), "warmup_iterations": 0}, "warm-up"),
        ({"request": PlanRequest(4), "plan_file": Path("plan.json")}, "profile"),
    ],
)
def test_contradictions_are_refused_before_training(options, shown):
    with pytest.raises(EnvPipeError, match=shown):
        SessionConfig(**options)


@pytest.mark.parametrize("fails_at", [0, 12])
def test_a_failing_meter_ends_profiling_and_not_training(three_ranks, tmp_path, fails_at):
    told = three_ranks.run(session_ranks.train_with_a_failing_meter, tmp_path, 1, fails_at)
    for phase, notes, without_plan in told:
        assert phase == "steady"
        assert without_plan
        assert "energy counter" in notes[0]


def test_a_session_is_not_used_again_after_a_failure(tmp_path):
    with RankPool(2) as pool:  # its own: the failed messages stay in the group
        told = pool.run(session_ranks.use_again_after_a_failure, tmp_path)
    for first, second in told:
        assert first.startswith(("ValueError", "ChannelError"))
        assert second.startswith("SessionError: An earlier iteration failed")


def test_clocks_that_the_gpu_lacks_are_refused_on_every_rank(three_ranks, tmp_path):
    rows = [
        (stage, kind, ProfileRow(f, 1410 / f, f / 1e3))
        for stage in range(3)
        for kind in Kind
        for f in (1410, 1193)
    ]
    make_profile(rows, source="made for a test").write(tmp_path / "profile.csv")
    for text in three_ranks.run(session_ranks.plan_of_other_clocks, tmp_path):
        assert text.startswith("SessionError: The plan asks for clocks")
        assert "1193" in text
