"""`envpipe plan`."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console

from envpipe_megatron.cli.common import (
    EXISTING_FILE,
    OUTPUT_FILE,
    Counts,
    known_blocking_power,
    say,
    summary_table,
)
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.policies.planner import (
    POLICIES,
    RECONFIGURE_NAMES,
    SCHEDULE_ALIASES,
    SCHEDULES,
    PlanRequest,
    make_plan,
)
from envpipe_megatron.profile import read_profile
from envpipe_megatron.sidecar import sidecar_path


@click.command()
@click.option("--profile", "profile_path", type=EXISTING_FILE, required=True, help="Profile CSV.")
@click.option("--num-microbatches", type=int, required=True, help="Microbatches of an iteration.")
@click.option("--output", type=OUTPUT_FILE, required=True, help="Plan JSON.")
@click.option(
    "--schedule",
    type=click.Choice([*SCHEDULES, *SCHEDULE_ALIASES]),
    default="1f1b",
    show_default=True,
    help="Order of units; 'ours' is EnvPipe's own name for 'envpipe'.",
)
@click.option(
    "--policy", type=click.Choice(POLICIES), default="baseline", show_default=True,
    help="How units get their frequencies.",
)  # fmt: skip
@click.option(
    "--reconfigure", type=click.Choice(RECONFIGURE_NAMES), default="default", show_default=True,
    help="How the critical path is raised; with --policy envelope.",
)  # fmt: skip
@click.option(
    "--blocking-power",
    type=click.FloatRange(min=0),
    help="Power of a GPU that waits in a receive, W. Default: the profile's sidecar, or 0.",
)
@click.option("--max-extra-forwards", type=click.IntRange(min=0), help="Limit for every stage.")
@click.option("--max-in-flight", type=Counts(), help="Limit on microbatches held, or per stage.")
@click.option(
    "--max-warmup-step",
    type=click.IntRange(min=0),
    help="How far neighbouring stages' extra forwards may differ.",
)
@click.option(
    "--channel-capacity",
    type=click.IntRange(min=0),
    help="Messages that a bounded p2p channel holds (1 with a single hardware queue).",
)
@click.option("--num-chunks", type=click.IntRange(min=1), default=1, show_default=True)
def plan(
    profile_path: Path,
    num_microbatches: int,
    output: Path,
    schedule: str,
    policy: str,
    reconfigure: str,
    blocking_power: float | None,
    max_extra_forwards: int | None,
    max_in_flight: tuple[int, ...] | None,
    max_warmup_step: int | None,
    channel_capacity: int | None,
    num_chunks: int,
) -> None:
    """Make a plan from a profile; needs no GPU.

    Example:

      envpipe plan --profile profile.csv --num-microbatches 24 --schedule envpipe
      --policy envelope --reconfigure balanced --output plan.json
    """
    if output.resolve() in (profile_path.resolve(), sidecar_path(profile_path).resolve()):
        raise EnvPipeError(
            "The plan would overwrite the profile or its sidecar",
            value=str(output),
            remedy="Give another --output.",
        )
    profile = read_profile(profile_path)
    planned = make_plan(
        profile,
        PlanRequest(
            num_microbatches=num_microbatches,
            schedule=schedule,
            policy=policy,
            reconfigure=reconfigure,
            blocking_power_w=known_blocking_power(profile, blocking_power),
            num_chunks=num_chunks,
            max_extra_forwards=max_extra_forwards,
            max_in_flight=max_in_flight,
            max_warmup_step=max_warmup_step,
            channel_capacity=channel_capacity,
        ),
    )
    planned.plan.write(output)
    console = Console()
    for note in planned.notes:
        say(console, f"Note: {note}")
    if planned.reconfigured:
        result = planned.reconfigured
        console.print(f"Reconfigured in {result.steps} steps, until {result.ended.value}.")
    console.print(summary_table(planned.plan))
    say(console, f"Plan written to {output}")
