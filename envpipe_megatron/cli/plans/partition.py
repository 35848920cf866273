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
from envpipe_megatron.console import say, show_tables, table_of
from envpipe_megatron.core.fields import PERCENT, POWER, Number
from envpipe_megatron.core.kinds import WHOLE
from envpipe_megatron.core.plan import Cost
from envpipe_megatron.core.sidecar import SIDECAR_FORMAT, sidecar_path
from envpipe_megatron.errors import plain
from envpipe_megatron.policies.partitions.energy import FoundEnergy, least_energy, plan_cost
from envpipe_megatron.policies.partitions.layers import (
    EMBEDDING,
    LOSS,
    LayerTable,
    Split,
    first_last_flags,
    layout_flags,
    megatron_even_split,
    read_layers,
    stage_memory_bytes,
    stage_profile,
)
from envpipe_megatron.policies.partitions.search import Found, SplitSpace, least_bottleneck

_BYTES = Number(positive=True, unit="bytes", mistaken=(("GiB", 2.0**30), ("GB", 1e9)))


@click.command()
@click.option(
    "--layers",
    "layers_path",
    type=EXISTING_FILE,
    required=True,
    help="Layer CSV: layer,instruction,frequency,time,energy[,memory][,activation].",
)
@click.option("--num-stages", type=click.IntRange(min=2), required=True, help="Pipeline stages.")
@MICROBATCHES_OPTION
@click.option(
    "--objective",
    type=click.Choice(["bottleneck", "energy"]),
    default="bottleneck",
    show_default=True,
    help="The fastest slowest stage, or the least planned energy among the fastest splits.",
)
@click.option(
    "--memory-limit",
    type=Finite(min_open=True, of=_BYTES),
    help="Bytes that a stage may hold at 1F1B's peak; needs memory or activation in the CSV.",
)
@click.option(
    "--time-tolerance",
    type=Finite(of=PERCENT),
    default=0.1,
    show_default=True,
    help="With --objective energy: percent that a split may be slower than the fastest.",
)
@click.option(
    "--blocking-power",
    type=Finite(of=POWER),
    help="Power of a GPU that waits in a receive, W. Default: 0.",
)
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
    table = read_layers(layers_path)
    if blocking_power is None and table.has_energy:
        warn_of_free_waiting()
    job = _Job(SplitSpace(table, num_stages, num_microbatches, memory_limit), blocking_power or 0.0)
    console = Console()

    def best(space: SplitSpace) -> Found:
        if objective == "energy":
            return least_energy(space, job.blocking_power_w, time_tolerance / 100)
        return least_bottleneck(space)

    found = best(job.space)
    write_stages(stage_profile(table, found.split, memory_limit), blocking_power, output)
    show_tables(console, _stage_table(table, found.split, num_microbatches))
    even, even_flags = megatron_even_split(table.num_transformer_layers, num_stages) or (None, ())
    show_tables(console, _comparison(job, found, even))
    say(console, _about_even_split(job, found, even, even_flags))
    say(console, _how_sure(found, time_tolerance))
    if memory_limit and best(SplitSpace(table, num_stages, num_microbatches)).split == found.split:
        say(console, "--memory-limit does not bind: without it the split is the same.")
    say(console, "\nFor Megatron-LM, in place of its other flags for the split:")
    say(console, f"  {layout_flags(found.split)}")
    flags = first_last_flags(found.split)
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
    """What every split of this command is held against."""

    space: SplitSpace
    blocking_power_w: float

    def iteration_time_s(self, split: Split) -> float:
        return float(self.space.iteration_times_s(np.array([split]))[0])

    def fits(self, split: Split) -> bool:
        """Whether the split keeps the memory limit."""
        limit = self.space.memory_limit_bytes
        held = stage_memory_bytes(self.space.table, split, self.space.num_microbatches)
        return limit is None or float(held.max()) <= limit

    def cost(self, split: Split, deadline_s: float = 0.0) -> Cost | None:
        """Cost of a plan in time, or if the split is late at the highest clocks, no later."""
        if not self.space.table.has_energy:
            return None
        limit = self.space.memory_limit_bytes if self.fits(split) else None
        profile = stage_profile(self.space.table, split, limit)
        return plan_cost(
            profile,
            self.space.num_microbatches,
            self.blocking_power_w,
            max(self.iteration_time_s(split), deadline_s),
        )


