"""`envpipe plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from envpipe_megatron.cli.common import (
    COUNTS,
    EXISTING_FILE,
    OUTPUT_FILE,
    PROFILE_OPTION,
    Finite,
    Numbers,
    check_outputs,
    known_blocking_power,
    options_of,
    taken,
)
from envpipe_megatron.cli.plans.tables import show_figures, show_summary
from envpipe_megatron.console import say
from envpipe_megatron.core.conditions import SIDECAR_FIELDS, Conditions, make_conditions
from envpipe_megatron.core.fields import (
    COUNT,
    ENERGY,
    POWER,
    RATIO,
    SHORT_TIME,
    TIME,
    Number,
)
from envpipe_megatron.core.plan import read_order_and_groups
from envpipe_megatron.core.profile import Profile, read_profile
from envpipe_megatron.core.profile_rows import SplitBackward
from envpipe_megatron.core.sidecar import sidecar_path
from envpipe_megatron.files import csv_text, replace_files
from envpipe_megatron.formats.frontier import FRONTIER_FORMAT, write_frontier
from envpipe_megatron.formats.torch_csv import read_torch_csv
from envpipe_megatron.policies.objective import Objective
from envpipe_megatron.policies.planner import (
    check_frontier,
    check_memory_frontier,
    make_frontier,
    make_memory_frontier,
    make_plan,
)
from envpipe_megatron.policies.request import BY_MEMORY, PlanRequest
from envpipe_megatron.policies.schedules import SCHEDULES

#: Figures of a frontier's plans; of those by memory all take nearly as long.
_FIGURES = (
    *("iteration_time_s", "energy_j", "mean_power_w", "saving_percent", "slowdown_percent"),
    "gap_percent",
)
_OF_MEMORY = ("schedule", "energy_j", "saving_percent", "microbatches_in_flight")
#: Options that are conditions.
_CONDITIONS = (
    *("blocking_power_w", "latency_s", "tail_time_s", "gpus_per_stage", "change_time_s"),
    "change_energy_j",
)
_EACH = "one number, or one for each stage."


def _microbatches(text: str) -> float:
    """Read microbatches from 1, of which one of V chunks is a part: 5.5."""
    read = COUNT if text.isdigit() else Number(least=1, positive=True)
    number: float = read.of_text(text)
    return number


class _NameOrFile(click.Choice[str]):
    """The name of an order, or the path of a file that holds one."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Read the name; the file is read by `_job_options`."""
        path = Path(value)
        is_file = path.suffix in (".json", ".csv") or path.is_file()
        if str(value).lower() in self.choices or not is_file:
            return super().convert(value, param, ctx)
        return EXISTING_FILE.convert(path, param, ctx)


