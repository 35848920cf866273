"""From wishes to a plan, and the figures of published profiles."""

from pathlib import Path

import pytest
from core_cases import uniform_profile

from envpipe_megatron import builders
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.plan import Plan
from envpipe_megatron.policies.planner import (
    RECONFIGURE_NAMES,
    SCHEDULES,
    PlannerError,
    PlanRequest,
    build_schedule,
    make_plan,
)
from envpipe_megatron.policies.reconfigure import RECONFIGURE_POLICIES, Ended, reconfigure
from envpipe_megatron.profile import read_profile
from envpipe_megatron.sidecar import Sidecar

CURVE = {f: (1 + (1200 - f) / 480, 10 + (f - 1080) / 20) for f in (1200, 1170, 1140, 1110, 1080)}
PROFILE = uniform_profile(4, CURVE)  # 1.25 s at the optimum: EnvPipe wants 4, 3, 1, 0 extra


@pytest.mark.parametrize(
    ("name", "chunks", "expected"),
    [
        ("1f1b", 1, builders.one_f_one_b(4, 8)),
        ("gpipe", 1, builders.gpipe(4, 8)),
        ("interleaved", 2, builders.interleaved(4, 8, 2)),
        ("envpipe", 1, builders.envpipe(4, 8, [4, 3, 1, 0])),
        ("ours", 1, builders.envpipe(4, 8, [4, 3, 1, 0])),
    ],
)
def test_every_schedule_by_its_name(name, chunks, expected):
    schedule, notes = build_schedule(PROFILE, PlanRequest(8, name, num_chunks=chunks))
    assert schedule == expected
    assert notes == ()


def test_names_are_those_of_the_command_line():
    assert {"1f1b", "gpipe", "interleaved", "envpipe"} <= set(SCHEDULES)
    assert RECONFIGURE_NAMES[:3] == ("default", "greedy", "balanced")


@pytest.mark.parametrize(
    ("limits", "extra"),
    [
        ({"max_extra_forwards": 2}, (2, 2, 1, 0)),
        ({"max_warmup_step": 1}, (3, 2, 1, 0)),
        ({"max_in_flight": 5}, (1, 2, 1, 0)),
        ({"max_in_flight": (5,)}, (1, 2, 1, 0)),
        ({"max_in_flight": (8, 4, 2, 1)}, (4, 1, 0, 0)),
    ],
)
def test_limits_reach_the_order(limits, extra):
    schedule, _ = build_schedule(PROFILE, PlanRequest(32, "envpipe", **limits))
    assert schedule.extra_forwards == extra


def test_a_channel_that_holds_little_lowers_the_extra_forwards_and_says_so():
    profile = uniform_profile(4, CURVE, backward=12.0)
    free, no_notes = build_schedule(profile, PlanRequest(48, "envpipe"))
    tight, notes = build_schedule(profile, PlanRequest(48, "envpipe", channel_capacity=1))
    assert no_notes == ()
    assert sum(tight.extra_forwards) < sum(free.extra_forwards)
    assert len(notes) == 1
    assert notes[0]


@pytest.mark.parametrize("policy", ["baseline", "uniform", "envelope"])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved", "envpipe"])
def test_every_policy_on_every_schedule(schedule, policy):
    chunks = 2 if schedule == "interleaved" else 1
    planned = make_plan(PROFILE, PlanRequest(8, schedule, policy, "default", 50.0, chunks))
    assert planned.plan.policy == policy
    assert planned.reconfigured is None
    assert planned.plan.conditions.blocking_power_w == (50.0,) * 4
    assert planned.plan.cost.energy_j > 0
    work = 10.0 if policy == "uniform" else 16.0
    assert planned.plan.energy_by_stage_j[3] == pytest.approx(
        8 * 3 * work
        + 50 * (planned.plan.cost.iteration_time_s - 8 * 3 * (1.25 if work == 10 else 1))
    )


@pytest.mark.parametrize("name", ["greedy", "balanced"])
def test_reconfigured_plans_are_named_and_keep_the_baselines_time(name):
    planned = make_plan(PROFILE, PlanRequest(16, "envpipe", "envelope", name, 30.0))
    assert planned.plan.policy == f"envelope-{name}"
    assert planned.reconfigured.ended is Ended.ENVELOPE
    baseline = planned.plan.baseline.cost
    assert planned.plan.cost.slowdown_percent(baseline) < 1e-6
    assert planned.plan.cost.saving_percent(baseline) > 0


