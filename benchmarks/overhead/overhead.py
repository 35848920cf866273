"""What EnvPipe's own machinery costs.

    python benchmarks/overhead/overhead.py

- training thread: what the calls around one unit take, with clocks, without, and with messages;
- log line: what ranks exchange then, against a gather of every rank's objects to every rank;
- iteration: time over that of megatron-core's own 1F1B, in turns, on two CPU ranks over gloo;
- logs: bytes of an iteration;
- planning: time of one plan.

All on CPU, in about two minutes on a quiet machine of two cores. `gpu/control.py` and
`gpu/schedules.py` measure the same on GPUs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

import click
from rich.console import Console

from benchmarks.outputs import PERSEUS_DATA, Claim, leave, make_console, make_table, output_option
from benchmarks.overhead.measures import (
    Measure,
    iteration_measures,
    log_line_measures,
    log_measures,
    message_measure,
    planning_measures,
    thread_measures,
)
from benchmarks.planner.workloads import Workload, preset_workload, read_workloads

#: The pipeline that is planned: 8 stages, 96 microbatches.
KEY = "gpt3-175b_a100_sxm_mb96"
#: Where nobody has measured a profile: stages and microbatches of the same size.
_STAGES, _MICROBATCHES = 8, 96
#: More ranks than two would share the two cores of a small machine, and measure each other.
NUM_RANKS = 2
#: Of the jobs whose log lines are measured, which wait for cores as well as for each other.
LOG_LINE_RANKS = (8, 16, 32, 64)
COMMAND = "python benchmarks/overhead/overhead.py"
#: Each part, and how its claim begins.
SENTENCES = {
    "training thread": "The calls around a unit take the training thread, median and p99: ",
    "log line": "What ranks exchange at a log line takes, median and p99: ",
    "iteration": "Time of an iteration over megatron-core's own 1F1B, median and 95 %: ",
    "logs": "Logs take on disk: ",
    "planning": "One plan takes: ",
}


@click.command()
@click.option("--seconds", default=3.0, show_default=True, help="For each line of the thread.")
@output_option("overhead")
def main(seconds: float, output: Path) -> None:
    """Measure what EnvPipe's machinery costs on this machine's CPU."""
    console = make_console()
    load = os.getloadavg()[0]
    measures = []
    for measure in _measured(seconds, console):
        measures.append(measure)
        console.print(f"{measure.part}: {measure.what}: {measure.median:.4g} {measure.unit}")
    measures.sort(key=lambda measure: list(SENTENCES).index(measure.part))
    basis = f"measured on {os.cpu_count()} CPU cores, load average {load:.1f} at the start"
    rows = [asdict(measure) for measure in measures]
    console.print(make_table(f"Overhead, {basis}", rows))
    tables = {"overhead": ({**row, "basis": basis} for row in rows)}
    leave(output, tables, claims(measures, basis))


def _measured(seconds: float, console: Console) -> Iterator[Measure]:
    """All measures, one part after the other: they would disturb each other."""
    from rank_pool import RankPool  # type: ignore[import-not-found]  # of tests/

    yield from thread_measures(seconds)
    yield from planning_measures(_workload())
    for ranks in LOG_LINE_RANKS:
        with RankPool(ranks, timeout_s=300) as pool:
            yield from log_line_measures(pool)
    with RankPool(NUM_RANKS) as pool:
        yield message_measure(pool, seconds)
        yield from log_measures(pool)
        if find_spec("megatron") is None:
            console.print("The ratio is left out: megatron-core is not installed.")
        else:
            yield from iteration_measures(pool)


def _workload() -> Workload:
    if PERSEUS_DATA.is_dir():
        return next(workload for workload in read_workloads(PERSEUS_DATA) if workload.key == KEY)
    return preset_workload(_STAGES, _MICROBATCHES)


def claims(measures: Sequence[Measure], basis: str) -> list[Claim]:
    """One claim for each part that was measured."""
    return [
        Claim(
            "overhead",
            COMMAND,
            sentence + "; ".join(f"{m.what} {_figures(m)}" for m in found),
            basis,
        )
        for part, sentence in SENTENCES.items()
        if (found := [m for m in measures if m.part == part])
    ]


def _figures(measure: Measure) -> str:
    if measure.low is not None and measure.high is not None:
        return f"{measure.median:.3f} ({measure.low:.3f} to {measure.high:.3f})"
    second = "" if measure.p99 is None else f" and {measure.p99:.3g}"
    return f"{measure.median:.3g}{second} {measure.unit}"


if __name__ == "__main__":
    main()
