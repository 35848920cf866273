"""EnvPipe's rule in chunks: Megatron's interleaved order with more forwards in its warm-up."""

import random
from pathlib import Path

import pytest
from core_cases import for_chunks, profile_of, uniform_profile
from on_request import on_request
from planning_cases import random_conditions, random_profile

from envpipe_megatron.core.kinds import Kind, ScheduleError
from envpipe_megatron.core.orders.builders import interleaved
from envpipe_megatron.core.plan import read_plan
from envpipe_megatron.core.profile import read_profile
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.policies.optimal.linear_program import LinearProgramError
from envpipe_megatron.policies.planner import make_plan
from envpipe_megatron.policies.problem import PlannerError
from envpipe_megatron.policies.request import PlanRequest
from envpipe_megatron.policies.schedules import envpipe_order

#: The optimum is 1080 MHz, where a forward takes 1.25 s in place of 1 s.
CURVE = {1200: (1.0, 16.0), 1140: (1.125, 13.0), 1080: (1.25, 10.0)}
GPT3 = Path(__file__).parents[4] / "shared/data/perseus_sosp24/emulation/stage_profile"


def order_of(profile, microbatches, chunks=2, lowered=None, **request):
    """The order; `lowered` is what its note says, if there is one."""
    wanted = PlanRequest(microbatches, "envpipe", num_chunks=chunks, **request)
    order, notes = envpipe_order(profile.for_chunks(chunks), wanted)
    told = () if lowered is None else (f"Extra forwards of a chunk lowered on {lowered}.",)
    assert notes == told
    return order


def more_warmup(order, group_size=None):
    """For each stage the forwards before its first backward, beyond Megatron's."""

    def warmups(schedule):
        kinds = [[unit.kind for unit in stage] for stage in schedule.stages]
        return [stage.index(Kind.BACKWARD) for stage in kinds]

    job = order.num_stages, order.num_microbatches, order.num_chunks
    own = interleaved(*job, group_size)
    return [more - less for more, less in zip(warmups(order), warmups(own), strict=True)]


@pytest.mark.parametrize(
    ("backward", "more"),
    [
        # A stage waits (B - F) for each stage behind it; a slow forward takes 1.25 F.
        (3.0, [4, 3, 1, 0]),  # 2 / 1.25 = 1.6 for each
        (2.0, [2, 1, 0, 0]),  # 0.8
        (1.0, [0, 0, 0, 0]),
        (0.5, [0, 0, 0, 0]),
    ],
)
@pytest.mark.parametrize("chunks", [2, 3])
def test_counts_of_equal_stages_by_hand(backward, more, chunks):
    order = order_of(uniform_profile(4, CURVE, backward=backward), 24, chunks, group_size=6)
    assert more_warmup(order, 6) == more
    own = interleaved(4, 24, chunks, 6)
    assert order.stages == interleaved(4, 24, chunks, 6, extra_warmup=more).stages
    assert order.name == ("envpipe-interleaved" if any(more) else own.name)


def test_chunks_with_times_of_their_own_count_by_their_mean():
    table = {
        (2 * stage + chunk, kind): {
            mhz: (weight * time_s, weight * energy_j) for mhz, (time_s, energy_j) in CURVE.items()
        }
        for stage in range(4)
        for chunk, backward in enumerate((1.2, 0.8))
        for kind, weight in ((Kind.FORWARD, 0.5), (Kind.BACKWARD, backward))
    }
    order = order_of(profile_of(table, listed_chunks=2), 24, group_size=6)
    assert more_warmup(order, 6) == [2, 1, 0, 0]


