"""What --log-energy prints against what EnvPipe prints of the same iterations."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from benchmarks.megatron_lm.part_ratio import arguments
from benchmarks.megatron_lm.proof_arms import ENVPIPE
from benchmarks.megatron_lm.proof_jobs import Job, Site
from benchmarks.megatron_lm.proof_state import State

PART = "energy"
TARGET = 0.01
NAME = f"{PART}/envpipe"
_LOG_INTERVAL = 10


def jobs(site: Site, iterations: int) -> list[Job]:
    """One job in EnvPipe's order."""
    energy = () if site.cpu else ("--log-energy",)  # it asks NVML
    return [
        Job(
            name=NAME,
            arguments=(*arguments(site, ENVPIPE, iterations, _LOG_INTERVAL), *energy),
            num_ranks=site.num_gpus,
            iterations=iterations,
            patched=True,
            limit_s=3600.0,
        )
    ]


@dataclass(frozen=True)
class Agreement:
    """J an iteration and GPU, over the log intervals of the run but the first.

    Args:
        megatron_j: by Megatron's monitor.
        envpipe_j: by EnvPipe's meter.
        iterations: that both cover.
        duration_s: of them.
    """

    megatron_j: float
    envpipe_j: float
    iterations: int
    duration_s: float

    @property
    def difference(self) -> float:
        """Relative."""
        return self.envpipe_j / self.megatron_j - 1


def agreement(state: State) -> Agreement | None:
    """Of the run, where it ended well and both were printed."""
    run = state.runs.get(NAME, {})
    if run.get("status") != "ok":
        return None
    # The first interval holds the start.
    lines = [line for line in run["energies"] if line["iteration"] > _LOG_INTERVAL]
    if not lines or any(line["envpipe_j"] is None for line in lines):
        return None
    return Agreement(
        statistics.fmean(line["megatron_j"] for line in lines),
        statistics.fmean(line["envpipe_j"] for line in lines),
        _LOG_INTERVAL * len(lines),
        sum(line["iteration_ms"] for line in lines) * _LOG_INTERVAL / 1e3,
    )
