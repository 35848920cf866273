"""Splits of layers over stages, held against all splits there are and against Megatron's reader."""

import re
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from on_request import examples

from envpipe_megatron.core.kinds import WHOLE, Kind
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.profile import read_profile
from envpipe_megatron.core.timeline import Timeline
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.policies.partitions.energy import least_energy, plan_cost
from envpipe_megatron.policies.partitions.layers import (
    LayerTable,
    first_last_flags,
    layout_flags,
    megatron_even_split,
    megatron_layout,
    read_layers,
    stage_memory_bytes,
    stage_profile,
)
from envpipe_megatron.policies.partitions.search import (
    SplitSpace,
    cheapest_splits,
    fastest,
    least_bottleneck,
)

F, B = Kind.FORWARD, Kind.BACKWARD
#: {frequency_mhz: (slowdown, power_w)}: least energy at 900 MHz.
CURVE = {1200: (1.0, 400.0), 1000: (1.1, 310.0), 900: (1.2, 270.0), 600: (1.7, 250.0)}


def table_of(forward_s, backward_s, *, embedding=False, loss=False, curve=CURVE, **columns):
    """A table from the time of each layer at the highest clock."""
    layers = len(forward_s) - embedding - loss
    names = ["embedding"] * embedding + [str(n) for n in range(layers)] + ["loss"] * loss
    slowdown, power_w = np.array(list(curve.values())).T
    times = {F: np.outer(forward_s, slowdown), B: np.outer(backward_s, slowdown)}
    return LayerTable(
        tuple(names),
        {kind: np.array(list(curve)) for kind in WHOLE},
        times,
        {kind: times[kind] * power_w for kind in WHOLE},
        columns.get("memory_bytes"),
        columns.get("activation_bytes"),
        "made for a test",
    )


def layer_lists(table, split):
    """The layers of each stage, dealt one by one."""
    names = [n for n in table.names if n.isdigit()]
    stages = []
    for count in split:
        stages.append(names[:count])
        names = names[count:]
    assert not names
    if table.names[0] == "embedding":
        stages[0].insert(0, "embedding")
    if table.names[-1] == "loss":
        stages[-1].append("loss")
    return stages


def all_splits(table, num_stages):
    layers = sum(name.isdigit() for name in table.names)
    return [
        split
        for split in product(range(layers + 1), repeat=num_stages)
        if sum(split) == layers and all(layer_lists(table, split))
    ]


def stage_times(table, split, kind):
    return [
        sum(table.time_s[kind][table.names.index(name), 0] for name in stage)
        for stage in layer_lists(table, split)
    ]


def bottleneck(table, split):
    return max(map(sum, zip(*(stage_times(table, split, kind) for kind in WHOLE), strict=True)))


def iteration_time(table, split, num_microbatches):
    schedule = builders.one_f_one_b(len(split), num_microbatches)
    by_kind = np.array([stage_times(table, split, kind) for kind in WHOLE])
    durations = by_kind[schedule.is_backward.astype(int), np.arange(len(split))[:, None]]
    return Timeline(schedule, durations).iteration_time_s


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


@given(jobs())
@settings(max_examples=examples(60), deadline=None)
def test_least_bottleneck_then_time_then_spread_of_all_splits(job):
    table, num_stages, num_microbatches = job
    found = least_bottleneck(SplitSpace(table, num_stages, num_microbatches))

    def rank(split):
        total = np.sum([stage_times(table, split, kind) for kind in WHOLE], axis=0)
        figures = total.max(), iteration_time(table, split, num_microbatches), total.std()
        return tuple(round(float(figure), 9) for figure in figures)

    assert rank(found.split) == min(map(rank, all_splits(table, num_stages)))
    assert found.exact
    assert found.iteration_time_s == pytest.approx(
        iteration_time(table, found.split, num_microbatches)
    )


