"""Checked reading of JSON objects, TOML tables and options: errors name what is wrong, and where.

A *reader* is a function of a field's value that returns what the program uses, or raises a
ValueError that says what the value must be.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_type_hints

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.files import decode, read_text

T = TypeVar("T")
Reader = Callable[[Any], T]
_REQUIRED: Any = object()

#: No GPU has such a clock: the number is not in MHz.
MAX_FREQUENCY_MHZ = 10_000


@dataclass(frozen=True)
class Number:
    """A reader of numbers in a range, as JSON has them or as the text of a cell.

    Args:
        least: and above 0 is 0 read too, unless `positive`: it says that something is off.
        unit: what the number is in.
        mistaken: other units in which it may have been given, and what one of each is in `unit`.
        above: added to a number in another unit that is less: 2 % longer is 1.02 times as long.
    """

    whole: bool = False
    positive: bool = False
    below: float = 1e300
    least: float = 0.0
    unit: str = ""
    mistaken: tuple[tuple[str, float], ...] = ()
    above: float = 0.0

    def __call__(self, value: Any) -> Any:
        """Read a value of JSON."""
        types = (int,) if self.whole else (int, float)
        if type(value) not in types or not self._has(value):
            raise ValueError(self.wanted(value))
        return value if self.whole else float(value)

    def of_text(self, text: str) -> Any:
        """Read the text of a cell."""
        try:
            value: float = float(text)
        except ValueError:
            raise ValueError(self.wanted(text)) from None
        return self(int(value) if self.whole and value.is_integer() else value)

    def _has(self, value: float) -> bool:
        zero = value == 0 and not self.positive
        return zero or (value > 0 and self.least <= value < self.below)

    def wanted(self, value: Any) -> str:
        """Say what the number must be, and the value's size in `unit` if it is in another."""
        kind = "a whole number" if self.whole else "a number"
        least = "above 0" if self.positive and not self.least else f"of at least {self.least:g}"
        if self.least and not self.positive:
            least = f"{least}, or 0,"
        most = f" and below {self.below:,.0f}" if self.below < 1e300 else ""
        wanted = f"{kind} {least}{most}"
        for name, factor in self.mistaken:
            stated = isinstance(value, str) and value.endswith(name)
            with suppress(ArithmeticError, TypeError, ValueError):
                number = float(value.removesuffix(name) if stated else value)
                meant, more = number * factor, ""
                if 0 < meant < self.above:
                    meant, more = meant + self.above, " longer"
                meant = float(f"{meant:.6g}")
                if stated or (meant and self._has(meant)):
                    said = f"{wanted}; {number:.10g} {name}{more} is {meant:.10g} {self.unit}"
                    return said.rstrip()
        return wanted


AMOUNT = Number()
WHOLE_NUMBER = Number(whole=True)
COUNT = Number(whole=True, positive=True)
#: MHz; 1 and 2 are GHz.
FREQUENCY = Number(
    True, True, MAX_FREQUENCY_MHZ, 3, "MHz", (("GHz", 1e3), ("kHz", 1e-3), ("Hz", 1e-6))
)
#: W of a GPU: the least draws more than the first when it computes, none draws nearly the second.
POWER = Number(False, False, 5000, 1, "W", (("kW", 1e3), ("mW", 1e-3)))
#: s; one time divided by another stays finite.
UNIT_TIME = Number(positive=True, least=1e-12, below=1e12)
#: s of what lasts no longer than a message or a change of clock does.
SHORT_TIME = Number(below=10, unit="s", mistaken=(("ms", 1e-3), ("us", 1e-6)))
#: s of what lasts no longer than what follows an iteration's last unit does.
TIME = Number(below=600, unit="s", mistaken=(("ms", 1e-3), ("us", 1e-6)))
JOULES_PER_KWH = 3.6e6
#: J of a change, a unit or an iteration.
ENERGY = Number(
    unit="J", mistaken=(("kWh", JOULES_PER_KWH), ("Wh", 3600), ("kJ", 1e3), ("mJ", 1e-3))
)
RATIO = Number(mistaken=(("%", 0.01),))
#: How many times as long.
FACTOR = Number(positive=True, below=100, mistaken=(("%", 0.01),), above=1)
PERCENT = Number(mistaken=(("%", 1),))


