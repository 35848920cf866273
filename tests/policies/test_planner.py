"""From wishes to a plan, and the figures of published profiles."""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from core_cases import uniform_profile
from on_request import on_request

from envpipe_megatron.core.conditions import Conditions
from envpipe_megatron.core.kinds import ScheduleError
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.orders.builders import zero_bubble, zero_bubble_v
from envpipe_megatron.core.plan import read_plan
from envpipe_megatron.core.profile import make_profile, read_profile
from envpipe_megatron.core.profile_rows import ProfileError, SplitBackward
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.policies.clock_changes.clock_runs import shortest_dwell_s
from envpipe_megatron.policies.frequencies import Ended
from envpipe_megatron.policies.optimal.linear_program import LinearProgramError
from envpipe_megatron.policies.planner import build_schedule, make_frontier, make_plan
from envpipe_megatron.policies.request import PlanRequest

CURVE = {f: (1 + (1200 - f) / 480, 10 + (f - 1080) / 20) for f in (1200, 1170, 1140, 1110, 1080)}
PROFILE = uniform_profile(4, CURVE)  # 1.25 s at the optimum: EnvPipe wants 4, 3, 1, 0 extra


@pytest.mark.parametrize(
    ("name", "chunks", "expected"),
    [
        ("1f1b", 1, builders.one_f_one_b(4, 8)),
        ("gpipe", 1, builders.gpipe(4, 8)),
        ("interleaved", 2, builders.interleaved(4, 8, 2)),
        ("interleaved-combined", 2, builders.interleaved(4, 8, 2, combined=True)),
        ("breadth-first", 2, builders.breadth_first(4, 8, 2)),
        ("envpipe", 1, builders.envpipe(4, 8, [4, 3, 1, 0])),
        ("ours", 1, builders.envpipe(4, 8, [4, 3, 1, 0])),
    ],
)
def test_every_schedule_by_its_name(name, chunks, expected):
    schedule, notes = build_schedule(PROFILE, PlanRequest(8, name, num_chunks=chunks))
    assert schedule == expected
    assert notes == ()


@pytest.mark.parametrize(
    ("name", "limit", "chunks", "expected"),
    [
        ("zb-h1", None, 1, partial(zero_bubble, 4, 8)),
        ("zb-h1", 9, 1, partial(zero_bubble, 4, 8)),
        ("zb-h2", None, 1, partial(zero_bubble, 4, 8, 7)),
        ("zb-h2", (5, 6, 7, 8), 1, partial(zero_bubble, 4, 8, 5)),
        ("zb-v", None, 2, partial(zero_bubble_v, 4, 8)),
        ("zb-v", 3.5, 2, partial(zero_bubble_v, 4, 8, 7)),
    ],
)
def test_zero_bubble_orders_by_their_names(name, limit, chunks, expected):
    request = PlanRequest(
        8,
        name,
        "optimal",
        num_chunks=chunks,
        max_in_flight=limit,
        split=SplitBackward(overhead=0.05),
    )
    plan = make_plan(PROFILE, request).plan
    assert plan.schedule.stages == expected().stages
    assert plan.cost.energy_j < plan.baseline.cost.energy_j


@pytest.mark.parametrize(("limit", "name"), [(8, None), (16, "zb-h1"), (28, "zb-h2")])
def test_zero_bubble_orders_fit_where_weight_gradients_hold_the_most(limit, name):
    known = replace(PROFILE.sidecar, activation_bytes=(1.0,) * 4, pending_bytes=(4.0,) * 4)
    request = PlanRequest(8, "zb-h2", max_in_flight=limit, split=SplitBackward())
    plan = partial(make_plan, replace(PROFILE, sidecar=known), request)
    if name is None:
        with pytest.raises(EnvPipeError, match=r"needs memory of 7\.0, 10\.0, 13\.0, 16\.0 micro"):
            plan()
    else:
        assert plan().plan.schedule.name == name