@pytest.mark.parametrize(
    ("limits", "more", "lowered"),
    [
        ({"max_in_flight": 100}, [4, 3, 1, 0], None),
        # Megatron's order holds 6.5 on stage 0.
        ({"max_in_flight": 8}, [3, 3, 1, 0], "stage 0 from 4 to 3"),
        (
            {"max_in_flight": (8.5, 6.5, 5, 3.5)},
            [2, 2, 1, 0],
            "stage 0 from 4 to 2, stage 1 from 3 to 2",
        ),
        (
            {"max_in_flight": 6.5},
            [0, 0, 0, 0],
            "stage 0 from 4 to 0, stage 1 from 3 to 0, stage 2 from 1 to 0",
        ),
        ({"max_extra_forwards": 1}, [2, 2, 1, 0], None),  # of whole microbatches
        ({"max_extra_forwards": 0}, [0, 0, 0, 0], None),
    ],
)
def test_limits_lower_the_counts_of_all_stages(limits, more, lowered):
    why = lowered and f"{lowered}: more would hold more microbatches than the limit"
    profile = uniform_profile(4, CURVE, backward=3.0)
    order = order_of(profile, 24, lowered=why, group_size=6, **limits)
    assert more_warmup(order, 6) == more


@pytest.mark.parametrize(
    ("schedule", "limit", "error"),
    [
        ("envpipe", 2, "Stage 0 .*got 2.0.* holds 5.5 there"),
        ("envpipe", (8, 4, 8, 8), "Stage 1 .*got 4.0.* holds 4.5 there"),
        ("auto", 2, "Stage 0 .*got 2.0.* holds 5.5 there"),
    ],
)
def test_a_limit_below_what_megatrons_order_holds_is_refused(schedule, limit, error):
    request = PlanRequest(24, schedule, "optimal", num_chunks=2, max_in_flight=limit, runnable=True)
    with pytest.raises(EnvPipeError, match=error) as refused:
        make_plan(uniform_profile(4, CURVE, backward=3.0), request)
    # The search for an order says so as it says all else that leaves no plan.
    assert isinstance(refused.value, ScheduleError if schedule == "envpipe" else LinearProgramError)


@pytest.mark.parametrize(
    ("stages", "microbatches", "group_size", "more", "lowered"),
    [
        (
            4,
            24,
            None,
            [1, 1, 1, 0],
            "stage 0 from 4 to 1, stage 1 from 3 to 1: more would take longer than Megatron's "
            "order at full clock",
        ),
        (  # the last group is small, and three forwards are left after stage 0's warm-up
            4,
            8,
            6,
            [0, 0, 0, 0],
            "stage 0 from 3 to 0, stage 1 from 3 to 0, stage 2 from 1 to 0: more would take longer "
            "than Megatron's order at full clock",
        ),
        (
            8,
            64,
            10,
            [0] * 8,
            "stage 0 from 11 to 0, stage 1 from 9 to 0, stage 2 from 8 to 0, stage 3 from 6 to 0, "
            "stage 4 from 4 to 0, stage 5 from 3 to 0, stage 6 from 1 to 0: more would make stages "
            "wait in circles",
        ),
    ],
)
def test_an_order_that_would_hang_or_be_slower_is_not_taken(
    stages, microbatches, group_size, more, lowered
):
    profile = uniform_profile(stages, CURVE, backward=3.0)
    order = order_of(profile, microbatches, lowered=lowered, group_size=group_size)
    assert more_warmup(order, group_size) == more
    if not any(more):
        assert order == interleaved(stages, microbatches, 2, group_size)


@pytest.mark.parametrize(
    ("microbatches", "group_size"),
    [
        (2, None),  # the warm-up has all forwards
        (3, 3),  # it has all but one, which comes before the first backward in any case
    ],
)
def test_where_no_forwards_are_left_the_order_is_megatrons_own(microbatches, group_size):
    profile = uniform_profile(2, CURVE, backward=6.0)
    order = order_of(profile, microbatches, group_size=group_size)
    assert order == interleaved(2, microbatches, 2, group_size)