@dataclass(frozen=True)
class Option:
    """How users give a field of a dataclass that `option` made.

    Args:
        help: what it does.
        read: the numbers it may be, or the words, with what each becomes where that is not the word
            itself, or what makes the field of a text (a ValueError says what that must be); None of
            a switch.
        metavar: the name of the number or text in help; N or X by default.
        usual: the default in words.
        flag: its name, where that is not the field's without a unit.
        of_levels: whether only frameworks have it that have more than one level.
    """

    help: str
    read: Number | Mapping[str, Any] | tuple[str, ...] | Callable[[str], Any] | None = None
    metavar: str = ""
    usual: str = ""
    flag: str = ""
    of_levels: bool = False

    @property
    def words(self) -> tuple[str, ...]:
        """The words that it may be; none where it is a number, a text or a switch."""
        return tuple(self.read) if isinstance(self.read, tuple | Mapping) else ()

    def value_of(self, given: object) -> Any:
        """Make the field of a text, a number, a list or True; a ValueError says what it must be."""
        text = ",".join(map(str, given)) if isinstance(given, list | tuple) else str(given)
        if isinstance(self.read, Number):
            return self.read.of_text(text)
        if callable(self.read):
            return self.read(text)
        if self.read is None:
            return given
        # As users write it; a back end of another package may have capitals.
        word = text if text in self.read else text.lower()
        if word not in self.read:
            raise ValueError(" or ".join(", ".join(self.read).rsplit(", ", 1)))
        return self.read[word] if isinstance(self.read, Mapping) else word


def option(help_text: str, read: Any = None, default: Any = None, **more: Any) -> Any:
    """Make a field of a dataclass that users give; `more` is as `Option` has it.

    `cli.common.options_of` makes options of a command of such fields, `integrations.options` flags
    and settings of a job.
    """
    if isinstance(read, Number):
        more.setdefault("metavar", "N" if read.whole else "X")
    if "usual" not in more and default is not None and read is not None:
        more["usual"] = f"{default:g}" if isinstance(default, float) else str(default)
    return field(default=default, metadata={"option": Option(help_text, read, **more)})


def options_in(kind: type[Any]) -> dict[str, Option]:
    """Return how users give the fields of a dataclass, by the fields' names."""
    return {each.name: each.metadata["option"] for each in fields(kind) if each.metadata}


def of_type(kind: type[T], words: str) -> Reader[T]:
    """Return a reader of values of a type, such as texts."""

    def read(value: Any) -> T:
        if type(value) is not kind:
            raise ValueError(words)
        return value

    return read


TEXT = of_type(str, "a text")
FLAG = of_type(bool, "true or false")


def many(read: Reader[T], length: int | None = None) -> Reader[tuple[T, ...]]:
    """Return a reader of lists, of any length or a given one."""

    def read_all(values: Any) -> tuple[T, ...]:
        if not isinstance(values, list) or length not in (None, len(values)):
            values = [None]  # as where a field is missing: its reader says what it wants
        try:
            return tuple(map(read, values))
        except ValueError as error:
            of_how_many = "" if length is None else f" of {length}"
            raise ValueError(f"a list{of_how_many}, each {error}") from None

    return read_all


