"""The file of a layer profile, `envpipe-layers/1`: JSON, described by docs/schemas/layers.json.

Enter at `read_layers` and `layers_text`. `envpipe profile --layers` and `profile_layers` of the
integration with DeepSpeed write it, `envpipe search` and `envpipe partition` read it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

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
    read_json,
)
from envpipe_megatron.core.profile_rows import check_power
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.search.layer_profile import (
    FULL,
    SELECTIVE,
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

logger = logging.getLogger(__name__)

LAYERS_FORMAT = "envpipe-layers/1"
#: A model of more pieces in all is a mistake in a file, and would fill the memory.
_MOST_PIECES = 100_000
_MADE_BY = "envpipe profile --layers makes one; a CSV of stages is for envpipe plan."


def read_layers(path: Path) -> LayerProfile:
    """Read a layer profile; EnvPipeError names the file, the field, and what it must be."""
    data = read_json(path, "Layer profile", remedy=_MADE_BY)
    data.check_format(LAYERS_FORMAT)
    measures: dict[Sizes, dict[str, Measure]] = {}
    for entry in data.entries("measures"):
        piece, sizes, measure = _read_measure(entry)
        if piece in measures.setdefault(sizes, {}):
            raise entry.wrong("piece", "It is there twice at the same sizes; list it once.")
        measures[sizes][piece] = measure
    profile = data.make(
        LayerProfile,
        _PROFILE,
        also=("format", "blocks", "measures", "bytes_per_parameter", "links"),
        blocks=tuple(entry.make(Block, _readers(Block)) for entry in data.entries("blocks")),
        measures=measures,
        bytes_per_parameter=data.inside("bytes_per_parameter").make(
            BytesPerParameter, _readers(BytesPerParameter)
        ),
        links=_read_links(data.inside("links")),
        source=str(path),
    )
    check_profile(replace(profile, source=str(path)))
    _check_energies(profile, path)
    return profile


def _check_energies(profile: LayerProfile, path: Path) -> None:
    """Check the sum: a layer without weights, a difference of two, may have next to none."""
    metered = [
        (measure.both_j, measure.both_s)
        for by_piece in profile.measures.values()
        for measure in by_piece.values()
        if measure.both_j is not None
    ]
    if metered:
        energy_j, time_s = (float(np.sum(column)) for column in zip(*metered, strict=True))
        check_power(str(path), energy_j, time_s, EnvPipeError)
        if energy_j and not profile.has_energy:
            logger.warning(
                "%s has joules of some pieces, sizes or recomputations only, and none is used: "
                "measure all.",
                path,
            )


def _read_measure(entry: Fields) -> tuple[str, Sizes, Measure]:
    """Read one object of `measures`: the piece, at which sizes, what was measured."""
    ways = tuple(
        way.make(Recomputation, _RECOMPUTATION, energy_j=None)
        for way in entry.entries("recomputation")
    )
    others = "piece", "recomputation", "apart_s"  # the last is of 0.2.0's files, and not used
    measure = entry.make(Measure, _MEASURE, (*others, *_SIZES), recomputation=ways)
    entry.read("activation_bytes", AMOUNT)  # if it were 0 by default, all would fit into memory
    return entry.read("piece", TEXT), entry.make(Sizes, _SIZES, (*others, *_MEASURE)), measure


def check_profile(profile: LayerProfile) -> LayerProfile:
    """Return the profile; EnvPipeError names the piece or size that is missing or misshapen."""
    names = {piece for block in profile.blocks for piece in block.pieces}
    if not names or not profile.measures:
        raise EnvPipeError(f"{profile.source} has no pieces or no measures")
    num_pieces = sum(len(block.pieces) * block.repeat for block in profile.blocks)
    if num_pieces > _MOST_PIECES:
        raise EnvPipeError(
            f"{profile.source}: the blocks have more than {_MOST_PIECES} pieces in all",
            value=num_pieces,
            remedy="Correct the blocks' repeat.",
        )
    width = len(profile.frequency_mhz)
    if width == 0 or (np.diff(profile.frequency_mhz) >= 0).any():
        raise EnvPipeError(
            f"{profile.source}: frequency_mhz must fall, the highest first",
            value=list(profile.frequency_mhz),
        )
    for sizes, by_piece in profile.measures.items():
        if set(by_piece) != names:
            raise EnvPipeError(
                f"{profile.source}: at {sizes} not the pieces of the blocks are measured",
                value=sorted(set(by_piece) ^ names),
                remedy="Measure each piece at each of the sizes, once.",
            )
        for piece, measure in by_piece.items():
            for values in _by_frequency(measure):
                if values.shape != (width,):
                    raise EnvPipeError(
                        f"{profile.source}: '{piece}' at {sizes} needs {width} values, one a clock",
                        value=values.tolist(),
                    )
            for time_s in (measure.forward_s, measure.backward_s, measure.known_rested_s):
                if (time_s <= 0).any():
                    raise EnvPipeError(
                        f"{profile.source}: times of '{piece}' at {sizes} must be above 0",
                        value=time_s.tolist(),
                        remedy="Measure it again.",
                    )
    return profile


def _by_frequency(measure: Measure) -> list[FloatArray]:
    rows = vars(measure), *(vars(way) for way in measure.recomputation)
    return [value for row in rows for value in row.values() if isinstance(value, np.ndarray)]


def layers_text(profile: LayerProfile) -> str:
    """Return the text of a profile's file; each measure is a line."""
    known = {each.name: getattr(profile, each.name) for each in fields(profile)}
    del known["measures"]
    head = _plain({"format": LAYERS_FORMAT, **known})
    lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    measures = [
        f"  {json.dumps(_plain({'piece': piece, **vars(sizes), **vars(measure)}))}"
        for sizes, by_piece in sorted(profile.measures.items())
        for piece, measure in by_piece.items()
    ]
    all_measures = ",\n".join(measures)
    return "{\n" + ",\n".join([*lines, f' "measures": [\n{all_measures}\n ]']) + "\n}\n"