@given(jobs())
@settings(max_examples=examples(60), deadline=None)
def test_fastest_of_all_splits(job):
    table, num_stages, num_microbatches = job
    space = SplitSpace(table, num_stages, num_microbatches)
    found = fastest(space, space.allowed)
    times = [iteration_time(table, s, num_microbatches) for s in all_splits(table, num_stages)]
    assert found.exact
    assert found.iteration_time_s == pytest.approx(min(times))


@given(jobs(max_layers=8))
@settings(max_examples=examples(40), deadline=None)
def test_what_the_search_stands_on(job):
    """Splits are listed once each, by cost; timed as Timeline does; and keep their bound."""
    table, num_stages, num_microbatches = job
    space = SplitSpace(table, num_stages, num_microbatches)
    splits = list(cheapest_splits(space.stage_time_s**2, space.allowed))
    assert sorted(splits) == sorted(all_splits(table, num_stages))
    squares = [
        np.square(np.sum([stage_times(table, s, kind) for kind in WHOLE], axis=0)).sum()
        for s in splits
    ]
    assert squares == pytest.approx(sorted(squares))
    times = [iteration_time(table, split, num_microbatches) for split in splits]
    assert space.iteration_times_s(np.array(splits)) == pytest.approx(times)
    for split, time_s in zip(splits, times, strict=True):
        edges = np.cumsum((0, *split))
        bound = max(
            space.bound_s[s, a, b]
            for s, (a, b) in enumerate(pairwise(edges))
        )  # fmt: skip
        assert bound <= time_s * (1 + 1e-9)
        assert space.bottleneck_s(split) == pytest.approx(bottleneck(table, split))


def test_a_large_model_is_split_exactly():
    # 126 layers over 16 stages: about 10^18 splits.
    times = np.concatenate([[0.2], np.ones(126), [2.0]])
    space = SplitSpace(table_of(times, 2 * times, embedding=True, loss=True), 16, 64)
    found = least_bottleneck(space)
    assert found.exact
    assert found.split == (8,) * 15 + (6,)
    assert space.bottleneck_s(found.split) == pytest.approx(3 * 8.2)


def test_embedding_stays_on_the_first_stage_and_loss_on_the_last():
    # Each weighs as much as two layers, so the end stages take two layers less.
    times = np.array([0.2, *[0.1] * 8, 0.2])
    found = least_bottleneck(SplitSpace(table_of(times, times, embedding=True, loss=True), 3, 6))
    assert found.split == (2, 4, 2)
    # So heavy that they want a stage for themselves.
    times = np.array([0.9, *[0.1] * 8, 0.9])
    found = least_bottleneck(SplitSpace(table_of(times, times, embedding=True, loss=True), 4, 6))
    assert found.split == (0, 4, 4, 0)
    profile = stage_profile(table_of(times, times, embedding=True, loss=True), found.split)
    assert [kinds[F][0].time_s for kinds in profile.rows] == pytest.approx([0.9, 0.4, 0.4, 0.9])


def planned_energy(table, split, num_microbatches, power_w, deadline_s):
    return plan_cost(stage_profile(table, split), num_microbatches, power_w, deadline_s).energy_j


@given(jobs(max_layers=5, max_stages=3, max_microbatches=4), st.sampled_from([0.0, 0.05, 0.3]))
@settings(max_examples=examples(25), deadline=None)
def test_least_energy_of_all_splits_that_are_fast_enough(job, tolerance):
    table, num_stages, num_microbatches = job
    found = least_energy(SplitSpace(table, num_stages, num_microbatches), 80.0, tolerance, 10_000)
    times = {s: iteration_time(table, s, num_microbatches) for s in all_splits(table, num_stages)}
    limit_s = min(times.values()) * (1 + tolerance) * (1 + 1e-9)
    within = [split for split, time_s in times.items() if time_s <= limit_s]
    energies = {s: planned_energy(table, s, num_microbatches, 80.0, limit_s) for s in within}
    assert found.exact
    assert found.num_planned == len(within)
    assert found.split in within
    assert found.cost.energy_j == pytest.approx(min(energies.values()))
    assert found.cost.energy_j == pytest.approx(energies[found.split])


