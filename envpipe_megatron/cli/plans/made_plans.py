"""Commands on plans that are made, here or elsewhere.

`envpipe simulate` and `compare`, `import-freqs`, `export-freqs`, `export-schedule`, `straggler`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from envpipe_megatron.cli.common import (
    EXISTING_FILE,
    MICROBATCHES_OPTION,
    OUTPUT_FILE,
    OUTPUT_FOLDER,
    PLAN_OPTION,
    PROFILE_OPTION,
    Finite,
    check_outputs,
    known_blocking_power,
)
from envpipe_megatron.cli.plans.tables import facts_of, show_plans, show_summary
from envpipe_megatron.console import say, say_working, show_table
from envpipe_megatron.core.conditions import make_conditions
from envpipe_megatron.core.fields import FACTOR, POWER, TIME
from envpipe_megatron.core.plan import Plan, PlanError, read_order, read_plan
from envpipe_megatron.core.profile import read_profile
from envpipe_megatron.core.sidecar import sidecar_path
from envpipe_megatron.core.timeline import RELATIVE_TOLERANCE
from envpipe_megatron.files import refuse_foreign, replace_files
from envpipe_megatron.formats.frontier import read_frontier
from envpipe_megatron.formats.interchange import read_freqs, write_freqs
from envpipe_megatron.formats.torch_csv import torch_csv

_OUTPUT_OPTION = click.option("--output", type=OUTPUT_FILE, required=True, help="File to write.")

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
        from envpipe_megatron.report.units import plan_charts
        from envpipe_megatron.report.views import valley_chart

        refuse_foreign(output, _FILES, _FILES[0])
        output.mkdir(parents=True, exist_ok=True)
        replace_files({output / _FILES[0]: [json.dumps(facts, indent=1), "\n"]})
        drawn = {"timeline": simulated, "timeline_baseline": simulated.baseline}
        for (name, plan), chart in zip(drawn.items(), plan_charts(drawn.values()), strict=True):
            title = f"{plan.policy} on {plan.schedule.name}"
            save([chart], title, output / f"{name}.png")
        title = f"Energy valley: {profile_path.name}"
        save([valley_chart(profile)], title, output / "energy_valley.png")
    if as_json:
        click.echo(json.dumps(facts, indent=1))
        return
    show_summary(simulated)
    _show_stages(simulated, facts["bubble_s"])
    if output is not None:
        say(f"Pictures written to {output}")


def _simulation_facts(plan: Plan) -> dict[str, Any]:
    """Return the figures of a plan that `simulate` prints as JSON."""
    baseline, busy_s = plan.baseline, plan.timeline.duration_s.sum(axis=1)
    return {
        **facts_of(plan, baseline.cost),
        "energy_by_stage_j": plan.energy_by_stage_j.tolist(),
        "baseline": {"schedule": baseline.schedule.name, **vars(baseline.cost)},
        "bubble_s": (plan.cost.iteration_time_s - busy_s).tolist(),
    }


def _show_stages(plan: Plan, waits_s: Iterable[float]) -> None:
    rows = [
        (
            str(stage),
            f"{plan.energy_by_stage_j[stage]:.1f}",
            f"{plan.cost.iteration_time_s - wait_s:.4f}",
            f"{wait_s:.4f}",
            f"{plan.frequency_mhz[stage].min()}-{plan.frequency_mhz[stage].max()}",
        )
        for stage, wait_s in enumerate(waits_s)
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
    plans = {str(path): read_plan(path, profile) for path in plan_paths}
    first_path, first = next(iter(plans.items()))
    baseline, facts, notes = first.baseline, {}, []
    for path, plan in plans.items():
        if plan.schedule.num_microbatches != first.schedule.num_microbatches:
            raise PlanError(
                f"{path} is for another number of microbatches than {first_path}",
                value=plan.schedule.num_microbatches,
                remedy=f"Compare plans for {first.schedule.num_microbatches}.",
            )
        if plan.conditions != first.conditions:
            notes.append(f"Note: {path} was made for other conditions than {first_path}.")
        try:
            facts[path] = facts_of(replace(plan, conditions=first.conditions), baseline.cost)
        except PlanError as error:
            raise PlanError(
                f"{path} cannot run under the conditions of {first_path}: {error.what}",
                remedy="Name the plan first that parks in waits.",
            ) from error
    if as_json:
        click.echo(json.dumps([{"plan": path, **each} for path, each in facts.items()], indent=1))
        return
    for note in notes:
        say(note)
    title = f"Against {baseline.schedule.name} at the highest clocks"
    show_plans(title, facts)


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

    \b
    Example:
      envpipe import-freqs --profile profile.csv --freqs freqs_pipeline_00123.py \\
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

    \b
    Example:
      envpipe export-freqs --profile profile.csv --plan plan.json \\
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

    \b
    Example:
      envpipe straggler --profile profile.csv --frontier frontier.jsonl \\
          --factor 1.1 --output plan.json
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
