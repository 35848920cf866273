"""`envpipe simulate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from envpipe_megatron.cli.common import (
    OUTPUT_FOLDER,
    PLAN_OPTION,
    PROFILE_OPTION,
    summary_table,
)
from envpipe_megatron.console import say, say_working, show_tables, table_of
from envpipe_megatron.core.plan import Plan, read_plan, saving_uncertainty_percent
from envpipe_megatron.core.profile import read_profile
from envpipe_megatron.files import refuse_foreign, replace_files

#: What is left in the folder of pictures.
_FILES = ("simulation.json", "timeline.png", "timeline_baseline.png", "energy_valley.png")


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
    facts = simulation_facts(simulated)
    if output is not None:
        say_working("Drawing")
        from envpipe_megatron.report.drawing.plots import plot_energy_valley, plot_timeline

        refuse_foreign(output, _FILES, _FILES[0])
        output.mkdir(parents=True, exist_ok=True)
        replace_files({output / _FILES[0]: [json.dumps(facts, indent=1), "\n"]})
        longest = max(facts["iteration_time_s"], facts["baseline"]["iteration_time_s"])
        for name, drawn in (("timeline", simulated), ("timeline_baseline", simulated.baseline)):
            title = f"{drawn.policy} on {drawn.schedule.name}"
            plot_timeline(drawn, output / f"{name}.png", title=title, x_max_s=longest)
        plot_energy_valley(profile, output / "energy_valley.png", title=profile_path.name)
    if as_json:
        click.echo(json.dumps(facts, indent=1))
        return
    console = Console()
    show_tables(console, summary_table(simulated))
    show_tables(console, _stage_table(simulated))
    if output is not None:
        say(console, f"Pictures written to {output}")


def simulation_facts(plan: Plan) -> dict[str, Any]:
    """What `simulate` says of a plan, for machines."""
    baseline = plan.baseline.cost
    return {
        "policy": plan.policy,
        "schedule": plan.schedule.name,
        "iteration_time_s": plan.cost.iteration_time_s,
        "energy_j": plan.cost.energy_j,
        "energy_by_stage_j": plan.energy_by_stage_j.tolist(),
        "saving_percent": plan.cost.saving_percent(baseline),
        "saving_uncertainty_percent": saving_uncertainty_percent(plan),
        "slowdown_percent": plan.cost.slowdown_percent(baseline),
        "extra_forwards": list(plan.schedule.extra_forwards),
        "peak_in_flight": list(plan.schedule.peak_in_flight),
        "baseline": {
            "schedule": plan.baseline.schedule.name,
            "iteration_time_s": baseline.iteration_time_s,
            "energy_j": baseline.energy_j,
        },
        "bubble_s": _waits(plan),
    }


def _waits(plan: Plan) -> list[float]:
    busy = plan.timeline.duration_s.sum(axis=1)
    return [plan.cost.iteration_time_s - float(b) for b in busy]


def _stage_table(plan: Plan) -> Table:
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
    return table_of("By stage", columns, rows)
