"""Layer profiles: their file and its schema, and which jobs measure what is in them."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.search.layer_file import layers_text, read_layers
from envpipe_megatron.search.layer_jobs import LayerJob, add_measures, jobs_for
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

SCHEMA = json.loads((Path(__file__).parents[2] / "docs/schemas/layers.json").read_text())


def measure(scale, energy):
    by_clock = np.array([1.0, 1.25]) * scale
    joules = by_clock * 300 if energy else None
    ways = (
        Recomputation("selective", by_clock / 9, None, 2e6, 3e6),
        Recomputation("full", by_clock, joules, 1e6, 9e6),
    )
    more = {"host_s": scale, "rested_s": 2.5 * by_clock} if energy else {}
    return Measure(
        by_clock, by_clock * 2, joules, joules, 5e6, 1e6, 1e6, 4e6, 2e6, 3e6, ways, **more
    )


def profile_with(energy=True, **changes):
    curve = Curve(np.array([1e3, 1e6]), np.array([1e-5, 1e-4]))
    known = {
        "blocks": (Block(("embedding",)), Block(("layer",), 4), Block(("loss",))),
        "frequency_mhz": np.array([1980, 1500]),
        "measures": {
            sizes: {
                piece: measure(scale / sizes.tensor_parallel, energy)
                for piece, scale in (("embedding", 0.1), ("layer", 1.0), ("loss", 0.5))
            }
            for sizes in (Sizes(1, 1), Sizes(2, 4), Sizes(1, 1, 2, 2))
        },
        "bytes_per_parameter": BytesPerParameter(2, 4, 12, 1e6),
        "links": Links(curve, None, (AllReduce(2, False, curve), AllReduce(8, True, curve))),
        "optimizer_s": 1e-11,
        "gradients_s": 2e-12,
        "workspaces_add": True,
        "frees_outputs": True,
        "gpu": "a GPU",
        "source": "a test",
    }
    return LayerProfile(**(known | changes))


def plain(value):
    """A profile as values that compare."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(map(plain, value))
    return plain(vars(value)) if hasattr(value, "__dict__") else value


@pytest.mark.parametrize(
    "profile",
    [
        profile_with(),
        profile_with(energy=False, links=Links(), gpu=None),
    ],
    ids=["all that is known", "little"],
)
def test_what_is_written_is_read_and_fits_the_schema(tmp_path, profile):
    path = tmp_path / "layers.json"
    path.write_text(layers_text(profile))
    assert plain(read_layers(path)) == plain(profile)
    fields = json.loads(path.read_text())
    Draft202012Validator(SCHEMA).validate(fields)
    path.write_text(json.dumps({key: value for key, value in fields.items() if key != "source"}))
    assert read_layers(path).source == str(path)


def test_joules_that_are_not_used_since_some_lack_are_named(tmp_path, caplog):
    profile = profile_with()
    for by_piece in profile.measures.values():
        by_piece["loss"] = measure(0.5, energy=False)
    (tmp_path / "layers.json").write_text(layers_text(profile))
    assert not read_layers(tmp_path / "layers.json").has_energy
    assert "joules of some pieces, sizes or recomputations only, and none is used" in caplog.text


def test_every_field_of_the_schema_is_written():
    data = json.loads(layers_text(profile_with()))
    assert data.keys() == SCHEMA["properties"].keys()
    entry = SCHEMA["properties"]["measures"]["items"]["properties"]
    assert data["measures"][0].keys() == entry.keys()
    ways = data["measures"][0]["recomputation"]
    assert ways[1].keys() == entry["recomputation"]["items"]["properties"].keys()


