"""Rows of profiles: what one unit costs at one frequency, measured or assumed; their table."""

from __future__ import annotations

import csv
import io
import json
import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from envpipe_megatron.core.fields import (
    AMOUNT,
    FREQUENCY,
    MAX_FREQUENCY_MHZ,
    POWER,
    UNIT_TIME,
    Number,
)
from envpipe_megatron.core.kinds import SPLIT, WHOLE, Kind
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.files import csv_text, decode

#: What `Kind.NOTHING` takes: nothing, to those who do not divide by it.
NOTHING_S = 1e-15
_COLUMNS = ("stage", "instruction", "frequency", "time", "energy")
_OPTIONAL = _RANK, _UNCERTAINTY, _CHUNK = "rank", "energy_uncertainty_j", "chunk"
#: The kinds that a profile's file may list.
LISTED = tuple(kind for kind in Kind if kind is not Kind.NOTHING)
#: How alike (difflib) the name of a kind and a misspelt one are: `send_forward` is not.
_MISSPELT = 0.8

logger = logging.getLogger(__name__)


class ProfileError(EnvPipeError):
    """A profile or sidecar that is not readable or not complete."""


@dataclass(frozen=True, slots=True)
class ProfileRow:
    """Cost of one unit at one frequency, of one GPU and microbatch.

    With the standard uncertainty of its energy, if that is known.
    """

    frequency_mhz: int
    time_s: float
    energy_j: float
    energy_uncertainty_j: float | None = None

    def __post_init__(self) -> None:
        if not (0 < self.frequency_mhz < MAX_FREQUENCY_MHZ and 0 < self.time_s < math.inf) or not (
            0 <= self.energy_j < math.inf
        ):
            raise ProfileError(
                "A profile row needs a frequency (MHz) that a GPU has, a time (s) above 0 and an "
                "energy (J) of at least 0",
                value=(self.frequency_mhz, self.time_s, self.energy_j),
            )
        known_j = self.energy_uncertainty_j
        if known_j is not None and not 0 <= known_j < math.inf:
            raise ProfileError("The uncertainty of a row's energy is at least 0", value=known_j)

    def scaled(self, share: float) -> ProfileRow:
        """Return the row of a share of the unit."""
        known_j = self.energy_uncertainty_j
        return ProfileRow(
            self.frequency_mhz,
            self.time_s * share,
            self.energy_j * share,
            None if known_j is None else known_j * share,
        )


@dataclass(frozen=True)
class SplitBackward:
    """Assumed costs of a backward in two parts, where neither was measured.

    Args:
        input_share: the share of the input's gradient.
        overhead: what both together take more than the whole backward, as a fraction of that, in
            time and in energy.
    """

    input_share: float = 0.5
    overhead: float = 0.0

    def __post_init__(self) -> None:
        if not (0 < self.input_share < 1 and 0 <= self.overhead < math.inf):
            raise ProfileError(
                "A split backward has a share of its first part between 0 and 1, and an overhead "
                "of zero or more",
                value=(self.input_share, self.overhead),
            )

    @property
    def shares(self) -> dict[Kind, float]:
        """Share that each part takes of the whole backward."""
        shares = (self.input_share, 1 - self.input_share)
        return {
            kind: (1 + self.overhead) * share for kind, share in zip(SPLIT[1:], shares, strict=True)
        }

    def rows(self, whole: Sequence[ProfileRow]) -> dict[Kind, tuple[ProfileRow, ...]]:
        """Return rows of both parts, from those of whole backwards."""
        return {
            kind: tuple(row.scaled(share) for row in whole) for kind, share in self.shares.items()
        }


#: What emulated GPUs charge: the overhead of linear layers on an H200 (docs/evidence/megatron.md).
#: The two products of a linear layer's backward are equally large; attention makes the first part
#: larger: 0.8 of it was seen on an H200 with attention in plain products, and plans save about as
#: much up to 0.7.
MEASURED_SPLIT = SplitBackward(input_share=0.5, overhead=0.01)


