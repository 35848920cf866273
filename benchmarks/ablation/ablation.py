"""What each ingredient of EnvPipe is worth: one at a time is switched, all else stays.

    python benchmarks/ablation/ablation.py

By planner and simulator on profiles that others measured, in ../shared/data, else on that of an
emulated A100's preset. A few plans are then run by the real runtime and compared with what the
simulator says of them. Takes about two minutes on a quiet machine of two cores.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import click
from rich.console import Console

from benchmarks import outputs
from benchmarks.ablation.findings import ablation_claims, runtime_claims
from benchmarks.ablation.rows import Checked, Row, ablate, check_by_runtime
from benchmarks.outputs import leave, make_console, make_table, output_option
from benchmarks.planner.workloads import Workload, preset_workload, read_workloads
from envpipe_megatron.errors import EnvPipeError

#: GPT-3 175B on both GPUs, few and many microbatches, and a model that was trained and measured.
KEYS = (
    "gpt3-175b_a100_sxm_mb24",
    "gpt3-175b_a100_sxm_mb96",
    "gpt3-175b_a40_mb24",
    "A100_gpt3-xl_dp1_pp4_tp1",
)
_STAGES, _MICROBATCHES = 4, 24
_SHOWN = (
    "ablation", "start", "setting", "saving_percent", "slowdown_percent", "peak_in_flight",
    "gap_percent", "planning_time_s",
)  # fmt: skip


@click.command()
@output_option("ablation")
def main(output: Path) -> None:
    """Switch one ingredient at a time, and say what it was worth."""
    console = make_console()
    workloads, basis = _workloads(console)
    rows: list[Row] = []
    try:
        for workload in workloads:
            found = ablate(workload)
            console.print(make_table(workload.name, [_cells(row) for row in found], _SHOWN))
            rows.extend(found)
    except EnvPipeError as error:
        raise click.ClickException(str(error)) from error
    checked = _checked(console)
    claims = [*ablation_claims(rows, basis), *runtime_claims(checked)]
    tables = {"ablation": map(_cells, rows), "ablation_runtime": map(_checked_cells, checked)}
    leave(output, tables, claims)
    for claim in claims:
        console.print(f"- {claim.claim}", markup=False)


def _checked(console: Console) -> list[Checked]:
    """Some plans as run by the runtime, where torch is installed."""
    if find_spec("torch") is None:
        console.print("No plan is run by the runtime: torch is not installed.")
        return []
    return check_by_runtime()


def _checked_cells(checked: Checked) -> dict[str, object]:
    return {
        "plan": checked.name,
        "simulated_time_s": checked.simulated.iteration_time_s,
        "run_time_s": checked.run.iteration_time_s,
        "simulated_energy_j": checked.simulated.energy_j,
        "run_energy_j": checked.run.energy_j,
    }


def _workloads(console: Console) -> tuple[list[Workload], str]:
    data = outputs.PERSEUS_DATA
    if data.is_dir():
        known = {workload.key: workload for workload in read_workloads(data)}
        return [known[key] for key in KEYS], "replay of measured A100 and A40 profiles"
    console.print(f"There are no measured profiles at {data}: an emulated A100 is used.")
    workload = preset_workload(_STAGES, _MICROBATCHES)
    return [workload], f"profile of an {workload.gpu}"


def _cells(row: Row) -> dict[str, object]:
    cost = row.plan.cost
    return {
        "workload": row.workload.key,
        "model": row.workload.model,
        "gpu": row.workload.gpu,
        "num_microbatches": row.workload.num_microbatches,
        "ablation": row.ablation.value,
        "start": row.start.value,
        "setting": row.setting,
        "saving_percent": row.saving_percent,
        "slowdown_percent": row.slowdown_percent,
        "peak_in_flight": row.peak_in_flight,
        "gap_percent": row.plan.gap_percent,
        "planning_time_s": row.planning_time_s,
        "iteration_time_s": cost.iteration_time_s,
        "energy_j": cost.energy_j,
    }


if __name__ == "__main__":
    main()
