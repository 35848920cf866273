"""Losses, gradients and weights are those of megatron-core's own schedules, to the last bit."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from jobs import ALIGNED, ALL, OVERLAP, Job, Ours, Result, train
from memory_folder import memory_folder
from on_request import each_of, on_request
from rank_pool import RankPool

from envpipe_megatron.core.conditions import Conditions
from envpipe_megatron.core.kinds import WHOLE, Kind
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.plan import Plan, read_plan
from envpipe_megatron.core.profile import Profile, make_profile, read_profile
from envpipe_megatron.core.profile_rows import ProfileRow, SplitBackward
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.policies.planner import make_plan
from envpipe_megatron.policies.request import PlanRequest

# One worker runs them all: they share the ranks.
pytestmark = pytest.mark.xdist_group("pipeline")

CLOCKS_MHZ = (1410, 1305, 1200, 1095, 990)


@pytest.fixture(scope="session")
def stock(pool: RankPool) -> Callable[[Job], list[Result]]:
    """Results of megatron-core's own function; each job is trained once."""

    @cache
    def run(job: Job) -> list[Result]:
        return results_of(pool, job, None, Path())

    # With chunks megatron-core frees outputs whose gloo sends are still under way.
    return lambda job: run(job if job.chunks == 1 else replace(job, deallocate=False))


@pytest.fixture
def ours(pool: RankPool) -> Iterator[Callable[[Job, Ours], list[Result]]]:
    with memory_folder() as folder:
        yield lambda job, how: results_of(pool, job, how, folder)


def results_of(pool: RankPool, job: Job, how: Ours | None, folder: Path) -> list[Result]:
    """Those of the ranks that have one."""
    return [result for result in pool.run(train, job, how, folder) if result is not None]


def synthetic_profile(
    num_stages: int,
    combined_chunks: int = 0,
) -> Profile:
    """A valley of energy, and stages that differ; with rows of pairs if units are combined."""
    rows = []
    for stage, kind, clock in itertools.product(range(num_stages), WHOLE, CLOCKS_MHZ):
        time_s = (1 + 0.1 * stage) * (1 + (kind is Kind.BACKWARD)) * (0.2 + 0.8 * 1410 / clock)
        rows.append((stage, kind, ProfileRow(clock, time_s, 100 + ((clock - 1200) / 100) ** 2)))
    if combined_chunks:
        parts = [
            (combined_chunks * stage + chunk, priced, row.scaled(1 / combined_chunks))
            for stage, kind, row in rows
            for priced in ((kind, Kind.COMBINED) if kind is Kind.BACKWARD else (kind,))
            for chunk in range(combined_chunks)
        ]
        return make_profile(parts, source="synthetic", listed_chunks=combined_chunks)
    return make_profile(rows, source="synthetic")


def by_plan(folder: Path, schedule: Schedule) -> Ours:
    """EnvPipe running this very order at alternating frequencies."""
    clocks = itertools.cycle(CLOCKS_MHZ)
    frequency_mhz = np.array([[next(clocks) for _ in order] for order in schedule.stages])
    if schedule.split:
        profile = synthetic_profile(schedule.num_stages)
        profile = profile.with_split_backwards(SplitBackward(0.5, 0.05))
        frequency_mhz = schedule.pair_clocks(frequency_mhz)
    else:
        pairs = schedule.num_chunks if schedule.combined.any() else 0
        profile = synthetic_profile(schedule.num_stages, combined_chunks=pairs)
    profile.write(folder / "profile_in.csv")
    conditions = Conditions((80.0,) * schedule.num_stages)
    chunk_profile = profile.for_chunks(schedule.num_chunks)
    plan = Plan("custom", schedule, frequency_mhz, chunk_profile, conditions)
    plan.write(folder / "plan_in.json")
    files = {"profile_file": folder / "profile_in.csv", "plan_file": folder / "plan_in.json"}
    return Ours(splits=schedule.split, **files)


def assert_same_bits(ours: list[Result], stock: list[Result]) -> None:
    for mine, theirs in zip(ours, stock, strict=True):
        where = f"stage {mine.stage}, replica {mine.replica}"
        assert mine.losses == theirs.losses, where
        assert mine.weights.keys() == theirs.weights.keys(), where
        for what in ("grads", "weights"):
            mine_bits, their_bits = getattr(mine, what), getattr(theirs, what)
            differ = [name for name, bits in their_bits.items() if mine_bits[name] != bits]
            assert not differ, f"{what}, {where}"
        assert mine.evaluated == theirs.evaluated, where
    assert any(result.losses[-1] for result in ours)  # the comparison had something to compare


def trained_alike(stock, ours, job: Job, how: Ours, schedule: Schedule) -> list[Result]:
    """Train by an order, and compare with Megatron's own."""
    results: list[Result] = ours(job, how)
    assert_executed(job, results, schedule)
    assert_same_bits(results, stock(job))
    return results


