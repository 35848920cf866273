"""The simulator against this project's own measurements on H200s, whose clocks were left alone.

`benchmarks/h200` holds what was measured through a patched Megatron-LM, over one-sided copies and
over receives that are posted ahead: the profile that one job made in Megatron's order, and jobs of
other numbers of microbatches in Megatron's order and in EnvPipe's. Each is predicted twice: from
that profile, and from the unit times of the profiled job when it ran the same order. Run from the
checkout:

    python benchmarks/planner/h200_validation.py
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np

from benchmarks.outputs import leave, make_console, make_table, output_option
from benchmarks.planner.validation import MemoryPrediction, memory_cells
from envpipe_megatron.core.conditions import make_conditions
from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.plan import Plan, max_frequencies
from envpipe_megatron.core.profile import Profile, make_profile, read_profile
from envpipe_megatron.core.profile_rows import ProfileRow
from envpipe_megatron.core.schedule import Schedule

MEASURED = Path(__file__).resolve().parents[1] / "h200"


@click.command(help=(__doc__ or "").replace("\n\n    python", "\n\n\b\n    python"))
@output_option("h200_validation")
def main(output: Path) -> None:
    """Predict the runs in benchmarks/h200."""
    folders = sorted(path.parent for path in MEASURED.glob("*/*/measured.json"))
    runs = [one for folder in folders for one in predict(folder)]
    memory = [one for folder in folders for one in peaks(folder)]
    tables = {"h200_validation": runs, "memory": memory_cells(memory)}
    leave(output, "GPUs", tables, gpus="2 H200")
    make_console().print(make_table("Predicted above measured", runs))


def predict(folder: Path) -> list[dict[str, Any]]:
    """Predict each run of a model's folder.

    In rows, `profiled_job` says whether the unit times are this very job's; errors are percent
    above what was measured, from the profile and (`by_order`) from unit times that the profiled job
    had in the same order; `timeline_error` is how far the end of a unit is off at most, in percent
    of the iteration.
    """
    profile = read_profile(folder / "profile.csv")
    runs = json.loads((folder / "measured.json").read_text())["runs"]
    first = runs[0]["num_microbatches"]
    own = {
        run["order"]: _with_times_of(run, profile)
        for run in runs
        if run["num_microbatches"] == first
    }
    return [_predicted(folder, run, first, profile, own[run["order"]]) for run in runs]


def _predicted(
    folder: Path, run: dict[str, Any], profiled: int, profile: Profile, own: Profile
) -> dict[str, Any]:
    schedule = _schedule(run)
    by_profile, by_order = _plan(schedule, profile), _plan(schedule, own)
    ends_s = np.array([stage["end_s"] for stage in run["timeline"]])
    off_s = float(np.abs(ends_s - by_order.timeline.end_s).max())
    time_s, energy_j, cost = run["iteration_time_s"], run["energy_j"], by_profile.cost
    by_order_s = by_order.cost.iteration_time_s
    return {
        "messages": folder.parent.name,
        "model": folder.name,
        "order": run["order"],
        "num_microbatches": run["num_microbatches"],
        "profiled_job": run["num_microbatches"] == profiled,
        "measured_time_s": time_s,
        "predicted_time_s": cost.iteration_time_s,
        "time_error_percent": 100 * (cost.iteration_time_s / time_s - 1),
        "predicted_time_by_order_s": by_order_s,
        "time_error_by_order_percent": 100 * (by_order_s / time_s - 1),
        "measured_energy_j": energy_j,
        "predicted_energy_j": cost.energy_j,
        "energy_error_percent": 100 * (cost.energy_j / energy_j - 1),
        "timeline_error_by_order_percent": 100 * off_s / time_s,
    }


def peaks(folder: Path) -> list[MemoryPrediction]:
    """Predict the peaks of EnvPipe's order from those of 1F1B in the profiled job."""
    data = json.loads((folder / "measured.json").read_text())
    return [
        MemoryPrediction(
            f"{folder.parent.name}/{folder.name}",
            stage,
            in_flight,
            known["baseline_peak_bytes"],
            known["baseline_peak_bytes"]
            + (in_flight - known["baseline_in_flight"]) * known["activation_bytes"],
            measured,
        )
        for run in data["runs"]
        if run["order"] == "envpipe"
        for stage, (known, in_flight, measured) in enumerate(
            zip(data["memory"], run["in_flight"], run["peak_bytes"], strict=True)
        )
    ]


def _schedule(run: dict[str, Any]) -> Schedule:
    """The order that a run had, which its recorded units confirm."""
    stages, count = len(run["timeline"]), run["num_microbatches"]
    plain = builders.one_f_one_b(stages, count)
    extra = np.subtract(run["in_flight"], plain.peak_in_flight).tolist()
    schedule = plain if run["order"] == "1f1b" else builders.envpipe(stages, count, extra)
    recorded = [stage["units"].split() for stage in run["timeline"]]
    if recorded != schedule.labels():
        raise click.ClickException(f"Recorded units of M={count} are not in order {run['order']}.")
    return schedule


def _plan(schedule: Schedule, profile: Profile) -> Plan:
    powers = profile.sidecar.wait_power_w or ()
    conditions = make_conditions(
        profile,
        blocking_power_w=[curve[max(curve)] for curve in powers],
        use=["tail"],
    )
    clocks = max_frequencies(schedule, profile)
    return Plan("baseline", schedule, clocks, profile, conditions)


def _with_times_of(run: dict[str, Any], profile: Profile) -> Profile:
    """The profile with the unit times that a run had; energies stay."""
    rows = []
    for stage, recorded in enumerate(run["timeline"]):
        time_s = np.subtract(recorded["end_s"], recorded["start_s"]).tolist()
        units = recorded["units"].split()
        for kind, letter in ((Kind.FORWARD, "F"), (Kind.BACKWARD, "B")):
            known = profile.rows[stage][kind][0]
            taken = [t for t, unit in zip(time_s, units, strict=True) if unit.startswith(letter)]
            rows.append(
                (stage, kind, ProfileRow(known.frequency_mhz, median(taken), known.energy_j))
            )
    return make_profile(rows, source=f"unit times of {run['order']}", sidecar=profile.sidecar)


if __name__ == "__main__":
    main()
