"""What a benchmark found, one sentence each, in a form that a table of all benchmarks is made from.

Each benchmark leaves `claims.json` beside its CSV: a list of objects with the fields of `Claim`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

CLAIMS_FILE = "claims.json"


@dataclass(frozen=True)
class Claim:
    """One thing that a benchmark has just seen.

    Args:
        figure: the benchmark's output folder, such as `fig9_a`.
        command: what makes it again, from the checkout.
        claim: one sentence with figures.
        basis: what it was seen on, such as `emulated V100 (fitted)`.
        paper: what a paper or a rival says of the same; empty where nothing.
        agrees: whether both agree; None where there is nothing to agree with.
        why: where they do not: why.
    """

    figure: str
    command: str
    claim: str
    basis: str
    paper: str = ""
    agrees: bool | None = None
    why: str = ""


def markdown_line(cells: Iterable[str]) -> str:
    """A line of a table in Markdown."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def write_claims(path: Path, claims: Iterable[Claim]) -> None:
    """Write claims as JSON; `path` is the file, usually `CLAIMS_FILE` in the output folder."""
    listed = [asdict(claim) for claim in claims]
    path.write_text(json.dumps(listed, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read_claims(path: Path) -> list[Claim]:
    """The claims of such a file."""
    return [Claim(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))]
