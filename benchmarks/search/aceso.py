"""Aceso's own plans against the search of Megatron's space, on Aceso's profiles of V100s.

Run from the checkout:

    python -m benchmarks.search.aceso                       # all settings, 25 minutes
    python -m benchmarks.search.aceso gpt-1.3B --budget 30

Both run on this machine's cores, each with its Python started. Rows of a setting:

- `Aceso`: its unmodified search with its authors' options. Its space has stages that differ in
  their sizes, and recomputes any operators;
- `Megatron`: our search of what Megatron can run: whole layers, one size, virtual stages up to 4,
  and the distributed optimizer, which Aceso's model lacks.

`model_ms` and `model_MiB` are what Aceso's cost model says of its own plan, which adds each message
to two stages; the simulator is ours, of 1F1B (or the interleaved order) on the same profile, in
which messages are waited for and gradients reduced. How far Aceso's search is from the best plan of
its own space was computed up to 16baa0ae, by `benchmarks/search/aceso_space` there.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import click

from benchmarks.outputs import leave, make_console, make_table, output_option
from benchmarks.processes import run_alone
from benchmarks.search.aceso_files import fold_blocks
from benchmarks.search.aceso_plans import read_plan, simulated
from benchmarks.search.aceso_runs import ARCHIVE, SETTINGS, Setting, read_setting, search, unpack
from envpipe_megatron.policies.objective import Goal, Objective
from envpipe_megatron.search.configuration import Configuration
from envpipe_megatron.search.search import search as search_megatron
from envpipe_megatron.search.space import Space

#: Virtual stages of a stage in Megatron's space at most.
MAX_CHUNKS = 4


def fastest(folder: Path, setting: Setting) -> Configuration:
    """Return the fastest configuration of Megatron's space."""
    profile = fold_blocks(read_setting(folder, setting))
    found = search_megatron(profile, setting.job, Space(MAX_CHUNKS), Objective(goal=Goal.TIME))
    return found.ranked[0].candidate.configuration


def compare(folder: Path, setting: Setting, budget_s: int) -> list[dict[str, Any]]:
    """Make the rows of a setting."""
    profile = read_setting(folder, setting)
    theirs, ours = search(folder, setting, budget_s), run_alone(fastest, folder, setting)
    plan = read_plan(theirs.plan)
    assert ours is not None
    aceso = None if plan is None else simulated(plan, profile, setting.job)
    megatron = simulated(ours.found, fold_blocks(profile), setting.job)
    common = {"setting": setting.name, "gpus": setting.num_gpus}
    return [
        {
            **common,
            "search": way,
            "model_ms": time_ms,
            "model_MiB": peak_mib,
            "simulated_ms": each and each.iteration_time_s * 1e3,
            "simulated_MiB": each and float(each.peak_bytes.max()) / 2**20,
            "above_percent": each and aceso and _above_percent(each, aceso),
            "wall_s": spent.wall_s,
            "cpu_s": spent.cpu_s,
        }
        for way, each, time_ms, peak_mib, spent in (
            ("Aceso", aceso, theirs.time_ms, theirs.peak_mib, theirs.spent),
            ("Megatron", megatron, None, None, ours.spent),
        )
    ]


def _above_percent(one: Any, other: Any) -> float:
    return float(100 * (one.iteration_time_s / other.iteration_time_s - 1))


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(list(SETTINGS)), metavar="[SETTING]...")
@click.option("--budget", default=200, show_default=True, help="Of their search, in s.")
@output_option("search_aceso")
def main(names: tuple[str, ...], budget: int, output: Path) -> None:
    """Search all settings, or those named."""
    console = make_console()
    if not ARCHIVE.exists():
        console.print(f"Skipped: {ARCHIVE} is not there", highlight=False)
        return
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        unpack(folder)
        for name in names or SETTINGS:
            found = compare(folder, SETTINGS[name], budget)
            console.print(make_table(name, found))
            rows += found
    leave(output, "computed", {"aceso": rows})


if __name__ == "__main__":
    main()
