"""`envpipe partition`."""

from __future__ import annotations

from pathlib import Path

import click

from envpipe_megatron.cli.common import (
    EXISTING_FILE,
    MICROBATCHES_OPTION,
    OUTPUT_FILE,
    Finite,
    check_outputs,
    warn_of_free_waiting,
    write_stages,
)
from envpipe_megatron.cli.plans.tables import show_stages
from envpipe_megatron.console import say, show_table
from envpipe_megatron.core.fields import PERCENT, POWER, Number
from envpipe_megatron.core.plan import Cost
from envpipe_megatron.core.sidecar import SIDECAR_FORMAT, sidecar_path
from envpipe_megatron.errors import plain
from envpipe_megatron.search.configuration import layout_flag, megatron_even_split
from envpipe_megatron.search.layer_file import read_layers
from envpipe_megatron.search.partition import (
    BestSplit,
    Cut,
    SplitSpace,
    cut_of,
    layers_of,
    least_bottleneck,
    least_energy,
    plan_cost,
)

_BYTES = Number(positive=True, unit="bytes", mistaken=(("GiB", 2.0**30), ("GB", 1e9)))


@click.command()
@click.option(
    "--layers", "layers_path", type=EXISTING_FILE, required=True,
    help="Layer profile JSON of one size, as `envpipe search` takes it.",
)  # fmt: skip
@click.option("--num-stages", type=click.IntRange(min=2), required=True, help="Pipeline stages.")
@MICROBATCHES_OPTION
@click.option(
    "--objective", type=click.Choice(["bottleneck", "energy"]), default="bottleneck",
    show_default=True,
    help="The fastest slowest stage, or the least planned energy among the fastest splits.",
)  # fmt: skip
@click.option(
    "--memory-limit", type=Finite(min_open=True, of=_BYTES),
    help="Bytes that a stage may hold at 1F1B's peak; needs bytes in the layers' file.",
)  # fmt: skip
@click.option(
    "--time-tolerance", type=Finite(of=PERCENT), default=0.1, show_default=True,
    help="With --objective energy: percent that a split may be slower than the fastest.",
)  # fmt: skip
@click.option(
    "--blocking-power", type=Finite(of=POWER),
    help="Power of a GPU that waits in a receive, W. Default: 0.",
)  # fmt: skip
@click.option(
    "--output", type=OUTPUT_FILE, required=True, help="Stage profile CSV, for `envpipe plan`."
)
def partition(
    layers_path: Path,
    num_stages: int,
    num_microbatches: int,
    objective: str,
    memory_limit: float | None,
    time_tolerance: float,
    blocking_power: float | None,
    output: Path,
) -> None:
    """Split a model's layers over pipeline stages; needs no GPU.

    Prints the split as Megatron's flags, and writes the profile of its stages.

    Example:

      envpipe partition --layers layers.json --num-stages 8 --num-microbatches 24
      --objective energy --blocking-power 84 --output profile.csv
    """
    check_outputs([output], [layers_path], {sidecar_path(output): SIDECAR_FORMAT})
    profile = read_layers(layers_path)
    if blocking_power is None and profile.has_energy:
        warn_of_free_waiting()
    space = SplitSpace(profile, num_stages, num_microbatches, memory_limit)
    power_w = blocking_power or 0.0
    if objective == "energy":
        found = least_energy(space, power_w, time_tolerance / 100)
    else:
        found = least_bottleneck(space)
    split, best_one = layers_of(profile, found.cut), space.candidate(found.cut)
    write_stages(best_one.stage_profile, blocking_power, output)
    title, memory = "Stages, at the highest clocks", "1F1B memory (GiB)"
    show_stages(title, best_one, best_one.peak_bytes, memory)
    _compare(space, found, sum(split), power_w)
    if found.cost is None:
        say("Least bottleneck; of equal ones the split whose stages force the shortest iteration.")
    else:
        say(
            f"Least planned energy of the most promising splits within {time_tolerance:g} % of the "
            f"fastest; planned: {found.num_planned}."
        )
    say("\nFor Megatron-LM, in place of its other flags for the split:")
    say(f"  {layout_flag(profile, best_one.configuration)}")
    say(f"\nStage profile written to {output}")


def _figures(
    space: SplitSpace, cut: Cut, power_w: float, deadline_s: float = 0.0, cost: Cost | None = None
) -> list[tuple[str, float, int]]:
    """Name the figures of a split, with the digits to show; the iteration time comes first.

    Without a cost, that of a plan in time, or if the split is late at the highest clocks, no later.
    """
    candidate = space.candidate(cut)
    time_s = candidate.iteration_time_s
    if cost is None and space.profile.has_energy:
        longest_s = max(time_s, deadline_s)
        cost = plan_cost(candidate.stage_profile, space.num_microbatches, power_w, longest_s)
    figures = [
        ("iteration time (s)", time_s, 4),
        ("bottleneck (ms)", 1e3 * space.bottleneck_s(cut), 3),
    ]
    if cost is not None:
        figures.append(("planned time (s)", cost.iteration_time_s, 4))
        figures.append(("planned energy (J)", cost.energy_j, 1))
    return figures


def _compare(space: SplitSpace, found: BestSplit, num_layers: int, power_w: float) -> None:
    """Print a split's figures beside those of Megatron's even one."""
    ours = _figures(space, found.cut, power_w, cost=found.cost)
    columns, rows = ["", "this split"], [[name, f"{value:.{n}f}"] for name, value, n in ours]
    text = f"Megatron has no even split of {num_layers} layers over {space.num_stages} stages."
    if known := megatron_even_split(num_layers, space.num_stages):
        even, flags = known
        cut = cut_of(space.profile, even)
        theirs = _figures(space, cut, power_w, found.deadline_s)
        columns += ["even split", "change (%)"]
        for row, (_, value, digits), (_, other, _) in zip(rows, ours, theirs, strict=True):
            row += [f"{other:.{digits}f}", f"{100 * (value / other - 1):+.2f}"]
        text = f"Even split: {plain(even)}" + (f", with {' '.join(flags)}." if flags else ".")
        limited = space.memory_limit_bytes is not None
        if limited and space.candidate(cut).job.memory_bytes is None:
            text += " It does not keep the memory limit."
        if space.profile.has_energy and theirs[0][1] > found.deadline_s:
            text += (
                " It is slower, and planned within its own time: energies are not at equal time."
            )
    show_table("1F1B at the highest clocks, and planned", columns, rows)
    say(text)