def read_rows(path: Path) -> tuple[bytes, list[tuple[int, Kind, ProfileRow]], int]:
    """Return a profile's bytes, its rows with their parts (see `Profile`), and chunks of a stage.

    One row for all ranks of a part. ProfileError names file, line and value of what is wrong.
    """
    content, lines = _read_table(path)
    units = list(_lines_of(lines))
    chunks = [
        line.read(_CHUNK, Number(whole=True)) if _CHUNK in line.cells else 0 for line, _ in units
    ]
    listed_chunks = max(chunks, default=0) + 1
    first_line: dict[tuple[int, Kind, int, str], str] = {}
    by_rank: dict[tuple[int, Kind, int], list[ProfileRow]] = {}
    for (line, kind), chunk in zip(units, chunks, strict=True):
        row = _read_row(line)
        check_power(line.where, row.energy_j, row.time_s)
        if kind is Kind.COMBINED and listed_chunks == 1:
            raise ProfileError(
                f"{line.where}: combined units, which only pipelines with chunks have",
                value=kind.value,
                remedy=f"Add a column {_CHUNK}.",
            )
        stage, rank = line.read("stage", Number(whole=True)), line.cells.get(_RANK, "")
        part = stage * listed_chunks + chunk
        key = (part, kind, row.frequency_mhz)
        if (*key, rank) in first_line:
            of_rank = f" of rank {rank}" if rank else ""
            raise ProfileError(
                f"{line.where}: a second row for {row_name(part, kind, listed_chunks)}{of_rank} "
                "at this frequency (MHz)",
                value=row.frequency_mhz,
                remedy=f"The first is {first_line[*key, rank]}; keep one.",
            )
        first_line[*key, rank] = line.where
        by_rank.setdefault(key, []).append(row)
    rows = [
        (part, kind, _one_gpu(frequency_mhz, ranks))
        for (part, kind, frequency_mhz), ranks in by_rank.items()
    ]
    return content, rows, listed_chunks


def rows_text(rows: Sequence[tuple[int, Kind, ProfileRow]], listed_chunks: int) -> str:
    """Return the CSV of rows with their parts, for `read_rows`."""
    listed = [(*divmod(part, listed_chunks), kind.value, row) for part, kind, row in rows]
    more = (_CHUNK,) * (listed_chunks > 1)
    if any(row.energy_uncertainty_j is not None for *_, row in listed):
        more = (_UNCERTAINTY, *more)
    lines: list[list[object]] = [[*_COLUMNS, *more]]
    for stage, chunk, instruction, row in listed:
        cells = [stage, instruction, row.frequency_mhz, row.time_s, row.energy_j]
        optional = {_UNCERTAINTY: row.energy_uncertainty_j, _CHUNK: chunk}
        lines.append([*cells, *(optional[name] for name in more)])
    return csv_text(lines)


@dataclass(frozen=True)
class _CsvLine:
    """One line of a CSV.

    Args:
        where: file and line, for messages.
        cells: by the names of the columns, without blanks around them.
    """

    where: str
    cells: Mapping[str, str]

    def read(self, column: str, number: Number, unit: str = "") -> Any:
        """Return the number in a cell; a message names the unit."""
        try:
            return number.of_text(self.cells[column])
        except ValueError as cause:
            of_unit = f" ({unit})" if unit else ""
            raise ProfileError(
                f"{self.where}: {column}{of_unit} must be {cause}", value=self.cells[column]
            ) from None


def _read_table(path: Path) -> tuple[bytes, list[_CsvLine]]:
    """Return a CSV's bytes and its rows, columns in any order; blank lines and others are left out.

    A row of more cells than the header is refused: with decimal commas, numbers would be others.
    """
    remedy = "Give the CSV of a profile."
    try:
        content = path.read_bytes()
        lines = list(csv.reader(io.StringIO(decode(content), newline="")))
    except (OSError, ValueError, csv.Error) as cause:
        raise ProfileError(f"The profile {path} is not readable: {cause}", remedy=remedy) from cause
    if content.lstrip()[:1] == b"{":
        with suppress(ValueError):
            first, _ = json.JSONDecoder().raw_decode(decode(content).lstrip())
            form = first.get("format", "unknown")
            raise ProfileError(f"{path} is JSON ({form}) where a CSV is wanted", remedy=remedy)
    header = [name.strip() for name in lines[0]] if lines else []
    known = [name for name in (*_COLUMNS, *_OPTIONAL) if name in header]
    if not {*_COLUMNS} <= {*known} or any(header.count(name) > 1 for name in known):
        raise ProfileError(
            f"{path}, line 1: not the header of a profile",
            value=",".join(header),
            remedy=f"The first line must name the columns {','.join(_COLUMNS)}.",
        )
    needed = 1 + max(map(header.index, _COLUMNS))
    rows = []
    for number, cells in enumerate(lines[1:], start=2):
        if not any(map(str.strip, cells)):
            continue
        where = f"{path}, line {number}"
        if len(cells) < needed or any(map(str.strip, cells[len(header) :])):
            raise ProfileError(
                f"{where}: too {'few' if len(cells) < needed else 'many'} columns",
                value=",".join(cells),
                remedy=f"Needed: {', '.join(_COLUMNS)}.",
            )
        named = dict(zip(header, map(str.strip, cells), strict=False))
        rows.append(_CsvLine(where, {name: named.get(name, "") for name in known}))
    if not rows:
        raise ProfileError(
            f"{path} has no rows", remedy="List every instruction at each frequency."
        )
    return content, rows