def test_the_sidecars_latency_counts():
    profile = uniform_profile(4, CURVE, sidecar=Sidecar(p2p_latency_s=(0.5, 0.25, 0.25)))
    slow, fast = (make_plan(p, PlanRequest(8)).plan for p in (profile, PROFILE))
    assert slow.conditions.latency_s == (0.5, 0.25, 0.25)
    assert slow.cost.iteration_time_s >= fast.cost.iteration_time_s + 2.0


@pytest.mark.parametrize(
    ("request_", "value"),
    [
        (PlanRequest(8, policy="uniform", reconfigure="greedy"), "greedy"),
        (PlanRequest(8, policy="baseline", reconfigure="balanced"), "balanced"),
        (PlanRequest(8, "1f1b", num_chunks=2), "2"),
        (PlanRequest(8, "envpipe", num_chunks=2), "2"),
        (PlanRequest(8, "envpipe", max_in_flight=(5, 5)), r"\(5, 5\)"),
    ],
)
def test_wishes_that_contradict_each_other_are_refused(request_, value):
    with pytest.raises(PlannerError, match=value):
        make_plan(PROFILE, request_)


@pytest.mark.parametrize(
    "request_",
    [
        PlanRequest(0),
        PlanRequest(6, "interleaved", num_chunks=2),
        PlanRequest(8, "interleaved"),
        PlanRequest(8, "envpipe", max_in_flight=3),
        PlanRequest(8, blocking_power_w=-1.0),
    ],
)
def test_impossible_wishes_are_refused_as_errors_for_users(request_):
    with pytest.raises(EnvPipeError):
        make_plan(PROFILE, request_)


DATA = Path(__file__).parents[2].parent / "shared" / "data" / "perseus_sosp24"


def published(path):
    if not (DATA / path).exists():
        pytest.skip(f"the published profiles are not in {DATA}")
    return read_profile(DATA / path)


@pytest.mark.parametrize(
    ("gpu", "blocking_power_w", "num_microbatches", "low", "high"),
    [
        ("a100_sxm", 83.64, 24, 20.35, 20.45),
        ("a100_sxm", 83.64, 96, 16.05, 16.15),
        ("a40", 70.38, 24, 17.7, 17.85),
        ("a40", 70.38, 96, 12.65, 13.0),
    ],
)
def test_envpipe_in_full_on_gpt3_175b(gpu, blocking_power_w, num_microbatches, low, high):
    """Against 1F1B with everything at the highest clock; 8 stages, its own order, balanced."""
    profile = published(f"emulation/stage_profile/gpt3-175b_{gpu}.csv")
    wishes = PlanRequest(num_microbatches, "envpipe", "envelope", "balanced", blocking_power_w)
    plan = make_plan(profile, wishes).plan
    baseline = plan.baseline.cost
    assert low <= plan.cost.saving_percent(baseline) <= high
    assert abs(plan.cost.slowdown_percent(baseline)) < 0.01


def test_greedy_takes_2905_steps_on_the_a100_with_96_microbatches():
    profile = published("emulation/stage_profile/gpt3-175b_a100_sxm.csv")
    planned = make_plan(profile, PlanRequest(96, "envpipe", "envelope", "greedy", 83.64))
    assert planned.reconfigured.steps == 2905
    assert planned.reconfigured.ended is Ended.ENVELOPE
    assert planned.plan.schedule.peak_in_flight[0] == 18


def test_on_a_measured_unbalanced_job_the_path_never_becomes_the_envelope():
    profile = published("measured/A100_gpt3-xl_dp1_pp4_tp1/profile.csv")
    plan = make_plan(profile, PlanRequest(128, "1f1b", "envelope", blocking_power_w=83.64)).plan
    result = reconfigure(plan, RECONFIGURE_POLICIES["balanced"])
    assert result.ended is Ended.NOTHING_CAN_RISE
    after = Plan("x", plan.schedule, result.frequency_mhz, profile, plan.conditions)
    assert after.cost.slowdown_percent(plan.baseline.cost) < 1e-6
