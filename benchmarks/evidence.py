"""Rows of evidence: a line of JSON for each setting that was measured.

A benchmark leaves `rows.jsonl` in its output folder (`outputs.leave`); `cat` adds it to a family's
file in docs/evidence/rows, and `python docs/tools/page_evidence.py` writes the tables of the pages
from these files. A line, here broken into several:

    {"table": "two stages",
     "setting": {"job, microbatches": "bf16, 8"},
     "measured": {"Megatron's (ms)": 371.2, "time": {"value": 0.918, "upper": 0.922}},
     "basis": "GPUs", "gpus": "2 H200", "commit": "7429d644", "command": "by hand"}

Names within `setting` and `measured` are the columns of the table. A cell is a text, a number, a
list of cells, or an object with the fields of `Figure`.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from decimal import Decimal
from pathlib import Path
from typing import Any

#: What a row was seen on; docs/evidence/index.md says what of each is real.
BASES = ("GPUs", "computed", "emulated", "CPU")
_COMMIT = re.compile(r"[0-9a-f]{7,8}(\+)?")
#: Errors of rounding are below it.
_NOTHING = 1e-9
_ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Figure:
    """A number that was measured, with all of its digits.

    Args:
        value: the number, or numbers of one kind side by side, None where one is missing.
        upper: upper 95 % bound, one-sided.
        plus_minus: half of the 95 % interval.
        high: the greatest, where `value` is the least of several.
        unit: such as %, ms or GiB; empty for a ratio, or where the column's name has it.
    """

    value: Decimal | tuple[Decimal | None, ...]
    upper: Decimal | None = None
    plus_minus: Decimal | None = None
    high: Decimal | None = None
    unit: str = ""

    def __str__(self) -> str:
        numbers = self.value if isinstance(self.value, tuple) else (self.value,)
        text = " / ".join("-" if number is None else f"{number:,}" for number in numbers)
        text += f" to {self.high:,}" if self.high is not None else ""
        text += f" ± {self.plus_minus:,}" if self.plus_minus is not None else ""
        text += f" {self.unit}" if self.unit else ""
        return text + (f" ({self.upper:,})" if self.upper is not None else "")


Cell = str | Figure | tuple[Any, ...]


@dataclass(frozen=True)
class Row:
    """A setting and what was measured in it.

    Args:
        table: the table that it belongs to; a marker of the family's page names it.
        setting: what was run, by column.
        measured: what came out, by column.
        basis: what it was seen on, one of BASES.
        gpus: number and product, such as 2 H200.
        commit: of this repository; a + behind it: with changes that were not committed.
        command: what makes it again, from the checkout; or `by hand`.
        log: where its log or data are kept.
        claim: `what` is claimed and its `value`, a template of measured columns, for the front
            table; most rows claim nothing there.
        superseded: by what, as Markdown; such a row moves from its page to the archive.
    """

    table: str
    setting: Mapping[str, Cell]
    measured: Mapping[str, Cell]
    basis: str
    gpus: str = ""
    commit: str = ""
    command: str = ""
    log: str = ""
    claim: Mapping[str, str] = field(default_factory=dict)
    superseded: str = ""

    def __post_init__(self) -> None:
        if self.basis not in BASES:
            raise ValueError(f"basis is {self.basis!r}, and must be one of {', '.join(BASES)}")
        if self.commit and not _COMMIT.fullmatch(self.commit):
            raise ValueError(f"commit is {self.commit!r}, and must be 7 or 8 hexadecimal digits")
        if not (self.table and self.setting and self.measured):
            raise ValueError("table, setting or measured is empty: a row needs all three")
        if both := self.setting.keys() & self.measured.keys():
            raise ValueError(f"{', '.join(both)} is in setting and in measured: keep it in one")
        if self.claim and self.claim.keys() != {"what", "value"}:
            raise ValueError(f"claim has {', '.join(self.claim)}, and must have what and value")

    def to_json(self) -> str:
        """Return the line of JSON, without what is empty."""
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        return _json({name: value for name, value in found.items() if value})


def read_rows(path: Path) -> list[Row]:
    """Read a file of rows. Raises ValueError, with file and line, for one that is none."""
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            entry = json.loads(line, parse_float=Decimal, parse_int=Decimal)
            for name in ("setting", "measured"):
                entry[name] = {column: _cell(found) for column, found in entry[name].items()}
            rows.append(Row(**entry))
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path}:{number}: not a row of evidence: {error}") from error
    return rows


def add_rows(path: Path, rows: Iterable[Row]) -> None:
    """Append rows to a file."""
    with path.open("a", encoding="utf-8") as file:
        file.writelines(row.to_json() + "\n" for row in rows)


def as_cell(value: object) -> Cell:
    """Return what a benchmark found as a cell: floats with four significant digits."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        rounded = Decimal(f"{value:.4g}") if abs(value) > _NOTHING else Decimal(0)
        return Figure(Decimal(f"{rounded:f}"))
    if isinstance(value, int):
        return Figure(Decimal(value))
    if isinstance(value, list):
        return tuple(map(as_cell, value))
    return value if isinstance(value, Figure | tuple) else str(value)


