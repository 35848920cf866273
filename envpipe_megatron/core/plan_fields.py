"""Checked access to the fields of a plan's JSON: whatever is wrong is named, with its file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from envpipe_megatron.core.arrays import IntArray
from envpipe_megatron.core.conditions import WaitCurves
from envpipe_megatron.core.evaluation import PlanError
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.core.sidecar import MAX_FREQUENCY_MHZ, read_wait_power
from envpipe_megatron.files import read_text

_MAX_GPUS = 1_000_000


@dataclass(frozen=True)
class Fields:
    """Checked access to the fields of one plan file."""

    data: dict[str, Any]
    path: Path

    def wrong(self, name: str, remedy: str) -> PlanError:
        """The error for one field."""
        value = self.data.get(name)
        return PlanError(f"{self.path}: field '{name}' is wrong", value=value, remedy=remedy)

    def count(self, name: str, default: int | None = None) -> int:
        """A positive whole number."""
        value = self.data.get(name, default)
        if type(value) is not int or value < 1:
            raise self.wrong(name, "It must be a positive whole number.")
        return value

    def text(self, name: str) -> str:
        """A text, `custom` where it is absent."""
        value = self.data.get(name, "custom")
        if not isinstance(value, str):
            raise self.wrong(name, "It must be a text.")
        return value

    def flag(self, name: str) -> bool:
        """True or false, false where it is absent."""
        value = self.data.get(name, False)
        if not isinstance(value, bool):
            raise self.wrong(name, "It must be true or false.")
        return value

    def rows(self, name: str, num_rows: int) -> list[list[Any]]:
        """As many lists as there are stages, whatever they hold."""
        value = self.data.get(name)
        if (
            not isinstance(value, list)
            or len(value) != num_rows
            or not all(isinstance(row, list) for row in value)
        ):
            raise self.wrong(name, f"It must be {num_rows} lists, one a stage.")
        return value

    def clocks(self, name: str, schedule: Schedule, lowest: int) -> IntArray:
        """[num_stages, units_per_stage] frequencies in MHz."""
        rows, width = self.rows(name, schedule.num_stages), schedule.units_per_stage
        if any(
            len(row) != width
            or not all(type(f) is int and lowest <= f < MAX_FREQUENCY_MHZ for f in row)
            for row in rows
        ):
            raise self.wrong(
                name, f"Each stage needs {width} whole numbers of MHz, {lowest} or more."
            )
        return np.array(rows, dtype=np.int64)

    def numbers(self, name: str, length: int) -> tuple[float, ...]:
        """As many numbers of zero or more."""
        value = self._list(name, length)
        if not all(_is_amount(x) for x in value):
            raise self.wrong(name, "Its numbers must be zero or more.")
        return tuple(float(x) for x in value)

    def counts(self, name: str, length: int) -> tuple[int, ...]:
        """As many positive whole numbers."""
        value = self._list(name, length)
        if not all(type(x) is int and 0 < x < _MAX_GPUS for x in value):
            raise self.wrong(name, "Its numbers must be positive and whole.")
        return tuple(value)

    def number(self, name: str) -> float:
        """A number of zero or more."""
        value: Any = self.data.get(name)
        if not _is_amount(value):
            raise self.wrong(name, "It must be a number, zero or more.")
        return float(value)

    def wait_power(self, name: str, num_stages: int) -> WaitCurves:
        """Waiting power by clock, for each stage."""
        try:
            curves = read_wait_power(self.data.get(name))
        except (TypeError, ValueError, OverflowError):
            curves = ()
        if len(curves) != num_stages:
            raise self.wrong(
                name,
                "It must list stage, frequency_mhz and power_w of at least one clock for each of "
                f"the {num_stages} stages.",
            )
        return curves

    def _list(self, name: str, length: int) -> list[Any]:
        value = self.data.get(name)
        if not isinstance(value, list) or len(value) != length:
            raise self.wrong(name, f"It must be a list of {length} numbers.")
        return value


def _is_amount(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < 1e300


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        PlanError: the file is not readable, or holds something else.
    """
    try:
        data = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise PlanError(f"Plan {path} is not readable JSON: {error}") from error
    if not isinstance(data, dict):
        raise PlanError(f"Plan {path} is not a JSON object", value=type(data).__name__)
    return data
