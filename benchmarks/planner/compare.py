"""Rival planners and ours side by side, on GPT-3 175B and on measured workloads.

Run from the checkout:

    python benchmarks/planner/compare.py --lowtime-limit 0

lowtime takes minutes to hours for the larger workloads, up to a limit each. Its runs are stored and
read again by later comparisons; `--lowtime-limit 0` takes what is stored and runs none.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from benchmarks.outputs import Claim, leave, make_console, make_table, output_option, span
from benchmarks.planner.lowtime_rival import run_lowtime
from benchmarks.planner.plans import (
    FRONTIER_POINTS,
    Comparison,
    PlanKind,
    Row,
    compare,
    warm_up,
)
from benchmarks.planner.workloads import (
    PERSEUS_SAVED_PERCENT,
    WHAT_DIFFERS,
    Workload,
    workloads_here,
)
from envpipe_megatron.errors import EnvPipeError

#: What a terminal shows of the plans.
_SHOWN = (
    "plan", "iteration_time_s", "slowdown_percent", "energy_j", "saving_percent", "gap_percent",
    "any_order_saving_percent", "planning_time_s", "planning_cpu_s", "peak_in_flight",
    "extra_forwards", "finished",
)  # fmt: skip
FIGURE = "planner_compare"
COMMAND = "python benchmarks/planner/compare.py"
BASIS = "replay of measured A100 and A40 profiles, one evaluator for all plans"
#: The largest of the compared pipelines, whose planning times are claimed.
_MOST_MICROBATCHES = 96


@click.command()
@output_option("planner_compare")
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
@click.option(
    "--workload",
    "names",
    multiple=True,
    default=("",),
    help="Only workloads whose name in the rows contains this; may be given again.",
)
def main(
    output: Path,
    lowtime_results: Path,
    lowtime_limit: float,
    names: tuple[str, ...],
) -> None:
    """Compare all planners on the profiles of ../shared/data."""
    console = make_console()
    lowtime = partial(run_lowtime, time_limit_s=lowtime_limit, output_dir=lowtime_results)
    load_before = os.getloadavg()[0]
    comparisons = []
    try:
        workloads = workloads_here(names)
        if not workloads:
            return
        warm_up(workloads[0])
        for workload in workloads:
            comparison = compare(workload, lowtime)
            rows = [_plan_row(workload, row) for row in comparison.rows]
            console.print(make_table(workload.name, rows, _SHOWN))
            comparisons.append(comparison)
    except EnvPipeError as error:
        raise click.ClickException(str(error)) from error
    plans = [_plan_row(c.workload, row) for c in comparisons for row in c.rows]
    frontiers = [
        {"workload": comparison.workload.key, **asdict(frontier)}
        for comparison in comparisons
        for frontier in comparison.frontiers
    ]
    console.print(make_table("Our frontiers", frontiers))
    console.print(WHAT_DIFFERS)
    for text in (text for comparison in comparisons for text in comparison.skipped):
        console.print(f"Left out: {text}", markup=False)
    console.print(
        "Planning times are of one planning each, after imports; of lowtime's run CPU time alone. "
        f"Load average (1 min) {load_before:.1f} at the start and {os.getloadavg()[0]:.1f} at the "
        f"end, on {os.cpu_count()} cores: where others were running, wall time exceeds CPU time."
    )
    options = " ".join(
        [f"--lowtime-limit {lowtime_limit:g}", *(f"--workload {name}" for name in names if name)]
    )
    tables = {"plans": plans, "frontiers": frontiers}
    leave(output, "computed", tables, comparison_claims(comparisons, options))


def _plan_row(workload: Workload, row: Row) -> dict[str, Any]:
    return {
        "workload": workload.key,
        "model": workload.model,
        "gpu": workload.gpu,
        "num_stages": workload.profile.num_stages,
        "num_microbatches": workload.num_microbatches,
        "plan": row.label,
        "iteration_time_s": row.cost.iteration_time_s,
        "slowdown_percent": row.slowdown_percent,
        "energy_j": row.cost.energy_j,
        "saving_percent": row.saving_percent,
        "gap_percent": row.plan.gap_percent,
        "any_order_saving_percent": row.any_order_saving_percent,
        "planning_time_s": row.planning_time_s,
        "planning_cpu_s": row.planning_cpu_s,
        "peak_in_flight": row.peak_in_flight,
        "extra_forwards": " ".join(map(str, row.plan.schedule.extra_forwards)),
        "finished": row.finished,
    }


def comparison_claims(comparisons: Sequence[Comparison], options: str = "") -> list[Claim]:
    """Say what comparisons show, which `options` of the command make."""
    claims = [
        *_saving_claims(comparisons),
        *_published_claims(comparisons),
        *_planning_claims(comparisons),
    ]
    return [replace(claim, command=f"{COMMAND} {options}".strip()) for claim in claims]


def _claim(
    claim: str, paper: str = "", agrees: bool | None = None, why: str = "", basis: str = BASIS
) -> Claim:
    return Claim(FIGURE, COMMAND, claim, basis, paper, agrees, why)


def _groups(comparisons: Sequence[Comparison]) -> list[tuple[str, list[Comparison]]]:
    """The emulated model and the measured ones, in words, where there are any."""
    named = (("GPT-3 175B on 8 stages", True), ("the models that were trained and measured", False))
    groups = [(name, [c for c in comparisons if c.workload.emulated == e]) for name, e in named]
    return [(name, some) for name, some in groups if some]


def _saved(comparisons: Sequence[Comparison], kind: PlanKind) -> list[float]:
    return [comparison.row(kind).saving_percent for comparison in comparisons]


def _saving_claims(comparisons: Sequence[Comparison]) -> list[Claim]:
    claims = []
    for name, some in _groups(comparisons):
        joint, envpipe = _saved(some, PlanKind.OURS_JOINT), _saved(some, PlanKind.ENVPIPE)
        lead = [ours - theirs for ours, theirs in zip(joint, envpipe, strict=True)]
        slower = max(c.row(PlanKind.OURS_JOINT).slowdown_percent for c in some)
        peaks = [
            [float(c.row(kind).peak_in_flight) for c in some]
            for kind in (PlanKind.OURS_JOINT, PlanKind.ENVPIPE)
        ]
        claims.append(
            _claim(
                f"On {name}, order and clocks planned together save {span(joint)} % with at most "
                f"{max(0.0, slower):.2f} % more time ({span(peaks[0], 0)} microbatches in "
                f"flight), EnvPipe in full {span(envpipe)} % ({span(peaks[1], 0)} in flight): "
                f"{span(lead)} points less",
            )
        )
    return claims


def _published_claims(comparisons: Sequence[Comparison]) -> list[Claim]:
    claims = []
    for name, some in _groups(comparisons):
        pairs = [
            (each.row(PlanKind.OURS_ON_1F1B).saving_percent, printed)
            for each in some
            if (printed := PERSEUS_SAVED_PERCENT.get(each.workload.key)) is not None
        ]
        if not pairs:
            continue
        ours, theirs = ([pair[side] for pair in pairs] for side in (0, 1))
        as_good = all(one >= other for one, other in pairs)
        claims.append(
            _claim(
                f"On {name}, in 1F1B's order alone the optimal policy saves {span(ours)} %",
                f"Perseus prints {span(theirs)} % for the same workloads",
                agrees=as_good,
                why="" if as_good else WHAT_DIFFERS,
            )
        )
    return claims


def _planning_claims(comparisons: Sequence[Comparison]) -> list[Claim]:
    gaps = [
        row.plan.gap_percent
        for c in comparisons
        for row in c.rows
        if row.kind is PlanKind.OURS_JOINT
    ]
    on_1f1b = [c.row(PlanKind.OURS_ON_1F1B).plan.gap_percent for c in comparisons]
    claims = [
        _claim(
            f"Joint plans lie {_known_span(gaps)} % above the lower bound of their order, plans on "
            f"1F1B {_known_span(on_1f1b)} %"
        )
    ]
    most = [c for c in comparisons if c.workload.num_microbatches == _MOST_MICROBATCHES]
    if most:
        plans, joint = (
            _known_span([comparison.row(kind).planning_time_s for comparison in most])
            for kind in (PlanKind.OURS_ON_1F1B, PlanKind.OURS_JOINT)
        )
        frontiers = span([f.planning_time_s for c in most for f in c.frontiers], 2)
        claims.append(
            _claim(
                f"Of 8 stages x {_MOST_MICROBATCHES} microbatches one plan on 1F1B takes {plans} "
                f"s, with the best order {joint} s, a frontier of {FRONTIER_POINTS} plans "
                f"{frontiers} s",
                "Perseus prints 87 s for a frontier of GPT-3 175B, 6.5 minutes on average",
                basis=f"{BASIS}; planned on this machine's CPU, busy or not",
            )
        )
    return claims


def _known_span(values: Sequence[float | None]) -> str:
    return span([value for value in values if value is not None], 2)


if __name__ == "__main__":
    main()
