"""TOML tables as dataclasses: how GPU presets and the site configuration are read.

`read_toml` reads a file's content, `make` makes a dataclass of one of its tables.
"""

import tomllib
from dataclasses import is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_type_hints

from envpipe_megatron.core.fields import (
    AMOUNT,
    COUNT,
    FLAG,
    FREQUENCY,
    MAX_FREQUENCY_MHZ,
    POWER,
    TEXT,
    TIME,
    Fields,
    Number,
    Reader,
    many,
)
from envpipe_megatron.files import decode
from envpipe_megatron.gpu.base import GpuError

Table = TypeVar("Table")


def read_toml(content: bytes, path: Path, format_name: str) -> Fields:
    """Return a file's fields but its format; GpuError if it is not TOML, or of another one."""
    try:
        fields = Fields(tomllib.loads(decode(content)), path, GpuError)
    except (ValueError, RecursionError) as error:
        raise GpuError(f"{path} is not TOML: {error}", remedy="Repair the file") from error
    fields.check_format(format_name)
    del fields.data["format"]
    return fields


def make(kind: type[Table], fields: Fields, **given: object) -> Table:
    """Return a dataclass with the values of a table, whose types say what a value must be.

    Whole numbers are above 0, other numbers finite and not negative, those in units within what a
    GPU has, texts not empty, paths absolute. A field with a default may be left out; those of
    `given` do not come from the table.

    Raises GpuError for a field that is unknown, missing or wrong.
    """
    hints = {name: hint for name, hint in get_type_hints(kind).items() if name not in given}
    readers = {name: _reader(hint, fields.path / name) for name, hint in hints.items()}
    return fields.make(kind, readers, (), **given)


def _reader(hint: Any, path: Path) -> Reader[Any]:
    if isinstance(hint, UnionType):  # a type or None, which is a field that is left out
        hint = get_args(hint)[0]
    if not is_dataclass(hint):
        unit = path.name.rpartition("_")[2]
        return _READERS_OF_UNITS.get((hint, unit)) or _READERS[hint]

    def read(table: Any) -> Any:
        if not isinstance(table, dict):
            raise ValueError("a table")
        return make(hint, Fields(table, path, GpuError))  # type: ignore[arg-type]  # a class

    return read


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("a text")
    return value


def _absolute(value: Any) -> Path:
    if not isinstance(value, str) or not value.startswith("/"):
        raise ValueError("an absolute path")
    return Path(value)


_READERS: dict[Any, Reader[Any]] = {
    bool: FLAG,
    int: COUNT,
    float: AMOUNT,
    str: _text,
    Path: _absolute,
    tuple[str, ...]: many(TEXT),
}
#: By type, and by the unit in which a field's name ends.
_READERS_OF_UNITS: dict[Any, Reader[Any]] = {
    (int, "mhz"): FREQUENCY,
    (float, "mhz"): Number(below=MAX_FREQUENCY_MHZ, least=1),
    (tuple[int, int], "mhz"): many(FREQUENCY, 2),
    (float, "w"): POWER,
    (float, "s"): TIME,
}
