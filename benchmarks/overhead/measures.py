"""Every measurement of the overhead as rows of one form."""

from __future__ import annotations

import tempfile
import timeit
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.overhead import host
from benchmarks.overhead.host import OPTIONS, compare_schedules
from benchmarks.planner.workloads import Workload
from envpipe_megatron.gpu.clock.controller import spread
from envpipe_megatron.policies.planner import make_plan

if TYPE_CHECKING:
    from rank_pool import RankPool  # type: ignore[import-not-found]  # of tests/

#: Of each job whose log lines are measured, and how many lines.
LOG_LINE_STAGES, LOG_LINES = 8, 20


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


def log_line_measures(pool: RankPool) -> Iterator[Measure]:
    """What ranks exchange at a log line, against a gather of all objects to all."""
    stages = min(pool.size, LOG_LINE_STAGES)
    for of_all, what in ((True, "all objects to all ranks"), (False, "sums in trees")):
        log_line = partial(host.log_line_s, of_all=of_all)
        by_rank = pool.run(log_line, stages, LOG_LINES)
        wall = spread(1e3 * max(s for s, _ in lines) for lines in zip(*by_rank, strict=True))
        cpu_ms = median(1e3 * cpu_s for lines in by_rank for _, cpu_s in lines)
        where = f"{what}, {pool.size} ranks"
        yield _spread_measure("log line", where, "ms", wall)
        yield Measure("log line", where, "ms of a rank's CPU", cpu_ms, count=int(wall["count"]))


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