def _stage_table(table: LayerTable, split: Split, num_microbatches: int) -> Table:
    memory = stage_memory_bytes(table, split, num_microbatches)
    columns = ["stage", "layers", "forward (ms)", "backward (ms)", "share of bottleneck (%)"]
    if memory.any():
        columns.append("1F1B memory (GiB)")
    slices = table.stage_slices(split)
    forward_s, backward_s = (
        np.array([table.time_s[kind][own, 0].sum() for own in slices]) for kind in WHOLE
    )
    share = 100 * (forward_s + backward_s) / (forward_s + backward_s).max()
    rows = (
        (
            str(stage),
            _layer_range(table.names[own]),
            f"{1e3 * forward_s[stage]:.3f}",
            f"{1e3 * backward_s[stage]:.3f}",
            f"{share[stage]:.1f}",
            *([f"{memory[stage] / 2**30:.2f}"] if memory.any() else []),
        )
        for stage, own in enumerate(slices)
    )
    shown = table_of("Stages, at the highest clocks", columns, rows)
    shown.columns[1].justify = "left"
    return shown


def _layer_range(names: tuple[str, ...]) -> str:
    """`embedding, 0-5`."""
    numbers = [name for name in names if name.isdigit()]
    parts = [EMBEDDING] if names[0] == EMBEDDING else []
    if numbers:
        parts.append("-".join(dict.fromkeys([numbers[0], numbers[-1]])))
    if names[-1] == LOSS:
        parts.append(LOSS)
    return ", ".join(parts)


def _figures(job: _Job, split: Split, cost: Cost | None) -> dict[str, tuple[float, int]]:
    """By name, what a split takes, and the digits to show."""
    figures = {
        "iteration time (s)": (job.iteration_time_s(split), 4),
        "bottleneck (ms)": (1e3 * job.space.bottleneck_s(split), 3),
    }
    if cost is not None:
        figures["planned time (s)"] = cost.iteration_time_s, 4
        figures["planned energy (J)"] = cost.energy_j, 1
    return figures


def _comparison(job: _Job, found: Found, even: Split | None) -> Table:
    columns = ("", "this split", *(("even split", "change (%)") if even else ()))
    rows = []
    cost = found.cost if isinstance(found, FoundEnergy) else job.cost(found.split)
    theirs = _figures(job, even, job.cost(even, _deadline_s(found))) if even else {}
    for name, (value, digits) in _figures(job, found.split, cost).items():
        cells = [name, f"{value:.{digits}f}"]
        if name in theirs:
            other = theirs[name][0]
            cells += [f"{other:.{digits}f}", f"{100 * (value / other - 1):+.2f}"]
        rows.append(cells)
    return table_of("1F1B at the highest clocks, and planned", columns, rows)


def _about_even_split(job: _Job, found: Found, even: Split | None, flags: tuple[str, ...]) -> str:
    if even is None:
        layers, stages = job.space.table.num_transformer_layers, job.space.num_stages
        return f"Megatron has no even split of {layers} layers over {stages} stages."
    text = f"Even split: {plain(even)}" + (f", with {' '.join(flags)}." if flags else ".")
    if not job.fits(even):
        text += " It does not keep the memory limit."
    if job.space.table.has_energy and job.iteration_time_s(even) > _deadline_s(found):
        text += " It is slower, and planned within its own time: energies are not at equal time."
    return text


def _deadline_s(found: Found) -> float:
    """Within which the split was planned."""
    return found.deadline_s if isinstance(found, FoundEnergy) else found.iteration_time_s


def _how_sure(found: Found, time_tolerance: float) -> str:
    """How many splits were looked at, and whether a better one can be left."""
    timed = f"{found.num_considered} splits were timed"
    if isinstance(found, FoundEnergy):
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
