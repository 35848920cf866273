"""What EnvPipe's own machinery costs.

    python benchmarks/overhead/overhead.py

- training thread: what the calls around one unit take, with clocks, without, and with messages;
- iteration: time over that of megatron-core's own 1F1B, in turns, on two CPU ranks over gloo;
- logs: bytes of an iteration;
- planning: time of one plan.

All on CPU, in about two minutes on a quiet machine of two cores. `gpu/unit_cost.py` and
`gpu/schedules.py` measure the same on GPUs.
"""

from __future__ import annotations

import os
import tempfile
import timeit
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console

from benchmarks.outputs import PERSEUS_DATA, leave, make_console, make_table, output_option
from benchmarks.overhead import host
from benchmarks.overhead.host import OPTIONS, compare_schedules
from benchmarks.planner.workloads import Workload, preset_workload, read_workloads
from envpipe_megatron.gpu.clock.controller import spread
from envpipe_megatron.policies.planner import make_plan

if TYPE_CHECKING:
    from rank_pool import RankPool  # of tests/helpers

#: The pipeline that is planned: 8 stages, 96 microbatches.
KEY = "gpt3-175b_a100_sxm_mb96"
#: Where nobody has measured a profile: stages and microbatches of the same size.
_STAGES, _MICROBATCHES = 8, 96
#: More ranks than two would share the two cores of a small machine, and measure each other.
NUM_RANKS = 2


@dataclass(frozen=True)
class Measure:
    """One thing that was measured; `low` and `high` are of a 95 % interval of the median."""

    part: str
    what: str
    unit: str
    median: float
    p99: float | None = None
    low: float | None = None
    high: float | None = None
    count: int = 1


def _spread_measure(part: str, what: str, unit: str, found: Mapping[str, float]) -> Measure:
    return Measure(part, what, unit, found["median"], found["p99"], count=int(found["count"]))


def thread_measures(seconds: float) -> Iterator[Measure]:
    """What the calls around a unit take the training thread."""
    for clocks, what in ((False, "without clock requests"), (True, "each unit asks for a clock")):
        costs = spread(ns / 1e3 for ns in host.thread_costs_ns(seconds, clocks=clocks))
        yield _spread_measure("training thread", what, "us a unit", costs)


def message_measure(pool: RankPool, seconds: float) -> Measure:
    """What a unit that does nothing takes in a pipeline, its message included."""
    by_rank = pool.run(host.pipeline_unit_s, seconds)
    times = spread(1e6 * max(of_ranks) for of_ranks in zip(*by_rank, strict=True))
    what = f"empty units with clocks and messages, {pool.size} gloo ranks"
    return _spread_measure("training thread", what, "us a unit", times)


def iteration_measures(pool: RankPool) -> Iterator[Measure]:
    """Time of an iteration against megatron-core's own 1F1B, and whether results are equal."""
    for name, found in pool.run(compare_schedules)[0].items():
        if not name.startswith("interpreter "):
            continue
        equal = "equal to the last bit" if found["bit_equal"] else "NOT EQUAL"
        low, high = found["time_ratio_95_percent"]
        yield Measure(
            "iteration", f"{name.removeprefix('interpreter ')}, {equal}", "of megatron-core's time",
            found["time_ratio"], low=low, high=high, count=OPTIONS["blocks"],
        )  # fmt: skip


def log_measures(pool: RankPool) -> Iterator[Measure]:
    """Bytes that the logs of a rank grow by in an iteration."""
    with tempfile.TemporaryDirectory() as folder:
        grown, iteration_time_s = pool.run(host.leave_logs, Path(folder))[0]
    for name, size in grown.items():
        what = f"{name}, iterations of {iteration_time_s:.1f} s"
        per_rank = size / host.MEASURED / pool.size
        yield Measure("logs", what, "bytes a rank and iteration", per_rank, count=host.MEASURED)


def planning_measures(workload: Workload) -> Iterator[Measure]:
    """Wall time of one plan of a workload, by order."""
    make_plan(workload.profile, workload.request("1f1b", "optimal"))  # loads the solver
    for order in ("1f1b", "envpipe", "auto"):
        request = workload.request(order, "optimal")
        seconds = timeit.timeit(partial(make_plan, workload.profile, request), number=1)
        what = f"optimal on {order}, {workload.profile.num_stages} x {workload.num_microbatches}"
        yield Measure("planning", what, "s", seconds)


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
    basis = f"measured on {os.cpu_count()} CPU cores, load average {load:.1f} at the start"
    rows = [asdict(measure) for measure in measures]
    console.print(make_table(f"Overhead, {basis}", rows))
    tables = {"overhead": ({**row, "basis": basis} for row in rows)}
    leave(output, "CPU", tables)


def _measured(seconds: float, console: Console) -> Iterator[Measure]:
    """All measures, one part after the other: they would disturb each other."""
    from rank_pool import RankPool

    yield from thread_measures(seconds)
    yield from planning_measures(_workload())
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


if __name__ == "__main__":
    main()
