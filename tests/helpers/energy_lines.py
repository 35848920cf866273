"""Lines of energy logs for tests, and of files that several processes have written to."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from envpipe_megatron.formats.bill import Bill
from envpipe_megatron.formats.energy import EnergyNote, EnergyWindow, parse_line
from envpipe_megatron.formats.energy_sums import EnergySums
from envpipe_megatron.formats.steps import RunningMean

Line = dict[str, Any]


def window(gpu: int = 0, iteration: int | None = 0, energy_j: float = 100.0, **fields: Any) -> Line:
    """Two seconds of one iteration, of which one in units and half a second in receives."""
    return {
        "format": "envpipe-energy/1",
        "node": "n0",
        "gpu": "NVIDIA A100",
        "gpu_uid": f"GPU-{gpu}",
        "rank": gpu,
        "stage": gpu,
        "phase": "steady",
        "first_iteration": iteration,
        "last_iteration": iteration,
        "begin_s": 10.0 + 2 * (iteration or 0),
        "duration_s": 2.0,
        "energy_j": energy_j,
        "energy_uncertainty_j": 0.5,
        "compute_s": 1.0,
        "blocking_s": 0.5,
        "idle_s": 0.5,
        **fields,
    }


def note(name: str, node: str = "n0", **fields: Any) -> Line:
    return {"format": "envpipe-note/1", "node": node, "note": name, **fields}


def job(**facts: Any) -> Line:
    return note("job", facts=facts)


def parsed(entries: Iterable[Line]) -> list[EnergyWindow | EnergyNote]:
    return [parse_line(json.dumps(entry).encode()) for entry in entries]


def bill(*entries: Line) -> Bill:
    return Bill(parsed(entries))


def bill_of_ranks(ranks: Iterable[Mapping[str, EnergySums]]) -> Bill:
    made = Bill()
    for sums in ranks:
        made.add_sums(sums.values())
    return made


def json_lines(path: Path) -> list[Any]:
    """The objects of a file; writers that met have left an empty line, which readers pass over."""
    return [json.loads(line) for line in path.read_text().splitlines() if line]


def error_of(values: Iterable[float]) -> float | None:
    """The standard uncertainty of a mean."""
    mean = RunningMean()
    for value in values:
        mean.add(value)
    return mean.uncertainty
