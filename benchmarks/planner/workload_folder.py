"""Reading a workload folder: plans that ran on real GPUs, and what they took.

A folder holds `meta.json` (stages, microbatches, blocking power), `plans.json` (the clock of every
unit of every run, `{"<system>-<plan>": [{"forward": [MHz by microbatch], "backward": [...]}, ... by
stage]}`), `runs.csv` (iteration time and energy of every run) and `profile.csv` (time and energy of
a unit by clock).
"""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from envpipe_megatron.core import builders
from envpipe_megatron.core.arrays import FloatArray, IntArray
from envpipe_megatron.core.conditions import Conditions
from envpipe_megatron.core.profile import Profile, ProfileRow, make_profile, read_profile
from envpipe_megatron.core.schedule import Kind, Schedule
from envpipe_megatron.errors import EnvPipeError

FILES = ("meta.json", "plans.json", "runs.csv", "profile.csv")


class MeasuredRunsError(EnvPipeError):
    """A workload folder that is not complete or contradicts itself."""


@dataclass(frozen=True)
class MeasuredRun:
    """One plan that ran, and the means over its iterations.

    Args:
        name: `<system>-<plan>`.
        system: the planner that made the plan.
        frequency_mhz: [num_stages, units_per_stage].
        iteration_time_s: of the slowest rank.
        energy_j: of one iteration, all ranks.
        energy_by_stage_j: [num_stages] the same by stage.
    """

    name: str
    system: str
    frequency_mhz: IntArray
    iteration_time_s: float
    energy_j: float
    energy_by_stage_j: FloatArray


@dataclass(frozen=True)
class Workload:
    """A folder of measured runs.

    Args:
        name: of the folder.
        schedule: the order that all runs used.
        profile: with a row for every clock of every run.
        conditions: what is known without any fit: blocking power and GPUs of a stage.
        runs: in the file's order.
        interpolated_rows: rows of the profile that were not measured: linear in the clock between
            their neighbours.
        extended_rows: the same outside of the measured clocks: equal to the nearest row.
    """

    name: str
    schedule: Schedule
    profile: Profile
    conditions: Conditions
    runs: tuple[MeasuredRun, ...]
    interpolated_rows: int
    extended_rows: int


def read_workload(folder: Path) -> Workload:
    """Read a workload folder, and give its profile a row for every clock of every run.

    Raises:
        MeasuredRunsError: naming the file and the value that is wrong.
        ProfileError: a profile that is not readable.
    """
    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing:
        raise MeasuredRunsError(
            f"{folder} lacks files",
            value=", ".join(missing),
            remedy=f"A workload folder holds {', '.join(FILES)}.",
        )
    try:
        meta = json.loads((folder / "meta.json").read_text())
        plans = json.loads((folder / "plans.json").read_text())
        with (folder / "runs.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        if meta["schedule"] != "1f1b":
            raise MeasuredRunsError(
                f"{folder / 'meta.json'}: 'schedule' is not known",
                value=meta["schedule"],
                remedy="The runs must have used 1f1b.",
            )
        schedule = builders.one_f_one_b(int(meta["num_stages"]), int(meta["num_microbatches"]))
        runs = tuple(_parse_run(row, plans, schedule) for row in rows)
        gpus, left = divmod(int(rows[0]["ranks"]), schedule.num_stages)
        if left or not gpus:
            raise MeasuredRunsError(
                f"{folder / 'runs.csv'}: 'ranks' is no multiple of {schedule.num_stages} stages",
                value=rows[0]["ranks"],
            )
        conditions = Conditions(
            (float(meta["blocking_power_w"]),) * schedule.num_stages,
            gpus_per_stage=(gpus,) * schedule.num_stages,
        )
    except (KeyError, ValueError, TypeError, IndexError) as error:
        raise MeasuredRunsError(
            f"{folder}: a field is missing or wrong: {error!r}",
            remedy="Compare the folder with the form that this module describes.",
        ) from error
    profile, interpolated, extended = _complete(
        read_profile(folder / "profile.csv"), schedule, runs
    )
    return Workload(folder.name, schedule, profile, conditions, runs, interpolated, extended)


def _parse_run(row: dict[str, str], plans: dict[str, Any], schedule: Schedule) -> MeasuredRun:
    name = f"{row['system']}-{row['plan']}"
    clocks = plans[name]
    lengths = {len(stage[kind.value]) for stage in clocks for kind in Kind}
    if len(clocks) != schedule.num_stages or lengths != {schedule.num_microbatches}:
        raise ValueError(f"plan {name} has other stages or microbatches than meta.json")
    frequency_mhz = np.array(
        [
            [clocks[stage][unit.kind.value][unit.microbatch] for unit in order]
            for stage, order in enumerate(schedule.stages)
        ],
        dtype=np.int64,
    )
    by_stage_j = [float(row[f"energy_stage{stage}_j"]) for stage in range(schedule.num_stages)]
    return MeasuredRun(
        name,
        row["system"],
        frequency_mhz,
        float(row["iteration_time_s"]),
        float(row["energy_j"]),
        np.array(by_stage_j),
    )


def _complete(
    profile: Profile, schedule: Schedule, runs: Sequence[MeasuredRun]
) -> tuple[Profile, int, int]:
    """The profile with rows for all clocks of the runs; how many lie within and outside its own."""
    every_run_mhz = np.stack([run.frequency_mhz for run in runs])
    rows: list[tuple[int, Kind, ProfileRow]] = []
    interpolated = extended = 0
    for stage, kinds in enumerate(profile.rows):
        for kind, known in kinds.items():
            is_kind = schedule.is_backward[stage] == (kind is Kind.BACKWARD)
            clocks = [row.frequency_mhz for row in known][::-1]
            time_s = [row.time_s for row in known][::-1]
            energy_j = [row.energy_j for row in known][::-1]
            rows.extend((stage, kind, row) for row in known)
            for clock in np.setdiff1d(every_run_mhz[:, stage, is_kind], clocks).tolist():
                inside = clocks[0] < clock < clocks[-1]
                interpolated += inside
                extended += not inside
                row = ProfileRow(
                    clock,
                    float(np.interp(clock, clocks, time_s)),
                    float(np.interp(clock, clocks, energy_j)),
                )
                rows.append((stage, kind, row))
    completed = make_profile(rows, source=profile.source, sidecar=profile.sidecar)
    return completed, interpolated, extended
