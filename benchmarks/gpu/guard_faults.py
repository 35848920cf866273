"""How often a clock stays locked when ranks, guard or both end at a random point: never, it must.

    python benchmarks/gpu/guard_faults.py --repeat 200 --output guard_faults.csv

Plays the rounds of `tests/gpu/guard/test_guard.py`: real processes that are killed, stopped
or starved of memory while they lock clocks of emulated GPUs and of the tests' fake NVML library.
Needs the development extra and a C compiler; touches no real GPU.

Columns: the fault, its rounds, the clocks that were locked and the lease files that were there when
all of a round had ended, the rounds that failed in any way, and from the fault to the last reset
clock and deleted lease the median and longest time in s.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Console
from rich.progress import track

from benchmarks.outputs import leave, make_console, make_table

# isort: split
from fake_nvml.fake_nvml import build_library  # type: ignore[import-not-found]  # of tests/
from guard_rounds import FAULTS, Node, Outcome, play  # type: ignore[import-not-found]  # of tests/


def play_all(
    node: Node, fault: str, repeat: int, seed: int, console: Console
) -> dict[str, str | int | float]:
    """Play a fault's rounds; return its row of the table."""
    outcomes: list[Outcome] = []
    failed = 0
    for number in track(range(repeat), fault.replace("_", " "), console=console, transient=True):
        outcome = Outcome()
        try:
            play(node, fault, number, seed, outcome)
        except (AssertionError, OSError, EOFError) as error:
            failed += 1
            console.print(f"{fault}, seed {seed}, round {number}: {type(error).__name__} {error}")
        outcomes.append(outcome)
    reset_s = [time_s for outcome in outcomes for time_s in outcome.reset_s] or [float("nan")]
    return {
        "fault": fault,
        "repeats": repeat,
        "clocks_left_locked": sum(outcome.locked for outcome in outcomes),
        "leases_left": sum(outcome.leases for outcome in outcomes),
        "failed_rounds": failed,
        "reset_median_s": round(statistics.median(reset_s), 4),
        "reset_max_s": round(max(reset_s), 4),
    }


@click.command(context_settings={"show_default": True})
@click.option("--repeat", type=click.IntRange(1), default=20, help="Rounds of each fault.")
@click.option("--fault", "faults", type=click.Choice(list(FAULTS)), multiple=True, help="Only it.")
@click.option("--seed", type=int, help="Of the random points; by default the present time.")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="The table as CSV.")
def main(repeat: int, faults: Sequence[str], seed: int | None, output: Path | None) -> None:
    """Let ranks and guards end at random points, and count what stays locked.

    Example: python benchmarks/gpu/guard_faults.py --repeat 200 --output guard_faults.csv
    """
    console = make_console()
    seed = int(time.time()) if seed is None else seed
    console.print(f"seed {seed}")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        library = build_library(Path(folder) / "library")
        node = Node(Path(folder), library)
        with node.in_use():
            for fault in faults or FAULTS:
                rows.append(play_all(node, fault, repeat, seed, console))
                if output is not None:
                    leave(output.parent, {output.stem: rows})
    console.print(make_table("Faults of the guard", rows))
    if any(
        row[bad] for row in rows for bad in ("clocks_left_locked", "leases_left", "failed_rounds")
    ):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