def test_a_channel_that_holds_little_lowers_the_extra_forwards_and_says_so():
    profile = uniform_profile(4, {1200: (1.0, 10.0)}, backward=4.0)

    def built(**options):
        schedule, notes = build_schedule(profile, PlanRequest(48, "envpipe", **options))
        return schedule.extra_forwards, notes

    assert built() == built(channel_capacity=3) == ((12, 8, 4, 0), ())
    assert built(channel_capacity=2)[0] == (9, 6, 3, 0)
    counts, (note,) = built(channel_capacity=1)
    assert counts == (3, 2, 1, 0)
    assert note.startswith(
        "Extra forwards lowered on stage 0 from 12 to 3, stage 1 from 8 to 2, stage 2 from 4 to "
        "1: on a channel of capacity 1 they may fall by at most 1 from a stage to the next."
    )
    assert "CUDA_DEVICE_MAX_CONNECTIONS=8" in note


@pytest.mark.parametrize("name", ["greedy", "balanced"])
def test_reconfigured_plans_are_named_and_keep_the_baselines_time(name):
    planned = make_plan(PROFILE, PlanRequest(16, "envpipe", "envelope", name, 30.0))
    assert planned.plan.policy == f"envelope-{name}"
    assert planned.reconfigured.ended is Ended.ENVELOPE
    baseline = planned.plan.baseline.cost
    assert planned.plan.cost.slowdown_percent(baseline) < 1e-6
    assert planned.plan.cost.saving_percent(baseline) > 0


def by_chunk(*slowness):
    """`PROFILE` in chunks with rows of their own: as many, each so slow (1: an equal part)."""
    rows = [
        (stage * len(slowness) + chunk, kind, replace(part, time_s=slow * part.time_s))
        for stage, kinds in enumerate(PROFILE.rows)
        for kind, listed in kinds.items()
        for chunk, slow in enumerate(slowness)
        for part in (row.scaled(1 / len(slowness)) for row in listed)
    ]
    return make_profile(rows, source="made for a test", listed_chunks=len(slowness))


LATE = Conditions((50.0,) * 4, change_time_s=0.02, change_energy_j=0.1)


@pytest.mark.parametrize(
    "how",
    [
        {"policy": "baseline"},
        {"policy": "uniform"},
        {"policy": "envelope", "reconfigure": "balanced"},
        {"policy": "optimal"},
        {"policy": "optimal", "conditions": LATE},
    ],
)
def test_chunks_with_equal_rows_are_planned_as_equal_parts(how, tmp_path):
    request = PlanRequest(8, "interleaved", num_chunks=2, **how)
    own_rows = by_chunk(1, 1)
    parts, own = (make_plan(profile, request).plan for profile in (PROFILE, own_rows))
    assert own.frequency_mhz.tolist() == parts.frequency_mhz.tolist()
    assert own.cost == parts.cost
    assert own.energy_lower_bound_j == pytest.approx(parts.energy_lower_bound_j, rel=1e-9)
    own.write(tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json", own_rows).cost == own.cost


@pytest.mark.parametrize("conditions", [Conditions((50.0,) * 4), LATE])
def test_clocks_follow_what_each_chunk_takes(conditions):
    """The second chunk takes twice as long: a plan that knows it saves more than one that thinks
    that both are alike, once both are priced as it is."""
    request = PlanRequest(
        8, "interleaved", "optimal", num_chunks=2, conditions=conditions, deadline_factor=1.05
    )
    uneven = by_chunk(2 / 3, 4 / 3)
    plan = make_plan(uneven, request).plan
    assert plan.cost.slowdown_percent(plan.baseline.cost) <= 5 + 1e-6
    assert 0 <= plan.gap_percent < 3
    alike = replace(make_plan(PROFILE, request).plan, profile=uneven)
    assert plan.cost.energy_j < alike.cost.energy_j
    assert plan.cost.iteration_time_s < alike.cost.iteration_time_s


def test_a_profile_of_chunks_plans_no_order_without():
    for schedule, policy in (("1f1b", "baseline"), ("envpipe", "envelope"), ("auto", "optimal")):
        with pytest.raises(ProfileError, match=r"2 chunks .*got 1"):
            make_plan(by_chunk(1, 1), PlanRequest(8, schedule, policy))


def optimal(schedule="1f1b", microbatches=8, **wishes):
    chunks = 2 if schedule == "interleaved" else 1
    return PlanRequest(
        microbatches, schedule, "optimal", blocking_power_w=30.0, num_chunks=chunks, **wishes
    )


def test_auto_is_at_least_as_good_as_any_order_by_name_and_says_what_is_left():
    planned = make_plan(PROFILE, optimal("auto"))
    for schedule in ("1f1b", "gpipe", "envpipe"):
        assert (
            planned.plan.cost.energy_j <= make_plan(PROFILE, optimal(schedule)).plan.cost.energy_j
        )
    (note,) = planned.notes
    compared, _, most = note.partition(
        " orders were compared. No order of whole backwards can save more than "
    )
    assert int(compared) > 5
    saving = planned.plan.cost.saving_percent(planned.plan.baseline.cost)
    assert saving <= float(most.partition(" %")[0]) + 0.005  # it is printed with two decimals
    assert "at this deadline" in most


@pytest.mark.parametrize("schedule", ["1f1b", "auto"])
def test_dwell_times_reach_the_plan_and_the_frontier(schedule):
    profile = uniform_profile(2, CURVE)
    conditions = Conditions((60.0,) * 2, wait_power_w=({300: 10.0, 1200: 60.0},) * 2)
    request = PlanRequest(4, schedule, "optimal", conditions=conditions, min_dwell_s=1.5)
    planned = make_plan(profile, request)
    for plan in (planned.plan, *make_frontier(profile, request, 2)):
        assert shortest_dwell_s(plan) >= 1.5
    assert planned.plan.conditions == conditions


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "envpipe", "auto"])
def test_a_deadline_that_no_clock_meets_is_told(schedule):
    with pytest.raises(LinearProgramError, match=r"deadline \(s\).*Its fastest") as refused:
        make_plan(PROFILE, optimal(schedule, deadline_factor=0.9))
    more = float(re.search(r"multiply --deadline-factor by ([\d.]+)", str(refused.value))[1])
    assert make_plan(PROFILE, optimal(schedule, deadline_factor=0.9 * more))


