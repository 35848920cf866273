"""What a rank is asked to train, handed over as a JSON file, and what names it in the cache."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.figures.experiments import BASELINE, ENVELOPE, Job, Setting

#: One more whenever the same request comes to something else: what was run before is run again.
_EDITION = 2
#: Iterations before anything is measured: the first is not looked at.
WARMUP_ITERATIONS = 3
#: In a run's folder, once it is done.
RESULT_FILE = "result.json"
#: In the folder of a run that profiled.
PROFILE_FILE = "profile.csv"


@dataclass(frozen=True)
class EmulatedTime:
    """How emulated GPUs pass time.

    Args:
        factor: emulated time over that of the real size.
        forward_s: of each stage at the maximum clock, with the factor.
        backward_s: likewise.
    """

    factor: float
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]

    @classmethod
    def of_json(cls, data: dict[str, Any]) -> EmulatedTime:
        """What a JSON object of the fields says."""
        return cls(data["factor"], tuple(data["forward_s"]), tuple(data["backward_s"]))


@dataclass(frozen=True)
class RunRequest:
    """One run: a job trained in one setting.

    Args:
        job: what is trained.
        setting: how.
        steps: measured iterations, behind all other phases.
        emulated: None on real GPUs, where the model has its full size.
        backend: of the clocks of real GPUs.
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
        """The run whose profile this one plans from: one for all its numbers of microbatches.

        A profile says what one forward and one backward cost, so it is made with the fewest
        microbatches, as many as stages.
        """
        job = self.job
        minibatch = job.stages * job.microbatch_size * job.replicas
        return replace(self, job=replace(job, minibatch_size=minibatch), setting=ENVELOPE, steps=1)

    def to_json(self) -> dict[str, Any]:
        """Of JSON's types."""
        return asdict(self)

    @classmethod
    def of_json(cls, data: dict[str, Any]) -> RunRequest:
        """What `to_json` gave."""
        fields = {**data, "job": Job(**data["job"]), "setting": Setting(**data["setting"])}
        if data["emulated"]:
            fields["emulated"] = EmulatedTime.of_json(data["emulated"])
        return cls(**fields)


@dataclass(frozen=True)
class Batch:
    """Runs of equal numbers of stages and replicas, which the same ranks do one after another.

    Args:
        requests: what to run, in this order; a profile before those who plan from it.
        folder: each run's files go to its own folder there, called by its key.
    """

    requests: tuple[RunRequest, ...]
    folder: Path

    def write(self, path: Path) -> None:
        """Write the JSON file that ranks read."""
        content = {
            "folder": str(self.folder),
            "requests": [request.to_json() for request in self.requests],
        }
        path.write_text(json.dumps(content, indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Batch:
        """Read the JSON file."""
        content = json.loads(path.read_text())
        requests = tuple(RunRequest.of_json(entry) for entry in content["requests"])
        return cls(requests, Path(content["folder"]))
