"""Commands on plans that are made: `envpipe simulate` and `compare`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from envpipe_megatron.cli.common import (
    EXISTING_FILE,
    OUTPUT_FOLDER,
    PLAN_OPTION,
    PROFILE_OPTION,
)
from envpipe_megatron.cli.plans.tables import facts_of, show_plans, show_summary
from envpipe_megatron.console import say, say_working, show_table
from envpipe_megatron.core.plan import (
    Plan,
    PlanError,
    read_plan,
)
from envpipe_megatron.core.profile import read_profile
from envpipe_megatron.files import refuse_foreign, replace_files

#: What is left in the folder of pictures.
_FILES = ("simulation.json", "timeline.png", "timeline_baseline.png", "energy_valley.png")

#: What a run leaves beside its plan.
_PROFILE_NAME = "profile.csv"


@click.command()
@PROFILE_OPTION
@PLAN_OPTION
@click.option("--output", type=OUTPUT_FOLDER, help="Folder for the pictures.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def simulate(profile_path: Path, plan_path: Path, output: Path | None, as_json: bool) -> None:
    """Compute timeline and energy of a plan.

    Example:

      envpipe simulate --profile profile.csv --plan plan.json --output pictures
    """
    say_working(f"Simulating {plan_path}")
    profile = read_profile(profile_path)
    simulated = read_plan(plan_path, profile)
    facts = _simulation_facts(simulated)
    if output is not None:
        say_working("Drawing")
        from envpipe_megatron.report.stills import save
        from envpipe_megatron.report.units import plan_chart
        from envpipe_megatron.report.views import valley_chart

        refuse_foreign(output, _FILES, _FILES[0])
        output.mkdir(parents=True, exist_ok=True)
        replace_files({output / _FILES[0]: [json.dumps(facts, indent=1), "\n"]})
        clocks_mhz = {*simulated.frequency_mhz.flat, *simulated.baseline.frequency_mhz.flat}
        longest = max(facts["iteration_time_s"], facts["baseline"]["iteration_time_s"])
        for name, drawn in (("timeline", simulated), ("timeline_baseline", simulated.baseline)):
            title = f"{drawn.policy} on {drawn.schedule.name}"
            chart = plan_chart(drawn, x_max_s=longest, scale_mhz=(min(clocks_mhz), max(clocks_mhz)))
            save([chart], title, output / f"{name}.png")
        title = f"Energy valley: {profile_path.name}"
        save([valley_chart(profile)], title, output / "energy_valley.png")
    if as_json:
        click.echo(json.dumps(facts, indent=1))
        return
    show_summary(simulated)
    _show_stages(simulated)
    if output is not None:
        say(f"Pictures written to {output}")


def _simulation_facts(plan: Plan) -> dict[str, Any]:
    """Figures of a plan that `simulate` prints as JSON."""
    baseline = plan.baseline
    return {
        **facts_of(plan, baseline.cost),
        "energy_by_stage_j": plan.energy_by_stage_j.tolist(),
        "baseline": {"schedule": baseline.schedule.name, **vars(baseline.cost)},
        "bubble_s": _waits(plan),
    }


def _waits(plan: Plan) -> list[float]:
    busy = plan.timeline.duration_s.sum(axis=1)
    return [plan.cost.iteration_time_s - float(b) for b in busy]


def _show_stages(plan: Plan) -> None:
    busy = plan.timeline.duration_s.sum(axis=1)
    rows = [
        (
            str(stage),
            f"{plan.energy_by_stage_j[stage]:.1f}",
            f"{busy[stage]:.4f}",
            f"{wait_s:.4f}",
            f"{plan.frequency_mhz[stage].min()}-{plan.frequency_mhz[stage].max()}",
        )
        for stage, wait_s in enumerate(_waits(plan))
    ]
    columns = ("stage", "energy (J)", "busy (s)", "waiting (s)", "clocks (MHz)")
    show_table("By stage", columns, rows)


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
            facts.append(facts_of(replace(plan, conditions=first.conditions), baseline.cost))
        except PlanError as error:
            raise PlanError(
                f"{path} cannot run under the conditions of {plan_paths[0]}: {error.what}",
                remedy="Name the plan first that parks in waits.",
            ) from error
    if as_json:
        listed = [{"plan": str(p), **each} for p, each in zip(plan_paths, facts, strict=True)]
        click.echo(json.dumps(listed, indent=1))
        return
    for path, plan in zip(plan_paths, read, strict=True):
        if plan.conditions != first.conditions:
            say(f"Note: {path} was made for other conditions than {plan_paths[0]}.")
    title = f"Against {baseline.schedule.name} at the highest clocks"
    show_plans(title, dict(zip(map(str, plan_paths), facts, strict=True)))