def changed(where, value):
    """The file's data with one value replaced, or left out."""
    data = json.loads(layers_text(profile_with()))
    *path, last = where
    inner = data
    for step in path:
        inner = inner[step]
    if value is None:
        del inner[last]
    else:
        inner[last] = value
    return data


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        (("format",), "envpipe-plan/1", "'format' is wrong.*envpipe-layers/1"),
        (("strange",), 1, "layers.json: unknown field .got 'strange'"),
        (("measures", 3, "forward_s"), None, "measures/3: field 'forward_s'.*a list"),
        (("measures", 0, "forward_s"), [1, -1], "measures/0: field 'forward_s'.*at least 0"),
        (("measures", 0, "microbatch_size"), 0, "'microbatch_size' is wrong .got 0"),
        (("measures", 0, "recomputation", 1, "time_s"), "x", "recomputation/1: field 'time_s'"),
        (("measures", 1), {}, "measures/1: field 'forward_s' is wrong .got nothing"),
        (("links", "within_node"), [[2, 1], [1, 1]], "links: field 'within_node'.*rising in bytes"),
        (("links", "all_reduce", 0, "gpus"), 1, "all_reduce/0: field 'gpus'.*at least 2"),
        (("blocks", 0, "repeat"), 1.5, "blocks/0: field 'repeat'"),
        (("bytes_per_parameter", "weight"), "2", "field 'weight'"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_its_place(tmp_path, where, value, message):
    path = tmp_path / "layers.json"
    data = changed(where, value)
    path.write_text(json.dumps(data))
    assert not Draft202012Validator(SCHEMA).is_valid(data) or "rising" in message
    with pytest.raises(EnvPipeError, match=message):
        read_layers(path)


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        (("measures", 0, "piece"), "layer", "'piece' is wrong|twice"),
        (("measures", 0), None, "layers.json: at .* not the pieces"),
        (("measures", 0, "backward_s"), [1], "needs 2 values"),
        (("frequency_mhz",), [1500, 1980], "must fall"),
        (("blocks", 1, "repeat"), 99_999, "more than 100000 pieces in all .got 100001"),
        (("measures", 1, "forward_s"), [1, 0], "'layer' at Sizes.* above 0 .got 1.0, 0.0"),
        (("measures", 1, "backward_s"), [0, 1], "'layer' at Sizes.* above 0"),
        (
            ("measures", 1, "recomputation", 0, "name"),
            "some",
            "name.*got 'some'.*selective or full",
        ),
    ],
)
def test_pieces_sizes_and_clocks_must_fit_together(tmp_path, where, value, message):
    path = tmp_path / "layers.json"
    path.write_text(json.dumps(changed(where, value)))
    with pytest.raises(EnvPipeError, match=message):
        read_layers(path)


@pytest.mark.parametrize("content", [b"", b"\x89PNG\xff\xfe", b"stage,instruction\n", b"[]"])
def test_files_that_are_none(tmp_path, content):
    path = tmp_path / "layers.json"
    path.write_bytes(content)
    with pytest.raises(EnvPipeError, match=r"layers\.json is not"):
        read_layers(path)


def test_ranks_are_told_of_a_job_by_a_text():
    job = LayerJob("/layers.json", (Sizes(2, 1, 1, 4), Sizes(2, 2, 1, 4)), (1980, 1500))
    assert LayerJob.of_text(job.to_text()) == job
    (named,) = jobs_for((1,), (1,), (1,), (1,), (), Path("/parts"), [], "train.py --bf16")
    assert LayerJob.of_text(named.to_text()).source == "train.py --bf16"


@pytest.mark.parametrize(
    ("tensor", "context", "expert", "ranks"),
    [(2, 1, 1, 2), (2, 2, 1, 4), (1, 1, 4, 4), (2, 2, 4, 8), (2, 2, 2, 4)],
)
def test_experts_lie_on_ranks_of_data_and_context_parallelism(tensor, context, expert, ranks):
    assert LayerJob("", (Sizes(tensor, 1, context, expert),)).num_ranks == ranks


@pytest.mark.parametrize(
    ("tensor", "speeds", "gpus"),
    [
        (1, [7, 7, 6, 7], [2]),
        (2, [7, 7, 7, 6], [2, 3]),
        (2, [7, 7, 6], [1, 2]),
        (4, [7, 7, 6, 7], [0, 1, 2, 3]),
        (1, [7, 7], [0]),
        (1, [100.4, 102, 100], [0]),
    ],
)
def test_a_job_runs_on_the_slowest_gpu_and_its_neighbours(tensor, speeds, gpus):
    assert list(LayerJob("", (Sizes(tensor),)).gpus(speeds)) == gpus


def test_what_was_measured_is_left_out():
    measured = [Sizes(1, 1), Sizes(1, 2), Sizes(2, 4)]
    jobs = jobs_for((2, 1), (1,), (1,), (4, 2, 1), (), Path("/parts"), measured)
    assert [job.sizes for job in jobs] == [(Sizes(1, 4),), (Sizes(2, 1), Sizes(2, 2))]
    assert jobs_for((1,), (1,), (1,), (1, 2), (), Path("/parts"), measured) == []


def test_measures_of_several_jobs_become_one_profile(tmp_path):
    path, first = tmp_path / "layers.json", profile_with()
    more = {Sizes(1, 2): first.measures[Sizes(1, 1)]}
    for links, measures in ((first.links, first.measures), (Links(), more)):
        add_measures(path, replace(first, links=links, measures=measures))
    both = replace(first, measures={**first.measures, **more})
    assert plain(read_layers(path)) == plain(both)


@pytest.mark.parametrize(
    "other",
    [
        {"blocks": (Block(("embedding",)), Block(("loss",)), Block(("layer",)))},
        {"frequency_mhz": np.array([1980, 1400])},
        {"source": "another command"},
        {"gpu": "another GPU"},
    ],
)
def test_measures_of_another_model_are_refused(tmp_path, other):
    add_measures(tmp_path / "layers.json", profile_with())
    with pytest.raises(EnvPipeError, match="--output"):
        add_measures(tmp_path / "layers.json", profile_with(**other))
