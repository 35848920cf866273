"""The search in Megatron's space finds what trying all configurations finds."""

from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pytest
from whole_layers import whole_layers

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.policies.objective import Objective
from envpipe_megatron.search.candidates import Candidate
from envpipe_megatron.search.configuration import Job, Shape, megatron_flags
from envpipe_megatron.search.layer_profile import LayerProfile
from envpipe_megatron.search.search import search
from envpipe_megatron.search.space import MegatronSpace, Space

JOB = Job(num_gpus=4, gpus_per_node=2, global_batch=8, memory_bytes=260.0)
FASTEST = Objective(goal="time")


def _least_s(megatron: MegatronSpace, shape: Shape) -> float:
    """The least time that any cut forces, each stage with all that it can recompute."""
    pieces, least_s = len(megatron.profile.pieces), np.inf
    options = [(None, 0), *product(("selective", "full"), range(1, pieces + 1))]
    for inner in combinations(range(1, pieces), shape.num_stages - 1):
        cut = (0, *inner, pieces)
        forced_s = np.full(shape.num_stages, np.inf)
        for option in options:
            candidate = megatron.candidate(shape, cut, [option] * shape.num_stages)
            fits = candidate.peak_bytes <= megatron.job.memory_bytes
            forced_s = np.minimum(forced_s, np.where(fits, _forced_s(candidate), np.inf))
        least_s = min(least_s, forced_s.max())
    return least_s


def _forced_s(candidate: Candidate) -> list[float]:
    """Return what each stage of 1F1B forces; ways through other stages recompute nothing."""
    works = candidate.works
    count, stages = candidate.configuration.num_microbatches, len(works)
    forward_s = [work.forward_s[0, 0] for work in works]
    backward_s = [work.backward_s[0, 0] for work in works]
    plain_s = [work.time_s - work.recomputed_s[0] for work in works]
    forced = []
    for stage in range(stages):
        steady = count - min(count, stages - stage)
        forced.append(
            max(
                sum(plain_s[:stage]) + count * (forward_s[stage] + backward_s[stage]),
                sum(plain_s) + (count - 1) * backward_s[stage] + steady * forward_s[stage],
                sum(plain_s) + (count - 1) * forward_s[stage] + steady * backward_s[stage],
                (steady > 0) * (sum(plain_s) + sum(plain_s[stage + 1 :]))
                + steady * (forward_s[stage] + backward_s[stage]),
            )
        )
    return forced


def test_no_cut_of_a_shape_takes_less() -> None:
    found, shapes = [], 0
    for seed, memory_bytes in enumerate((150.0, 190.0, 230.0, 270.0)):
        megatron = MegatronSpace(
            whole_layers(seed), replace(JOB, memory_bytes=memory_bytes), Space()
        )
        shapes += len(megatron.shapes)
        for shape in megatron.shapes:
            cut, least_s = megatron.best_cut(shape), _least_s(megatron, shape)
            assert (np.inf if cut is None else cut.bound_s) == pytest.approx(least_s)
            if cut is None:
                continue
            found.append(cut.configuration)
            assert (cut.peak_bytes <= memory_bytes).all()
            assert cut.bound_s == pytest.approx(max(_forced_s(cut)))
            assert megatron.bound_s(shape) <= cut.bound_s * (1 + 1e-9)
    ways = {stage.recomputed[0] for each in found for stage in each.stages}
    assert ways == {None, "selective", "full"}
    assert len(found) < shapes


def test_the_fastest_by_the_simulator_is_found_whatever_the_bounds_leave_out() -> None:
    space = Space(max_chunks=2)
    megatron = MegatronSpace(whole_layers(5), JOB, space)
    candidates = [*filter(None, map(megatron.best_cut, megatron.shapes))]
    assert all(each.bound_s <= each.iteration_time_s for each in candidates)
    found = search(megatron.profile, JOB, space, FASTEST)
    times_s = sorted(each.iteration_time_s for each in candidates)
    assert [each.candidate.iteration_time_s for each in found.ranked[:1]] == times_s[:1]
    assert {each.configuration.num_chunks for each in candidates} == {1, 2}
    for each in candidates:
        assert (each.peak_bytes <= JOB.memory_bytes).all()