def assert_replicas_agree(results: list[Result]) -> None:
    """They saw different data, and have the same weights; else nothing was reduced."""
    by_stage = sorted(results, key=lambda result: (result.stage, result.replica))
    for one, other in zip(by_stage[::2], by_stage[1::2], strict=True):
        assert one.weights == other.weights
        assert one.losses != other.losses or not one.losses[0]


def labels_that_run(order: Schedule, stage: int) -> list[str]:
    """A stage's units; a whole backward among split ones is listed as two, and runs as one."""
    ran: list[str] = []
    whole = False
    for own in order.stages[stage]:
        if own.combined:
            whole = True
            continue
        ran.append(own.label(order.num_chunks).replace("W", "B" if whole else "W"))
        whole = False
    return ran


def assert_executed(job: Job, results: list[Result], steady: Schedule) -> None:
    """Every stage ran the framework's order up to its plan, then the intended one."""
    for result in results:
        orders = [
            steady if phase in ("reconfigure", "steady") else job.own_order
            for phase in result.phases
        ]
        assert result.executed == [labels_that_run(order, result.stage) for order in orders]
        assert result.phases.count("steady") >= 2


def assert_locked(results: list[Result], frequency_mhz: np.ndarray) -> None:
    """After one warm-up iteration, every GPU was told the frequency of each unit, in order."""
    for result in results:
        steady = result.phases.count("steady")
        wanted = [1410, *(frequency_mhz[result.stage].tolist() * steady)]
        changes = [clock for clock, _ in itertools.groupby(wanted)]
        # Behind the last unit the clock of the next iteration's first may have been set, or not.
        assert result.locked_mhz[: len(changes)] == changes
        assert len(result.locked_mhz) <= len(changes) + 1


# Schedules -----------------------------------------------------------------------------------


def order_of(stages: int, microbatches: int, order: str | tuple[int, ...]) -> Schedule:
    """By name, or 1F1B with these extra forwards."""
    if isinstance(order, str):
        if order == "interleaved":
            return builders.interleaved(stages, microbatches, 2)
        named = {"1f1b": builders.one_f_one_b, "gpipe": builders.gpipe}
        return named[order](stages, microbatches)
    return builders.envpipe(stages, microbatches, order)


#: One microbatch, fewer than stages, an odd number, and some more; whether the head is tied to the
#: embedding.
SCHEDULES = [
    (2, 1, "1f1b", False),
    (2, 3, (1, 0), False),
    (2, 6, "1f1b", False),
    (2, 6, (4, 5), True),
    (4, 1, "gpipe", True),
    (4, 3, "1f1b", False),
    (4, 8, "gpipe", True),
    (4, 8, (4, 5, 3, 0), True),
    (2, 2, "interleaved", False),
    pytest.param(4, 8, "interleaved", False, marks=on_request("PIPELINE")),
]


@pytest.mark.parametrize(("stages", "microbatches", "order", "tied"), SCHEDULES)
def test_every_schedule(stock, ours, tmp_path, stages, microbatches, order, tied):
    schedule = order_of(stages, microbatches, order)
    # Deallocation is on for half of the numbers of microbatches where tied, the others where not.
    deallocate = tied == (microbatches in (1, 3, 8)) or schedule.num_chunks > 1
    job = Job(stages, microbatches, schedule.num_chunks, tied=tied, deallocate=deallocate)
    how = by_plan(tmp_path, schedule)
    results = trained_alike(stock, ours, job, how, schedule)
    assert_locked(results, read_plan(how.plan_file, read_profile(how.profile_file)).frequency_mhz)


def test_interleaved_reference_is_right(stock):
    """Megatron's interleaved order is silently wrong with other p2p settings: so check it too."""
    whole = []
    for chunks in (1, 2):
        model: dict[tuple[int, str], bytes] = {}
        for result in stock(Job(2, 6, chunks=chunks, layers=4)):
            model |= {(result.replica, name): bits for name, bits in result.weights.items()}
        whole.append(model)
    assert whole[0] == whole[1]


# Policies ------------------------------------------------------------------------------------


def test_a_policy_planned_by_the_session(stock, ours, tmp_path):
    job = Job(4, 6)
    profile = synthetic_profile(4)
    profile.write(tmp_path / "profile_in.csv")
    planned = make_plan(profile, PlanRequest(6, "envpipe", "envelope")).plan
    assert sum(planned.schedule.extra_forwards) > 0  # not a plan in name only
    how = Ours("envpipe", "envelope", profile_file=tmp_path / "profile_in.csv")
    results = trained_alike(stock, ours, job, how, planned.schedule)
    assert_locked(results, planned.frequency_mhz)


