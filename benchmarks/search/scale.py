"""The search of Megatron's space at its largest: 1,024 layers, and 1,024 GPUs.

Run from the checkout, with nothing else on the machine:

    python -m benchmarks.search.scale

Each search runs in a process of its own, whose start, imports and reading of the profile count.
Energies are modelled, so that the second objective has any.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from benchmarks.claims import CLAIMS_FILE, Claim, write_claims
from benchmarks.outputs import make_console, make_table, output_option, write_csv
from benchmarks.search.aceso_runs import ARCHIVE, SETTINGS, Setting, read_setting, spend, unpack
from benchmarks.search.divide_alone import MAX_CHUNKS
from envpipe_megatron.gpu.emulated.modelled import with_modelled_energy
from envpipe_megatron.gpu.emulated.presets import load_preset
from envpipe_megatron.policies.objectives.objective import Goal, Objective
from envpipe_megatron.search.folding import fold_blocks
from envpipe_megatron.search.megatron.search import search
from envpipe_megatron.search.megatron.space import Space

COMMAND = "python -m benchmarks.search.scale"
_PRESET = "a100-sxm"
#: How much longer than the fastest the configuration of the least energy may take.
_MAX_SLOWDOWN = 0.02


@dataclass(frozen=True)
class Scale:
    """A search, and what it may take at most."""

    setting: Setting
    objective: Goal
    most_s: float
    most_mib: float


_LAYERS = SETTINGS["1024-layers"]
_GPUS = replace(SETTINGS["gpt-2.6B-1024-gpus"], name="1024-gpus", num_layers=96, global_batch=4096)
SCALES = {
    f"{setting.name}-{goal}": Scale(setting, goal, most_s, 4096)
    for setting, most_s in ((_LAYERS, 10), (_GPUS, 30))
    for goal in (Goal.TIME, Goal.ENERGY)
}


def search_alone(folder: Path, scale: Scale) -> dict[str, Any]:
    """Search in this process; times of the best."""
    profile, wait_w = fold_blocks(read_setting(folder, scale.setting)), 0.0
    if scale.objective == Goal.ENERGY:
        preset = load_preset(_PRESET)
        profile, wait_w = with_modelled_energy(profile, preset), preset.wait_power_w
    found = search(
        profile,
        scale.setting.job,
        Space(MAX_CHUNKS),
        Objective(goal=scale.objective),
        blocking_power_w=wait_w,
        max_slowdown=_MAX_SLOWDOWN if scale.objective == Goal.ENERGY else 0.0,
    )
    best = found.ranked[0]
    first = best.candidate.configuration.stages[0]
    return {
        "best": f"PP{len(best.candidate.works)} VP{len(first.chunks)}"
        f" TP{first.sizes.tensor_parallel} DP{first.data_parallel}",
        "shapes": found.num_shapes,
        "iteration_s": best.iteration_time_s,
        "modelled_kJ": None if best.cost is None else best.cost.energy_j / 1e3,
        "process_MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def measure(folder: Path, name: str) -> dict[str, Any]:
    """The row of a search in a process of its own."""
    spent = spend(
        [sys.executable, "-m", "benchmarks.search.scale", "--in", str(folder), name], Path.cwd()
    )
    found = json.loads(spent.output)
    scale = SCALES[name]
    within = spent.wall_s <= scale.most_s and found["process_MiB"] <= scale.most_mib
    return {
        "search": name,
        **found,
        "wall_s": spent.wall_s,
        "cpu_s": spent.cpu_s,
        "at_most_s": scale.most_s,
        "within": within,
    }


def claim_of(row: dict[str, Any]) -> Claim:
    """What a row says."""
    return Claim(
        "search_scale",
        f"{COMMAND} {row['search']}",
        f"Megatron's space, {row['search']}: {row['shapes']} shapes in {row['wall_s']:.1f} s with"
        f" {row['process_MiB'] / 1024:.2f} GiB, best {row['best']}",
        "profiles of V100s, EuroSys'24"
        + ("" if row["modelled_kJ"] is None else f"; energy modelled: {_PRESET}"),
        paper=f"at most {row['at_most_s']:.0f} s",
        agrees=row["within"],
    )


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(list(SCALES)), metavar="[SEARCH]...")
@click.option("--in", "folder", type=click.Path(path_type=Path), hidden=True)
@output_option("search_scale")
def main(names: tuple[str, ...], folder: Path | None, output: Path) -> None:
    """Time all searches, or those named."""
    if folder is not None:
        click.echo(json.dumps(search_alone(folder, SCALES[names[0]])))
        return
    console = make_console()
    if not ARCHIVE.exists():
        console.print(f"Skipped: {ARCHIVE} is not there", highlight=False)
        return
    with tempfile.TemporaryDirectory() as temporary:
        unpack(Path(temporary))
        rows = [measure(Path(temporary), name) for name in names or SCALES]
    console.print(make_table("Searches of Megatron's space", rows))
    output.mkdir(parents=True, exist_ok=True)
    write_csv(output / "scale.csv", rows)
    write_claims(output / CLAIMS_FILE, [claim_of(row) for row in rows])


if __name__ == "__main__":
    main()