def _with_rests(profile: LayerProfile, share: float) -> LayerProfile:
    """The same on GPUs that are faster, by some of their pieces, where they rest half the time."""
    faster = {
        sizes: {
            name: replace(each, rested_s=share * each.both_s) if name == "layer" else each
            for name, each in by_piece.items()
        }
        for sizes, by_piece in profile.measures.items()
    }
    return replace(profile, measures=faster)


def test_gpus_at_their_power_limit_are_the_faster_the_more_they_wait() -> None:
    plain = whole_layers(5)
    megatron = MegatronSpace(_with_rests(plain, 0.7), JOB, Space(max_chunks=2))
    waits = set()
    for cut in filter(None, map(megatron.best_cut, megatron.shapes)):
        rested, busy = cut, replace(cut, profile=plain)
        assert 0.7 * busy.iteration_time_s < rested.iteration_time_s <= busy.iteration_time_s
        assert (rested.peak_bytes == busy.peak_bytes).all()
        for stage, work, measured in zip(
            cut.configuration.stages, rested.works, busy.works, strict=True
        ):
            share = cut.configuration.num_microbatches * work.time_s / rested.iteration_time_s
            waits.add(round(1 - share, 2))
            kinds = [plain.pieces[piece] for piece in stage.pieces]
            all_s, layers_s = (
                sum(
                    plain.at(stage.sizes)[kind].both_s[0]
                    for kind in kinds
                    if kind == "layer" or not only
                )
                for only in (False, True)
            )
            by_half = 1 - 0.3 * layers_s / all_s
            factor = 1 - (1 - share) * (1 - by_half)
            assert work.time_s == pytest.approx(factor * measured.time_s, rel=5e-3)
    assert min(waits) < 0.05
    assert max(waits) > 0.4


@pytest.mark.parametrize("seed", range(4))
def test_rests_hide_no_shape_from_the_search(seed: int) -> None:
    profile, space = _with_rests(whole_layers(seed), 0.5), Space(max_chunks=2)
    megatron = MegatronSpace(profile, JOB, space)
    cuts = filter(None, map(megatron.best_cut, megatron.shapes))
    times_s = sorted(cut.iteration_time_s for cut in cuts)
    found = search(profile, JOB, space, FASTEST)
    assert found.ranked[0].candidate.iteration_time_s == times_s[0]


def test_stages_that_recompute_alike_are_one_of_megatrons_own_jobs() -> None:
    alike = MegatronSpace(whole_layers(1), JOB, Space(same_recomputation=True))
    each = MegatronSpace(whole_layers(1), JOB, Space())
    slower = 0
    for shape in alike.shapes:
        cut, free = alike.best_cut(shape), each.best_cut(shape)
        if cut is None or free is None:
            assert cut is None
            continue
        slower += cut.bound_s > free.bound_s * (1 + 1e-9)
        assert cut.bound_s >= free.bound_s * (1 - 1e-9)
        names = {stage.recomputed[0] for stage in cut.configuration.stages} - {None}
        assert len(names) <= 1
    assert slower


@pytest.mark.parametrize("seed", [0, 2, 7])
def test_stages_recompute_alike_whatever_is_asked_for(seed: int) -> None:
    """Other cuts of the best shapes, which need less energy, too."""
    profile, recomputing = whole_layers(seed, ("layer", "other") * 3, clocks=3), 0
    for memory_bytes in (230.0, 260.0, 300.0):
        job = Job(4, 2, 8, memory_bytes)
        alike = Space(same_recomputation=True)
        found = search(profile, job, alike, Objective(), blocking_power_w=60.0, max_slowdown=0.05)
        for each in found.ranked:
            flags = " ".join(megatron_flags(profile, each.candidate.configuration, job))
            assert "--envpipe" not in flags
            recomputing += "--recompute" in flags
    assert recomputing


