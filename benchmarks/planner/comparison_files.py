"""The files that a comparison of planners leaves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.claims import CLAIMS_FILE, write_claims
from benchmarks.outputs import save_picture, write_csv
from benchmarks.planner.comparison_claims import comparison_claims
from benchmarks.planner.comparison_pictures import memory_figure, savings_figure
from benchmarks.planner.planner_targets import Target
from benchmarks.planner.planning_workloads import Workload
from benchmarks.planner.plans_compared import Comparison, Row, rival_pairs
from benchmarks.planner.published_savings import Published, Saving


def write_results(
    output: Path,
    comparisons: Sequence[Comparison],
    published: Sequence[Published],
    targets: Sequence[Target],
    options: str,
) -> None:
    """Write all of a comparison into a folder that is there.

    CSV files of plans, plans at a rival's time, frontiers, published figures and targets; pictures;
    and claims.
    """
    write_csv(
        output / "plans.csv",
        (
            _csv_row(comparison.workload, row)
            for comparison in comparisons
            for row in comparison.rows
        ),
    )
    write_csv(
        output / "at_rival_time.csv",
        (
            {
                "workload": comparison.workload.key,
                "rival": pair.rival.label,
                "rival_time_s": pair.rival.cost.iteration_time_s,
                "rival_energy_j": pair.rival.cost.energy_j,
                "our_order": pair.order,
                "our_time_s": pair.ours.iteration_time_s,
                "our_energy_j": pair.ours.energy_j,
                "energy_difference_percent": pair.energy_percent,
                "passed": pair.passed,
            }
            for comparison, pair in rival_pairs(comparisons)
        ),
    )
    write_csv(
        output / "frontiers.csv",
        (
            {"workload": comparison.workload.key} | asdict(frontier)
            for comparison in comparisons
            for frontier in comparison.frontiers
        ),
    )
    write_csv(
        output / "published.csv",
        (
            {"workload": comparison.workload.key} | _published_cells(known)
            for comparison, known in zip(comparisons, published, strict=True)
        ),
    )
    write_csv(
        output / "targets.csv",
        (
            {
                "target": target.name,
                "asked": target.asked,
                "where": figure.where,
                "figure": figure.value,
                "passed": figure not in target.missed,
            }
            for target in targets
            for figure in target.figures
        ),
    )
    save_picture(savings_figure(comparisons), output, "savings")
    memory = memory_figure(comparisons)
    if memory is not None:
        save_picture(memory, output, "saving_by_memory")
    write_claims(output / CLAIMS_FILE, comparison_claims(comparisons, published, options))


def _csv_row(workload: Workload, row: Row) -> dict[str, object]:
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
        "gap_percent": row.gap_percent,
        "any_order_saving_percent": row.any_order_saving_percent,
        "planning_time_s": row.planning_time_s,
        "planning_cpu_s": row.planning_cpu_s,
        "peak_in_flight": row.peak_in_flight,
        "extra_forwards": " ".join(map(str, row.extra_forwards)),
        "finished": row.finished,
    }


def _published_cells(known: Published) -> dict[str, object]:
    cells: dict[str, object] = {}
    for name in ("perseus", "perseus_file", "envpipe", "envpipe_file"):
        saving: Saving | None = getattr(known, name)
        cells[f"{name}_saving_percent"] = saving and saving.saving_percent
        cells[f"{name}_slowdown_percent"] = saving and saving.slowdown_percent
    return cells
