"""Files of others: `envpipe import-freqs`, `envpipe export-freqs` and `envpipe export-schedule`."""

from __future__ import annotations

from pathlib import Path

import click

from envpipe_megatron.cli.common import (
    EXISTING_FILE,
    MICROBATCHES_OPTION,
    NEW_PLAN_OPTION,
    OUTPUT_FILE,
    PLAN_OPTION,
    PROFILE_OPTION,
    Finite,
    check_outputs,
    known_blocking_power,
    show_summary,
)
from envpipe_megatron.console import say
from envpipe_megatron.core.conditions import make_conditions
from envpipe_megatron.core.fields import POWER
from envpipe_megatron.core.plan import Plan, read_order, read_plan
from envpipe_megatron.core.profile import read_profile
from envpipe_megatron.core.sidecar import sidecar_path
from envpipe_megatron.files import replace_files
from envpipe_megatron.formats.interchange import read_freqs, write_freqs
from envpipe_megatron.formats.torch_csv import torch_csv


@click.command("import-freqs")
@PROFILE_OPTION
@click.option(
    "--freqs", "freqs_path", type=EXISTING_FILE, required=True,
    help="freqs_pipeline_NNNNN.py of Zeus or lowtime; it is parsed, never run.",
)  # fmt: skip
@MICROBATCHES_OPTION
@NEW_PLAN_OPTION
@click.option(
    "--blocking-power",
    type=Finite(of=POWER),
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
@click.option(
    "--output", type=OUTPUT_FILE, required=True,
    help="File for Zeus's server, called .py: lowtime says freqs_pipeline_NNNNN.py.",
)  # fmt: skip
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