def _lines_of(lines: Sequence[_CsvLine]) -> Iterator[tuple[_CsvLine, Kind]]:
    """Yield each line whose instruction can be listed; a misspelt kind is refused.

    Other instructions, such as the loading of data, are left out, and a warning names them.
    """
    left_out = Counter[str]()
    for line in lines:
        instruction = line.cells["instruction"]
        if instruction in set(LISTED):
            yield line, Kind(instruction)
        elif alike := get_close_matches(instruction.lower(), LISTED, 1, _MISSPELT):
            raise ProfileError(
                f"{line.where}: unknown instruction",
                value=instruction,
                remedy=f"Did you mean {alike[0]}? There are {', '.join(LISTED)}.",
            )
        else:
            left_out[instruction] += 1
    if left_out:
        named = ", ".join(f"{name or 'none'} ({rows})" for name, rows in left_out.items())
        logger.warning(
            "%s: rows of other instructions are left out: %s",
            lines[0].where.rpartition(", line")[0], named,
        )  # fmt: skip


def _read_row(line: _CsvLine) -> ProfileRow:
    """Return a line's frequency, time and energy."""
    return ProfileRow(
        line.read("frequency", FREQUENCY, "MHz"),
        line.read("time", UNIT_TIME, "s"),
        line.read("energy", AMOUNT, "J"),
        line.read(_UNCERTAINTY, AMOUNT, "J") if line.cells.get(_UNCERTAINTY) else None,
    )


def check_power(
    where: str, energy_j: float, time_s: float, error: type[EnvPipeError] = ProfileError
) -> None:
    """Refuse a time or an energy in another unit, by the power that they make."""
    try:
        POWER(energy_j / time_s)
    except ValueError:
        raise error(
            f"{where}: {energy_j:g} J in {time_s:g} s are a power that no GPU has (W)",
            value=float(f"{energy_j / time_s:.3g}"),
            remedy="Give the time in s and the energy in J, of one GPU and one microbatch: not ms, "
            f"kJ, or the J of a node. A GPU draws {POWER.least:g} to {POWER.below:,.0f} W.",
        ) from None


def _one_gpu(frequency_mhz: int, ranks: Sequence[ProfileRow]) -> ProfileRow:
    """Return one row for all GPUs of a stage."""
    known = [row.energy_uncertainty_j for row in ranks if row.energy_uncertainty_j is not None]
    return ProfileRow(
        frequency_mhz,
        max(row.time_s for row in ranks),
        math.fsum(row.energy_j for row in ranks) / len(ranks),
        math.hypot(*known) / len(ranks) if len(known) == len(ranks) else None,
    )


def whole_backwards(kinds: Mapping[Kind, Sequence[ProfileRow]]) -> list[ProfileRow]:
    """Return backwards as one of their halves after the other, at the clocks that both have."""
    second = {row.frequency_mhz: row for row in kinds[Kind.WEIGHT_GRADIENT]}
    return [
        ProfileRow(
            first.frequency_mhz,
            first.time_s + second[first.frequency_mhz].time_s,
            first.energy_j + second[first.frequency_mhz].energy_j,
        )
        for first in kinds[Kind.INPUT_GRADIENT]
        if first.frequency_mhz in second
    ]


def in_order(
    kinds: Mapping[Kind, tuple[ProfileRow, ...]],
) -> Mapping[Kind, tuple[ProfileRow, ...]]:
    """Sort rows by `Kind`; where units may run as one, add those of `Kind.NOTHING`.

    Such units run at the clock of the last of them, so there is a row for any clock.
    """
    known = dict(kinds)
    if len(kinds) > len(WHOLE):
        clocks = {row.frequency_mhz for rows in kinds.values() for row in rows}
        known[Kind.NOTHING] = tuple(
            ProfileRow(clock, NOTHING_S, 0.0) for clock in sorted(clocks, reverse=True)
        )
    return {kind: known[kind] for kind in Kind if kind in known}


def row_name(part: int, kind: Kind, listed_chunks: int) -> str:
    """Return what rows are of, for messages: `stage 2 forward`, or `stage 2 chunk 1 combined`."""
    stage, chunk = divmod(part, listed_chunks)
    of_chunk = f" chunk {chunk}" if listed_chunks > 1 else ""
    return f"stage {stage}{of_chunk} {kind}"
