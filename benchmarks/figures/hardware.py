"""Where experiments run: on emulated GPUs, or where asked for on those of this machine."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.figures.emulation import time_factor
from benchmarks.figures.experiments import Experiment, Job, Setting
from benchmarks.figures.outcome import DRY_RUN, NO_CONTROL, Outcome
from benchmarks.figures.requests import EmulatedTime, RunRequest
from benchmarks.figures.training import ExperimentError
from benchmarks.figures.unit_times import unit_times
from envpipe_megatron.gpu.emulated.presets import load_preset

SIZES = ("paper", "reduced")
#: Measured steps of a run, as in EnvPipe's scripts.
STEPS = 30
#: The same of a job that the reduced size trains one replica of: its iterations take seconds.
REDUCED_STEPS = 10


@dataclass(frozen=True)
class Place:
    """How a figure is made.

    Args:
        size: one of `SIZES`; reduced trains one of several replicas for all, in fewer steps.
        gpus: of this machine; None emulates.
        backend: of the clocks of real GPUs.
        forward_ms: wall time of a pipeline's longest forward on emulated GPUs.
    """

    size: str
    gpus: int | None = None
    backend: str = "auto"
    forward_ms: int = 8

    @property
    def emulated(self) -> bool:
        """Whether GPUs are emulated."""
        return self.gpus is None

    def request(self, job: Job, setting: Setting) -> RunRequest:
        """What ranks are asked to do for one run of a figure."""
        steps = STEPS
        if self.size == "reduced" and job.replicas > 1:
            job = replace(job, minibatch_size=job.minibatch_size // job.replicas, replicas=1)
            steps = REDUCED_STEPS
        emulated = emulated_time(job, self.forward_ms) if self.emulated else None
        return RunRequest(job, setting, steps, emulated, self.backend)

    def check(self, experiment: Experiment) -> None:
        """Raise where a figure cannot be made here.

        Raises:
            ExperimentError: fewer GPUs than ranks.
        """
        jobs = [self.request(job, setting).job for job, setting in experiment.runs()]
        needed = max(job.stages * job.replicas for job in jobs)
        if self.gpus is not None and needed > self.gpus:
            raise ExperimentError(
                f"{experiment.name} needs {needed} GPUs at size {self.size}, PyTorch sees fewer",
                value=self.gpus,
                remedy="Give fewer stages with --stages, or leave out --real-gpus and "
                "--gpu-backend to emulate GPUs.",
            )


def hardware_of(request: RunRequest, outcome: Outcome) -> str:
    """What a run was done on, for tables and pictures."""
    if request.emulated is not None:
        preset = load_preset(request.job.gpu)
        return f"emulated {preset.gpu} ({'fitted' if preset.fitted else 'not fitted'})"
    if outcome.control in (DRY_RUN, NO_CONTROL):
        return f"{outcome.gpu} (clocks left alone, so savings mean nothing)"
    return f"{outcome.gpu} (clocks by {outcome.control})"


def emulated_time(job: Job, forward_ms: int) -> EmulatedTime:
    """Time of a job on its emulated GPU, whose longest forward has this wall time."""
    times = unit_times(job)
    factor = time_factor(times, forward_ms / 1e3)
    scaled = times.scaled(factor)
    return EmulatedTime(factor, scaled.forward_s, scaled.backward_s)