def test_fewer_plans_than_splits_are_not_called_exact():
    times = np.concatenate([np.ones(12), [5.0]])
    space = SplitSpace(table_of(times, 2 * times, loss=True), 4, 8)
    everything = least_energy(space, 80.0, 0.05, 10_000)
    some = least_energy(space, 80.0, 0.05, 3)
    assert everything.exact
    assert everything.num_planned > 4
    assert not some.exact
    assert some.num_planned <= 4  # those, and the fastest
    assert everything.cost.energy_j <= some.cost.energy_j
    # The estimate knows good splits: three plans come within 2 % of the best.
    assert some.cost.energy_j <= 1.02 * everything.cost.energy_j


def test_energy_needs_energies():
    free = {frequency: (slowdown, 0.0) for frequency, (slowdown, _) in CURVE.items()}
    table = table_of(np.ones(4), np.ones(4), curve=free)
    assert least_bottleneck(SplitSpace(table, 2, 4)).split == (2, 2)
    with pytest.raises(EnvPipeError, match="no energies"):
        least_energy(SplitSpace(table, 2, 4), 80.0, 0.0)


@given(jobs(), st.data())
@settings(max_examples=examples(60), deadline=None)
def test_splits_above_the_memory_limit_are_left_out(job, data):
    table, num_stages, num_microbatches = job
    sizes = st.lists(
        st.integers(0, 4), min_size=len(table.names), max_size=len(table.names)
    ).map(lambda values: np.array(values, dtype=float))  # fmt: skip
    table = LayerTable(
        *(getattr(table, name) for name in ("names", "frequency_mhz", "time_s", "energy_j")),
        data.draw(sizes), data.draw(sizes), table.source,
    )  # fmt: skip

    def peak(split):
        held = [0.0] * num_stages
        for stage, names in enumerate(layer_lists(table, split)):
            in_flight = min(num_microbatches, num_stages - stage)
            for row in map(table.names.index, names):
                held[stage] += table.memory_bytes[row] + in_flight * table.activation_bytes[row]
        assert stage_memory_bytes(table, split, num_microbatches) == pytest.approx(held)
        return max(held)

    splits = all_splits(table, num_stages)
    limit = float(data.draw(st.integers(1, 40)))
    fitting = [split for split in splits if peak(split) <= limit]
    if not fitting:
        with pytest.raises(EnvPipeError, match=r"stage \d+ is the tightest") as caught:
            SplitSpace(table, num_stages, num_microbatches, limit)
        assert f"holds {min(map(peak, splits)):.6g} bytes" in str(caught.value)
        return
    found = least_bottleneck(SplitSpace(table, num_stages, num_microbatches, limit))
    assert found.split in fitting
    assert bottleneck(table, found.split) == pytest.approx(
        min(bottleneck(table, split) for split in fitting)
    )


def test_the_tightest_stage_is_named():
    # Stage 0 holds two microbatches, and the embedding's weights.
    table = table_of(
        np.ones(5), np.ones(5), embedding=True,
        memory_bytes=np.array([50.0, 1, 1, 1, 1]), activation_bytes=np.full(5, 3.0),
    )  # fmt: skip
    with pytest.raises(EnvPipeError, match="stage 0 is the tightest and holds 56 bytes"):
        SplitSpace(table, 2, 8, 40.0)
    with pytest.raises(EnvPipeError, match="no bytes for the memory limit"):
        SplitSpace(table_of(np.ones(4), np.ones(4)), 2, 8, 40.0)


@pytest.mark.parametrize(("layers", "stages"), [(1, 3), (2, 4), (2, 10**9)])
def test_fewer_layers_than_stages(layers, stages):
    with pytest.raises(EnvPipeError, match=f"too few layers for {stages} stages"):
        SplitSpace(table_of(np.ones(layers), np.ones(layers)), stages, 4)


# --- Megatron's flags ---


