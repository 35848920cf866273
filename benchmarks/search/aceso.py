"""The search of divisions against Aceso's own, on its profiles, judged by its own cost model.

Run from the checkout:

    python -m benchmarks.search.aceso                       # all settings, 25 minutes
    python -m benchmarks.search.aceso gpt-1.3B --no-rival   # one, without their search

Both run on this machine's cores, each with its Python started. Rows of a setting:

- `Aceso`: its unmodified search with its authors' options;
- `divide`: our search of its space: cuts inside layers, sizes by stage, recomputed operators;
- `whole layers`: ours with cuts between layers, one size, and recomputed layers;
- `Megatron`: our search of Megatron's space, which wins some of that back: virtual stages up to 4,
  and the distributed optimizer, which Aceso's model lacks. It has no ResNet.

Times are of an iteration: by Aceso's cost model, which adds each message to two stages and knows no
virtual stages, and by our simulator of 1F1B (or the interleaved order) on the same profile, in
which messages are waited for and gradients reduced. `above_percent` is by the simulator, beside
`divide`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks.outputs import Claim, leave, make_console, make_table, output_option
from benchmarks.search.aceso_runs import (
    ARCHIVE,
    SETTINGS,
    Setting,
    judge,
    read_plan,
    read_setting,
    search,
    unpack,
    write_plan,
)
from benchmarks.search.aceso_space.aceso_files import fold_blocks
from benchmarks.search.aceso_space.plans import simulated
from benchmarks.search.searches import alone, divide_layers, divide_operators, search_megatron
from envpipe_megatron.search.configuration import Configuration
from envpipe_megatron.search.layer_profile import LayerProfile

COMMAND = "python -m benchmarks.search.aceso"
#: In percent: what Megatron's space may cost against stages of any sizes.
_MOST_ABOVE = 3.0


def compare(folder: Path, setting: Setting, budget_s: int | None) -> list[dict[str, Any]]:
    """Make the rows of a setting; without a budget for their search, without its row."""
    profile = read_setting(folder, setting)
    folded, rows = fold_blocks(profile), []

    def add(way: str, time_ms: float | None, spent: Any, simulated: float | None) -> None:
        rows.append(
            {
                "setting": setting.name,
                "gpus": setting.num_gpus,
                "search": way,
                "model_ms": time_ms,
                "wall_s": spent.wall_s,
                "cpu_s": spent.cpu_s,
                "memory_mib": getattr(spent, "memory_mib", None),
                "simulated_ms": simulated,
            }
        )

    def simulated_ms(plan: Configuration | None, of: LayerProfile = profile) -> float | None:
        return None if plan is None else simulated(plan, of, setting.job).iteration_time_s * 1e3

    if budget_s is not None:
        theirs = search(folder, setting, budget_s)
        add("Aceso", theirs.judged.time_ms, theirs, simulated_ms(read_plan(theirs.plan)))
    ours = alone(divide_operators, folder, setting)
    whole = alone(divide_layers, folder, setting)
    if ours.found is None or whole.found is None:
        raise click.ClickException(f"Nothing fits in setting {setting.name}")
    judged = judge(folder, setting, write_plan(folder, setting, ours.found))
    if abs(judged.time_ms / 1e3 - ours.found.time_s) > 1e-5 * ours.found.time_s:
        raise click.ClickException(f"{setting.name}: their model takes this plan to be another")
    plan = None if any(ours.found.switches) else ours.found.configuration
    add("divide", judged.time_ms, ours, simulated_ms(plan))
    in_layers_ms = simulated_ms(whole.found.configuration, folded)
    add("whole layers", whole.found.time_s * 1e3, whole, in_layers_ms)
    if setting.model != "resnet":
        megatron = alone(search_megatron, folder, setting)
        add("Megatron", None, megatron, simulated_ms(megatron.found, folded))
    return [row | {"above_percent": _above_percent(row, rows)} for row in rows]


def _above_percent(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> float | None:
    """How much longer a row takes than the division, both by the simulator where that can."""
    (divided,) = (each for each in rows if each["search"] == "divide")
    if row["simulated_ms"] is None or divided["simulated_ms"] is None:
        return None
    return float(100 * (row["simulated_ms"] / divided["simulated_ms"] - 1))


def claims_of(rows: Sequence[dict[str, Any]]) -> list[Claim]:
    """Claims of each setting: what Megatron's space costs, and where theirs ran, against it."""
    by_setting: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        by_setting.setdefault(row["setting"], {})[row["search"]] = row
    claims = []
    for name, ways in by_setting.items():
        above = {way: row["above_percent"] for way, row in ways.items()}
        if "Megatron" in above and None not in above.values():
            claims.append(
                Claim(
                    "search_aceso",
                    f"{COMMAND} {name} --no-rival",
                    f"{name}: Megatron's space is {above['Megatron']:.1f} % above stages of any"
                    " sizes by our simulator, with virtual stages, the distributed optimizer and"
                    " recomputation by stage; whole layers of one size alone"
                    f" {above['whole layers']:.1f} %",
                    "profiles of V100s, EuroSys'24",
                    agrees=above["Megatron"] <= _MOST_ABOVE,
                )
            )
        if "Aceso" not in ways:
            continue
        ours, theirs = ways["divide"], ways["Aceso"]
        gain = 1 - ours["model_ms"] / theirs["model_ms"]
        claims.append(
            Claim(
                "search_aceso",
                f"{COMMAND} {name}",
                f"{name}: {gain:.1%} less time by Aceso's own model than Aceso's search finds, in"
                f" 1/{theirs['wall_s'] / ours['wall_s']:.0f} of its time and"
                f" 1/{theirs['cpu_s'] / ours['cpu_s']:.0f} of its processor time",
                "profiles of V100s, EuroSys'24",
                paper=f"{theirs['model_ms']:.0f} ms in {theirs['wall_s']:.0f} s",
                agrees=gain >= 0,
            )
        )
    return claims


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(list(SETTINGS)), metavar="[SETTING]...")
@click.option("--rival/--no-rival", default=True, help="Whether Aceso's own search runs too.")
@click.option("--budget", default=200, show_default=True, help="Of their search, in s.")
@output_option("search_aceso")
def main(names: tuple[str, ...], rival: bool, budget: int, output: Path) -> None:
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
            found = compare(folder, SETTINGS[name], budget if rival else None)
            console.print(make_table(name, found))
            rows += found
    leave(output, {"aceso": rows}, claims_of(rows))


if __name__ == "__main__":
    main()
