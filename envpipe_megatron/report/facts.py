"""The figures of a report, which whoever adds up a bill hands over."""

from __future__ import annotations

from dataclasses import dataclass

from envpipe_megatron.report.bubbles import Bubbles
from envpipe_megatron.report.shares import GpuShares


@dataclass(frozen=True)
class StepFacts:
    """An average step of a phase, over all GPUs of the job.

    Args:
        name: the run and phase, for people.
        iterations: how many steps were averaged.
        energy_j: on all GPUs; None if it is not known.
        energy_uncertainty_j: standard; None if it is not known.
    """

    name: str
    iterations: int
    num_gpus: int
    time_s: float
    energy_j: float | None
    energy_uncertainty_j: float | None

    @property
    def power_w(self) -> float | None:
        """Mean power of one GPU; None of no GPUs, and of steps in which no time passed."""
        if self.energy_j is None or not self.time_s or not self.num_gpus:
            return None
        return self.energy_j / self.time_s / self.num_gpus


@dataclass(frozen=True)
class StageFacts:
    """What one stage took in a step of the steady phase, or of the baseline.

    Args:
        name: a name of the steps for people.
        energy_j: energy of a step, on the mean of the stage's GPUs.
        shares: shares of a step on the mean GPU; None without a plan that prices units.
        shares_s: seconds of a step in units, in receives, in the rest; None if not known.
    """

    name: str
    stage: int
    num_gpus: int
    energy_j: float
    shares: GpuShares | None
    shares_s: tuple[float, ...] | None


@dataclass(frozen=True)
class LevelFacts:
    """What a level is predicted to save, against the job's own order at the highest clocks."""

    level: str
    saving_percent: float
    slowdown_percent: float


@dataclass(frozen=True)
class Predicted:
    """What the levels would save.

    Args:
        waiting_power_w: of each stage's GPU in its bubbles; None if not known.
        assumed: what the prediction rests on, for people.
        lacking: what cannot be predicted, and why.
    """

    levels: tuple[LevelFacts, ...]
    waiting_power_w: tuple[float, ...] | None
    assumed: tuple[str, ...]
    lacking: tuple[str, ...] = ()


@dataclass(frozen=True)
class ReportFacts:
    """What was added up of a run.

    Args:
        phases: an average step of each run and phase.
        baseline: what is compared with; None if that is not known.
        saved: the saving with its 95 % interval, for people.
        slower: the slowdown, likewise.
        notes: what a reader of the figures must know.
        bubbles: None if no whole iteration at full clock was recorded.
        predicted: None without bubbles.
        changed_nothing: whether the run only measured, so that nothing was saved.
    """

    phases: tuple[StepFacts, ...] = ()
    baseline: StepFacts | None = None
    steady: StepFacts | None = None
    saved: str = "not known"
    slower: str = "not known"
    stages: tuple[StageFacts, ...] = ()
    notes: tuple[str, ...] = ()
    bubbles: Bubbles | None = None
    predicted: Predicted | None = None
    changed_nothing: bool = False
