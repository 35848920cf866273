"""The `envpipe` command."""

from __future__ import annotations

import json
import logging
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.logging import RichHandler
from rich.table import Table

from envpipe_megatron import __version__
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.plan import Plan, read_plan
from envpipe_megatron.policies.frequencies import POLICIES
from envpipe_megatron.policies.planner import (
    RECONFIGURE_NAMES,
    SCHEDULE_ALIASES,
    SCHEDULES,
    PlanRequest,
    make_plan,
)
from envpipe_megatron.profile import Profile, read_profile
from envpipe_megatron.sidecar import sidecar_path

EXISTING_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)

logger = logging.getLogger(__name__)


class _Group(click.Group):
    """Prints EnvPipe's errors as one message, and exits 0 on success alone."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except EnvPipeError as error:
            raise click.ClickException(str(error)) from error
        except OSError as error:
            if error.filename is None:
                raise
            raise click.ClickException(
                f"Cannot read or write {error.filename}: {error.strerror}. "
                "Check that its folder exists and is yours to write."
            ) from error


class _Counts(click.ParamType):  # type: ignore[type-arg]  # generic in click's stubs alone
    """`N` or `N,N,...`."""

    name = "N[,N...]"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            counts = tuple(int(part) for part in str(value).split(","))
        except ValueError:
            counts = ()
        if not counts or min(counts) < 1:
            self.fail(f"{value!r} is not a positive number, or one for each stage", param, ctx)
        return counts


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="envpipe")
def main() -> None:
    """Save energy in pipeline-parallel training without slowing it down."""
    handler = RichHandler(console=Console(stderr=True), show_time=False, show_path=False)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[handler])


@main.command()
@click.option("--profile", "profile_path", type=EXISTING_FILE, required=True, help="Profile CSV.")
@click.option("--num-microbatches", type=int, required=True, help="Microbatches of an iteration.")
@click.option(
    "--output", type=click.Path(dir_okay=False, path_type=Path), required=True, help="Plan JSON."
)
@click.option(
    "--schedule",
    type=click.Choice([*SCHEDULES, *SCHEDULE_ALIASES]),
    default="1f1b",
    show_default=True,
    help="Order of units; 'ours' is EnvPipe's own name for 'envpipe'.",
)
@click.option(
    "--policy", type=click.Choice(list(POLICIES)), default="baseline", show_default=True,
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
@click.option("--max-in-flight", type=_Counts(), help="Limit on microbatches held, or per stage.")
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
    limits = (max_extra_forwards, max_in_flight, max_warmup_step, channel_capacity)
    if any(limit is not None for limit in limits) and schedule not in ("envpipe", "ours"):
        raise EnvPipeError(
            "Limits on extra forwards and on microbatches in flight go with the envpipe schedule",
            value=schedule,
            remedy="Use --schedule envpipe, or leave the limits out.",
        )
    profile = read_profile(profile_path)
    planned = make_plan(
        profile,
        PlanRequest(
            num_microbatches=num_microbatches,
            schedule=schedule,
            policy=policy,
            reconfigure=reconfigure,
            blocking_power_w=_blocking_power(profile, blocking_power),
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
        _say(console, f"Note: {note}")
    if planned.reconfigured:
        result = planned.reconfigured
        console.print(f"Reconfigured in {result.steps} steps, until {result.ended.value}.")
    console.print(_summary_table(planned.plan))
    _say(console, f"Plan written to {output}")


@main.command()
@click.option("--profile", "profile_path", type=EXISTING_FILE, required=True, help="Profile CSV.")
@click.option("--plan", "plan_path", type=EXISTING_FILE, required=True, help="Plan JSON.")
@click.option(
    "--output", type=click.Path(file_okay=False, path_type=Path), help="Folder for the pictures."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def simulate(profile_path: Path, plan_path: Path, output: Path | None, as_json: bool) -> None:
    """Compute timeline and energy of a plan.

    Example:

      envpipe simulate --profile profile.csv --plan plan.json --output pictures
    """
    profile = read_profile(profile_path)
    simulated = read_plan(plan_path, profile)
    facts = simulation_facts(simulated)
    if output is not None:
        from envpipe_megatron.report.plots import plot_energy_valley, plot_timeline

        output.mkdir(parents=True, exist_ok=True)
        longest = max(facts["iteration_time_s"], facts["baseline"]["iteration_time_s"])
        for name, drawn in (("timeline", simulated), ("timeline_baseline", simulated.baseline)):
            title = f"{drawn.policy} on {drawn.schedule.name}"
            plot_timeline(drawn, output / f"{name}.png", title=title, x_max_s=longest)
        plot_energy_valley(profile, output / "energy_valley.png", title=profile_path.name)
        (output / "simulation.json").write_text(json.dumps(facts, indent=1) + "\n")
    if as_json:
        click.echo(json.dumps(facts, indent=1))
        return
    console = Console()
    console.print(_summary_table(simulated))
    console.print(_stage_table(simulated))
    if output is not None:
        _say(console, f"Pictures written to {output}")


@main.command()
@click.option(
    "--text",
    type=click.Path(exists=True, path_type=Path),
    help="File or folder to train on. Default: the Python standard library's sources.",
)
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("runs/quickstart"),
    show_default=True,
)
@click.option("--gpu", "preset", default="a100-sxm", show_default=True, help="Emulated GPU.")
def quickstart(text: Path | None, output: Path, preset: str) -> None:
    """Train a small GPT on this machine, with and without EnvPipe.

    Four pipeline ranks on the CPU, each with an emulated GPU; about three minutes.

    Example:

      envpipe quickstart --text my_book.txt
    """
    from envpipe_megatron.quickstart.run import run_quickstart
    from envpipe_megatron.quickstart.settings import Settings

    source = text or Path(sysconfig.get_path("stdlib"))
    run_quickstart(Settings(str(output.resolve()), str(source.resolve()), preset), Console())


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


def _blocking_power(profile: Profile, given: float | None) -> float | tuple[float, ...]:
    if given is not None:
        return given
    if profile.sidecar.wait_power_w is not None:
        return tuple(curve[max(curve)] for curve in profile.sidecar.wait_power_w)
    logger.warning(
        "No blocking power is known: waiting is taken to cost nothing, and savings are off. "
        "Give --blocking-power (an A100 SXM waits at 83.6 W, an A40 at 70.4 W)."
    )
    return 0.0


def _say(console: Console, text: str) -> None:
    """Print text that holds paths: they are neither broken over lines nor read as markup."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _summary_table(plan: Plan) -> Table:
    baseline = plan.baseline
    table = Table(title=f"{plan.policy} on {plan.schedule.name}")
    for column in ("", "plan", f"baseline ({baseline.schedule.name})"):
        table.add_column(column, justify="right" if column else "left")

    def spread(counts: Iterable[int]) -> str:
        return " ".join(str(count) for count in counts)

    table.add_row(
        "iteration time (s)",
        f"{plan.cost.iteration_time_s:.4f}",
        f"{baseline.cost.iteration_time_s:.4f}",
    )
    table.add_row("energy (J)", f"{plan.cost.energy_j:.1f}", f"{baseline.cost.energy_j:.1f}")
    table.add_row("saving (%)", f"{plan.cost.saving_percent(baseline.cost):.2f}", "")
    table.add_row("slowdown (%)", f"{plan.cost.slowdown_percent(baseline.cost):.3f}", "")
    if plan.schedule.num_chunks == 1:
        table.add_row("extra forwards by stage", spread(plan.schedule.extra_forwards), "")
    table.add_row(
        "peak in flight by stage",
        spread(plan.schedule.peak_in_flight),
        spread(baseline.schedule.peak_in_flight),
    )
    return table


def _stage_table(plan: Plan) -> Table:
    table = Table(title="By stage")
    for column in ("stage", "energy (J)", "busy (s)", "waiting (s)", "clocks (MHz)"):
        table.add_column(column, justify="right")
    busy = plan.timeline.duration_s.sum(axis=1)
    for stage, wait_s in enumerate(_waits(plan)):
        clocks = plan.frequency_mhz[stage]
        table.add_row(
            str(stage),
            f"{plan.energy_by_stage_j[stage]:.1f}",
            f"{busy[stage]:.4f}",
            f"{wait_s:.4f}",
            f"{clocks.min()}-{clocks.max()}",
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
