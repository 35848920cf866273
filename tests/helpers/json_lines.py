"""JSON Lines that several processes have written to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def json_lines(path: Path) -> list[Any]:
    """The objects of a file; writers that met have left an empty line, which readers pass over."""
    return [json.loads(line) for line in path.read_text().splitlines() if line]
