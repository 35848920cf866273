"""Commands on profiles of layers: `envpipe search` and `partition`."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click
import numpy as np
from click.core import ParameterSource

from envpipe_megatron.cli.common import (
    EXISTING_FILE,
    MICROBATCHES_OPTION,
    OUTPUT_FILE,
    OUTPUT_FOLDER,
    Finite,
    check_outputs,
    taken,
    warn_of_free_waiting,
    write_stages,
)
from envpipe_megatron.cli.plans.tables import show_found, show_stages, sizes_words
from envpipe_megatron.console import say, say_working, show_table
from envpipe_megatron.core.arrays import FloatArray
from envpipe_megatron.core.fields import PERCENT, POWER, Number
from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.core.sidecar import SIDECAR_FORMAT, sidecar_path
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.files import csv_text, refuse_foreign, replace_files
from envpipe_megatron.gpu.presets import GpuPreset, load_preset
from envpipe_megatron.policies.objective import Goal, Objective
from envpipe_megatron.search.configuration import Job, layout_flag, megatron_flags
from envpipe_megatron.search.layer_file import read_layers
from envpipe_megatron.search.layer_profile import LayerProfile, Measure
from envpipe_megatron.search.partition import (
    SplitSpace,
    least_bottleneck,
    least_energy,
)
from envpipe_megatron.search.search import Found, Ranked, search
from envpipe_megatron.search.space import Space

_GIB = 2.0**30
#: No GPU has as much as `below`: such a number is not in GiB.
_MEMORY = Number(
    positive=True, below=4096, unit="GiB",
    mistaken=(("GiB", 1), ("GB", 1e9 / _GIB), ("MiB", 1 / 1024)),
)  # fmt: skip
_BYTES = Number(positive=True, unit="bytes", mistaken=(("GiB", 2.0**30), ("GB", 1e9)))
_CONFIGURATION, _FRONTIER, _PICTURE = "configuration.json", "frontier.csv", "frontier.png"
_STAGES, _PLAN = "profile.csv", "plan.json"
_SIDECAR = sidecar_path(Path(_STAGES)).name
_FRONTIER_POINTS = 12

logger = logging.getLogger(__name__)


@click.command("search")
@click.option(
    "--profile", "profile_path", type=EXISTING_FILE, required=True,
    help="Layer profile JSON, as `envpipe profile --layers` writes it.",
)  # fmt: skip
@click.option(
    "--gpus", "num_gpus", type=click.IntRange(min=1), required=True, help="GPUs of the job."
)
@click.option("--gpus-per-node", type=click.IntRange(min=1), default=8, show_default=True)
@click.option(
    "--global-batch", type=click.IntRange(min=1), required=True, help="Samples of an iteration."
)
@click.option(
    "--memory", "memory_gib", type=Finite(_MEMORY),
    help="Of one GPU at its peak, GiB.",
)  # fmt: skip
@click.option(
    "--objective", "goal", type=click.Choice(["time", "energy", "cost"]),
    default=Goal.TIME.value, show_default=True, help="What is to be least.",
)  # fmt: skip
@click.option(
    "--max-slowdown", "slowdown_percent", type=Finite(PERCENT), default=0.0, show_default=True,
    help="With --objective energy or cost: percent that an iteration may take longer than that of "
    "the fastest configuration at the highest clocks.",
)  # fmt: skip
@click.option(
    "--max-virtual-stages", "max_chunks", type=click.IntRange(min=1), default=4, show_default=True,
    help="Virtual stages of a stage at most.",
)  # fmt: skip
@click.option(
    "--same-recomputation", is_flag=True,
    help="All stages recompute alike, as Megatron without EnvPipe does.",
)  # fmt: skip
@click.option(
    "--distributed-optimizer/--no-distributed-optimizer", default=True, show_default=True,
    help="Whether data parallel ranks share the optimizer's state.",
)  # fmt: skip
@click.option(
    "--power-model", "preset", metavar="PRESET",
    help="Model joules and clocks by a GPU preset, such as a100-sxm, where none were measured.",
)  # fmt: skip
@click.option(
    "--blocking-power", "blocking_power_w", type=Finite(POWER),
    help="Power of a GPU that waits in a receive, W. Default: the power model's, or 0.",
)  # fmt: skip
@click.option("--energy-price", type=Finite(), default=0.0, help="With cost: of a kWh.")
@click.option("--gpu-price", type=Finite(), default=0.0, help="With cost: of an hour of a GPU.")
@click.option(
    "--output", type=OUTPUT_FOLDER,
    help="Folder for the best configuration, and with joules its stage profile, plan and frontier.",
)  # fmt: skip
def search_command(
    profile_path: Path,
    goal: str,
    memory_gib: float | None,
    slowdown_percent: float,
    preset: str | None,
    blocking_power_w: float | None,
    output: Path | None,
    **options: Any,
) -> None:
    """Search the parallel configuration of a Megatron job; needs no GPU.

    Stages and their layers, virtual stages, tensor, context, expert and data parallel sizes,
    microbatch and recomputation, for the least time, energy or cost of an iteration with EnvPipe's
    order and clocks.

    \b
    Example:
      envpipe search --profile layers.json --gpus 64 --global-batch 512 \\
          --memory 72 --objective energy --max-slowdown 1 --output best
    """
    given = click.get_current_context().get_parameter_source("slowdown_percent")
    if goal == Goal.TIME.value and given is not ParameterSource.DEFAULT:
        raise click.UsageError(
            "--max-slowdown goes with --objective energy or cost: the least time is no slower "
            "than itself. Leave it out, or give the objective."
        )
    if output is not None:
        refuse_foreign(output, (_STAGES, _SIDECAR, _PLAN, _FRONTIER, _PICTURE), _CONFIGURATION)
        output.mkdir(parents=True, exist_ok=True)  # fails now, not after the search
    profile = read_layers(profile_path)
    profile, blocking_power_w = _with_power(profile, preset, blocking_power_w)
    options["memory_bytes"] = None if memory_gib is None else memory_gib * _GIB
    job, space = taken(Job, options), taken(Space, options)
    _warn_of_links(profile, job)
    say_working(f"Searching configurations of {job.num_gpus} GPUs")
    found = search(
        profile,
        job,
        space,
        Objective(goal, **options),
        blocking_power_w=blocking_power_w,
        max_slowdown=slowdown_percent / 100,
    )
    show_found(profile, found)
    flags = megatron_flags(profile, found.ranked[0].candidate.configuration, job)
    say("\nFor Megatron-LM:\n  " + " \\\n  ".join(flags))
    if output is not None:
        _write(output, profile, job, found, flags, blocking_power_w)
        say(f"\nWritten to {output}")


def _warn_of_links(profile: LayerProfile, job: Job) -> None:
    """Say what the profile does not know of messages, and the job may need."""
    links = profile.links
    if job.num_gpus > 1 and links.within_node is None and not links.all_reduce:
        logger.warning(
            "The profile knows no links: messages and reductions are taken to cost nothing. "
            "Profile the layers on two GPUs or more."
        )
    elif job.num_gpus > job.gpus_per_node and links.across_nodes is None:
        logger.warning(
            "The profile knows no links across nodes: they are taken to be as fast as those within "
            "one."
        )


def _with_power(
    profile: LayerProfile, preset: str | None, blocking_power_w: float | None
) -> tuple[LayerProfile, float]:
    """Return the profile with joules as far as there are any, and the power of waiting."""
    if preset is not None:
        if profile.has_energy:
            raise EnvPipeError(
                "The profile has measured joules, which a model would replace",
                value=preset,
                remedy="Leave --power-model out.",
            )
        model = load_preset(preset)
        if blocking_power_w is None:
            blocking_power_w = model.wait_power_w
        return with_modelled_energy(profile, model), blocking_power_w
    if profile.has_energy and blocking_power_w is None:
        warn_of_free_waiting()
    return profile, blocking_power_w or 0.0


def with_modelled_energy(profile: LayerProfile, preset: GpuPreset) -> LayerProfile:
    """Return the profile at a preset's clocks; its times at the highest one stay as they are.

    Collectives within the times are taken to follow the clock as the rest does.
    """

    def curves(kind: Kind, time_s: FloatArray) -> tuple[FloatArray, FloatArray]:
        costs = preset.modelled(kind, float(time_s[0]))
        return np.array([at_s for _, at_s, _ in costs]), np.array([joules for *_, joules in costs])

    def modelled(measure: Measure) -> Measure:
        forward_s, forward_j = curves(Kind.FORWARD, measure.forward_s)
        backward_s, backward_j = curves(Kind.BACKWARD, measure.backward_s)
        ways = []
        for way in measure.recomputation:
            time_s, energy_j = curves(Kind.FORWARD, way.time_s)
            ways.append(replace(way, time_s=time_s, energy_j=energy_j))
        rested_s = measure.rested_s
        if rested_s is not None:  # of a power limit, below which a rest makes no clock higher
            rested_s = np.append(rested_s[:1], (forward_s + backward_s)[1:])
        return replace(
            measure,
            forward_s=forward_s,
            backward_s=backward_s,
            forward_j=forward_j,
            backward_j=backward_j,
            recomputation=tuple(ways),
            rested_s=rested_s,
        )

    return replace(
        profile,
        frequency_mhz=np.array([mhz for mhz, *_ in preset.modelled(Kind.FORWARD, 1.0)]),
        measures={
            sizes: {piece: modelled(measure) for piece, measure in by_piece.items()}
            for sizes, by_piece in profile.measures.items()
        },
        source=f"{profile.source} with the power model {preset.name}",
    )


def _write(
    output: Path,
    profile: LayerProfile,
    job: Job,
    found: Found,
    flags: list[str],
    blocking_power_w: float,
) -> None:
    """Write what was found; what an earlier search left and this one has not is removed."""
    best = found.ranked[0]
    known = {
        "format": "envpipe-configuration/2",
        "profile": profile.source,
        **asdict(job),
        **asdict(best.candidate.configuration),
        "megatron_flags": flags,
        "predicted": {
            "iteration_time_s": best.iteration_time_s,
            "energy_j": None if best.cost is None else best.cost.energy_j,
            "own_order_iteration_time_s": best.candidate.iteration_time_s,
            "peak_bytes": best.peak_bytes.tolist(),
        },
    }
    for name in (_STAGES, _SIDECAR, _PLAN, _FRONTIER, _PICTURE):
        (output / name).unlink(missing_ok=True)
    replace_files({output / _CONFIGURATION: [json.dumps(known, indent=1), "\n"]})
    if best.plan is not None:
        from envpipe_megatron.report.stills import save
        from envpipe_megatron.report.views import configurations_chart

        write_stages(best.candidate.stage_profile, blocking_power_w, output / _STAGES)
        best.plan.write(output / _PLAN)
        frontiers = {
            f"{number}: {sizes_words(each)}": [
                (plan.cost.iteration_time_s, plan.cost.energy_j)
                for plan in each.candidate.frontier(blocking_power_w, _FRONTIER_POINTS)
            ]
            for number, each in enumerate(found.ranked, start=1)
        }
        rows = [(name, *costs) for name, points in frontiers.items() for costs in points]
        header = ("configuration", "iteration_time_s", "energy_j")
        replace_files({output / _FRONTIER: [csv_text([header, *rows])]})
        title = "Configurations, each with its best orders and clocks"
        save([configurations_chart(frontiers)], title, output / _PICTURE)


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

    \b
    Example:
      envpipe partition --layers layers.json --num-stages 8 --output profile.csv \\
          --num-microbatches 24 --objective energy --blocking-power 84
    """
    check_outputs([output], [layers_path], {sidecar_path(output): SIDECAR_FORMAT})
    profile = read_layers(layers_path)
    if blocking_power is None and profile.has_energy:
        warn_of_free_waiting()
    space = SplitSpace(profile, num_stages, num_microbatches, memory_limit)
    power_w = blocking_power or 0.0
    if objective == "energy":
        ranked = least_energy(space, power_w, time_tolerance / 100)
    else:
        ranked = [Ranked(least_bottleneck(space), None)]
    best_one, cost = ranked[0].candidate, ranked[0].cost
    write_stages(best_one.stage_profile, blocking_power, output)
    title, memory = "Stages, at the highest clocks", "1F1B memory (GiB)"
    show_stages(title, best_one, best_one.peak_bytes, memory)
    if cost is None and profile.has_energy:
        cost = best_one.plan(power_w).cost
    figures = [
        ("iteration time (s)", f"{best_one.iteration_time_s:.4f}"),
        ("bottleneck (ms)", f"{1e3 * max(work.time_s for work in best_one.works):.3f}"),
    ]
    if cost is not None:
        figures.append(("planned time (s)", f"{cost.iteration_time_s:.4f}"))
        # Of one GPU of each stage, as `envpipe plan` takes the stage profile.
        figures.append(("planned energy (J)", f"{cost.energy_j / space.shape.sizes.gpus:.1f}"))
    show_table("1F1B, and its plan", ("", "this split"), figures)
    if ranked[0].plan is None:
        say("Least bottleneck; of equal ones the split whose stages force the shortest iteration.")
    else:
        say(
            f"Least planned energy of the most promising splits within {time_tolerance:g} % of the "
            f"fastest; planned: {len(ranked)}."
        )
    say("\nFor Megatron-LM, in place of its other flags for the split:")
    say(f"  {layout_flag(profile, best_one.configuration)}")
    say(f"\nStage profile written to {output}")