@click.command()
@PROFILE_OPTION
@click.option(
    "--num-microbatches", type=click.IntRange(min=1),
    help="Microbatches of an iteration; by default those of the file that --schedule names.",
)  # fmt: skip
@click.option("--output", type=OUTPUT_FILE, help="Plan JSON; without it, a plan is only shown.")
@click.option(
    "--schedule",
    type=_NameOrFile(tuple(SCHEDULES), case_sensitive=False),
    metavar=f"[{'|'.join(SCHEDULES)}|FILE]",
    help="Order of units; 'ours' is EnvPipe's own name for 'envpipe', and 'auto', the default with "
    "the optimal policy, is planned together with the frequencies. Or a file with any order: a "
    "plan JSON, or a CSV of torch.distributed.pipelining (format compute_only). With other "
    "policies the default is 1f1b.",
)
@options_of(PlanRequest, policy="optimal")
@options_of(Objective)
@click.option(
    "--blocking-power", "blocking_power_w", type=Numbers(POWER.of_text),
    help=f"Power of a GPU that waits in a receive, W; {_EACH} Default: what the profile's "
    "sidecar knows at the highest clock, or 0.",
)  # fmt: skip
@click.option(
    "--use", type=click.Choice(list(SIDECAR_FIELDS)), multiple=True,
    help="Take this, too, from the profile's sidecar; repeat for more. The latency is "
    "always taken where it is known.",
)  # fmt: skip
@click.option(
    "--p2p-latency", "latency_s", type=Numbers(SHORT_TIME.of_text),
    help="Latency of a p2p hop, s; one number, or one for each boundary between stages.",
)  # fmt: skip
@click.option(
    "--tail-time", "tail_time_s", type=Numbers(TIME.of_text),
    help=f"Time after a stage's last unit (gradient reduction, optimizer), s; {_EACH}",
)  # fmt: skip
@click.option(
    "--tensor-parallel", "gpus_per_stage", type=COUNTS,
    help=f"Tensor-parallel degree, GPUs that follow one plan; {_EACH}",
)  # fmt: skip
@click.option(
    "--change-time", "change_time_s", type=Finite(SHORT_TIME),
    help="Time from the request of a clock until it runs, s.",
)  # fmt: skip
@click.option(
    "--change-energy", "change_energy_j", type=Finite(ENERGY),
    help="Energy of a change of clock on one GPU, J.",
)  # fmt: skip
@click.option(
    "--max-in-flight",
    type=Numbers(_microbatches, BY_MEMORY),
    help="Limit on microbatches held, or for each stage, or by the sidecar's free bytes. One "
    "of two chunks is half of one: 5.5.",
)
@click.option(
    "--split-overhead", type=Finite(RATIO),
    help="Backwards may be run in two halves, the gradients of inputs and of weights, which are "
    "assumed to take this fraction more (0.05: 5 %), for a profile without rows of such.",
)  # fmt: skip
@click.option(
    "--frontier",
    "frontier_path",
    type=OUTPUT_FILE,
    help="CSV of the time-energy frontier, from the fastest iteration to the cheapest; its plans "
    "(.jsonl) and a picture (.png) go beside it. Deadline and objective only decide which order "
    "competes.",
)
@click.option(
    "--frontier-points", type=click.IntRange(2, 10_000), default=100, show_default=True,
    help="Deadlines of the frontier.",
)  # fmt: skip
@click.option(
    "--memory-frontier",
    "memory_path",
    type=OUTPUT_FILE,
    help="With --schedule auto: CSV of the best plan over all families of orders for each limit of "
    "memory, 0, 1, 2 ... microbatches in flight beyond the framework's own order on each stage, as "
    "long as more saves energy.",
)
def plan(
    profile_path: Path,
    output: Path | None,
    schedule: str | Path | None,
    split_overhead: float | None,
    frontier_path: Path | None,
    frontier_points: int,
    memory_path: Path | None,
    **options: Any,
) -> None:
    """Make a plan from a profile; needs no GPU. By default the best order, and the best clocks.

    \b
    Example:
      envpipe plan --profile profile.csv --num-microbatches 24 \\
          --max-in-flight 12 --output plan.json
      # or as EnvPipe itself plans:
      envpipe plan --profile profile.csv --num-microbatches 24 \\
          --schedule envpipe --policy envelope --reconfigure balanced
    """
    beside: dict[Path, str] = {}
    if frontier_path is not None:
        from envpipe_megatron.report.stills import PICTURE_MARK

        beside[frontier_path.with_suffix(".jsonl")] = FRONTIER_FORMAT
        beside[frontier_path.with_suffix(".png")] = PICTURE_MARK
    written = [path for path in (output, frontier_path, memory_path) if path is not None]
    read = [profile_path, sidecar_path(profile_path)]
    if isinstance(schedule, Path):
        read.append(schedule)
        if options["num_chunks"] or options["group_size"]:
            raise click.UsageError("--num-chunks and --group-size go with no order from a file.")
    check_outputs(written, read, beside)
    options |= _job_options(schedule, options["num_microbatches"], options["policy"])
    profile = read_profile(profile_path)
    options["num_chunks"] = options["num_chunks"] or profile.sidecar.num_chunks
    if split_overhead is not None:
        options["split"] = SplitBackward(overhead=split_overhead)
    options["objective"] = taken(Objective, options)
    options["conditions"] = _take_conditions(profile, options)
    request = taken(PlanRequest, options)
    given = click.get_current_context().get_parameter_source("frontier_points")
    if frontier_path is not None:
        check_frontier(request)
    elif given is not ParameterSource.DEFAULT:
        raise click.UsageError("--frontier-points goes with --frontier.")
    if memory_path is not None:
        check_memory_frontier(request)
    if request.runnable and (request.order is not None or request.schedule != "auto"):
        raise click.UsageError("--runnable goes with --schedule auto.")
    planned = make_plan(profile, request)
    if output is not None:
        planned.plan.write(output)
    for note in planned.notes:
        say(f"Note: {note}")
    if planned.auto and (more := planned.auto.next_microbatch_percent()) is not None:
        say(f"Note: Another microbatch in flight on each stage would save {more:.2f} %.")
    if planned.reconfigured:
        result = planned.reconfigured
        say(f"Reconfigured in {result.steps} steps, until {result.ended.value}.")
    show_summary(planned.plan)
    if output is not None:
        say(f"Plan written to {output}")
    if frontier_path is not None:
        _make_frontier(profile, request, frontier_points, frontier_path)
    if memory_path is not None:
        _make_memory_frontier(profile, request, memory_path)