SPLITS = {"split": SplitBackward()}
TWO, LIMIT = {"num_chunks": 2}, {"channel_capacity": 1}
#: What is asked for, a schedule's name first, and what is said of it.
REFUSED = [
    ("zb-h1", {}, r"zb-h1 splits backwards.*--split-overhead.*input-gradient"),
    ("zb-h2", {**SPLITS, "max_in_flight": 3}, "Allow 4 in flight"),
    ("zb-h2", {**SPLITS, **TWO}, "one chunk a stage"),
    ("zb-v", SPLITS, "--num-chunks 2"),
    ("zb-h1", {"max_extra_forwards": 1}, "no extra forwards to limit.*envpipe or auto"),
    ("1f1b", {"policy": "uniform", "reconfigure": "greedy"}, "greedy"),
    ("1f1b", {"policy": "baseline", "reconfigure": "balanced"}, "balanced"),
    ("1f1b", {"policy": "envelope", "reconfigure": "fast"}, "Unknown reconfigure.*fast"),
    ("1f1b", {"policy": "cheapest"}, "Unknown policy.*cheapest"),
    ("1f1b", TWO, "2"),
    ("gpipe", TWO, r"one chunk.*2.*interleaved, envpipe or auto"),
    ("1f1b", {"group_size": 5}, "5"),
    ("envpipe", {"max_in_flight": (5, 5)}, r"\(got 5, 5\)"),
    ("envpipe", {"max_in_flight": float("inf")}, r"must be one number.*\(got inf\)"),
    ("zero-bubble", {}, "Unknown schedule.*zero-bubble"),
    *[
        ("1f1b", {"policy": policy, **wish}, rf"{policy} takes no {said}.*--policy optimal")
        for policy in ("baseline", "uniform", "envelope")
        for wish, said in (
            ({"deadline_factor": 1.1}, "deadline.*got 1.1"),
            ({"min_dwell_s": 0.1}, "dwell time.*got 0.1"),
        )
    ],
    *[
        (name, {"policy": "optimal", "deadline_factor": factor}, rf"deadline.*got {factor}.*above")
        for name in ("1f1b", "auto")
        for factor in (0.0, -1.0, float("nan"), float("inf"))
    ],
    ("auto", {"policy": "optimal", "num_chunks": 0}, "at least one chunk .got 0"),
    ("auto", {"policy": "optimal", **TWO, **LIMIT}, "of whole backwards.*got '2 chunks'"),
    ("auto", {"policy": "optimal", **SPLITS, **LIMIT}, "of whole.*got 'split backwards'"),
    *[(name, SPLITS, f"Schedule {name} splits no back") for name in ("1f1b", "gpipe", "envpipe")],
    *[
        (name, {**chunks, **limit}, rf"{name} .*got [16]\).*(envpipe or auto|envpipe, auto)")
        for name, chunks in (("1f1b", {}), ("gpipe", {}), ("interleaved", TWO))
        for limit in ({"max_extra_forwards": 1}, {"max_in_flight": 6}, LIMIT)
    ],
]


