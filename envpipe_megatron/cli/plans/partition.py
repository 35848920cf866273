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
from envpipe_megatron.core.sidecar import SIDECAR_FORMAT, sidecar_path
from envpipe_megatron.search.configuration import layout_flag
from envpipe_megatron.search.layer_file import read_layers
from envpipe_megatron.search.partition import (
    SplitSpace,
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
    "--memory-limit", type=Finite(_BYTES),
    help="Bytes that a stage may hold at 1F1B's peak; needs bytes in the layers' file.",
)  # fmt: skip
@click.option(
    "--time-tolerance", type=Finite(PERCENT), default=0.1, show_default=True,
    help="With --objective energy: percent that a split may be slower than the fastest.",
)  # fmt: skip
@click.option(
    "--blocking-power", type=Finite(POWER),
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
    best_one = space.candidate(found.cut)
    write_stages(best_one.stage_profile, blocking_power, output)
    title, memory = "Stages, at the highest clocks", "1F1B memory (GiB)"
    show_stages(title, best_one, best_one.peak_bytes, memory)
    cost = found.cost
    if cost is None and profile.has_energy:
        longest_s = best_one.iteration_time_s
        cost = plan_cost(best_one.stage_profile, num_microbatches, power_w, longest_s)
    figures = [
        ("iteration time (s)", f"{best_one.iteration_time_s:.4f}"),
        ("bottleneck (ms)", f"{1e3 * max(work.time_s for work in best_one.works):.3f}"),
    ]
    if cost is not None:
        figures.append(("planned time (s)", f"{cost.iteration_time_s:.4f}"))
        figures.append(("planned energy (J)", f"{cost.energy_j:.1f}"))
    show_table("1F1B, and its plan", ("", "this split"), figures)
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