def test_layouts_as_they_look():
    assert megatron_layout((3, 4, 4, 2)) == "Et*3|(t*4|)*2t*2L"
    assert megatron_layout((0, 1, 2, 0)) == "E|t|t*2|L"
    assert megatron_layout((1, 1)) == "Et|tL"
    assert layout_flags((1, 2)) == "--pipeline-model-parallel-layout 'Et|t*2L'"


def test_even_split():
    assert megatron_even_split(8, 4) == ((2, 2, 2, 2), ())
    both = ("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split")
    assert megatron_even_split(126, 16) == ((7, *[8] * 14, 7), both)
    assert megatron_even_split(7, 4) == ((1, 2, 2, 2), both[:1])
    assert megatron_even_split(9, 4) is None
    assert megatron_even_split(2, 4) is None


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


def built_by_megatron(config):
    from megatron.core.transformer.transformer_block import get_num_layers_to_build

    stages = range(config.pipeline_model_parallel_size)
    return tuple(get_num_layers_to_build(config, pp_rank=stage) for stage in stages)


@pytest.mark.xdist_group("megatron")
@pytest.mark.parametrize(
    "split", [(3, 4, 4, 2), (0, 1, 2, 0), (1, 1), (12, 13, 13, 11), (2, 1, 1, 2), (0, 10, 10, 1)]
)
def test_megatron_reads_the_flags_alike(megatron_config, split):
    from megatron.core.transformer.enums import LayerType

    config = megatron_config(split, pipeline_model_parallel_layout=megatron_layout(split))
    layout = config.pipeline_model_parallel_layout
    decoders = [
        layout.get_num_layers_to_build(LayerType.decoder, vp_stage=0, pp_rank=stage)
        for stage in range(len(split))
    ]
    assert tuple(decoders) == split
    assert config.virtual_pipeline_model_parallel_size is None
    if (flags := first_last_flags(split)) is not None:
        _, first, _, last = flags.split()
        config = megatron_config(
            split,
            num_layers_in_first_pipeline_stage=int(first),
            num_layers_in_last_pipeline_stage=int(last),
        )
        assert built_by_megatron(config) == split


@pytest.mark.xdist_group("megatron")
@pytest.mark.parametrize(("layers", "stages"), [(8, 4), (126, 16), (7, 4), (11, 4)])
def test_megatron_makes_the_even_split(megatron_config, layers, stages):
    split, flags = megatron_even_split(layers, stages)
    options = {flag.removeprefix("--").replace("-", "_"): True for flag in flags}
    assert built_by_megatron(megatron_config(split, **options)) == split


# --- Files ---

HEADER = "layer,instruction,frequency,time,energy"


def write_layers(path, layers=("embedding", "0", "1", "2", "loss"), header=HEADER, tail=""):
    lines = [header]
    for layer in layers:
        for kind in ("forward", "backward"):
            lines += [f"{layer},{kind},{f},0.{n + 1},1{tail}" for n, f in enumerate((1200, 900))]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_reading_a_table(tmp_path):
    path = write_layers(
        tmp_path / "layers.csv", ("1", "loss", "0"), HEADER + ",note,activation,memory", ",x,5,7e3"
    )
    table = read_layers(path)
    assert table.names == ("0", "1", "loss")
    assert table.frequency_mhz[F].tolist() == [1200, 900]
    assert table.time_s[B].tolist() == [[0.1, 0.2]] * 3
    assert table.activation_bytes.tolist() == [5.0] * 3
    assert table.memory_bytes.tolist() == [7000.0] * 3
    assert not table.has_embedding
    plain = read_layers(write_layers(tmp_path / "plain.csv"))
    assert plain.has_embedding
    assert plain.memory_bytes is None
    assert plain.num_transformer_layers == 3