def _take_conditions(profile: Profile, options: dict[str, Any]) -> Conditions:
    """Remove the conditions from the options, and return them for the profile's job."""
    given = {name: options.pop(name) for name in _CONDITIONS}
    for name, value in given.items():
        if isinstance(value, tuple) and len(value) == 1:  # for all stages
            given[name] = value[0]
    power_w = known_blocking_power(profile, given.pop("blocking_power_w"))
    return make_conditions(profile, blocking_power_w=power_w, use=options.pop("use"), **given)


def _job_options(
    schedule: str | Path | None, num_microbatches: int | None, policy: str
) -> dict[str, Any]:
    """Return fields of a `PlanRequest` for order and microbatches; reads the file."""
    if isinstance(schedule, Path):
        group_size = None
        if schedule.suffix == ".json":
            order, group_size = read_order_and_groups(schedule)
        else:
            order = read_torch_csv(schedule)
        num_microbatches = num_microbatches or order.num_microbatches
        return {"order": order, "group_size": group_size, "num_microbatches": num_microbatches}
    if num_microbatches is None:
        raise click.UsageError("Missing option '--num-microbatches'.")
    usual = "auto" if policy == "optimal" else "1f1b"
    return {"schedule": schedule or usual, "num_microbatches": num_microbatches}


def _make_frontier(profile: Profile, request: PlanRequest, num_points: int, path: Path) -> None:
    from envpipe_megatron.report.stills import save
    from envpipe_megatron.report.views import frontier_charts

    plans = make_frontier(profile, request, num_points)
    stored = write_frontier(plans, path)
    name = Path(profile.source).name
    save(frontier_charts(plans), f"{name}: time and energy", path.with_suffix(".png"))
    shown = sorted({round(at * (len(plans) - 1) / 9) for at in range(10)})
    some = f", {len(shown)} of them below" if len(shown) < len(plans) else ""
    title = f"Frontier: {len(plans)} plans{some}"
    show_figures(title, [plans[index] for index in shown], _FIGURES)
    say(f"Frontier written to {path}, its plans to {stored}")


def _make_memory_frontier(profile: Profile, request: PlanRequest, path: Path) -> None:
    points = make_memory_frontier(profile, request)
    plans = [point.plan for point in points]
    header = (
        "max_extra_forwards", "peak_in_flight", "order", "iteration_time_s", "energy_j",
        "energy_lower_bound_j", "saving_percent",
    )  # fmt: skip
    rows = (
        (
            point.max_extra_forwards, f"{point.peak_in_flight:g}", plan.schedule.name,
            plan.cost.iteration_time_s, plan.cost.energy_j, plan.energy_lower_bound_j,
            plan.cost.saving_percent(plan.baseline.cost),
        )
        for point, plan in zip(points, plans, strict=True)
    )  # fmt: skip
    replace_files({path: [csv_text([header, *rows])]})
    show_figures("What memory buys", plans, _OF_MEMORY)
    say(f"Memory frontier written to {path}")
