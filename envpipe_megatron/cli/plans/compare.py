"""`envpipe compare`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from envpipe_megatron.cli.common import EXISTING_FILE, numbers
from envpipe_megatron.console import say, show_tables, table_of
from envpipe_megatron.core.plan import Cost, Plan, PlanError, read_plan
from envpipe_megatron.core.profile import read_profile

#: What a run leaves beside its plan.
_PROFILE_NAME = "profile.csv"


@click.command()
@click.argument("plan_paths", metavar="PLAN...", nargs=-1, required=True, type=EXISTING_FILE)
@click.option(
    "--profile", "profile_path", type=EXISTING_FILE,
    help=f"Profile CSV that prices all plans; by default {_PROFILE_NAME} beside the first.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def compare(plan_paths: Sequence[Path], profile_path: Path | None, as_json: bool) -> None:
    """Show plans of one job side by side: one profile, and the conditions of the first, for all.

    Example:

      envpipe compare plan.json other.json --profile profile.csv
    """
    if profile_path is None:
        profile_path = plan_paths[0].parent / _PROFILE_NAME
        if not profile_path.is_file():
            raise PlanError(
                f"There is no {_PROFILE_NAME} beside {plan_paths[0]}",
                remedy="Give --profile: it says what the units of a plan cost.",
            )
    profile = read_profile(profile_path)
    read = [read_plan(path, profile) for path in plan_paths]
    first = read[0]
    for path, plan in zip(plan_paths, read, strict=True):
        if plan.schedule.num_microbatches != first.schedule.num_microbatches:
            raise PlanError(
                f"{path} is for another number of microbatches than {plan_paths[0]}",
                value=plan.schedule.num_microbatches,
                remedy=f"Compare plans for {first.schedule.num_microbatches}.",
            )
    baseline = first.baseline
    facts = []
    for path, plan in zip(plan_paths, read, strict=True):
        try:
            facts.append(_facts(replace(plan, conditions=first.conditions), baseline.cost))
        except PlanError as error:
            raise PlanError(
                f"{path} cannot run under the conditions of {plan_paths[0]}: {error.what}",
                remedy="Name the plan first that parks in waits.",
            ) from error
    if as_json:
        listed = [{"plan": str(p), **each} for p, each in zip(plan_paths, facts, strict=True)]
        click.echo(json.dumps(listed, indent=1))
        return
    console = Console()
    for path, plan in zip(plan_paths, read, strict=True):
        if plan.conditions != first.conditions:
            say(console, f"Note: {path} was made for other conditions than {plan_paths[0]}.")
    columns = ("", *map(str, plan_paths))
    rows = [(shown, *(write(each[name]) for each in facts)) for name, shown, write in _ROWS]
    title = f"Against {baseline.schedule.name} at the highest clocks"
    show_tables(console, table_of(title, columns, rows))


_ROWS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("schedule", "order", str),
    ("policy", "clocks", str),
    ("iteration_time_s", "iteration time (s)", "{:.4f}".format),
    ("energy_j", "energy (J)", "{:.1f}".format),
    ("saving_percent", "saving (%)", "{:.2f}".format),
    ("slowdown_percent", "slowdown (%)", "{:.3f}".format),
    ("mean_power_w", "mean power (W)", "{:.1f}".format),
    ("num_chunks", "chunks of a stage", str),
    ("microbatches_in_flight", "peak in flight by stage", numbers),
    ("clock_changes", "changes of clock by stage", numbers),
)


def _facts(plan: Plan, baseline: Cost) -> dict[str, Any]:
    return {
        "schedule": plan.schedule.name,
        "policy": plan.policy,
        **vars(plan.cost),
        "saving_percent": plan.cost.saving_percent(baseline),
        "slowdown_percent": plan.cost.slowdown_percent(baseline),
        "mean_power_w": plan.cost.mean_power_w,
        "num_chunks": plan.schedule.num_chunks,
        "peak_in_flight": list(plan.schedule.peak_in_flight),
        "microbatches_in_flight": list(plan.schedule.microbatches_in_flight),
        "clock_changes": plan.evaluation.clock_changes.tolist(),
    }