def test_blank_lines_zeros_and_further_blank_cells_are_accepted(tmp_path):
    path = write_layers(tmp_path / "layers.csv", ("00", "1"), HEADER + ",memory", ",0")
    first, *rest = path.read_text().splitlines()
    rest = [line.replace(",1,0", ",0,0, ,") for line in rest]
    path.write_bytes("\r".join([first, "", " ,,", *rest]).encode())
    table = read_layers(path)
    assert table.names == ("0", "1")
    assert table.memory_bytes.tolist() == [0.0, 0.0]
    assert not table.has_energy


def test_the_stage_profile_sums_layers_and_is_a_profile(tmp_path):
    table = table_of([0.1, 0.2, 0.3], [0.2, 0.2, 0.5], loss=True)
    stage_profile(table, (1, 1)).write(tmp_path / "profile.csv")
    profile = read_profile(tmp_path / "profile.csv")
    row = profile.row(1, B, 1000)
    assert row.time_s == pytest.approx(0.7 * 1.1)
    assert row.energy_j == pytest.approx(0.7 * 1.1 * 310.0)
    assert profile.row(0, F, 600).time_s == pytest.approx(0.17)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("layer,", "stage,", ["line 1", "stage,instruction", "must name the columns layer,"]),
        ("embedding,forward,1200", "head,forward,1200", ["line 2", "'head'", "embedding"]),
        ("0,forward,1200", "\u00b2,forward,1200", ["line 6", "'\u00b2'"]),
        pytest.param(
            "0,forward,1200",
            "9" * 5000 + ",forward",
            ["line 6", "unknown layer", "99..."],
            id="long number",
        ),
        ("0,forward,1200", "0,forwrd,1200", ["line 6", "'forwrd'"]),
        ("0,forward,1200", "0,forward,900", ["line 7", "second row", "900"]),
        (
            "0,forward,1200,0.1",
            "0,forward,1200,0",
            ["line 6", "time (s) must be a number of at least"],
        ),
        ("0,forward,1200,0.1,1,8", "0,forward,1200,0.1,1", ["line 6", "memory (bytes)"]),
        ("0,forward,1200,0.1,1,8", "0,forward,1200,0.1,1,9", ["line 7", "memory", "layer 0", "9"]),
        ("0,forward,1200,0.1,1,8", "0,forward,1200,0.1,1,inf", ["line 6", "memory", "'inf'"]),
        ("0,forward,1200", "0,forward,1100", ["layer 0 forward", "1100", "[1200, 900]"]),
    ],
)
def test_a_broken_table_is_named_with_line_and_value(tmp_path, old, new, said):
    path = write_layers(tmp_path / "layers.csv", header=HEADER + ",memory", tail=",8")
    text = path.read_text()
    at = text.index(old) if old.startswith(("layer", "embedding")) else text.index("\n" + old) + 1
    path.write_text(text[:at] + new + text[at + len(old) :])
    with pytest.raises(EnvPipeError) as caught:
        read_layers(path)
    for part in (str(path), *said):
        assert part in str(caught.value)


def test_tables_that_miss_something(tmp_path):
    path = tmp_path / "layers.csv"
    for layers, missing in ((("0", "2"), 1), (("embedding", "loss"), 0), (("2", "3"), 0)):
        with pytest.raises(EnvPipeError, match=f"no layer {missing}"):
            read_layers(write_layers(path, layers))
    whole = write_layers(path).read_text()
    for text, said in (
        (whole.replace("1,backward,1200,0.1,1", "1,backward,1200,0.1"), "line 12: too few columns"),
        (re.sub(".*backward.*\n", "", whole), "layer embedding backward .* or none"),
        (re.sub("1,backward.*\n", "", whole), "layer 1 backward .* or none"),
    ):
        path.write_text(text)
        with pytest.raises(EnvPipeError, match=said):
            read_layers(path)
    for content, said in (
        (b"", "line 1: not the header"),
        (b"\x89PNG\xff\xfe", "is not readable"),
        (HEADER.encode(), "has no rows"),
    ):
        path.write_bytes(content)
        with pytest.raises(EnvPipeError, match=rf"layers\.csv.*{said}"):
            read_layers(path)
