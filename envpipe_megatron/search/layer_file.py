"""The file of a layer profile, `envpipe-layers/1`: JSON, described by docs/schemas/layers.json.

Enter at `read_layers` and `layers_text`. `envpipe profile --layers` and `profile_layers` of the
integration with DeepSpeed write it, `envpipe search` and `envpipe partition` read it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from envpipe_megatron.core.arrays import FloatArray
from envpipe_megatron.core.fields import (
    AMOUNT,
    COUNT,
    FLAG,
    FREQUENCY,
    TEXT,
    Fields,
    Number,
    Reader,
    many,
    of_type,
    read_json,
)
from envpipe_megatron.core.profile_rows import check_power
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.search.layer_profile import (
    Block,
    BytesPerParameter,
    Curve,
    LayerProfile,
    Links,
    Measure,
    Recomputation,
    Sizes,
    check_profile,
)

LAYERS_FORMAT = "envpipe-layers/1"
_MADE_BY = "envpipe profile --layers makes one; a CSV of stages is for envpipe plan."

T = TypeVar("T")


def read_layers(path: Path) -> LayerProfile:
    """Read a layer profile; EnvPipeError names the file, the field, and what it must be."""
    data = read_json(path, "Layer profile", remedy=_MADE_BY)
    data.check_format(LAYERS_FORMAT)
    _refuse_unknown(data, _PROFILE)
    measures: dict[Sizes, dict[str, Measure]] = {}
    for entry in _entries(data, "measures"):
        piece, sizes, measure = _read_measure(entry)
        if piece in measures.setdefault(sizes, {}):
            raise entry.wrong("piece", "It is there twice at the same sizes; list it once.")
        measures[sizes][piece] = measure
    profile = LayerProfile(
        blocks=tuple(_object(entry, Block, _BLOCK) for entry in _entries(data, "blocks")),
        frequency_mhz=np.array(data.read("frequency_mhz", many(FREQUENCY)), dtype=np.int64),
        measures=measures,
        bytes_per_parameter=_object(_inside(data, "bytes_per_parameter"), BytesPerParameter, _HELD),
        links=_read_links(_inside(data, "links")),
        optimizer_s=data.read("optimizer_s", AMOUNT, 0.0),
        gradients_s=data.read("gradients_s", AMOUNT, 0.0),
        workspaces_add=data.read("workspaces_add", FLAG, False),
        frees_outputs=data.read("frees_outputs", FLAG, False),
        gpu=data.read("gpu", TEXT, None),
        source=data.read("source", TEXT, str(path)),
    )
    check_profile(replace(profile, source=str(path)))
    _check_energies(profile, path)
    return profile


def _check_energies(profile: LayerProfile, path: Path) -> None:
    """Check the sum: a layer without weights, a difference of two, may have next to none."""
    metered = [
        (measure.forward_j + measure.backward_j, measure.both_s)
        for by_piece in profile.measures.values()
        for measure in by_piece.values()
        if measure.forward_j is not None and measure.backward_j is not None
    ]
    if metered:
        energy_j, time_s = (float(np.sum(column)) for column in zip(*metered, strict=True))
        check_power(str(path), energy_j, time_s, EnvPipeError)


def _read_measure(entry: Fields) -> tuple[str, Sizes, Measure]:
    """One object of `measures`: the piece, at which sizes, what was measured."""
    _refuse_unknown(entry, ("piece", "recomputation", *_SIZES, *_MEASURE))
    ways = []
    for way in _entries(entry, "recomputation") if "recomputation" in entry.data else ():
        _refuse_unknown(way, _RECOMPUTATION)
        ways.append(Recomputation(**{"energy_j": None, **_values(way, _RECOMPUTATION)}))
    measure = Measure(**_values(entry, _MEASURE), recomputation=tuple(ways))
    return entry.read("piece", TEXT), Sizes(**_values(entry, _SIZES)), measure


def layers_text(profile: LayerProfile) -> str:
    """Return the text of a profile's file; each measure is a line."""
    head = {
        "format": LAYERS_FORMAT,
        "source": profile.source,
        "gpu": profile.gpu,
        "frequency_mhz": profile.frequency_mhz,
        "blocks": [asdict(block) for block in profile.blocks],
        "bytes_per_parameter": asdict(profile.bytes_per_parameter),
        "links": _links_entry(profile.links),
        "optimizer_s": profile.optimizer_s,
        "gradients_s": profile.gradients_s,
        "workspaces_add": profile.workspaces_add,
        "frees_outputs": profile.frees_outputs,
    }
    lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in _known(head).items()]
    measures = [
        f"  {json.dumps(_measure_entry(piece, sizes, measure))}"
        for sizes, by_piece in sorted(profile.measures.items())
        for piece, measure in by_piece.items()
    ]
    all_measures = ",\n".join(measures)
    return "{\n" + ",\n".join([*lines, f' "measures": [\n{all_measures}\n ]']) + "\n}\n"


def links_text(links: Links) -> str:
    """Return the text of a file with only links, an object as a layer profile's `links`."""
    return json.dumps(_known(_links_entry(links)), indent=1) + "\n"


def read_links(path: Path) -> Links:
    """The inverse of `links_text`; EnvPipeError as `read_layers`."""
    return _read_links(read_json(path, "File of links"))


