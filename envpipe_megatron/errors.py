"""The base class of all errors that a user is meant to read."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import PurePath

_MOST_CHARACTERS = 200


def plain(value: object) -> str:
    """Return a value as a message shows it: texts in quotes, commas between several values."""
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, bytes):
        value = value.decode(errors="replace")
    if isinstance(value, str | PurePath):
        text = str(value)
        # What a terminal would obey or not show is escaped.
        text = f"'{text if text.isprintable() else repr(text)[1:-1]}'"
    elif value is None:
        text = "nothing"
    elif isinstance(value, bool):
        text = str(value).lower()
    elif isinstance(value, Mapping):
        text = ", ".join(f"{_item(key)}: {_item(item)}" for key, item in value.items()) or "nothing"
    elif isinstance(value, list | tuple | set | frozenset):
        text = ", ".join(map(_item, value)) or "nothing"
    else:
        text = str(value)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 3]}..."


def _item(value: object) -> str:
    """Return one of several values: a word needs no quotes, and several in one have brackets."""
    text = plain(value)
    if isinstance(value, list | tuple | Mapping):
        return f"({text})"
    return text if text == "''" or " " in text or "," in text else text.strip("'")


def first_line(error: Exception | str) -> str:
    """Return the first line of an error's text, or its class name."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


class EnvPipeError(Exception):
    """Bad input or a failed precondition.

    What is wrong (with its file, line or option), the value as `plain` shows it, and as a sentence
    what the user can do about it.
    """

    _NO_VALUE = object()

    def __init__(self, what: str, *, value: object = _NO_VALUE, remedy: str = "") -> None:
        self.what = what
        self.remedy = remedy
        shown = "" if value is self._NO_VALUE else f" (got {plain(value)})"
        super().__init__(f"{what}{shown}" + (f". {remedy}" if remedy else ""))
