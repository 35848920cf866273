"""The outcome of a run, from what its ranks measured."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from envpipe_megatron.core.plan import Plan
from envpipe_megatron.runtime.energy.log import PhaseTotals
from envpipe_megatron.runtime.job.session import SessionState

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
        ranks: Sequence[tuple[PhaseTotals, str]],
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
            iteration_time_s=max(m.duration_s / m.iterations for m in metered),
            energy_j=sum(m.energy_j / m.iterations for m in metered),
            energy_uncertainty_j=math.hypot(*(m.uncertainty_j / m.iterations for m in metered)),
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
