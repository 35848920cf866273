"""What ranks are asked to train, what names it in the cache, and how what is missing is trained."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import pickle
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.figures.experiments import BASELINE, ENVELOPE, Experiment, Job, Setting
from benchmarks.figures.rows import DRY_RUN, NO_CONTROL, Outcome
from benchmarks.figures.unit_times import EmulatedTime, emulated_time, write_scaled_preset
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.gpu.presets import load_preset
from envpipe_megatron.trials.ranks import rank_environment, run_ranks

#: Counted up when the same request gives another result: what was run before is run again.
_EDITION = 2
#: Iterations before anything is measured: the first is not looked at.
WARMUP_ITERATIONS = 3
#: In a run's folder, once it is done.
RESULT_FILE = "result.json"
#: In the folder of a run that profiled.
PROFILE_FILE = "profile.csv"


@dataclass(frozen=True)
class RunRequest:
    """One run: a job trained in one setting, until `steps` iterations are measured.

    On real GPUs `emulated` is None, and the model has its full size.
    """

    job: Job
    setting: Setting
    steps: int
    emulated: EmulatedTime | None
    backend: str = "auto"

    @property
    def needs_profile(self) -> bool:
        """Whether a plan is made."""
        return self.setting != BASELINE

    @property
    def key(self) -> str:
        """What its results are found by: all of the request, and the edition."""
        job, setting = self.job, self.setting
        text = json.dumps([_EDITION, asdict(self)], sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:10]
        words = (
            job.model, job.gpu, f"m{job.num_microbatches}", f"p{job.stages}", f"d{job.replicas}",
            setting.type, setting.scheduling, setting.reconfigure, digest,
        )  # fmt: skip
        return "-".join(words)

    def profiling(self) -> RunRequest:
        """The run whose profile this one plans from, with as many microbatches as stages."""
        job = self.job
        minibatch = job.stages * job.microbatch_size * job.replicas
        return replace(self, job=replace(job, minibatch_size=minibatch), setting=ENVELOPE, steps=1)


@dataclass(frozen=True)
class Batch:
    """Runs of equal numbers of stages and replicas, for the same ranks, one after another.

    A profile comes before those who plan from it. Each run has the folder of its key in `folder`.
    """

    requests: tuple[RunRequest, ...]
    folder: Path


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
        gpus: this machine has; None emulates.
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
        """Raise EnvPipeError where there are fewer GPUs than ranks."""
        jobs = [self.request(job, setting).job for job, setting in experiment.runs()]
        needed = max(job.stages * job.replicas for job in jobs)
        if self.gpus is not None and needed > self.gpus:
            raise EnvPipeError(
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


_CHECKOUT = Path(__file__).resolve().parents[2]


def train(requests: Iterable[RunRequest], folder: Path, console: Console) -> None:
    """Do those of the runs that have no result in a folder yet, and the profiles they need.

    Raises EnvPipeError where a rank failed; runs that ended before keep their results.
    """
    wanted = list(requests)
    missing = [request for request in wanted if read_result(folder, request) is None]
    for request in wanted:
        if request not in missing:
            _say(console, f"{request.key}: done before", "dim")
    for batch in batches(missing, folder):
        _train_batch(batch, console)


def batches(requests: Sequence[RunRequest], folder: Path) -> list[Batch]:
    """The runs in the order in which ranks do them, with missing profiles before their users."""
    by_ranks: dict[tuple[int, int], list[RunRequest]] = {}
    for request in requests:
        runs = by_ranks.setdefault((request.job.stages, request.job.replicas), [])
        profiling = request.profiling()
        is_missing = request.needs_profile and read_result(folder, profiling) is None
        if is_missing and profiling not in runs:
            runs.append(profiling)
        if request not in runs:
            runs.append(request)
    return [Batch(tuple(runs), folder) for runs in by_ranks.values()]


def read_result(folder: Path, request: RunRequest) -> Outcome | None:
    """The outcome of a run; None if it did not end."""
    path = folder / request.key / RESULT_FILE
    return Outcome.read(path) if path.is_file() else None


def _train_batch(batch: Batch, console: Console) -> None:
    batch.folder.mkdir(parents=True, exist_ok=True)
    for request in batch.requests:
        run = batch.folder / request.key
        shutil.rmtree(run, ignore_errors=True)  # what was left half done would be appended to
        if request.emulated:
            write_scaled_preset(request.job.gpu, request.emulated.factor, run)
    path, log_path = batch.folder / "batch.pickle", batch.folder / "log.txt"
    path.write_bytes(pickle.dumps(batch))
    job = batch.requests[0].job
    begun = itertools.count(1)

    def take(event: dict[str, Any]) -> None:
        if event["event"] == "begun":
            _say(console, f"{next(begun)} of {len(batch.requests)}: {event['key']}")
        elif event["event"] == "say":
            _say(console, f"  {event['text']}", "dim")

    with tempfile.TemporaryDirectory() as emulated:
        run_ranks(
            job.stages * job.replicas,
            ["--module", "benchmarks.figures.worker", str(path)],
            _environment(Path(emulated)),
            log_path,
            take,
        )


def _say(console: Console, text: str, style: str | None = None) -> None:
    console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)


def _environment(emulated: Path) -> dict[str, str]:
    environment = rank_environment(emulated)
    paths = [str(_CHECKOUT), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    # On GPUs, kernels must be loaded before any receive spins, and receives need queues.
    environment.setdefault("CUDA_MODULE_LOADING", "EAGER")
    environment.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    return environment