class Fields:
    """The fields of the JSON object in a file; `error` is raised if one is wrong."""

    def __init__(
        self, data: dict[str, Any], path: Path, error: type[EnvPipeError] = EnvPipeError
    ) -> None:
        self.data, self.path, self._error = data, path, error

    def wrong(self, name: str, remedy: str) -> EnvPipeError:
        """Return the error for one field."""
        value = self.data.get(name)
        return self._error(f"{self.path}: field '{name}' is wrong", value=value, remedy=remedy)

    def read(self, name: str, reader: Reader[T], default: T = _REQUIRED) -> T:
        """Return the value of a field; the default if it is absent."""
        if default is not _REQUIRED and name not in self.data:
            return default
        try:
            return reader(self.data.get(name))
        except ValueError as error:
            raise self.wrong(name, f"It must be {error}.") from None

    def inside(self, name: str) -> Fields:
        """Return the fields of an object in a field, which messages name as a part of the path."""
        return Fields(self.read(name, of_type(dict, "an object")), self.path / name, self._error)

    def entries(self, name: str) -> list[Fields]:
        """Return the fields of each object in a list; none if it is absent."""
        none: tuple[dict[str, Any], ...] = ()
        values = self.read(name, many(of_type(dict, "an object")), none)
        at = self.path / name
        return [Fields(value, at / str(n), self._error) for n, value in enumerate(values)]

    def make(
        self,
        kind: type[T],
        readers: Mapping[str, Reader[Any]],
        also: Iterable[str] = (),
        **more: Any,
    ) -> T:
        """Make a dataclass of the fields; those without a default there or in `more` must be given.

        Other fields than those of the readers and `also` are refused.
        """
        known = (*readers, *also)
        unknown = [name for name in self.data if name not in known]
        if unknown:
            raise self._error(
                f"{self.path}: unknown field",
                value=unknown[0],
                remedy=f"Known: {', '.join(known)}.",
            )
        needed = {each.name for each in fields(kind) if each.default is each.default_factory}  # type: ignore[arg-type]
        there = [name for name in readers if name in self.data or name in needed - more.keys()]
        return kind(**{**more, **{n: self.read(n, readers[n]) for n in there}})

    def make_typed(self, kind: type[T], **more: Any) -> T:
        """Make a dataclass of the fields, whose types and units say what a value must be.

        Whole numbers are above 0, other numbers finite and not negative, those in units within what
        a GPU has, texts not empty, paths absolute. Other fields than its own are refused; those of
        `more` do not come from the file.
        """
        hints = {name: hint for name, hint in get_type_hints(kind).items() if name not in more}
        return self.make(
            kind, {name: self._typed(name, hint) for name, hint in hints.items()}, **more
        )

    def _typed(self, name: str, hint: Any) -> Reader[Any]:
        if isinstance(hint, UnionType):  # a type or None, which is a field that is left out
            hint = get_args(hint)[0]
        if not is_dataclass(hint):
            return _OF_UNITS.get((hint, name.rpartition("_")[2])) or _OF_TYPES[hint]

        def read(table: Any) -> Any:
            if not isinstance(table, dict):
                raise ValueError("a table")
            return Fields(table, self.path / name, self._error).make_typed(hint)  # type: ignore[arg-type]  # a class

        return read

    def check_format(self, expected: str) -> None:
        """Refuse an object of another format."""
        if self.data.get("format") != expected:
            raise self.wrong("format", f"It must be '{expected}'.")


def _whole_text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("a text")
    return value


def _absolute_path(value: Any) -> Path:
    if not isinstance(value, str) or not value.startswith("/"):
        raise ValueError("an absolute path")
    return Path(value)


_OF_TYPES: dict[Any, Reader[Any]] = {
    bool: FLAG,
    int: COUNT,
    float: AMOUNT,
    str: _whole_text,
    Path: _absolute_path,
    tuple[str, ...]: many(TEXT),
}
#: By type, and by the unit in which a field's name ends.
_OF_UNITS: dict[Any, Reader[Any]] = {
    (int, "mhz"): FREQUENCY,
    (float, "mhz"): Number(below=MAX_FREQUENCY_MHZ, least=1),
    (tuple[int, int], "mhz"): many(FREQUENCY, 2),
    (float, "w"): POWER,
    (float, "s"): TIME,
}


def parse_toml(content: bytes, path: Path, format_name: str, error: type[EnvPipeError]) -> Fields:
    """Return a file's fields but its format; `error` if it is not TOML, or of another one."""
    try:
        fields = Fields(tomllib.loads(decode(content)), path, error)
    except (ValueError, RecursionError) as cause:
        raise error(f"{path} is not TOML: {cause}", remedy="Repair the file") from cause
    fields.check_format(format_name)
    del fields.data["format"]
    return fields


def read_json(
    path: Path, what: str, error: type[EnvPipeError] = EnvPipeError, remedy: str = ""
) -> Fields:
    """Return the fields of the JSON object in a file; `what` is its name in messages."""
    try:
        text = read_text(path)
    except (OSError, ValueError) as cause:
        raise error(f"{what} {path} is not readable JSON: {cause}", remedy=remedy) from cause
    return parse_json(text, path, what, error, remedy)


def parse_json(
    text: str, path: Path, what: str, error: type[EnvPipeError] = EnvPipeError, remedy: str = ""
) -> Fields:
    """Return the fields of a file's JSON object; `error`, with the remedy, for anything else."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as cause:
        why, header = str(cause), text.partition("\n")[0].strip()
        if re.fullmatch(r"[a-z_]+(,[a-z_]+)+", header):
            why, remedy = (
                f"it is a table of {header}",
                remedy or f"Give the JSON of a {what.lower()}.",
            )
        raise error(f"{what} {path} is not readable JSON: {why}", remedy=remedy) from cause
    if not isinstance(data, dict):
        raise error(f"{what} {path} is not a JSON object", value=type(data).__name__, remedy=remedy)
    return Fields(data, path, error)
