"""Whether a job of a closed loop grows: its memory, files and threads over 10,000 iterations.

Run from the checkout, a few minutes:

    python benchmarks/online/long.py

A GPU becomes 5 % slower and recovers again and again, so that plans are made, run, kept in the
output folder, and dropped.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

from benchmarks.online.emulated_job import EmulatedJob
from benchmarks.online.pipelines import Pipelines
from benchmarks.online.runs import slower
from benchmarks.outputs import leave, make_console, make_table, output_option
from envpipe_megatron.gpu.emulated.presets import load_preset
from envpipe_megatron.policies.request import PlanRequest
from envpipe_megatron.runtime.job.config import SessionConfig

CONFIG = SessionConfig(PlanRequest(8, schedule="auto", policy="optimal"), closed_loop=True)
STAGES = 4
#: The GPU's state changes after so many iterations.
_CHANGES_EVERY = 250


def footprints(iterations: int, every: int) -> Iterator[dict[str, Any]]:
    """What the process and the job's folder hold, each time that so many iterations have run."""
    pipelines = Pipelines(
        load_preset("a100-sxm"),
        [0.03] * STAGES,
        faults=lambda at: {(0, 1): slower(1.05)} if at // _CHANGES_EVERY % 2 else {},
    )
    with (
        TemporaryDirectory() as folder,
        EmulatedJob(pipelines, replace(CONFIG, output_dir=Path(folder))) as job,
    ):
        while pipelines.begun < iterations:
            job.run(every)
            said = [text for _, text in job.said]
            answered = sum("planning again" in text or "highest clocks" in text for text in said)
            pipelines.iterations.clear()  # these two are the benchmark's own
            job.said.clear()
            gc.collect()
            kept = list(Path(folder).iterdir())
            yield {
                "iterations": pipelines.begun,
                "changes that were answered": answered,
                "memory (MiB)": _memory_mib(),
                "objects": len(gc.get_objects()),
                "open files": len(list(Path("/proc/self/fd").iterdir())),
                "threads": threading.active_count(),
                "files in the folder": len(kept),
                "their size (KiB)": sum(file.stat().st_size for file in kept) / 1024,
            }


def _memory_mib() -> float:
    resident = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if "VmRSS" in line
    )
    return int(resident.split()[1]) / 1024


@click.command()
@click.option("--iterations", default=10_000, show_default=True)
@output_option("online")
def main(iterations: int, output: Path) -> None:
    """Run a long job and print what it holds as it goes on."""
    rows = list(footprints(iterations, every=min(2_000, iterations)))
    leave(output, {"long": rows})
    make_console().print(make_table("long", rows))


if __name__ == "__main__":
    main()
