"""The outcomes of a figure's runs, and as rows: EnvPipe's columns, then ours."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.figures.experiments import BASELINE, Job, Setting
from envpipe_megatron.core.plan import Plan
from envpipe_megatron.formats.energy_sums import EnergySums
from envpipe_megatron.runtime.job.parts import SessionState

#: A back end that changes no clock, and the name of none.
DRY_RUN, NO_CONTROL = "dry_run", "none"
EMULATED = "emulated"


@dataclass(frozen=True)
class PlanFacts:
    """What the plan says that was trained with."""

    extra_forwards: list[int]
    peak_in_flight: list[int]
    predicted_saving_percent: float
    predicted_slowdown_percent: float

    @classmethod
    def of(cls, plan: Plan) -> PlanFacts:
        """Take them from a plan."""
        cost, baseline = plan.cost, plan.baseline.cost
        return cls(
            list(plan.schedule.extra_forwards),
            list(plan.schedule.peak_in_flight),
            cost.saving_percent(baseline),
            cost.slowdown_percent(baseline),
        )


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run; emulated times include the factor.

    Args:
        losses: [iterations][microbatches].
        iteration_time_s: mean over the measured steps, of the slowest GPU.
        energy_j: of all GPUs, mean over the measured steps.
        reconfigure_ended: why; empty without reconfiguring.
        plan: None for a baseline.
    """

    gpu: str
    control: str
    iterations: int
    losses: list[list[float]]
    iteration_time_s: float
    energy_j: float
    energy_uncertainty_j: float
    reconfigure_steps: int
    reconfigure_ended: str
    notes: list[str]
    plan: PlanFacts | None

    @classmethod
    def of_ranks(
        cls,
        ranks: Sequence[tuple[EnergySums, str]],
        losses: list[list[float]],
        state: SessionState,
        gpu: str,
        control: str,
    ) -> Outcome:
        """Put together what ranks metered, and any error of clocks."""
        metered, clock_errors = zip(*ranks, strict=True)
        ended = state.reconfigure_ended
        return cls(
            gpu=gpu,
            control=control,
            iterations=len(losses),
            losses=losses,
            iteration_time_s=max(m.duration_s / m.steps for m in metered),
            energy_j=sum(m.energy_j / m.steps for m in metered),
            energy_uncertainty_j=math.hypot(
                *((m.energy_uncertainty_j or 0.0) / m.steps for m in metered)
            ),
            reconfigure_steps=state.reconfigure_steps,
            reconfigure_ended=ended.value if ended else "",
            notes=[*state.notes, *filter(None, clock_errors)],
            plan=None if state.plan is None else PlanFacts.of(state.plan),
        )

    def write(self, path: Path) -> None:
        """Write the JSON file, whole or not at all: its being there means that the run is done."""
        part = path.with_suffix(".part")
        part.write_text(json.dumps(asdict(self)) + "\n")
        part.rename(path)

    @classmethod
    def read(cls, path: Path) -> Outcome:
        """Read the JSON file."""
        content = json.loads(path.read_text())
        plan = content.pop("plan")
        return cls(**content, plan=PlanFacts(**plan) if plan else None)


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
        """Return the columns of its row of evidence."""
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
