"""Where experiments run: on this machine's GPUs, or on emulated ones where there are none."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from envpipe_megatron.gpu.presets import load_preset
from figures.emulation import time_factor
from figures.experiments import Experiment, Job, Setting
from figures.outcome import DRY_RUN, NO_CONTROL, Outcome
from figures.requests import EmulatedTime, RunRequest
from figures.training import ExperimentError
from figures.unit_times import unit_times

#: Measured steps of a run: of EnvPipe's scripts, and enough where time is emulated.
STEPS = {"paper": 30, "reduced": 10}


@dataclass(frozen=True)
class Place:
    """How a figure is made.

    Args:
        size: one of `STEPS`; reduced trains one replica for all.
        gpus: of this machine; 0 emulates.
        backend: of the clocks of real GPUs.
    """

    size: str
    gpus: int
    backend: str

    @property
    def emulated(self) -> bool:
        """Whether GPUs are emulated."""
        return self.gpus == 0

    def request(self, job: Job, setting: Setting) -> RunRequest:
        """What ranks are asked to do for one run of a figure."""
        if self.size == "reduced":
            job = replace(job, minibatch_size=job.minibatch_size // job.replicas, replicas=1)
        emulated = emulated_time(job) if self.emulated else None
        return RunRequest(job, setting, STEPS[self.size], emulated, self.backend)

    def check(self, experiment: Experiment) -> None:
        """Raise where a figure cannot be made here.

        Raises:
            ExperimentError: fewer GPUs than ranks.
        """
        jobs = [self.request(job, setting).job for job, setting in experiment.runs()]
        needed = max(job.stages * job.replicas for job in jobs)
        if not self.emulated and needed > self.gpus:
            raise ExperimentError(
                f"{experiment.name} needs {needed} GPUs at size {self.size}",
                value=self.gpus,
                remedy="Give fewer stages with --stages, or emulate with CUDA_VISIBLE_DEVICES=''.",
            )


def hardware_of(request: RunRequest, outcome: Outcome) -> str:
    """What a run was done on, for tables and pictures."""
    if request.emulated is not None:
        preset = load_preset(request.job.gpu)
        return f"emulated {preset.gpu} ({'fitted' if preset.fitted else 'not fitted'})"
    if outcome.control in (DRY_RUN, NO_CONTROL):
        return f"{outcome.gpu} (clocks left alone, so savings mean nothing)"
    return f"{outcome.gpu} (clocks by {outcome.control})"


def find_place(size: str, backend: str) -> Place:
    """The place that this machine offers."""
    return Place(size, torch.cuda.device_count() if torch.cuda.is_available() else 0, backend)


def emulated_time(job: Job) -> EmulatedTime:
    """Time of a job on its emulated GPU."""
    times = unit_times(job)
    factor = time_factor(times)
    scaled = times.scaled(factor)
    return EmulatedTime(factor, scaled.forward_s, scaled.backward_s)
