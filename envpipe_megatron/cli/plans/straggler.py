"""`envpipe straggler`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click
from rich.console import Console

from envpipe_megatron.cli.common import (
    EXISTING_FILE,
    NEW_PLAN_OPTION,
    PROFILE_OPTION,
    Finite,
    check_outputs,
    summary_table,
)
from envpipe_megatron.console import say, show_tables
from envpipe_megatron.core.fields import FACTOR, TIME
from envpipe_megatron.core.profile import read_profile
from envpipe_megatron.core.sidecar import sidecar_path
from envpipe_megatron.core.timeline import RELATIVE_TOLERANCE
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.formats.frontier import read_frontier


@click.command()
@PROFILE_OPTION
@click.option(
    "--frontier", "frontier_path", type=EXISTING_FILE, required=True,
    help="Plans of a frontier, the .jsonl that envpipe plan --frontier writes.",
)  # fmt: skip
@click.option(
    "--factor",
    type=Finite(1, of=replace(FACTOR, least=1)),
    help="Time of the slower replica over that of the framework's own order at the highest clocks.",
)
@click.option(
    "--time", "time_s", type=Finite(min_open=True, of=replace(TIME, positive=True, below=1e300)),
    help="Measured iteration time of the slower replica, s.",
)  # fmt: skip
@NEW_PLAN_OPTION
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
        raise EnvPipeError(
            "How slow the straggler is must be said once",
            value=(factor, time_s),
            remedy="Give --factor or --time.",
        )
    check_outputs([output], [profile_path, sidecar_path(profile_path), frontier_path])
    stored = read_frontier(frontier_path)
    allowed_s = time_s if time_s is not None else (factor or 1.0) * stored.baseline_s
    if allowed_s >= FACTOR.below * stored.baseline_s:
        raise EnvPipeError(
            f"The slower replica takes {allowed_s / stored.baseline_s:.0f} times as long as others",
            value=allowed_s,
            remedy=f"Give --time in s, not ms: the others take {stored.baseline_s:.4f} s.",
        )
    plan = stored.plan_for(allowed_s, read_profile(profile_path))
    plan.write(output)
    console = Console()
    if plan.cost.iteration_time_s > allowed_s * (1 + RELATIVE_TOLERANCE):
        say(console, f"Note: no plan of the frontier is so fast as {allowed_s:.4f} s.")
    show_tables(console, summary_table(plan))
    say(
        console,
        f"The plan takes {plan.cost.iteration_time_s:.4f} s, the slower replica {allowed_s:.4f} s. "
        f"Plan written to {output}",
    )