def ratio(value: float, upper: float) -> Figure:
    """Return a ratio to four decimals; of one round there is no bound."""
    bound = Decimal(f"{upper:.4f}") if math.isfinite(upper) else None
    return Figure(Decimal(f"{value:.4f}"), upper=bound)


def row_of(table: str, found: Mapping[str, object], **more: Any) -> Row:
    """Return a benchmark's row.

    Columns before the first float or Figure are its setting; without one, the texts in front, but
    for the last column. None, and a float that is not finite, is left out.
    """
    values = {name: value for name, value in found.items() if _is_there(value)}
    figures = [at for at, value in enumerate(values.values()) if isinstance(value, float | Figure)]
    others = [at for at, value in enumerate(values.values()) if not isinstance(value, str)]
    first = figures[0] if figures else min([*others, len(values) - 1])
    cells = [(name, as_cell(value)) for name, value in values.items()]
    return Row(table, dict(cells[: max(1, first)]), dict(cells[max(1, first) :]), **more)


def _is_there(value: object) -> bool:
    return math.isfinite(value) if isinstance(value, float) else value is not None


def made_by() -> dict[str, str]:
    """Return commit and command of this process; without git, no commit."""
    script = Path(sys.argv[0]).resolve()
    inside = script.relative_to(_ROOT) if _ROOT in script.parents else Path(script.name)
    made = {"command": shlex.join(["python", str(inside), *sys.argv[1:]])}
    if shutil.which("git"):
        describe = ["git", "describe", "--always", "--abbrev=8", "--exclude=*", "--dirty=+"]
        ran = subprocess.run(describe, cwd=_ROOT, capture_output=True, text=True)
        made["commit"] = ran.stdout.strip()
    return made


def _cell(found: Any) -> Cell:
    if isinstance(found, list):
        return tuple(map(_cell, found))
    if isinstance(found, Decimal):
        return Figure(found)
    if isinstance(found, Mapping):
        value = found["value"]
        return Figure(**{**found, "value": tuple(value) if isinstance(value, list) else value})
    if isinstance(found, str):
        return found
    raise ValueError(f"{found!r} is no cell: it must be a text, a number, a list or an object")


def _json(value: Any) -> str:
    """Return JSON that keeps the digits of decimal numbers."""
    if isinstance(value, Figure):
        kept = {each.name: getattr(value, each.name) for each in fields(value)}
        kept = {name: found for name, found in kept.items() if found not in (None, "")}
        return _json(kept if len(kept) > 1 or isinstance(value.value, tuple) else value.value)
    if isinstance(value, Mapping):
        pairs = (f"{_json(name)}: {_json(found)}" for name, found in value.items())
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_json, value)) + "]"
    return str(value) if isinstance(value, Decimal) else json.dumps(value, ensure_ascii=False)
