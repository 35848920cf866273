"""How often a clock stays locked when ranks, guard or both end at a random point: never, it must.

    python benchmarks/gpu/guard_faults.py --rounds 200

Plays the rounds of `tests/helpers/guards/guard_rounds.py`: real processes that end while clocks are
locked, every other round of emulated GPUs and of the tests' fake NVML library. Needs the
development extra and a C compiler; touches no real GPU.

`rounds.csv` in `--output` gets a line for each round. The same command again goes on where it was
stopped; several may append to one file, each with faults of its own. The table, and rows.jsonl, are
of all rounds in it: clocks locked
and leases left when all of a round had ended, rounds that failed in any way, and from the fault to
the last reset the median and longest time in s.
"""

from __future__ import annotations

import csv
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import click
from rich.progress import track

from benchmarks.outputs import leave, make_console, make_table, output_option

# isort: split
from fake_nvml.fake_nvml import build_library  # of tests/helpers
from guard_rounds import FAULTS, Node, Outcome, play  # type: ignore[import-not-found]  # of tests/

COLUMNS = ("fault", "seed", "number", "locked", "leases", "failed", "reset_s")


def rounds_of(path: Path, fault: str) -> list[dict[str, str]]:
    """Return a fault's rounds in a file."""
    rows = csv.DictReader(path.read_text().splitlines(), COLUMNS)
    return [row for row in rows if row["fault"] == fault]


def play_one(node: Node, fault: str, number: int, seed: int) -> list[object]:
    """Play a round; return its columns."""
    outcome, failed = Outcome(), ""
    try:
        play(node, fault, number, seed, outcome)
    except (AssertionError, OSError, EOFError) as error:
        failed = repr(error)
    times_s = " ".join(map(str, outcome.reset_s))
    return [fault, seed, number, outcome.locked, outcome.leases, failed, times_s]


def summarise(fault: str, rounds: Sequence[dict[str, str]]) -> dict[str, str | int | float]:
    """Return a fault's row of the table."""
    reset_s = [float(time_s) for row in rounds for time_s in row["reset_s"].split()] or [0.0]
    return {
        "fault": fault,
        "reset_median_s": round(statistics.median(reset_s), 4),
        "reset_max_s": round(max(reset_s), 4),
        "rounds": len(rounds),
        "clocks_left_locked": sum(int(row["locked"]) for row in rounds),
        "leases_left": sum(int(row["leases"]) for row in rounds),
        "failed_rounds": sum(bool(row["failed"]) for row in rounds),
    }


@click.command(context_settings={"show_default": True})
@click.option("--rounds", type=click.IntRange(0), default=20, help="Of each fault, in the file.")
@click.option("--fault", "faults", type=click.Choice(list(FAULTS)), multiple=True, help="Only it.")
@output_option("guard_faults")
def main(rounds: int, faults: Sequence[str], output: Path) -> None:
    """Let ranks and guards end at random points, and count what stays locked."""
    console, seed = make_console(), int(time.time())
    output.mkdir(parents=True, exist_ok=True)
    file_of_rounds = output / "rounds.csv"
    file_of_rounds.touch()
    with tempfile.TemporaryDirectory() as folder:
        node = Node(Path(folder), build_library(Path(folder) / "library"))
        with node.in_use():
            for fault in faults or FAULTS:
                left = range(len(rounds_of(file_of_rounds, fault)), rounds)
                for number in track(left, fault, console=console, transient=True):
                    columns = play_one(node, fault, number, seed)
                    with file_of_rounds.open("a") as file:
                        csv.writer(file).writerow(columns)
    played = {fault: rounds_of(file_of_rounds, fault) for fault in FAULTS}
    table = [summarise(fault, found) for fault, found in played.items() if found]
    console.print(make_table("Faults of the guard", table))
    leave(output, "emulated", {"rounds of faults": table})
    bad = ("clocks_left_locked", "leases_left", "failed_rounds")
    raise SystemExit(any(row[column] for row in table for column in bad))


if __name__ == "__main__":
    main()