@pytest.mark.parametrize("seed", range(40))
def test_no_order_is_slower_than_megatrons_or_beyond_its_limit(seed):
    rng = random.Random(seed)
    stages, chunks = rng.choice([2, 3, 4]), rng.choice([2, 3])
    microbatches = stages * rng.randint(1, 4)
    group_size = rng.choice([None, stages, 2 * stages])
    own = interleaved(stages, microbatches, chunks, group_size)
    profile = for_chunks(rng, random_profile(rng, stages), chunks)
    limit = max(own.peak_in_flight) / chunks + rng.choice([0, 0.5, 1, 2])
    request = PlanRequest(
        microbatches,
        "envpipe",
        num_chunks=chunks,
        group_size=group_size,
        max_in_flight=limit,
        conditions=random_conditions(rng, profile),
    )
    plan = make_plan(profile, request).plan  # at the highest clocks
    assert plan.baseline.schedule.stages == own.stages
    assert plan.cost.slowdown_percent(plan.baseline.cost) <= 1e-6
    assert max(plan.schedule.peak_in_flight) <= chunks * limit + 1e-9
    more = more_warmup(plan.schedule, group_size)
    assert min(more) >= 0
    assert any(more) or plan.schedule == own
    assert (plan.schedule.name == "envpipe-interleaved") == any(more)


@pytest.mark.parametrize("how", [{"policy": "optimal"}, {"policy": "envelope"}])
def test_its_plans_save_at_the_same_time_and_can_be_read_again(how, tmp_path):
    profile = uniform_profile(4, CURVE, backward=3.0)
    request = PlanRequest(12, "ours", num_chunks=2, blocking_power_w=5.0, **how)
    plan = make_plan(profile, request).plan
    assert plan.schedule.name == "envpipe-interleaved"
    assert plan.cost.saving_percent(plan.baseline.cost) > 5
    if how["policy"] == "optimal":
        assert plan.cost.slowdown_percent(plan.baseline.cost) <= 1e-6
    plan.write(tmp_path / "plan.json")
    again = read_plan(tmp_path / "plan.json", profile)
    assert (again.schedule, again.cost) == (plan.schedule, plan.cost)


@pytest.mark.parametrize(
    "limit", [{"channel_capacity": 1}, {"max_warmup_step": 1}], ids=["channel", "step"]
)
@pytest.mark.parametrize("schedule", ["envpipe", "ours", "auto"])
def test_limits_of_one_chunk_are_refused_with_more(schedule, limit):
    policy = "optimal" if schedule == "auto" else "baseline"
    profile = uniform_profile(4, CURVE)
    request = PlanRequest(8, schedule, policy, num_chunks=2, **limit)
    with pytest.raises(PlannerError, match=r"channels are of whole .*'2 chunks'.*Leave out"):
        make_plan(profile, request)
    make_plan(profile, PlanRequest(8, schedule, policy, **limit))


@on_request("CORE")
def test_what_the_page_says_of_gpt3():
    """In chunks the rule saves less than Megatron's order does, and `auto` more than both."""
    path = GPT3 / "gpt3-175b_a100_sxm.csv"
    if not path.exists():
        pytest.skip(f"the published profiles are not in {GPT3}")
    profile, saved = read_profile(path), {}
    for schedule, runnable in (
        ("envpipe", False),
        ("interleaved", False),
        ("auto", False),
        ("auto", True),
    ):
        request = PlanRequest(
            24, schedule, "optimal", blocking_power_w=83.64, num_chunks=2, runnable=runnable
        )
        plan = make_plan(profile, request).plan
        assert plan.cost.slowdown_percent(plan.baseline.cost) <= 1e-6
        saved[schedule, runnable] = f"{plan.cost.saving_percent(plan.baseline.cost):.2f}"
    assert [*saved.values()] == ["17.67", "18.11", "19.05", "18.82"]
    page = " ".join((Path(__file__).parents[3] / "docs" / "planner.md").read_text().split())
    assert "save 17.67 % against 18.11 % in Megatron's own interleaved order" in page
    assert "`auto`, with 19.05 %, or 18.82 % [as jobs run it]" in page
