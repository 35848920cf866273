"""Splits of layers over stages, held against all splits there are and against Megatron's reader."""

import shlex
from dataclasses import replace
from itertools import pairwise, product
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from on_request import examples
from whole_layers import CURVE, layers_that_take

from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.timeline import Timeline
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.search import partition
from envpipe_megatron.search.configuration import layout_flag
from envpipe_megatron.search.layer_profile import Sizes
from envpipe_megatron.search.partition import (
    SplitSpace,
    least_bottleneck,
    least_energy,
)
from envpipe_megatron.search.runs import cheapest_paths


def table_of(forward_s, backward_s, *, embedding=False, loss=False, curve=CURVE, held=None):
    """A profile from the time of each layer at the highest clock, and perhaps its bytes."""
    layers = len(forward_s) - embedding - loss
    names = ["embedding"] * embedding + [str(n) for n in range(layers)] + ["loss"] * loss
    times_s = dict(zip(names, zip(forward_s, backward_s, strict=True), strict=True))
    return layers_that_take(times_s, curve, held and dict(zip(names, held, strict=True)))


def layers_of(table, cut):
    """Transformer layers on each stage of a cut."""
    counts = np.diff(cut)
    counts[0] -= table.pieces[0] == "embedding"
    counts[-1] -= table.pieces[-1] == "loss"
    return tuple(counts.tolist())


def bottleneck_s(space, cut):
    return max(work.time_s for work in space.candidate(cut).works)


def cut_found(found):
    return (0, *(stage.chunks[0][1] for stage in found.configuration.stages))


def cut_of(table, split):
    """The inverse of `layers_of`."""
    inner = np.cumsum(split[:-1]) + (table.pieces[0] == "embedding")
    return (0, *inner.tolist(), len(table.pieces))


def all_cuts(table, num_stages):
    """Every way to deal the layers, one at least to a stage."""
    layers = len(table.pieces)
    return [
        cut
        for inner in product(range(1, layers), repeat=num_stages - 1)
        if list(cut := (0, *inner, layers)) == sorted(set(cut))
    ]


def stage_times(table, cut, kind):
    measures = table.at(Sizes())
    each_s = [getattr(measures[piece], f"{kind}_s")[0] for piece in table.pieces]
    return [sum(each_s[first:end]) for first, end in pairwise(cut)]


def both_times(table, cut):
    return np.sum([stage_times(table, cut, kind) for kind in ("forward", "backward")], axis=0)


def iteration_time(table, cut, num_microbatches):
    schedule = builders.one_f_one_b(len(cut) - 1, num_microbatches)
    by_kind = np.array([stage_times(table, cut, kind) for kind in ("forward", "backward")])
    durations = by_kind[schedule.is_backward.astype(int), np.arange(len(cut) - 1)[:, None]]
    return Timeline(schedule, durations).iteration_time_s


def planned_energy(table, cut, num_microbatches, power_w, deadline_s):
    candidate = SplitSpace(table, len(cut) - 1, num_microbatches).candidate(cut)
    return candidate.plan(power_w, deadline_s).cost.energy_j


@st.composite
def jobs(draw, max_layers=6, max_stages=4, max_microbatches=6):
    """(table, stages, microbatches); whole times, so that ties are common."""
    num_stages = draw(st.integers(2, max_stages))
    embedding, loss = draw(st.booleans()), draw(st.booleans())
    fewest = max(1, num_stages - embedding - loss)
    layers = draw(st.integers(fewest, max(fewest, max_layers))) + embedding + loss
    times = st.lists(st.integers(1, 5), min_size=layers, max_size=layers)
    table = table_of(
        np.array(draw(times)) / 10, np.array(draw(times)) / 10, embedding=embedding, loss=loss
    )
    return table, num_stages, draw(st.integers(1, max_microbatches))


def forced_time(space, cut):
    """Return what the stages of a cut force."""
    forced = zip(space.cuts.runs, space.cuts.forced_s, pairwise(cut), strict=True)
    return max(float(force[runs.place(*run)]) for runs, force, run in forced)


@given(jobs())
@settings(max_examples=examples(60), deadline=None)
def test_least_bottleneck_then_forced_time_then_the_evenest_of_all_cuts(job):
    table, num_stages, num_microbatches = job
    space = SplitSpace(table, num_stages, num_microbatches)
    found = least_bottleneck(space)

    def rank(cut):
        total = both_times(table, cut)
        figures = total.max(), forced_time(space, cut)
        return tuple(round(float(figure), 9) for figure in figures)

    assert rank(cut_found(found)) == min(map(rank, all_cuts(table, num_stages)))


