"""`envpipe partition`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from envpipe_megatron.cli.common import (
    EXISTING_FILE,
    MICROBATCHES_OPTION,
    OUTPUT_FILE,
    Finite,
    check_outputs,
    warn_of_free_waiting,
    write_stages,
)
from envpipe_megatron.cli.plans.search_tables import stage_table
from envpipe_megatron.console import say, show_tables, table_of
from envpipe_megatron.core.fields import PERCENT, POWER, Number
from envpipe_megatron.core.plan import Cost
from envpipe_megatron.core.sidecar import SIDECAR_FORMAT, sidecar_path
from envpipe_megatron.errors import plain
from envpipe_megatron.search.configuration import (
    Split,
    first_last_flags,
    layout_flag,
    megatron_even_split,
)
from envpipe_megatron.search.layer_file import read_layers_or_table
from envpipe_megatron.search.partition import (
    Cut,
    Found,
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
    help="Layer profile JSON of one size, as `envpipe search` takes it, or layer CSV: "
    "layer,instruction,frequency,time,energy[,memory][,activation].",
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

      envpipe partition --layers layers.csv --num-stages 8 --num-microbatches 24
      --objective energy --blocking-power 84 --output profile.csv
    """
    check_outputs([output], [layers_path], {sidecar_path(output): SIDECAR_FORMAT})
    profile = read_layers_or_table(layers_path)
    if blocking_power is None and profile.has_energy:
        warn_of_free_waiting()
    space = SplitSpace(profile, num_stages, num_microbatches, memory_limit)
    job, console = _Job(space, blocking_power or 0.0), Console()

    def best(space: SplitSpace) -> Found:
        if objective == "energy":
            return least_energy(space, job.blocking_power_w, time_tolerance / 100)
        return least_bottleneck(space)

    found = best(space)
    split, best_one = layers_of(profile, found.cut), space.candidate(found.cut)
    write_stages(best_one.stage_profile, blocking_power, output)
    title, memory = "Stages, at the highest clocks", "1F1B memory (GiB)"
    show_tables(console, stage_table(title, best_one, best_one.peak_bytes, memory))
    num_layers = sum(split)
    even, even_flags = megatron_even_split(num_layers, num_stages) or (None, ())
    show_tables(console, _comparison(job, found, even))
    if even is None:
        say(console, f"Megatron has no even split of {num_layers} layers over {num_stages} stages.")
    else:
        say(console, _about_even_split(job, found, even, even_flags))
    say(console, _how_sure(found, time_tolerance))
    if memory_limit and best(SplitSpace(profile, num_stages, num_microbatches)).cut == found.cut:
        say(console, "--memory-limit does not bind: without it the split is the same.")
    say(console, "\nFor Megatron-LM, in place of its other flags for the split:")
    say(console, f"  {layout_flag(profile, best_one.configuration)}")
    flags = first_last_flags(split)
    if flags is None:
        say(
            console,
            "This split has no form as --decoder-first-pipeline-num-layers and "
            "--decoder-last-pipeline-num-layers: they need a layer on each of the two stages and "
            "equally many on all between.",
        )
    else:
        say(console, f"or\n  {flags}")
    say(console, f"\nStage profile written to {output}")


@dataclass(frozen=True)
class _Job:
    """Splits of one command, which are held against each other."""

    space: SplitSpace
    blocking_power_w: float

    def iteration_time_s(self, cut: Cut) -> float:
        return float(self.space.iteration_times_s(np.array([cut]))[0])

    def figures(
        self, cut: Cut, deadline_s: float, cost: Cost | None
    ) -> dict[str, tuple[float, int]]:
        """Name the figures of a split, with the digits to show.

        Without a cost, that of a plan in time, or if the split is late at the highest clocks, no
        later.
        """
        space, time_s = self.space, self.iteration_time_s(cut)
        if cost is None and space.profile.has_energy:
            cost = plan_cost(
                space.candidate(cut).stage_profile,
                space.num_microbatches,
                self.blocking_power_w,
                max(time_s, deadline_s),
            )
        figures = {
            "iteration time (s)": (time_s, 4),
            "bottleneck (ms)": (1e3 * space.bottleneck_s(cut), 3),
        }
        if cost is not None:
            figures["planned time (s)"] = cost.iteration_time_s, 4
            figures["planned energy (J)"] = cost.energy_j, 1
        return figures


def _comparison(job: _Job, found: Found, even: Split | None) -> Table:
    columns = ["", "this split"]
    ours = job.figures(found.cut, 0.0, found.cost)
    rows = [[name, f"{value:.{digits}f}"] for name, (value, digits) in ours.items()]
    if even is not None:
        columns += ["even split", "change (%)"]
        theirs = job.figures(cut_of(job.space.profile, even), found.deadline_s, None)
        for row, (value, digits), (other, _) in zip(
            rows, ours.values(), theirs.values(), strict=True
        ):
            row += [f"{other:.{digits}f}", f"{100 * (value / other - 1):+.2f}"]
    return table_of("1F1B at the highest clocks, and planned", columns, rows)


def _about_even_split(job: _Job, found: Found, even: Split, flags: tuple[str, ...]) -> str:
    cut = cut_of(job.space.profile, even)
    text = f"Even split: {plain(even)}" + (f", with {' '.join(flags)}." if flags else ".")
    limited = job.space.memory_limit_bytes is not None
    if limited and job.space.candidate(cut).job.memory_bytes is None:
        text += " It does not keep the memory limit."
    if job.space.profile.has_energy and job.iteration_time_s(cut) > found.deadline_s:
        text += " It is slower, and planned within its own time: energies are not at equal time."
    return text


def _how_sure(found: Found, time_tolerance: float) -> str:
    """How many splits were looked at, and whether a better one can be left."""
    timed = f"{found.num_considered} splits were timed"
    if found.cost is not None:
        planned = (
            f"{timed}, and {found.num_planned} of those within {time_tolerance:g} % of the fastest "
            "planned."
        )
        if found.exact:
            return f"Least planned energy (exact): {planned} These are all there are."
        return f"Least planned energy found (there are more splits, perhaps better): {planned}"
    if found.exact:
        return f"Least bottleneck, then least iteration time (both exact): {timed}."
    return (
        f"Least bottleneck (exact), then the least iteration time found: {timed}, there are more "
        "with that bottleneck."
    )
