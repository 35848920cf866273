"""Plans for and of others: `import-freqs`, `export-freqs`, `export-schedule`, and `straggler`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from envpipe_megatron.cli.common import (
    EXISTING_FILE,
    MICROBATCHES_OPTION,
    OUTPUT_FILE,
    PLAN_OPTION,
    PROFILE_OPTION,
    Finite,
    check_outputs,
    known_blocking_power,
)
from envpipe_megatron.cli.plans.tables import show_summary
from envpipe_megatron.console import say
from envpipe_megatron.core.conditions import make_conditions
from envpipe_megatron.core.fields import FACTOR, POWER, TIME
from envpipe_megatron.core.plan import Plan, read_order, read_plan
from envpipe_megatron.core.profile import read_profile
from envpipe_megatron.core.sidecar import sidecar_path
from envpipe_megatron.core.timeline import RELATIVE_TOLERANCE
from envpipe_megatron.files import replace_files
from envpipe_megatron.formats.frontier import read_frontier
from envpipe_megatron.formats.interchange import read_freqs, write_freqs
from envpipe_megatron.formats.torch_csv import torch_csv

_OUTPUT_OPTION = click.option("--output", type=OUTPUT_FILE, required=True, help="File to write.")


@click.command("import-freqs")
@PROFILE_OPTION
@click.option(
    "--freqs", "freqs_path", type=EXISTING_FILE, required=True,
    help="freqs_pipeline_NNNNN.py of Zeus or lowtime; it is parsed, never run.",
)  # fmt: skip
@MICROBATCHES_OPTION
@_OUTPUT_OPTION
@click.option(
    "--blocking-power",
    type=Finite(POWER),
    help="Power of a GPU that waits in a receive, W. Default: the profile's sidecar, or 0.",
)
def import_freqs(
    profile_path: Path,
    freqs_path: Path,
    num_microbatches: int,
    output: Path,
    blocking_power: float | None,
) -> None:
    """Turn a plan file of Zeus or lowtime into a plan.

    Example:

      envpipe import-freqs --profile profile.csv --freqs freqs_pipeline_00123.py
      --num-microbatches 24 --blocking-power 83.6 --output plan.json
    """
    check_outputs([output], [profile_path, sidecar_path(profile_path), freqs_path])
    profile = read_profile(profile_path)
    schedule, frequency_mhz = read_freqs(freqs_path, num_microbatches)
    power_w = known_blocking_power(profile, blocking_power)
    conditions = make_conditions(profile, blocking_power_w=power_w)
    plan = Plan("imported", schedule, frequency_mhz, profile, conditions)
    plan.write(output)
    show_summary(plan)
    say(f"Plan written to {output}")


@click.command("export-freqs")
@PROFILE_OPTION
@PLAN_OPTION
@_OUTPUT_OPTION
def export_freqs(profile_path: Path, plan_path: Path, output: Path) -> None:
    """Write a plan as Zeus's pipeline frequency server reads it, in the plan's own order.

    Example:

      envpipe export-freqs --profile profile.csv --plan plan.json
      --output freqs_pipeline_00000.py
    """
    check_outputs([output], [profile_path, sidecar_path(profile_path), plan_path])
    write_freqs(read_plan(plan_path, read_profile(profile_path)), output)
    say(f"Plan file written to {output}")


@click.command("export-schedule")
@click.argument("plan_path", metavar="PLAN", type=EXISTING_FILE)
@click.option("--output", type=OUTPUT_FILE, help="CSV; without it, it is printed.")
def export_schedule(plan_path: Path, output: Path | None) -> None:
    """Write a plan's order as torch.distributed.pipelining reads it (format compute_only).

    Example:

      envpipe export-schedule plan.json --output order.csv
    """
    text = torch_csv(read_order(plan_path))
    if output is None:
        click.echo(text, nl=False)
        return
    check_outputs([output], [plan_path])
    replace_files({output: [text]})
    say(f"Order written to {output}")


@click.command()
@PROFILE_OPTION
@click.option(
    "--frontier", "frontier_path", type=EXISTING_FILE, required=True,
    help="Plans of a frontier, the .jsonl that envpipe plan --frontier writes.",
)  # fmt: skip
@click.option(
    "--factor",
    type=Finite(replace(FACTOR, least=1)),
    help="Time of the slower replica over that of the framework's own order at the highest clocks.",
)
@click.option(
    "--time", "time_s", type=Finite(replace(TIME, positive=True, below=1e300)),
    help="Measured iteration time of the slower replica, s.",
)  # fmt: skip
@_OUTPUT_OPTION
def straggler(
    profile_path: Path,
    frontier_path: Path,
    factor: float | None,
    time_s: float | None,
    output: Path,
) -> None:
    """Pick the plan that is just as slow as a slower replica.

    The other replicas wait for it at the gradient reduction anyway; as slow as that one, they use
    less energy and lose no time.

    Example:

      envpipe straggler --profile profile.csv --frontier frontier.jsonl --factor 1.1
      --output plan.json
    """
    if (factor is None) == (time_s is None):
        raise click.UsageError("Give --factor or --time, one of them: how slow the replica is.")
    check_outputs([output], [profile_path, sidecar_path(profile_path), frontier_path])
    stored = read_frontier(frontier_path)
    allowed_s = time_s if time_s is not None else (factor or 1.0) * stored.baseline_s
    if allowed_s >= FACTOR.below * stored.baseline_s:
        raise click.UsageError(
            f"Give --time in s, not ms: the others take {stored.baseline_s:.4f} s."
        )
    plan = stored.plan_for(allowed_s, read_profile(profile_path))
    plan.write(output)
    if plan.cost.iteration_time_s > allowed_s * (1 + RELATIVE_TOLERANCE):
        say(f"Note: no plan of the frontier is so fast as {allowed_s:.4f} s.")
    show_summary(plan)
    say(
        f"The plan takes {plan.cost.iteration_time_s:.4f} s, the slower replica {allowed_s:.4f} s. "
        f"Plan written to {output}",
    )