@given(jobs(max_layers=8))
@settings(max_examples=examples(60), deadline=None)
def test_cuts_are_listed_once_each_timed_as_timeline_does_and_keep_their_bound(job):
    table, num_stages, num_microbatches = job
    space = SplitSpace(table, num_stages, num_microbatches)
    weights = [time_s**2 for time_s in space.cuts.time_s]
    cuts = list(cheapest_paths(space.cuts.runs, weights))
    assert sorted(cuts) == sorted(all_cuts(table, num_stages))
    squares = [np.square(both_times(table, cut)).sum() for cut in cuts]
    assert squares == pytest.approx(sorted(squares))
    for cut in cuts:
        time_s = iteration_time(table, cut, num_microbatches)
        assert space.candidate(cut).iteration_time_s == pytest.approx(time_s)
        assert forced_time(space, cut) <= time_s * (1 + 1e-9)
        assert bottleneck_s(space, cut) == pytest.approx(both_times(table, cut).max())


def test_a_large_model_is_split_exactly():
    # 126 layers over 16 stages: about 10^18 splits.
    times = np.concatenate([[0.2], np.ones(126), [2.0]])
    space = SplitSpace(table_of(times, 2 * times, embedding=True, loss=True), 16, 64)
    cut = cut_found(least_bottleneck(space))
    assert layers_of(space.profile, cut) == (8,) * 15 + (6,)
    assert bottleneck_s(space, cut) == pytest.approx(3 * 8.2)


@pytest.mark.parametrize(
    ("weights", "split"),
    [
        # Each end weighs as much as two layers, so the end stages take two layers less.
        ([0.2, *[0.1] * 8, 0.2], (2, 4, 2)),
        # So heavy that they want a stage for themselves.
        ([0.9, *[0.1] * 8, 0.9], (0, 4, 4, 0)),
    ],
)
def test_embedding_stays_on_the_first_stage_and_loss_on_the_last(weights, split):
    table = table_of(np.array(weights), np.array(weights), embedding=True, loss=True)
    space = SplitSpace(table, len(split), 6)
    cut = cut_found(least_bottleneck(space))
    assert layers_of(table, cut) == split
    assert cut_of(table, split) == cut
    rows = space.candidate(cut).stage_profile.rows
    times_s = [kinds[Kind.FORWARD][0].time_s for kinds in rows]
    assert times_s == pytest.approx(stage_times(table, cut, "forward"))
    joules = [kinds[Kind.BACKWARD][3].energy_j for kinds in rows]
    assert joules == pytest.approx([1.7 * 250 * time_s for time_s in times_s])


@given(jobs(max_layers=5, max_stages=3, max_microbatches=4), st.sampled_from([0.0, 0.05, 0.3]))
@settings(max_examples=examples(25), deadline=None)
def test_least_energy_of_all_cuts_that_are_fast_enough(job, tolerance):
    table, num_stages, num_microbatches = job
    space = SplitSpace(table, num_stages, num_microbatches)
    with patch.object(partition, "_MAX_PLANNED", 10_000):
        found = least_energy(space, 80.0, tolerance)
    times = {c: iteration_time(table, c, num_microbatches) for c in all_cuts(table, num_stages)}
    limit_s = times[space.cuts.fastest()[1]] * (1 + tolerance) * (1 + 1e-9)
    within = [cut for cut, time_s in times.items() if time_s <= limit_s]
    energies = {c: planned_energy(table, c, num_microbatches, 80.0, limit_s) for c in within}
    planned = {cut_found(each.candidate): each.cost.energy_j for each in found}
    assert planned == pytest.approx(energies)
    assert list(planned.values()) == sorted(planned.values())


def test_a_few_plans_come_near_the_best_split():
    times = np.concatenate([np.ones(12), [5.0]])
    space = SplitSpace(table_of(times, 2 * times, loss=True), 4, 8)
    found = []
    for most in (3, 10_000):
        with patch.object(partition, "_MAX_PLANNED", most):
            found.append(least_energy(space, 80.0, 0.05))
    some, everything = found
    assert len(some) <= 4 < len(everything)  # those, and the fastest
    least_j = everything[0].cost.energy_j
    assert least_j <= some[0].cost.energy_j <= 1.02 * least_j


def test_energy_needs_energies():
    free = {frequency: (slowdown, 0.0) for frequency, (slowdown, _) in CURVE.items()}
    table = table_of(np.ones(4), np.ones(4), curve=free)
    assert cut_found(least_bottleneck(SplitSpace(table, 2, 4))) == (0, 2, 4)
    with pytest.raises(EnvPipeError, match="no energies"):
        least_energy(SplitSpace(table, 2, 4), 80.0, 0.0)


