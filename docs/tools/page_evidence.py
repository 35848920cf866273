"""Write the tables of docs/evidence from the rows that runs have left; a test compares the two.

python docs/tools/page_evidence.py

A table is written where a page has `<!-- rows: TABLE -->` and, behind an empty line, the table's
head and rule, whose titles are columns of the rows; what lies below them up to an empty line is
written anew. `<!-- rows: TABLE; COLUMN = TEXT -->` leaves only rows that have this text there. Rows
are those of docs/evidence/rows/PAGE.jsonl, in the file's order, without those that are superseded;
`front` are all rows with a claim, `superseded` all that are. `benchmarks/evidence.py` has the
format of a row.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from benchmarks.evidence import Cell, Row, read_rows
from benchmarks.outputs import markdown_line

PAGES = Path(__file__).resolve().parents[1] / "evidence"
#: Pages with rows, in the order of the front table.
FAMILIES = (
    "equality", "megatron", "units", "prediction", "planning", "emulation", "loop", "safety",
    "nodes", "frameworks", "search", "paper",
)  # fmt: skip
_TABLE = re.compile(r"(<!-- rows: ([^>]*?) -->\n\n(\|.*)\n\|[-:| ]+\n)((?:\|.*\n)*)")


def shown(cell: Cell) -> str:
    """Return a cell as the page shows it."""
    return "; ".join(map(shown, cell)) if isinstance(cell, tuple) else str(cell)


def columns(row: Row) -> dict[str, str]:
    """Return what a table can show of a row, by title."""
    own = {name: shown(cell) for name, cell in {**row.setting, **row.measured}.items()}
    command = row.command if row.command.startswith("by hand") else f"`{row.command}`"
    return {"kind": row.basis, "GPUs": row.gpus, "commit": row.commit, "command": command, **own}


def claim(row: Row, family: str) -> dict[str, str]:
    """Return a row's line of the front table."""
    value = row.claim["value"].format_map(columns(row))
    kind = f"{row.basis}, {row.gpus}" if row.gpus else row.basis
    return {
        "claim": row.claim["what"],
        "value (interval)": value,
        "kind": kind,
        "rows": f"[{family}]({family}.md)",
    }


def archived(row: Row, family: str) -> dict[str, str]:
    """Return a row's line of the archive."""
    measured = [f"{name} {shown(cell)}" for name, cell in row.measured.items()]
    return {
        "what": ", ".join(map(shown, row.setting.values())),
        "seen": ", ".join(measured).removeprefix("seen "),
        "superseded by": row.superseded,
        "page": f"[{family}]({family}.md)",
        "commit": row.commit,
    }


def read_families(folder: Path = PAGES) -> dict[str, list[Row]]:
    """Return the rows of each family, by page."""
    return {name: read_rows(folder / "rows" / f"{name}.jsonl") for name in FAMILIES}


def lines_of(
    family: str, marker: str, families: Mapping[str, list[Row]]
) -> Iterator[dict[str, str]]:
    """Yield what a marker's rows show. Raises ValueError if there is none."""
    name, *conditions = (part.strip() for part in marker.split(";"))
    everywhere: dict[str, tuple[Callable[[Row], object], Callable[[Row, str], dict[str, str]]]] = {
        "front": (lambda row: row.claim and not row.superseded, claim),
        "superseded": (lambda row: row.superseded, archived),
    }
    found = [(row, of) for of, rows in families.items() for row in rows]
    if name in everywhere:
        chosen, show = everywhere[name]
        yield from (show(row, of) for row, of in found if chosen(row))
        return
    wanted = dict(condition.split(" = ") for condition in conditions)
    own = [row for row in families[family] if row.table == name and not row.superseded]
    lines = [columns(row) for row in own]
    lines = [line for line in lines if wanted.items() <= line.items()]
    if not lines:
        raise ValueError(f"no row of rows/{family}.jsonl fits the marker {marker!r}")
    yield from lines


def with_tables(family: str, text: str, families: Mapping[str, list[Row]]) -> str:
    """Return a page's text with the tables that the rows make."""

    def table(found: re.Match[str]) -> str:
        titles = [title.strip() for title in found[3].strip("|").split(" | ")]
        lines = list(lines_of(family, found[2], families))
        if unknown := [title for title in titles if not any(title in line for line in lines)]:
            raise ValueError(f"{family}.md, {found[2]}: no row has a column {unknown[0]!r}")
        cells = ([line.get(title, "") for title in titles] for line in lines)
        return found[1] + "".join(markdown_line(row) + "\n" for row in cells)

    return _TABLE.sub(table, text)


def main() -> None:
    """Write all pages anew."""
    families = read_families()
    for page in sorted(PAGES.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        page.write_text(with_tables(page.stem, text, families), encoding="utf-8")


if __name__ == "__main__":
    main()
