"""The outcomes of a figure's runs as rows: EnvPipe's columns, then ours."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from benchmarks.figures.experiments import BASELINE, Job, Setting
from benchmarks.figures.outcome import EMULATED, Outcome


@dataclass(frozen=True)
class Row:
    """One run beside the baseline of its job, in seconds and joules of the real size.

    Args:
        job: as the paper has it, with all its replicas.
        factor: emulated over real time; 1 on real GPUs.
        replicas_run: replicas that were trained; energy and throughput are for all of the job's.
        profile: the file that its plan was made from, if any.
    """

    job: Job
    setting: Setting
    hardware: str
    factor: float
    steps: int
    replicas_run: int
    result: Outcome
    baseline: Outcome
    profile: Path | None

    @property
    def emulated(self) -> bool:
        """Whether it ran on emulated GPUs."""
        return self.result.control == EMULATED

    @property
    def iteration_time_s(self) -> float:
        """Of the real size."""
        return self.result.iteration_time_s / self.factor

    @property
    def energy_j(self) -> float:
        """Of all GPUs in one iteration of the real size."""
        replicas = self.job.replicas / self.replicas_run
        return self.result.energy_j / self.factor * replicas

    @property
    def throughput(self) -> float:
        """Samples/s of all replicas."""
        return self.job.minibatch_size / self.iteration_time_s

    @property
    def saving_percent(self) -> float:
        """Energy saved against the baseline."""
        return 100 * (1 - self.result.energy_j / self.baseline.energy_j)

    @property
    def saving_uncertainty_percent(self) -> float:
        """Standard uncertainty of the saving as the meters say, in percentage points."""
        if self.setting == BASELINE:
            return 0.0
        ratio = self.result.energy_j / self.baseline.energy_j
        errors_j = (self.result.energy_uncertainty_j, ratio * self.baseline.energy_uncertainty_j)
        return 100 * math.hypot(*errors_j) / self.baseline.energy_j

    @property
    def slowdown_percent(self) -> float:
        """Time lost against the baseline."""
        ratio = self.result.iteration_time_s / self.baseline.iteration_time_s
        return 100 * (ratio - 1)

    @property
    def losses_equal(self) -> bool:
        """Whether all losses are the baseline's to the last bit, as far as both went."""
        mine, other = self.result.losses, self.baseline.losses
        common = min(len(mine), len(other))
        return common > 0 and mine[:common] == other[:common]

    @property
    def peak_in_flight(self) -> list[int]:
        """Of each stage."""
        job = self.job
        of_1f1b = [min(job.num_microbatches, job.stages - stage) for stage in range(job.stages)]
        return self.result.plan.peak_in_flight if self.result.plan else of_1f1b

    def columns(self) -> dict[str, object]:
        """The CSV's cells."""
        job, setting, result, plan = self.job, self.setting, self.result, self.result.plan
        several = {"DP": job.replicas, "PP": job.stages} if job.replicas > 1 else {}
        return {
            **several,
            "Model": job.model,
            "Microbatch size": job.microbatch_size,
            "Minibatch size": job.minibatch_size,
            "Type": setting.type,
            "Scheduling": setting.scheduling,
            "Reconfig": setting.reconfigure,
            "Throughput (sample/s)": round(self.throughput, 3),
            "Energy (mJ)": round(1e3 * self.energy_j, 3),
            "Iteration time (s)": self.iteration_time_s,
            "Saving (%)": self.saving_percent,
            "Saving uncertainty (%)": self.saving_uncertainty_percent,
            "Slowdown (%)": self.slowdown_percent,
            "Predicted saving (%)": plan.predicted_saving_percent if plan else "",
            "Predicted slowdown (%)": plan.predicted_slowdown_percent if plan else "",
            "Energy uncertainty (%)": 100 * result.energy_uncertainty_j / result.energy_j,
            "Iterations": result.iterations,
            "Measured steps": self.steps,
            "Microbatches": job.num_microbatches,
            "Stages": job.stages,
            "Extra forwards": _list(plan.extra_forwards if plan else [0] * job.stages),
            "Peak in flight": _list(self.peak_in_flight),
            "Reconfigure steps": result.reconfigure_steps,
            "Reconfiguring ended": result.reconfigure_ended,
            "Losses equal baseline's": "yes" if self.losses_equal else "no",
            "Hardware": self.hardware,
            "Time scale": self.factor,
            "Replicas run": self.replicas_run,
        }


def _list(numbers: list[int]) -> str:
    return " ".join(map(str, numbers))


def of_setting(rows: list[Row], setting: Setting) -> list[Row]:
    """The rows of one setting, in the order of their jobs."""
    return [row for row in rows if row.setting == setting]


def savers(rows: list[Row]) -> list[Row]:
    """All but the baselines."""
    return [row for row in rows if row.setting != BASELINE]


def saving_difference(row: Row, other: Row) -> tuple[float, float]:
    """How much more a run saves than another, and the standard uncertainty, in percentage points.

    A baseline that both have counts once: its error moves both savings alike.
    """
    difference = row.saving_percent - other.saving_percent
    if row.baseline != other.baseline:
        errors = (row.saving_uncertainty_percent, other.saving_uncertainty_percent)
        return difference, math.hypot(*errors)
    shared = row.baseline
    errors_j = (
        row.result.energy_uncertainty_j,
        other.result.energy_uncertainty_j,
        difference / 100 * shared.energy_uncertainty_j,
    )
    return difference, 100 * math.hypot(*errors_j) / shared.energy_j