def test_an_order_that_is_searched_for_chunks(stock, ours, tmp_path):
    """Forwards of two chunks come otherwise than in Megatron's order."""
    job = Job(2, 8, chunks=2, group=4)
    profile = synthetic_profile(job.stages)
    profile.write(tmp_path / "profile_in.csv")
    how = Ours("auto", "optimal", profile_file=tmp_path / "profile_in.csv")
    results = ours(job, how)
    order = results[0].plan.schedule
    assert order.stages != job.own_order.stages
    assert_executed(job, results, order)
    assert_same_bits(results, stock(job))


def test_whole_loop_online(stock, ours):
    """Warm-up, profile, plan, reconfigure, steady: training goes on through all of them."""
    # Few clocks, and units of which one iteration fills a window: else a hundred are trained twice.
    few = {"unit_s": 0.05, "clocks_mhz": CLOCKS_MHZ[::2]}
    how = Ours("envpipe", "envelope", "balanced", warmup_iterations=2, **few)
    job = Job(2, 6, steps=None)
    results = ours(job, how)
    plan = results[0].plan
    assert plan.policy == "envelope-balanced"
    assert sum(plan.schedule.extra_forwards) > 0
    assert results[0].reconfigure_steps > 0
    assert min(results[0].locked_mhz) < 1410
    assert_executed(job, results, plan.schedule)
    assert_same_bits(results, stock(replace(job, steps=len(results[0].losses))))
    phases = [phase for phase, _ in itertools.groupby(results[0].phases)]
    assert phases == ["warm-up", "profile", "reconfigure", "steady"]
    for result in results:
        assert result.profile.to_csv() == results[0].profile.to_csv()
        assert result.plan.to_json() == plan.to_json()


# What megatron-core does around the units ----------------------------------------------------


def test_off_and_on_again_in_two_replicas(stock, ours, tmp_path):
    schedule = order_of(2, 6, (4, 0))
    job = Job(2, 6, reducer=ALIGNED, steps=7)
    asks = (3, '{"off": true}'), (5, '{"off": false}')
    results = ours(job, replace(by_plan(tmp_path, schedule), unit_s=0.2, asks=asks))
    assert {tuple(result.phases) for result in results} == {
        ("warm-up", *["steady"] * 2, *["off"] * 2, *["steady"] * 2)
    }
    assert_executed(job, results, schedule)
    assert_same_bits(results, stock(job))
    assert_replicas_agree(results)


ALL_ALIGNED = (*ALL, "align_grad_reduce")
#: In Megatron's own order, what is done between units is Megatron's, and when it is done.
AROUND = {
    "three chunks, groups of three": Job(2, 5, chunks=3, group=3, reducer=ALL_ALIGNED),
    "lengths vary": Job(4, 4, lengths=(16, 5, 11, 2)),
}
ALL_AROUND = AROUND | {
    "four chunks, groups of three": Job(2, 6, chunks=4, group=3, reducer=ALL_ALIGNED),
    "two chunks": Job(2, 6, chunks=2, reducer=ALL_ALIGNED),
    "lengths vary, two chunks": Job(2, 6, chunks=2, lengths=(16, 5, 11, 2)),
    "bert, two chunks": Job(2, 6, chunks=2, bert=True),
}


@pytest.mark.parametrize("name", each_of(ALL_AROUND, AROUND))
def test_what_is_done_between_units(stock, ours, tmp_path, name):
    job = ALL_AROUND[name]
    results = ours(job, by_plan(tmp_path, job.own_order))
    references = stock(job)
    assert_same_bits(results, references)
    for result, reference in zip(results, references, strict=True):
        assert result.around == reference.around
    done = {what for what, _ in results[0].around}
    assert done == {"forward"} | ({"param_sync_func", "grad_sync_func"} if job.reducer else set())


FEATURES = {
    "per-token loss": Job(2, 6, per_token_loss=True, reducer=OVERLAP),
    "evaluation, tied": Job(4, 3, evaluate_after=1, tied=True),
    "evaluation in the warm-up": Job(2, 6, evaluate_after=0),
    "evaluation, two chunks": Job(2, 4, chunks=2, evaluate_after=1),
}


@pytest.mark.parametrize("feature", FEATURES)
def test_features(stock, ours, tmp_path, feature):
    job = FEATURES[feature]
    extra = {3: (0, 0, 1, 0), 4: "interleaved", 6: (3, 0)}[job.microbatches]
    schedule = order_of(job.stages, job.microbatches, extra)
    results = trained_alike(stock, ours, job, by_plan(tmp_path, schedule), schedule)
    if job.evaluate_after is not None:
        assert any(result.evaluated for result in results)
        # Evaluation leaves no trace in training.
        plain = stock(replace(job, evaluate_after=None))
        for result, reference in zip(results, plain, strict=True):
            assert result.weights == reference.weights
