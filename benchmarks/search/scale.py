"""The search of Megatron's space at its largest: 1,024 layers, and 1,024 GPUs.

Run from the checkout, with nothing else on the machine:

    python -m benchmarks.search.scale

Each search runs in a process of its own, whose start, imports and reading of the profile count.
Energies are modelled, so that the second objective has any.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from benchmarks.outputs import Claim, leave, make_console, make_table, output_option
from benchmarks.search.aceso_runs import ARCHIVE, SETTINGS, Setting, unpack
from benchmarks.search.searches import PRESET, alone, search_at_scale
from envpipe_megatron.policies.objective import Goal
from envpipe_megatron.search.configuration import Job

COMMAND = "python -m benchmarks.search.scale"
_MOST_MIB = 4096


@dataclass(frozen=True)
class Scale:
    """A search, and what it may take at most."""

    setting: Setting
    job: Job
    goal: Goal
    most_s: float


_LAYERS = SETTINGS["1024-layers"]
_DEEP = replace(SETTINGS["gpt-2.6B"], num_layers=96)
SCALES = {
    f"{name}-{goal}": Scale(setting, job, goal, most_s)
    for name, setting, job, most_s in (
        ("1024-layers", _LAYERS, _LAYERS.job, 10),
        ("1024-gpus", _DEEP, Job(1024, 8, 4096, _DEEP.job.memory_bytes), 30),
    )
    for goal in (Goal.TIME, Goal.ENERGY)
}


def measure(folder: Path, name: str) -> dict[str, Any]:
    """Make the row of a search in a process of its own."""
    scale = SCALES[name]
    ran = alone(search_at_scale, folder, scale.setting, scale.job, scale.goal)
    return {
        "search": name,
        **ran.found,
        "process_MiB": ran.memory_mib,
        "wall_s": ran.wall_s,
        "cpu_s": ran.cpu_s,
        "at_most_s": scale.most_s,
        "within": ran.wall_s <= scale.most_s and ran.memory_mib <= _MOST_MIB,
    }


def claim_of(row: dict[str, Any]) -> Claim:
    """What a row says."""
    return Claim(
        "search_scale",
        f"{COMMAND} {row['search']}",
        f"Megatron's space, {row['search']}: {row['shapes']} shapes in {row['wall_s']:.1f} s with"
        f" {row['process_MiB'] / 1024:.2f} GiB, best {row['best']}",
        "profiles of V100s, EuroSys'24"
        + ("" if row["modelled_kJ"] is None else f"; energy modelled: {PRESET}"),
        paper=f"at most {row['at_most_s']:.0f} s",
        agrees=row["within"],
    )


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(list(SCALES)), metavar="[SEARCH]...")
@output_option("search_scale")
def main(names: tuple[str, ...], output: Path) -> None:
    """Time all searches, or those named."""
    console = make_console()
    if not ARCHIVE.exists():
        console.print(f"Skipped: {ARCHIVE} is not there", highlight=False)
        return
    with tempfile.TemporaryDirectory() as temporary:
        unpack(Path(temporary))
        rows = [measure(Path(temporary), name) for name in names or SCALES]
    console.print(make_table("Searches of Megatron's space", rows))
    leave(output, {"scale": rows}, map(claim_of, rows))


if __name__ == "__main__":
    main()