@given(jobs(), st.data())
@settings(max_examples=examples(60), deadline=None)
def test_splits_above_the_memory_limit_are_left_out(job, data):
    table, num_stages, num_microbatches = job
    amounts = st.tuples(st.integers(0, 4), st.integers(0, 4))
    count = len(table.pieces)
    held = data.draw(st.lists(amounts, min_size=count, max_size=count).filter(np.any))
    by_piece = {
        piece: replace(measure, parameters=float(memory), activation_bytes=float(activation))
        for (piece, measure), (memory, activation) in zip(
            table.at(Sizes()).items(), held, strict=True
        )
    }
    table = replace(table, measures={Sizes(): by_piece})
    free = SplitSpace(table, num_stages, num_microbatches)

    def peak(cut):
        of_stages = [
            sum(m + min(num_microbatches, num_stages - stage) * a for m, a in held[first:end])
            for stage, (first, end) in enumerate(pairwise(cut))
        ]
        assert free.candidate(cut).peak_bytes == pytest.approx(of_stages)
        return max(of_stages)

    cuts = all_cuts(table, num_stages)
    limit = float(data.draw(st.integers(1, 40)))
    fitting = [cut for cut in cuts if peak(cut) <= limit]
    if not fitting:
        with pytest.raises(EnvPipeError, match=f"peak is {min(map(peak, cuts)):.6g} bytes"):
            SplitSpace(table, num_stages, num_microbatches, limit)
        return
    space = SplitSpace(table, num_stages, num_microbatches, limit)
    found = cut_found(least_bottleneck(space))
    assert found in fitting
    for cut in cuts:
        fits = bool((space.candidate(cut).peak_bytes <= limit * (1 + 1e-9)).all())
        assert fits == (cut in fitting)
    least_s = min(both_times(table, cut).max() for cut in fitting)
    assert both_times(table, found).max() == pytest.approx(least_s)


@pytest.mark.parametrize(("layers", "stages"), [(1, 3), (2, 4), (2, 10**9)])
def test_fewer_layers_than_stages(layers, stages):
    with pytest.raises(EnvPipeError, match=f"too few layers for {stages} stages"):
        SplitSpace(table_of(np.ones(layers), np.ones(layers)), stages, 4)


@pytest.mark.parametrize("sizes", [(1, 4), (2, 0)])
def test_a_split_needs_two_stages_and_a_microbatch(sizes):
    table = table_of(np.ones(4), np.ones(4))
    with pytest.raises(EnvPipeError, match="two stages and one microbatch"):
        SplitSpace(table, *sizes)
    assert cut_found(least_bottleneck(SplitSpace(table, 2, 1))) == (0, 2, 4)
    several = replace(table, measures={Sizes(): table.at(Sizes()), Sizes(2): table.at(Sizes())})
    with pytest.raises(EnvPipeError, match="at several sizes"):
        SplitSpace(several, 2, 1)
    with pytest.raises(EnvPipeError, match="no bytes for the memory limit"):
        SplitSpace(table, 2, 8, 40.0)


def test_the_estimate_takes_the_slowest_clocks_that_there_is_time_for():
    # Two layers take 6 s at 1200 MHz, 6.6 s at 1000. Less what waiting takes they use 1920 J there,
    # 1518 J at 1000 MHz and 1368 J at 900, the least.
    space = SplitSpace(table_of(np.ones(4), np.full(4, 2.0)), 2, 2)
    limit_s = 6.0 + 2 * 6.6
    first, second = space.cuts.energy_weights(limit_s, limit_s, 80.0)
    assert first[space.cuts.runs[0].place(0, 2)] == pytest.approx(1368.0)
    assert second[space.cuts.runs[1].place(2, 4)] == pytest.approx(1518.0)


# --- Megatron's flags ---


def flag_of(split, **ends):
    """As the flag gives it, whether embedding and loss were profiled or not."""
    ones = np.ones(sum(split) + len(ends))
    table = table_of(ones, ones, **ends)
    found = SplitSpace(table, len(split), 1).candidate(cut_of(table, split)).configuration
    return layout_flag(table, found)


@pytest.fixture(scope="module")
def megatron_config():
    pytest.importorskip("torch")
    pytest.importorskip("megatron.core")
    from megatron.core.transformer.transformer_config import TransformerConfig

    def make(split, **options):
        import torch

        return TransformerConfig(
            num_layers=sum(split), hidden_size=8, num_attention_heads=1,
            pipeline_model_parallel_size=len(split), pipeline_dtype=torch.float32, **options,
        )  # fmt: skip

    return make


@pytest.mark.xdist_group("megatron")
@pytest.mark.parametrize(
    "split", [(3, 4, 4, 2), (0, 1, 2, 0), (1, 1), (12, 13, 13, 11), (2, 1, 1, 2), (0, 10, 10, 1)]
)
def test_megatron_reads_the_flags_alike(megatron_config, split):
    from megatron.core.transformer.enums import LayerType

    text = shlex.split(flag_of(split, embedding=True, loss=True))[1]
    if min(split):  # whether embedding and loss were profiled or not
        assert shlex.split(flag_of(split))[1] == text
    config = megatron_config(split, pipeline_model_parallel_layout=text)
    layout = config.pipeline_model_parallel_layout
    decoders = [
        layout.get_num_layers_to_build(LayerType.decoder, vp_stage=0, pp_rank=stage)
        for stage in range(len(split))
    ]
    assert tuple(decoders) == split
    assert config.virtual_pipeline_model_parallel_size is None
