"""Sessions that cannot go on as wished: they train on, or refuse, in the same way on every rank."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import pytest
import session_ranks
from on_request import on_request
from presets import preset_profile
from rank_pool import RankPool

from envpipe_megatron.core.kinds import WHOLE
from envpipe_megatron.core.plan import read_plan
from envpipe_megatron.core.profile import read_profile
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.gpu.emulated.presets import load_preset
from envpipe_megatron.gpu.overrides import sweep_range
from envpipe_megatron.policies.frequencies import envelope
from envpipe_megatron.policies.reconfigure import RECONFIGURE_POLICIES, reconfigure
from envpipe_megatron.policies.request import PlanRequest
from envpipe_megatron.runtime.job.session import SessionConfig

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


def test_a_failing_meter_ends_profiling_and_not_training(three_ranks, tmp_path):
    told = three_ranks.run(session_ranks.train_with_a_failing_meter, tmp_path, 1, 12)
    for phase, notes, without_plan in told:
        assert phase == "steady"
        assert without_plan
        assert "energy counter" in notes[0]


def test_reconfiguring_raises_clocks_between_those_that_were_profiled(three_ranks, tmp_path):
    preset = load_preset("a100-sxm")
    swept = preset.supported_frequencies_mhz[6:90:6]  # 90 MHz apart
    profile = preset_profile("a100-sxm", 3, session_ranks.LONG_UNITS_S, swept)
    profile.write(tmp_path / "profile.csv")
    three_ranks.run(session_ranks.train_with_reconfiguring, tmp_path)
    plan = read_plan(tmp_path / "plan.json", profile)
    assert set(plan.frequency_mhz.ravel().tolist()) - {1410, *swept}
    assert plan.cost.slowdown_percent(plan.baseline.cost) < 1
    # Steps of the sweep alone overshoot.
    start = replace(plan, frequency_mhz=envelope(plan.schedule, profile), profile=profile)
    coarse = reconfigure(start, RECONFIGURE_POLICIES["balanced"]).frequency_mhz
    assert plan.cost.energy_j < replace(start, frequency_mhz=coarse).cost.energy_j


def test_no_profile_is_made_of_a_clock_that_is_not_controlled(three_ranks, tmp_path):
    """It would say of one clock's time and energy that they are those of many."""
    told = three_ranks.run(session_ranks.train_without_control, tmp_path, 2, 9)
    for phase, notes, without_plan in told:
        assert phase == "steady"
        assert without_plan
        assert "Stage 2: Clock control ended" in notes[0]
        assert "the driver of a test" in notes[0]
    assert not (tmp_path / "profile.csv").exists()


def test_a_session_is_not_used_again_after_a_failure(tmp_path):
    with RankPool(2) as pool:  # its own: the failed messages stay in the group
        told = pool.run(session_ranks.use_again_after_a_failure, tmp_path)
    for first, second in told:
        assert first.startswith(("ValueError", "ChannelError"))
        assert second.startswith("SessionError: An earlier iteration failed")


def test_the_sidecar_holds_what_surrounds_the_units(three_ranks, tmp_path):
    """Waiting power over the clock, hops, tails and changes; on every rank and in the file."""
    tails_s = (0.03, 0.05, 0.01)
    profiles = three_ranks.run(
        functools.partial(session_ranks.measure_a_job, slow=True), tmp_path, tails_s
    )
    preset = load_preset("a100-sxm")
    profile = profiles[0]
    assert all(other.sidecar == profile.sidecar for other in profiles)
    assert all(other.to_csv() == profile.to_csv() for other in profiles)
    assert read_profile(tmp_path / "profile.csv").sidecar == profile.sidecar
    facts = profile.sidecar
    for curve in facts.wait_power_w:
        clocks = sweep_range(preset.supported_frequencies_mhz[::10], None)
        assert len(curve) == 4
        assert (min(curve), max(curve)) == (clocks[-1], clocks[0])
        assert list(curve.values()) == pytest.approx([preset.wait_power_w] * 4, rel=0.01)
    # A message there takes no time, one back 6 ms.
    assert facts.p2p_latency_s == pytest.approx((0.003, 0.003))
    # The next iteration begins when the slowest is ready: that is what a planner must add.
    assert facts.tail_time_s == pytest.approx((0.05,) * 3, abs=1e-9)
    assert facts.frequency_change_s == pytest.approx(preset.frequency_change_s, rel=0.3)


@on_request("PIPELINE")
def test_energies_of_units_say_how_sure_they_are(three_ranks, tmp_path):
    run = functools.partial(session_ranks.measure_a_job, slow=False)
    profile = three_ranks.run(run, tmp_path, (0.0, 0.0, 0.0))[0]
    preset = load_preset("a100-sxm")
    assert profile.sidecar.p2p_latency_s == (0.0, 0.0)  # messages take no emulated time
    assert profile.sidecar.tail_time_s == pytest.approx((0.0,) * 3, abs=1e-9)
    header = (tmp_path / "profile.csv").read_text().splitlines()[0]
    assert header == "stage,instruction,frequency,time,energy,energy_uncertainty_j"
    shares, within = [], []
    for kinds in profile.rows:
        for kind, time_s in zip(WHOLE, (0.1, 0.2), strict=True):
            for row in kinds[kind]:
                clock = row.frequency_mhz
                unit_s = preset.unit_time_s(kind.value, clock, time_s)
                truth_j = unit_s * preset.busy_power_w(kind.value, clock)
                within.append(abs(row.energy_j - truth_j) <= 2 * row.energy_uncertainty_j)
                shares.append(row.energy_uncertainty_j / truth_j)
    assert sum(within) >= 0.95 * len(within)
    assert min(shares) > 0.001
    # Of the first stage, whose every refresh is seen: others' waits are jumped over here.
    assert max(shares[: len(shares) // 3]) < 0.15


def test_hops_are_measured_whenever_the_stages_come_to_it(three_ranks):
    """On a channel whose sends wait for their receives."""
    for seed in range(2):
        *front, last = three_ranks.run(session_ranks.hops, 5, (512, 512), seed)
        assert last == [0.0] * 5  # has no next stage
        for found_s in front:
            assert all(0 < latency_s < 0.5 for latency_s in found_s)
