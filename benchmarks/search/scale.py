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

from benchmarks.outputs import leave, make_console, make_table, output_option
from benchmarks.processes import run_alone
from benchmarks.search.aceso import MAX_CHUNKS
from benchmarks.search.aceso_files import fold_blocks
from benchmarks.search.aceso_runs import ARCHIVE, SETTINGS, Setting, read_setting, unpack
from envpipe_megatron.cli.plans.search import with_modelled_energy
from envpipe_megatron.gpu.presets import load_preset
from envpipe_megatron.policies.objective import Goal, Objective
from envpipe_megatron.search.configuration import Job
from envpipe_megatron.search.search import search
from envpipe_megatron.search.space import Space

_MOST_MIB = 4096
#: By which energies are modelled.
PRESET = "a100-sxm"
#: How much longer than the fastest the configuration of the least energy may take.
_MAX_SLOWDOWN = 0.02


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


def search_at_scale(folder: Path, setting: Setting, job: Job, goal: Goal) -> dict[str, Any]:
    """Search Megatron's space for the goal; what was found, for a table."""
    profile, wait_w = fold_blocks(read_setting(folder, setting)), 0.0
    if goal == Goal.ENERGY:
        preset = load_preset(PRESET)
        profile, wait_w = with_modelled_energy(profile, preset), preset.wait_power_w
    found = search(
        profile,
        job,
        Space(MAX_CHUNKS),
        Objective(goal=goal),
        blocking_power_w=wait_w,
        max_slowdown=_MAX_SLOWDOWN if goal == Goal.ENERGY else 0.0,
    )
    best = found.ranked[0]
    first = best.candidate.configuration.stages[0]
    return {
        "best": f"PP{len(best.candidate.works)} VP{len(first.chunks)}"
        f" TP{first.sizes.tensor_parallel} DP{first.data_parallel}",
        "shapes": found.num_shapes,
        "iteration_s": best.iteration_time_s,
        "modelled_kJ": None if best.cost is None else best.cost.energy_j / 1e3,
    }


def measure(folder: Path, name: str) -> dict[str, Any]:
    """Make the row of a search in a process of its own."""
    scale = SCALES[name]
    ran = run_alone(search_at_scale, folder, scale.setting, scale.job, scale.goal)
    assert ran is not None
    return {
        "search": name,
        **ran.found,
        "process_MiB": ran.memory_mib,
        "wall_s": ran.spent.wall_s,
        "cpu_s": ran.spent.cpu_s,
        "at_most_s": scale.most_s,
        "within": ran.spent.wall_s <= scale.most_s and ran.memory_mib <= _MOST_MIB,
    }


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
    leave(output, "CPU", {"scale": rows})


if __name__ == "__main__":
    main()
