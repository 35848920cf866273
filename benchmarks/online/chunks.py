"""What the closed loop saves with virtual stages: on Megatron's own order, and on any.

    python -m benchmarks.online.chunks --gpu a40

Emulated GPUs, 24 microbatches, four stages alike or not; each stage is split evenly into chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from benchmarks.online.runs import Ran, run_job
from benchmarks.outputs import make_console, make_table
from envpipe_megatron.gpu.emulated.presets import load_preset
from envpipe_megatron.policies.request import PlanRequest
from envpipe_megatron.runtime.job.config import SessionConfig

ITERATIONS, STEADY, MICROBATCHES, FORWARD_S = 110, 70, 24, 0.12
STAGES = {"even": (1.0, 1.0, 1.0, 1.0), "uneven": (1.0, 1.05, 1.0, 1.15)}


def rows(gpu: str) -> Iterator[dict[str, Any]]:
    """One for each number of chunks, kind of stages, and order that may be planned."""
    for name, shares in STAGES.items():
        one_chunk_s = 0.0
        for chunks in (1, 2, 4):
            for schedule in ("1f1b" if chunks == 1 else "interleaved", "auto"):
                ran = _run(gpu, shares, chunks, schedule)
                one_chunk_s = one_chunk_s or ran.own[-1].time_s
                yield {
                    "stages": name,
                    "chunks": chunks,
                    "own order, time against 1F1B (%)": 100
                    * (ran.own[-1].time_s / one_chunk_s - 1),
                    "planned": schedule,
                    "saved (%)": 100 * ran.saved(STEADY, ITERATIONS),
                    "longer (%)": 100 * ran.longer(STEADY, ITERATIONS),
                    "lost, in iterations": ran.lost(0, ITERATIONS),
                }


def _run(gpu: str, shares: tuple[float, ...], chunks: int, schedule: str) -> Ran:
    request = PlanRequest(MICROBATCHES, schedule, "optimal", num_chunks=chunks)
    config = SessionConfig(request, closed_loop=True)
    forward_s = [FORWARD_S * share / chunks for share in shares]
    return run_job(config, load_preset(gpu), forward_s, iterations=ITERATIONS)


@click.command()
@click.option("--gpu", default="a100-sxm", show_default=True, help="A preset.")
def main(gpu: str) -> None:
    """Print what is saved with one, two and four chunks a stage."""
    make_console().print(make_table(f"{gpu}, {MICROBATCHES} microbatches", list(rows(gpu))))


if __name__ == "__main__":
    main()
