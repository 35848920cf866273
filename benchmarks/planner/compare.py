"""Rival planners and ours side by side, on GPT-3 175B and on measured workloads.

Run from the checkout:

    python benchmarks/planner/compare.py --lowtime-limit 0

lowtime takes minutes to hours for the larger workloads, up to a limit each. Its runs are stored and
read again by later comparisons; `--lowtime-limit 0` takes what is stored and runs none.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from benchmarks.planner.comparison_files import write_results
from benchmarks.planner.planner_targets import Target, planner_targets
from benchmarks.planner.planning_workloads import Workload, read_workloads
from benchmarks.planner.plans_compared import (
    FRONTIER_POINTS,
    Comparison,
    LowtimeSource,
    PlanKind,
    Row,
    compare,
    rival_pairs,
    warm_up,
)
from benchmarks.planner.published_savings import WHAT_DIFFERS, Published, Saving, read_published
from envpipe_megatron.errors import EnvPipeError

DATA_DIR = Path("../shared/data/perseus_sosp24")
#: Characters of the tables, which a narrower terminal or a pipe would cut.
TABLE_WIDTH = 190


@click.command()
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("runs/benchmarks/planner_compare"),
    show_default=True,
    help="Folder for CSV files, pictures and claims.json.",
)
@click.option(
    "--lowtime-results",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("runs/lowtime"),
    show_default=True,
    help="Folder of lowtime's stored runs.",
)
@click.option(
    "--lowtime-limit",
    type=click.FloatRange(0),
    default=1500.0,
    show_default=True,
    help="CPU time (s) for each run of lowtime that is not stored; 0 starts none.",
)
@click.option("--skip-lowtime", is_flag=True, help="Leave lowtime out.")
@click.option(
    "--workload",
    "names",
    multiple=True,
    help="Only workloads whose name in plans.csv contains this; may be given again.",
)
def main(
    output: Path,
    lowtime_results: Path,
    lowtime_limit: float,
    skip_lowtime: bool,
    names: tuple[str, ...],
) -> None:
    """Compare all planners on the profiles of ../shared/data."""
    console = Console(width=max(Console().width, TABLE_WIDTH))
    if not DATA_DIR.is_dir():
        console.print(f"Skipped: there are no profiles at {DATA_DIR}.")
        return
    lowtime = None if skip_lowtime else LowtimeSource(lowtime_results, lowtime_limit)
    load_before = os.getloadavg()[0]
    comparisons = []
    published = []
    try:
        workloads = _chosen(read_workloads(DATA_DIR), names)
        warm_up(workloads[0])
        for workload in workloads:
            comparison = compare(workload, lowtime)
            console.print(_plans_table(comparison))
            comparisons.append(comparison)
            baseline = comparison.row(PlanKind.ALL_MAXIMUM).cost
            published.append(read_published(workload, baseline, DATA_DIR))
    except EnvPipeError as error:
        raise click.ClickException(str(error)) from error
    targets = planner_targets(comparisons)
    _print_summary(console, comparisons, published, targets)
    console.print(
        "Planning times are of one planning each, after imports; of lowtime's run CPU time alone. "
        f"Load average (1 min) {load_before:.1f} at the start and {os.getloadavg()[0]:.1f} at the "
        f"end, on {os.cpu_count()} cores: where others were running, wall time exceeds CPU time."
    )
    output.mkdir(parents=True, exist_ok=True)
    lowtime_options = ["--skip-lowtime"] if skip_lowtime else [f"--lowtime-limit {lowtime_limit:g}"]
    options = [*lowtime_options, *(f"--workload {name}" for name in names)]
    write_results(output, comparisons, published, targets, " ".join(options))


def _chosen(workloads: Sequence[Workload], names: Sequence[str]) -> list[Workload]:
    """The workloads that one of the names is part of; all without names."""
    chosen = [w for w in workloads if not names or any(name in w.key for name in names)]
    if not chosen:
        keys = ", ".join(workload.key for workload in workloads)
        raise EnvPipeError(
            "No workload has such a name", value=", ".join(names), remedy=f"Known: {keys}."
        )
    return chosen


def _plans_table(comparison: Comparison) -> Table:
    table = Table("plan", title=comparison.workload.name, title_justify="left")
    for heading in (
        "time (s)",
        "slowdown (%)",
        "energy (J)",
        "saving (%)",
        "gap (%)",
        "any order (%)",
        "planning (s)",
        "CPU (s)",
        "peak in flight",
    ):
        table.add_column(heading, justify="right")
    table.add_column("extra forwards")
    for row in comparison.rows:
        late = "" if row.finished else " (ended at its limit)"
        table.add_row(
            row.label + late,
            f"{row.cost.iteration_time_s:.4f}",
            _signed(row.slowdown_percent),
            f"{row.cost.energy_j:.1f}",
            f"{row.saving_percent:.2f}",
            _optional(row.gap_percent, 3),
            _optional(row.any_order_saving_percent, 2),
            _optional(row.planning_time_s, 2),
            f"{row.planning_cpu_s:.2f}",
            str(row.peak_in_flight),
            " ".join(map(str, row.extra_forwards)) if any(row.extra_forwards) else "-",
        )
    return table


def _optional(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _signed(value: float) -> str:
    return f"{round(value, 3) + 0.0:.3f}"  # + 0.0: no -0.000


def _print_summary(
    console: Console,
    comparisons: Sequence[Comparison],
    published: Sequence[Published],
    targets: Sequence[Target],
) -> None:
    console.print(_rival_time_table(comparisons))
    console.print(_frontier_table(comparisons))
    console.print(_published_table(comparisons, published))
    console.print(WHAT_DIFFERS)
    skipped = [text for comparison in comparisons for text in comparison.skipped]
    if skipped:
        console.print("[bold]Left out[/bold]")
        for text in skipped:
            console.print(text, markup=False)
    console.print(_targets_table(targets))


def _rival_time_table(comparisons: Sequence[Comparison]) -> Table:
    table = Table(
        title="Ours in the time of a rival's plan: 1F1B against lowtime, joint against EnvPipe",
        title_justify="left",
    )
    for heading in ("workload", "rival"):
        table.add_column(heading, no_wrap=True)
    for heading in ("its time (s)", "its slowdown (%)", "its energy (J)"):
        table.add_column(heading, justify="right")
    table.add_column("our order")
    for heading in ("our time (s)", "our energy (J)", "difference (%)"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for comparison, pair in rival_pairs(comparisons):
        table.add_row(
            comparison.workload.name,
            pair.rival.label,
            f"{pair.rival.cost.iteration_time_s:.4f}",
            _signed(pair.rival.slowdown_percent),
            f"{pair.rival.cost.energy_j:.1f}",
            pair.order,
            f"{pair.ours.iteration_time_s:.4f}",
            f"{pair.ours.energy_j:.1f}",
            f"{pair.energy_percent:+.3f}",
            "PASS" if pair.passed else "FAIL",
        )
    return table


def _frontier_table(comparisons: Sequence[Comparison]) -> Table:
    table = Table(
        "workload",
        "planner",
        title=f"Frontiers: {FRONTIER_POINTS} deadlines of ours, every step of lowtime's",
        title_justify="left",
    )
    for heading in ("plans", "time (s)", "CPU (s)", "widest gap (%)"):
        table.add_column(heading, justify="right")
    for comparison in comparisons:
        table.add_section()
        name = comparison.workload.name
        for row in comparison.lowtime_rows:
            late = "" if row.finished else " (ended at its limit)"
            plans = str(row.num_plans)
            table.add_row(name, row.label + late, plans, "-", f"{row.planning_cpu_s:.2f}", "-")
        for frontier in comparison.frontiers:
            table.add_row(
                name,
                f"ours, {frontier.order}",
                str(frontier.num_plans),
                f"{frontier.planning_time_s:.2f}",
                f"{frontier.planning_cpu_s:.2f}",
                f"{frontier.widest_gap_percent:.3f}",
            )
    return table


def _published_table(comparisons: Sequence[Comparison], published: Sequence[Published]) -> Table:
    table = Table(
        title="Saving / slowdown (%): as published, and of plans recomputed by one evaluator",
        title_justify="left",
    )
    table.add_column("workload", no_wrap=True)
    for heading in (
        "Perseus, printed",
        "Perseus, its file",
        "lowtime, here",
        "EnvPipe, printed",
        "EnvPipe, its file",
        "EnvPipe on 1F1B, here",
        "EnvPipe in full, here",
        "ours on 1F1B",
        "ours joint",
    ):
        table.add_column(heading, justify="right")
    for comparison, known in zip(comparisons, published, strict=True):
        lowtime = comparison.lowtime_rows
        table.add_row(
            comparison.workload.name,
            _saving_text(known.perseus),
            _saving_text(known.perseus_file),
            _row_text(max(lowtime, key=lambda row: row.saving_percent)) if lowtime else "-",
            _saving_text(known.envpipe),
            _saving_text(known.envpipe_file),
            *(
                _row_text(comparison.row(kind))
                for kind in (
                    PlanKind.ENVPIPE_ON_1F1B,
                    PlanKind.ENVPIPE,
                    PlanKind.OURS_ON_1F1B,
                    PlanKind.OURS_JOINT,
                )
            ),
        )
    return table


def _row_text(row: Row) -> str:
    return _saving_text(Saving(row.saving_percent, row.slowdown_percent))


def _saving_text(saving: Saving | None) -> str:
    if saving is None:
        return "-"
    if saving.slowdown_percent is None:
        return f"{saving.saving_percent:.1f}"
    return f"{saving.saving_percent:.1f} / {round(saving.slowdown_percent, 1) + 0.0:.1f}"


def _targets_table(targets: Sequence[Target]) -> Table:
    table = Table("target", "asked", title="Targets", title_justify="left")
    table.add_column("worst", justify="right")
    table.add_column("where")
    table.add_column("cases", justify="right")
    table.add_column("missed", justify="right")
    table.add_column("")
    for target in targets:
        worst = target.worst
        table.add_row(
            target.name,
            target.asked,
            f"{worst.value:.3g}" if worst else "-",
            worst.where if worst else "-",
            str(len(target.figures)),
            str(len(target.missed)),
            target.verdict,
        )
    return table


if __name__ == "__main__":
    main()