@pytest.mark.parametrize(("schedule", "options", "said"), REFUSED)
def test_what_does_not_go_together_is_refused(schedule, options, said):
    with pytest.raises(ScheduleError if "Allow 4" in said else EnvPipeError, match=said):
        make_plan(PROFILE, PlanRequest(8, schedule, **options))


DATA = Path(__file__).parents[2].parent / "shared" / "data" / "perseus_sosp24"


def published(path):
    if not (DATA / path).exists():
        pytest.skip(f"the published profiles are not in {DATA}")
    return read_profile(DATA / path)


@pytest.mark.parametrize(
    ("gpu", "blocking_power_w", "num_microbatches", "low", "high"),
    [
        ("a100_sxm", 83.64, 24, 20.65, 20.75),
        pytest.param("a100_sxm", 83.64, 96, 17.3, 17.4, marks=on_request("CORE")),
        ("a40", 70.38, 24, 17.85, 17.95),
        pytest.param("a40", 70.38, 96, 13.35, 13.42, marks=on_request("CORE")),
    ],
)
def test_envpipe_in_full_on_gpt3_175b(gpu, blocking_power_w, num_microbatches, low, high):
    """Against 1F1B with everything at the highest clock; 8 stages, its own order, balanced.

    EnvPipe, which only raises clocks, saves 20.4, 16.1, 17.8 and 12.7 %.
    """
    profile = published(f"emulation/stage_profile/gpt3-175b_{gpu}.csv")
    wishes = PlanRequest(num_microbatches, "envpipe", "envelope", "balanced", blocking_power_w)
    plan = make_plan(profile, wishes).plan
    baseline = plan.baseline.cost
    assert low <= plan.cost.saving_percent(baseline) <= high
    assert abs(plan.cost.slowdown_percent(baseline)) < 0.01


def test_greedy_takes_340_steps_on_the_a100_with_24_microbatches():
    profile = published("emulation/stage_profile/gpt3-175b_a100_sxm.csv")
    planned = make_plan(profile, PlanRequest(24, "envpipe", "envelope", "greedy", 83.64))
    assert planned.reconfigured.steps == 340
    assert planned.reconfigured.ended is Ended.ENVELOPE
    assert planned.plan.schedule.peak_in_flight[0] == 18


@pytest.mark.parametrize(
    ("gpu", "blocking_power_w", "expected"),
    [
        ("a100_sxm", 83.64, (14.7, 21.5, 21.6)),
        pytest.param("a40", 70.38, (10.9, 20.0, 20.2), marks=on_request("CORE")),
    ],
)
def test_order_and_clocks_together_on_gpt3_175b(gpu, blocking_power_w, expected):
    """Savings (%) of optimal clocks on 1F1B, EnvPipe's order and the best; 24 microbatches."""
    profile = published(f"emulation/stage_profile/gpt3-175b_{gpu}.csv")
    savings = []
    for schedule in ("1f1b", "envpipe", "auto"):
        wishes = PlanRequest(24, schedule, "optimal", blocking_power_w=blocking_power_w)
        plan = make_plan(profile, wishes).plan
        baseline = plan.baseline.cost
        savings.append(plan.cost.saving_percent(baseline))
        assert plan.cost.slowdown_percent(baseline) < 1e-6
        assert plan.gap_percent < (0.8 if schedule == "1f1b" else 0.3)
    assert savings == pytest.approx(expected, abs=0.15)
    assert savings == sorted(savings)