def _links_entry(links: Links) -> dict[str, Any]:
    return {
        "within_node": _points(links.within_node),
        "across_nodes": _points(links.across_nodes),
        "all_reduce": [
            {"gpus": gpus, "across_nodes": crosses, "points": _points(curve)}
            for (gpus, crosses), curve in sorted(links.all_reduce.items())
        ],
    }


def _measure_entry(piece: str, sizes: Sizes, measure: Measure) -> dict[str, Any]:
    """One object of `measures`, which `_read_measure` reads."""
    entry: dict[str, Any] = _known(
        {
            "piece": piece,
            **asdict(sizes),
            **vars(measure),
            "recomputation": [vars(way) for way in measure.recomputation],
        }
    )
    return entry


def _known(value: Any) -> Any:
    """A value as JSON has it; fields that are None are left out."""
    if isinstance(value, Mapping):
        return {key: _known(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_known(item) for item in value]
    return value.tolist() if isinstance(value, np.ndarray) else value


def _points(curve: Curve | None) -> FloatArray | None:
    return None if curve is None else np.stack([curve.num_bytes, curve.time_s], axis=1)


def _read_links(data: Fields) -> Links:
    _refuse_unknown(data, (*_MESSAGES, "all_reduce"))
    all_reduce = {}
    for entry in _entries(data, "all_reduce") if "all_reduce" in data.data else ():
        _refuse_unknown(entry, ("gpus", "across_nodes", "points"))
        key = entry.read("gpus", _read_group), entry.read("across_nodes", FLAG)
        all_reduce[key] = entry.read("points", _read_curve)
    within, across = (data.read(name, _read_curve, None) for name in _MESSAGES)
    return Links(within, across, all_reduce)


def _read_group(value: Any) -> int:
    number: int = COUNT(value) if value != 1 else 0
    if not number:
        raise ValueError("a whole number above 1")
    return number


def _read_curve(value: Any) -> Curve:
    points = np.array(many(many(_ABOVE_0, 2))(value)).reshape(-1, 2)
    if not len(points) or (np.diff(points[:, 0]) <= 0).any():
        raise ValueError("a list of [bytes, s], rising in bytes")
    return Curve(points[:, 0], points[:, 1])


def _read_by_clock(value: Any) -> FloatArray:
    return np.array(many(AMOUNT)(value), dtype=float)


def _inside(data: Fields, name: str) -> Fields:
    """The fields of an object in a field; messages name it as a part of the file's path."""
    return Fields(data.read(name, of_type(dict, "an object")), data.path / name)


def _entries(data: Fields, name: str) -> list[Fields]:
    """The fields of each object in a list."""
    values = data.read(name, many(of_type(dict, "an object")))
    return [Fields(value, data.path / name / str(at)) for at, value in enumerate(values)]


def _object(data: Fields, kind: type[T], readers: Mapping[str, Reader[Any]]) -> T:
    """A dataclass of an object's fields."""
    _refuse_unknown(data, readers)
    return kind(**_values(data, readers))


def _values(data: Fields, readers: Mapping[str, Reader[Any]]) -> dict[str, Any]:
    """Read the fields that are there, and all that must be."""
    there = (name for name in readers if name in data.data or name in _NEEDED)
    return {name: data.read(name, readers[name]) for name in there}


def _refuse_unknown(data: Fields, known: Iterable[str]) -> None:
    unknown = [name for name in data.data if name not in known]
    if unknown:
        raise EnvPipeError(
            f"{data.path}: unknown field", value=unknown[0], remedy=f"Known: {', '.join(known)}."
        )


_ABOVE_0 = Number(positive=True)
_PROFILE = ("format", *LayerProfile.__dataclass_fields__)
_MESSAGES = ("within_node", "across_nodes")
_BLOCK: dict[str, Reader[Any]] = {"pieces": many(TEXT), "repeat": COUNT}
_HELD: dict[str, Reader[Any]] = dict.fromkeys(BytesPerParameter.__dataclass_fields__, AMOUNT)
_SIZES: dict[str, Reader[Any]] = dict.fromkeys(Sizes.__dataclass_fields__, COUNT)
_MEASURE: dict[str, Reader[Any]] = {
    **dict.fromkeys(("forward_s", "backward_s", "forward_j", "backward_j"), _read_by_clock),
    "rested_s": _read_by_clock,
    **dict.fromkeys(("parameters", "input_bytes", "output_bytes", "activation_bytes"), AMOUNT),
    **dict.fromkeys(("forward_workspace_bytes", "backward_workspace_bytes"), AMOUNT),
    **dict.fromkeys(("host_s", "expert_parameters", "apart_s"), AMOUNT),
}
_RECOMPUTATION: dict[str, Reader[Any]] = {
    "name": TEXT,
    **dict.fromkeys(("time_s", "energy_j"), _read_by_clock),
    **dict.fromkeys(("activation_bytes", "working_bytes"), AMOUNT),
}
#: Fields of the tables above that must be there; the others have a dataclass's default.
_NEEDED = {
    *("pieces", "name", "forward_s", "backward_s", "time_s"),
    *("activation_bytes", "working_bytes"),
}
