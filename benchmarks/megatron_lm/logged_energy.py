"""What Megatron-LM's --log-energy prints against what EnvPipe prints of the same iterations."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.megatron_lm import ratio
from benchmarks.megatron_lm.models import ENVPIPE
from benchmarks.megatron_lm.running.jobs import Job, Site, State

RUN = "energy/envpipe"
TARGET_PERCENT = 1.0


def jobs(site: Site, iterations: int) -> list[Job]:
    """One job in EnvPipe's order."""
    energy = "" if site.cpu else "--log-energy"  # it asks NVML
    return [ratio.job_of(site, ratio.setting(site), RUN, ENVPIPE, iterations, (), energy)]


def rows(state: State) -> list[dict[str, Any]]:
    """J an iteration and GPU as both print it, over the log intervals of the run but the first.

    None where the run did not end well, or one of both was not printed.
    """
    run = state.runs.get(RUN, {})
    if run.get("status") != "ok":
        return []
    # The first interval holds the start.
    lines = [line for line in run["energies"] if line["iteration"] > ratio.LOG_INTERVAL]
    if not lines or any(line["envpipe_j"] is None for line in lines):
        return []
    megatron_j, envpipe_j = (
        statistics.fmean(line[name] for line in lines) for name in ("megatron_j", "envpipe_j")
    )
    duration_s = sum(line["iteration_ms"] for line in lines) * ratio.LOG_INTERVAL / 1e3
    percent = 100 * (envpipe_j / megatron_j - 1)
    return [
        {
            "Megatron (J)": megatron_j,
            "EnvPipe (J)": envpipe_j,
            "difference (%)": percent,
            "iterations": ratio.LOG_INTERVAL * len(lines),
            "duration (s)": duration_s,
            "target met": abs(percent) <= TARGET_PERCENT and duration_s >= 20,
        }
    ]