def test_many_pieces_are_cut_as_well_as_if_no_coarse_cut_came_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layers = tuple(np.random.default_rng(0).choice(["layer", "other"], 60))
    job = Job(4, 4, 8, memory_bytes=2000.0)
    megatron = MegatronSpace(whole_layers(2, layers), job, Space())
    shape = next(shape for shape in megatron.shapes if shape.num_stages == 4)
    at_once = megatron.best_cut(shape)
    assert at_once is not None
    monkeypatch.setattr("envpipe_megatron.search.space._COARSE_NODES", 12)
    assert megatron.best_cut(shape) == at_once
    assert megatron.best_cut(shape, at_once.bound_s) == at_once


def test_energy_takes_a_cut_that_time_alone_would_not() -> None:
    profile, job = whole_layers(4, ("layer", "other", "layer") * 3, clocks=6), Job(3, 3, 8)
    cheap = search(profile, job, Space(), Objective(), blocking_power_w=60.0, max_slowdown=0.05)
    fast = search(profile, job, Space(), FASTEST, blocking_power_w=60.0)
    best, fastest = cheap.ranked[0], fast.ranked[0].candidate
    longest_s = 1.05 * min(each.candidate.iteration_time_s for each in fast.ranked)
    assert all(each.iteration_time_s <= longest_s * (1 + 1e-9) for each in cheap.ranked)
    assert best.candidate.configuration.shape == fastest.configuration.shape
    assert best.candidate.configuration != fastest.configuration
    assert best.cost.energy_j < 0.99 * fastest.plan(60.0, longest_s).cost.energy_j


@pytest.mark.parametrize("seed", [3, 6])
def test_a_looser_limit_finds_nothing_dearer(seed: int) -> None:
    """Where time costs most, what takes the least energy at the longest time is no bargain."""
    profile, job = whole_layers(seed, ("layer", "other") * 4, clocks=4), Job(8, 8, 16, 400.0)
    cost = Objective("cost", energy_price=3.6e6, gpu_price=3600 * 600.0)
    tight, loose = (
        search(profile, job, Space(), cost, blocking_power_w=60.0, max_slowdown=slowdown).ranked[0]
        for slowdown in (0.02, 1.0)
    )
    assert cost.score(loose.cost, 8) <= cost.score(tight.cost, 8) * (1 + 1e-3)


def test_what_cannot_be_is_said() -> None:
    profile = whole_layers(0)
    too_little = r"No configuration keeps the memory limit \(GiB\) \(got 9\.31"
    with pytest.raises(EnvPipeError, match=too_little):
        search(profile, Job(4, 4, 8, 1.0), Space(), FASTEST)
    with pytest.raises(EnvPipeError, match=r"fit 7 GPUs and a batch of 8 .*expert parallel"):
        search(profile, Job(7, 7, 8), Space(), FASTEST)
    with pytest.raises(EnvPipeError, match="more than 1,000,000,000 samples"):
        search(profile, Job(4, 4, 8 * 10**19), Space(), FASTEST)
    timed = {
        sizes: {name: replace(of, forward_j=None) for name, of in by_piece.items()}
        for sizes, by_piece in profile.measures.items()
    }
    with pytest.raises(EnvPipeError, match="has no joules"):
        search(replace(profile, measures=timed), JOB, Space(), Objective())


@pytest.mark.parametrize("kept", [slice(1, None), slice(-1), [0, 0, 1, -1]])
def test_a_model_begins_with_one_embedding_and_ends_with_one_loss(kept: slice | list[int]) -> None:
    profile = whole_layers(0)
    blocks = tuple(np.array(profile.blocks, dtype=object)[kept])
    with pytest.raises(EnvPipeError, match="one 'embedding' and ends with one 'loss'"):
        search(replace(profile, blocks=blocks), JOB, Space(), FASTEST)
