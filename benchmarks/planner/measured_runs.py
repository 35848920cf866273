"""Measured training runs, and what is predicted for them from their clocks alone.

A workload folder holds plans that ran on real GPUs: `meta.json` (stages, microbatches, blocking
power), `plans.json` (the clock of every unit of every run, `{"<system>-<plan>": [{"forward": [MHz
by microbatch], "backward": [...]}, ... by stage]}`), `runs.csv` (iteration time and energy of every
run) and `profile.csv` (time and energy of a unit by clock).

`validate` predicts each run with the planner's own evaluator twice: from the profile and the
blocking power beside it alone, and with what else a profiler can measure, fitted on the half of the
runs that the run is not in:

- one *tail*, the same on all stages: time of an iteration that follows no unit, hence no clock
  (optimizer, data loading). At a single number of microbatches M it looks the same as M times a
  gap between units, so it holds both;
- p2p *latency* of a boundary between stages, only where the runs demand it, see `_MIN_IMPROVEMENT`;
- *blocking power*, the same on all stages.

The profile is itself estimated from runs of the folder. In the published ones the times are means
over the runs of one system, perseus (the column `samples` counts exactly their units), which
flatters the prediction of unit times there, but neither order, waits and tail, which no row of a
profile holds, nor the runs of the other system, envpipe.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import minimize_scalar

from envpipe_megatron.core.arrays import FloatArray, IntArray
from envpipe_megatron.core.conditions import Conditions
from envpipe_megatron.core.evaluation import evaluate
from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.plan import Cost
from envpipe_megatron.core.profile import Profile, make_profile, read_profile
from envpipe_megatron.core.profile_rows import ProfileRow
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.core.timeline import Timeline


@dataclass(frozen=True)
class MeasuredRun:
    """One plan that ran, `<system>-<plan>`, and the means over its iterations.

    Clocks are [num_stages, units_per_stage].
    """

    name: str
    system: str
    frequency_mhz: IntArray
    iteration_time_s: float
    energy_j: float


@dataclass(frozen=True)
class Workload:
    """A folder of measured runs.

    Args:
        profile: with a row for every clock of every run.
        conditions: what is known without any fit: blocking power and GPUs of a stage.
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
    """Read a workload folder, and give its profile a row for every clock of every run."""
    meta = json.loads((folder / "meta.json").read_text())
    plans = json.loads((folder / "plans.json").read_text())
    with (folder / "runs.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    schedule = builders.one_f_one_b(int(meta["num_stages"]), int(meta["num_microbatches"]))
    runs = tuple(_parse_run(row, plans, schedule) for row in rows)
    conditions = Conditions(
        (float(meta["blocking_power_w"]),) * schedule.num_stages,
        gpus_per_stage=(int(rows[0]["ranks"]) // schedule.num_stages,) * schedule.num_stages,
    )
    profile, interpolated, extended = _complete(
        read_profile(folder / "profile.csv"), schedule, runs
    )
    return Workload(folder.name, schedule, profile, conditions, runs, interpolated, extended)


def _parse_run(row: dict[str, str], plans: dict[str, Any], schedule: Schedule) -> MeasuredRun:
    name = f"{row['system']}-{row['plan']}"
    clocks = plans[name]
    frequency_mhz = np.array(
        [
            [clocks[stage][unit.kind.value][unit.microbatch] for unit in order]
            for stage, order in enumerate(schedule.stages)
        ],
        dtype=np.int64,
    )
    return MeasuredRun(
        name,
        row["system"],
        frequency_mhz,
        float(row["iteration_time_s"]),
        float(row["energy_j"]),
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


#: The system whose runs the published profiles' unit times are means over.
PROFILED_SYSTEM = "perseus"
#: The longest p2p latency that is believed, s: a slow network takes a tenth of a second for a batch
#: of activations.
_LONGEST_LATENCY_S = 0.16
#: A latency is kept if it divides the mean squared error of the fitted half by this
#: (halves the root): less may be chance, and the tail alone then explains the runs well.
_MIN_IMPROVEMENT = 4.0
#: Mean squared relative error of time at which nothing is left to explain: 0.01 % of an iteration
#: is less than iterations of one run differ by.
_EXPLAINED = 1e-8


@dataclass(frozen=True)
class Prediction:
    """A run beside what was predicted for it.

    Args:
        unfitted: from profile and known blocking power alone.
        held_out: with the conditions fitted on the other half.
    """

    run: MeasuredRun
    half: int
    unfitted: Cost
    held_out: Cost

    def time_error_percent(self, cost: Cost) -> float:
        """Predicted iteration time above the measured one."""
        return 100.0 * (cost.iteration_time_s / self.run.iteration_time_s - 1.0)

    def energy_error_percent(self, cost: Cost) -> float:
        """Predicted energy above the measured one."""
        return 100.0 * (cost.energy_j / self.run.energy_j - 1.0)


@dataclass(frozen=True)
class Errors:
    """Mean absolute errors over some runs, in percent of what was measured."""

    num_runs: int
    time_unfitted: float
    time_held_out: float
    energy_unfitted: float
    energy_held_out: float
    worst_time: Prediction
    worst_energy: Prediction


@dataclass(frozen=True)
class Validation:
    """A workload, the conditions fitted on each half of its runs, and all predictions."""

    workload: Workload
    fitted: tuple[Conditions, Conditions]
    predictions: tuple[Prediction, ...]

    @property
    def errors(self) -> Errors:
        """Of all runs."""
        return errors_of(self.predictions)


def errors_of(predictions: Sequence[Prediction]) -> Errors:
    """Mean absolute errors of some predictions, at least one."""
    rows = np.array(
        [
            (
                p.time_error_percent(p.unfitted),
                p.time_error_percent(p.held_out),
                p.energy_error_percent(p.unfitted),
                p.energy_error_percent(p.held_out),
            )
            for p in predictions
        ]
    )
    time_unfitted, time_held_out, energy_unfitted, energy_held_out = np.abs(rows).mean(axis=0)
    worst_time, worst_energy = np.abs(rows[:, [1, 3]]).argmax(axis=0)
    return Errors(
        num_runs=len(rows),
        time_unfitted=float(time_unfitted),
        time_held_out=float(time_held_out),
        energy_unfitted=float(energy_unfitted),
        energy_held_out=float(energy_held_out),
        worst_time=predictions[worst_time],
        worst_energy=predictions[worst_energy],
    )


def validate(folder: Path) -> Validation:
    """Predict every run of a workload folder.

    Runs take turns in the two halves, in the order of `runs.csv`. Each half is predicted with the
    conditions that were fitted on the other, so no run has a part in its own prediction.
    """
    workload = read_workload(folder)
    halves = [workload.runs[half::2] for half in (0, 1)]
    fitted = (fit_conditions(workload, halves[0]), fit_conditions(workload, halves[1]))
    predictions = []
    for index, run in enumerate(workload.runs):
        half = index % 2
        unfitted = _predict(workload, run, workload.conditions)
        held_out = _predict(workload, run, fitted[1 - half])
        predictions.append(Prediction(run, half, unfitted, held_out))
    return Validation(workload, fitted, tuple(predictions))


def fit_conditions(workload: Workload, runs: Sequence[MeasuredRun]) -> Conditions:
    """What surrounds the units, from some runs of a workload; see the module's description.

    Times first: the tail, then, one after another, whichever latency of a single boundary explains
    most of what is left.
    """
    model = _TimeModel(workload, runs)
    stages = workload.schedule.num_stages
    latency_s: FloatArray = np.zeros(stages - 1)
    error, tail_s = model.error_and_tail(latency_s)
    while error > _EXPLAINED:
        candidates = [model.best_along(latency_s, step) for step in np.eye(stages - 1)]
        found_s = min(candidates, key=model.error_and_tail)
        found_error, found_tail_s = model.error_and_tail(found_s)
        if found_error * _MIN_IMPROVEMENT > error:
            break
        latency_s, error, tail_s = found_s, found_error, found_tail_s
    conditions = replace(
        workload.conditions,
        latency_s=tuple(latency_s.tolist()),
        tail_time_s=(tail_s,) * stages,
    )
    power_w = _fit_blocking_power_w(workload, runs, conditions)
    return replace(conditions, blocking_power_w=(power_w,) * stages)


class _TimeModel:
    """Iteration times of some runs by p2p latencies, the tail following from them."""

    def __init__(self, workload: Workload, runs: Sequence[MeasuredRun]) -> None:
        self._schedule = workload.schedule
        self._durations_s = [
            workload.profile.lookup(workload.schedule, run.frequency_mhz)[0] for run in runs
        ]
        self._measured_s = np.array([run.iteration_time_s for run in runs])

    def error_and_tail(self, latency_s: FloatArray) -> tuple[float, float]:
        """Mean squared relative error of the times, at the tail (s) that makes it least."""
        latencies_s = latency_s.tolist()
        times = [
            Timeline(self._schedule, duration_s, latencies_s).iteration_time_s
            for duration_s in self._durations_s
        ]
        weight = self._measured_s**-2.0
        lacking_s = self._measured_s - times
        tail_s = max(0.0, float(weight @ lacking_s / weight.sum()))
        return float(np.mean(weight * (lacking_s - tail_s) ** 2)), tail_s

    def best_along(self, start_s: FloatArray, step: FloatArray) -> FloatArray:
        """`start_s` plus the multiple of `step` (at most the longest latency) with least error.

        A coarse search comes before the refinement: a latency shows in the iteration time only
        once it is long enough to be on the critical path, so there is no slope to follow from 0.
        Of sizes that explain the runs equally well the smallest is taken.
        """

        def error(size_s: float) -> float:
            explained = self.error_and_tail(start_s + size_s * step)[0]
            return explained + _EXPLAINED * size_s / _LONGEST_LATENCY_S

        tried_s = [0.0, *(_LONGEST_LATENCY_S * 0.5**halvings for halvings in range(6, -1, -1))]
        best = min(range(1, len(tried_s)), key=lambda index: error(tried_s[index]))
        refined = minimize_scalar(
            error,
            bounds=(tried_s[best - 1], tried_s[min(best + 1, len(tried_s) - 1)]),
            method="bounded",
            options={"xatol": 1e-4},
        )
        return start_s + float(refined.x) * step


def _fit_blocking_power_w(
    workload: Workload, runs: Sequence[MeasuredRun], conditions: Conditions
) -> float:
    """Least squares of relative errors of energy, which is linear in the blocking power."""
    stages = workload.schedule.num_stages
    without, one_watt = (
        replace(conditions, blocking_power_w=(power_w,) * stages) for power_w in (0.0, 1.0)
    )
    measured_j = np.array([run.energy_j for run in runs])
    busy_j, with_one_watt_j = (
        np.array([_predict(workload, run, given).energy_j for run in runs])
        for given in (without, one_watt)
    )
    per_watt = (with_one_watt_j - busy_j) / measured_j
    lacking = 1.0 - busy_j / measured_j
    return max(0.0, float(per_watt @ lacking / (per_watt @ per_watt)))


def _predict(workload: Workload, run: MeasuredRun, conditions: Conditions) -> Cost:
    """Time and energy of a run as the evaluator says."""
    evaluation = evaluate(workload.schedule, run.frequency_mhz, workload.profile, conditions)
    energy_j = float(evaluation.energy_by_stage_j.sum())
    return Cost(evaluation.timeline.iteration_time_s, energy_j)
