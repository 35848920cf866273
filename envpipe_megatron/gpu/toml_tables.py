"""TOML tables as dataclasses: how GPU presets and the site configuration are read.

`parse_toml` reads a file's content, `build` makes a dataclass of one of its tables.
"""

import math
import tomllib
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from envpipe_megatron.files import decode
from envpipe_megatron.gpu.base import GpuError

Table = TypeVar("Table")


def parse_toml(content: bytes, what: str, format_name: str) -> dict[str, Any]:
    """Return the fields of a file without its `format`; `what` names the file in errors.

    Raises GpuError if it is not TOML, or of another format.
    """
    try:
        table = tomllib.loads(decode(content))
    except ValueError as error:
        raise GpuError(f"{what} is not TOML: {error}", remedy="Repair the file") from error
    written = table.pop("format", None)
    if written != format_name:
        raise GpuError(f"{what}: field format must be {format_name!r}", value=written)
    return table


def build(kind: type[Table], table: object, where: str, **given: object) -> Table:
    """Return a dataclass with the values of a table, whose types say what a value must be.

    Texts are not empty, whole numbers above 0, other numbers finite and not negative, paths
    absolute. A field with a default may be left out.

    Args:
        where: stands before a field's name in an error: file, and table where it is not the first.
        given: fields that do not come from the table.

    Raises GpuError for a field that is unknown, missing or wrong.
    """
    if not isinstance(table, dict):
        raise GpuError(f"{where.removesuffix('.')} must be a table", value=table)
    types = {name: hint for name, hint in get_type_hints(kind).items() if name not in given}
    for name in table:
        if name not in types:
            known = ", ".join(types)
            raise GpuError(f"{where}{name} is not a known field", remedy=f"Known are {known}.")
    values = dict(given)
    for field in fields(kind):  # type: ignore[arg-type]  # a dataclass
        if field.name in table:
            values[field.name] = _read(types[field.name], table[field.name], where + field.name)
        elif field.default is MISSING and field.name not in given:
            raise GpuError(f"{where}{field.name} is missing", remedy="Add it.")
    return kind(**values)


def _read(hint: Any, value: Any, name: str) -> Any:
    if isinstance(hint, UnionType):  # a type or None: None stands for a field that is left out
        hint = get_args(hint)[0]
    if is_dataclass(hint):
        return build(hint, value, f"{name}.")  # type: ignore[arg-type]  # a class
    needed, is_right = _NEEDED[hint]
    if not is_right(value):
        raise GpuError(f"{name} must be {needed}", value=value, remedy="Correct this field.")
    return (get_origin(hint) or hint)(value)


def _is_whole(value: object) -> bool:
    return type(value) is int and value > 0


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


_NEEDED: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    bool: ("true or false", lambda value: isinstance(value, bool)),
    int: ("a whole number above 0", _is_whole),
    float: (
        "a finite number, at least 0",
        lambda value: type(value) in (int, float) and 0 <= value < math.inf,
    ),
    str: ("a text", _is_text),
    Path: ("an absolute path", lambda value: _is_text(value) and value.startswith("/")),
    tuple[str, ...]: (
        "a list of texts",
        lambda value: isinstance(value, list) and all(isinstance(text, str) for text in value),
    ),
    tuple[int, int]: (
        "a list of two whole numbers above 0",
        lambda value: isinstance(value, list) and len(value) == 2 and all(map(_is_whole, value)),
    ),
}
"""The check of a value, by the type of its field."""
