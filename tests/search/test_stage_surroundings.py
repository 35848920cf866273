"""A stage's work and what lies around its units, by hand: gradients, messages, replicas, memory."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest
from whole_layers import whole_layers

from envpipe_megatron.policies.objective import Objective
from envpipe_megatron.search.candidates import Candidate
from envpipe_megatron.search.configuration import Configuration, Job, Shape, StageLayout
from envpipe_megatron.search.layer_profile import (
    AllReduce,
    Block,
    BytesPerParameter,
    Curve,
    LayerProfile,
    Links,
    Measure,
    Recomputation,
    Sizes,
)
from envpipe_megatron.search.search import estimates_j, search
from envpipe_megatron.search.space import MegatronSpace, Space

WITHIN, ACROSS = Curve(np.array([10.0]), np.array([1.0])), Curve(np.array([10.0]), np.array([5.0]))
GROUPS = AllReduce(2, False, WITHIN), AllReduce(2, True, ACROSS), AllReduce(4, True, ACROSS)
LINKS = Links(WITHIN, ACROSS, GROUPS)
JOB = Job(num_gpus=4, gpus_per_node=2, global_batch=8)
ONE = Sizes()


def profile_of(experts: float = 0.0, **changes) -> LayerProfile:
    """Layers with 10 parameters and messages of 10 bytes, on links that are slow across nodes."""
    profile = whole_layers(0, ("layer",) * 4)
    measures = {
        sizes: {
            name: replace(measure, parameters=10.0, expert_parameters=experts, output_bytes=10.0)
            for name, measure in by_piece.items()
        }
        for sizes, by_piece in profile.measures.items()
    }
    more = {sizes: measures[Sizes()] for sizes in (Sizes(1, 1, 2), Sizes(1, 1, 1, 2))}
    changes = {"links": LINKS, "optimizer_s": 0.0, **changes}
    return replace(profile, measures={**measures, **more}, **changes)


def candidate_of(profile, sizes=ONE, stages=2, replicas=1, shared=False, job=JOB) -> Candidate:
    edges = [round(stage * 6 / stages) for stage in range(stages + 1)]
    layouts = tuple(StageLayout(((a, b),), sizes, replicas) for a, b in pairwise(edges))
    return Candidate(Configuration(layouts, 4, shared), profile, job)


def test_messages_between_nodes_take_the_slow_link() -> None:
    profile = profile_of()
    assert candidate_of(profile, stages=4).hops_s.tolist() == [1.0, 5.0, 1.0]
    assert candidate_of(profile, replicas=2).hops_s.tolist() == [5.0]
    # Of three GPUs a stage the first's peer is on its own node, and the last's is not.
    three = Job(num_gpus=6, gpus_per_node=4, global_batch=8)
    assert candidate_of(profile, replicas=3, job=three).hops_s.tolist() == [5.0]
    # Stages over several nodes reduce over it, too.
    four = Job(num_gpus=8, gpus_per_node=2, global_batch=8)
    tails_s = candidate_of(profile, replicas=4, job=four).tails_s.tolist()
    assert tails_s == pytest.approx([5.0 * 12] * 2)


@pytest.mark.parametrize(
    ("sizes", "replicas", "experts", "expected_s"),
    [
        (Sizes(), 1, 0.0, 0.0),
        # 3 layers x 10 parameters x 4 bytes are 12 times what the link takes 1 s for.
        (Sizes(), 2, 0.0, 12.0),
        (Sizes(1, 1, 2), 1, 0.0, 12.0),
        # Experts on two ranks each: nobody else holds theirs.
        (Sizes(1, 1, 1, 2), 2, 10.0, 0.0),
        (Sizes(1, 1, 1, 2), 2, 5.0, 6.0),
    ],
)
def test_gradients_are_reduced_among_those_who_hold_the_same(
    sizes, replicas, experts, expected_s
) -> None:
    candidate = candidate_of(profile_of(experts), sizes, replicas=replicas)
    assert candidate.tails_s.tolist() == pytest.approx([expected_s] * 2)
    # The optimizer's 12 bytes a parameter are shared by the same.
    shared = candidate_of(profile_of(experts), sizes, replicas=replicas, shared=True)
    group = replicas * sizes.context_parallel
    others = max(1, group // sizes.expert_parallel)
    saved = 12 * 3 * (10 - (experts / others + (10 - experts) / group))
    assert (candidate.peak_bytes - shared.peak_bytes).tolist() == pytest.approx([saved] * 2)


def test_what_all_ranks_do_for_gradients_is_not_shared() -> None:
    profile = profile_of(links=Links(), optimizer_s=0.1, gradients_s=0.01)
    assert candidate_of(profile, replicas=2).tails_s[0] == pytest.approx(30 * 0.11)
    assert candidate_of(profile, replicas=2, shared=True).tails_s[0] == pytest.approx(30 * 0.06)


def test_energy_is_of_all_gpus() -> None:
    profile = profile_of(links=Links())
    one, two = (candidate_of(profile, replicas=n) for n in (1, 2))
    assert two.plan(50.0).cost.energy_j == pytest.approx(2 * one.plan(50.0).cost.energy_j)
    times_s = one.iteration_time_s * np.array([1.0, 1.1])
    ours, theirs = (estimates_j(each, 50.0, times_s) for each in (two, one))
    assert ours == pytest.approx(2 * theirs)


def test_layers_without_activations_limit_no_microbatches() -> None:
    nothing = {"activation_bytes": 0.0, "input_bytes": 0.0, "output_bytes": 0.0}
    measures = {name: replace(each, **nothing) for name, each in profile_of().at(ONE).items()}
    profile = replace(profile_of(links=Links()), measures={ONE: measures})
    limited = candidate_of(profile, job=replace(JOB, memory_bytes=1e6))
    assert limited.stage_profile.sidecar.activation_bytes is None
    free = candidate_of(profile)
    assert limited.plan(50.0).cost.energy_j == pytest.approx(free.plan(50.0).cost.energy_j)


def with_ways(profile: LayerProfile, ways: Callable[[Measure], Iterable[Recomputation]]):
    """The same, whose pieces have other ways of recomputation."""
    measures = {
        sizes: {name: replace(each, recomputation=tuple(ways(each))) for name, each in of.items()}
        for sizes, of in profile.measures.items()
    }
    return replace(profile, measures=measures)


def test_a_recomputation_that_takes_no_time_can_be_used() -> None:
    profile, fastest = whole_layers(1, ("layer",) * 6), Objective(goal="time")
    at_once = with_ways(
        profile, lambda each: (replace(way, time_s=0 * way.time_s) for way in each.recomputation)
    )
    job = Job(4, 2, 8, memory_bytes=250.0)
    slow = search(profile, job, Space(), fastest).ranked[0].iteration_time_s
    for same in (False, True):
        free = search(at_once, job, Space(same_recomputation=same), fastest)
        assert free.ranked[0].iteration_time_s <= slow


def test_a_recomputation_that_saves_nothing_is_not_used() -> None:
    profile = whole_layers(1, ("layer",) * 6)
    useless = with_ways(
        profile,
        lambda each: (
            replace(way, activation_bytes=each.activation_bytes) for way in each.recomputation
        ),
    )
    job = Job(4, 2, 8, memory_bytes=400.0)
    with_it, without = (
        MegatronSpace(each, job, Space()) for each in (useless, with_ways(profile, lambda _: ()))
    )
    for shape in without.shapes:
        found, other = with_it.best_cut(shape), without.best_cut(shape)
        assert (found is None) == (other is None)
        if found is not None:
            assert (found.configuration, found.bound_s) == (other.configuration, other.bound_s)


def test_the_planned_order_keeps_the_memory_of_unlike_chunks() -> None:
    profile = whole_layers(0, ("layer", "other") * 3)
    for memory_bytes in (420.0, 450.0, 480.0):
        job = Job(2, 2, 8, memory_bytes=memory_bytes)
        megatron = MegatronSpace(profile, job, Space(max_chunks=2))
        for shape in megatron.shapes:
            candidate = megatron.best_cut(shape)
            if shape.num_chunks == 2 and candidate is not None:
                plan = candidate.plan(60.0)
                assert (candidate.peak_bytes_of(plan.schedule) <= memory_bytes).all()


def test_virtual_stages_are_nearly_as_fast_as_the_best_of_all() -> None:
    shape, above = Shape(Sizes(), 2, 1, 2, 8), []
    for seed in range(16):
        megatron = MegatronSpace(
            whole_layers(seed, ("layer", "other") * 4), Job(2, 2, 8), Space(max_chunks=2)
        )
        least_s = min(
            megatron.candidate(shape, (0, *inner, 10), [(None, 0)] * 2).iteration_time_s
            for inner in combinations(range(1, 10), 3)
        )
        above.append(megatron.best_cut(shape).iteration_time_s / least_s)
    assert min(above) == pytest.approx(1.0)
    assert np.mean(above) < 1.02
    assert max(above) < 1.07


PROFILE = LayerProfile(
    blocks=(Block(("a",)),),
    frequency_mhz=np.array([1]),
    measures={Sizes(): {"a": Measure(np.array([1.0]), np.array([2.0]), parameters=10.0)}},
    bytes_per_parameter=BytesPerParameter(),
    links=Links(),
)


@pytest.mark.parametrize(("shared", "tail_s"), [(False, 0.0), (True, 1.5 + 5.0)])
def test_weights_are_gathered_where_no_gradient_is_reduced(shared: bool, tail_s: float) -> None:
    """Half an all-reduce of their 20 bytes, and the optimizer."""
    links = Links(
        all_reduce=(AllReduce(2, False, Curve(np.array([10.0, 20.0]), np.array([1.0, 3.0]))),)
    )
    each = BytesPerParameter(weight=2.0, gradient=0.0)
    profile = replace(PROFILE, bytes_per_parameter=each, links=links, optimizer_s=float(shared))
    stage = StageLayout(((0, 1),), Sizes(), 2)
    configuration = Configuration((stage,), 1, distributed_optimizer=shared)
    assert Candidate(configuration, profile, Job(2, 2, 2)).tails_s == pytest.approx([tail_s])