def _plain(value: Any) -> Any:
    """Return a value as JSON has it; fields that are None are left out."""
    if isinstance(value, Curve):
        value = np.stack([value.num_bytes, value.time_s], axis=1)
    if is_dataclass(value):
        value = vars(value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.tolist() if isinstance(value, np.ndarray) else value


def _read_links(data: Fields) -> Links:
    groups = tuple(entry.make(AllReduce, _ALL_REDUCE) for entry in data.entries("all_reduce"))
    return data.make(Links, _readers(Links), ("all_reduce",), all_reduce=groups)


def _read_curve(value: Any) -> Curve:
    points = np.array(many(many(_ABOVE_0, 2))(value)).reshape(-1, 2)
    if not len(points) or (np.diff(points[:, 0]) <= 0).any():
        raise ValueError("a list of [bytes, s], rising in bytes")
    return Curve(points[:, 0], points[:, 1])


def _read_way(value: Any) -> str:
    if value not in (SELECTIVE, FULL):
        raise ValueError(f"{SELECTIVE} or {FULL}")
    return str(value)


_ABOVE_0 = Number(positive=True)
#: By the type of a dataclass's field; a field of another type is read in its own way.
_BY_TYPE: dict[str, Reader[Any]] = {
    "float": AMOUNT,
    "int": COUNT,
    "bool": FLAG,
    "str": TEXT,
    "tuple[str, ...]": many(TEXT),
    "FloatArray": lambda value: np.array(many(AMOUNT)(value), dtype=float),
    "IntArray": lambda value: np.array(many(FREQUENCY)(value), dtype=np.int64),
    "Curve": _read_curve,
}


def _readers(kind: type[Any], **own: Reader[Any]) -> dict[str, Reader[Any]]:
    """Return the readers of a dataclass's fields, by their types; `own` go before these."""
    types = {each.name: str(each.type).removesuffix(" | None") for each in fields(kind)}
    return {name: _BY_TYPE[of] for name, of in types.items() if of in _BY_TYPE} | own


_PROFILE = _readers(LayerProfile)
_MEASURE = _readers(Measure)
_SIZES = _readers(Sizes)
_RECOMPUTATION = _readers(Recomputation, name=_read_way)
_ALL_REDUCE = _readers(AllReduce, gpus=Number(whole=True, positive=True, least=2))
