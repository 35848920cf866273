"""Every measurement of the overhead as rows of one form."""

from __future__ import annotations

import tempfile
import time
import timeit
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import torch

from benchmarks.overhead import host
from benchmarks.overhead.host import OPTIONS, compare_schedules
from benchmarks.overhead.trigger_latency import StandIn, measure
from benchmarks.planner.workloads import Workload
from envpipe_megatron.gpu.clock.controller import SWITCH_INTERVAL_S, spread
from envpipe_megatron.policies.planner import make_plan

if TYPE_CHECKING:
    from rank_pool import RankPool  # type: ignore[import-not-found]  # of tests/

#: Of each job whose log lines are measured, and how many lines.
LOG_LINE_STAGES, LOG_LINES = 8, 20
_USUAL_INTERVAL_S = 5e-3


_LOOK_S = 2e-4
#: Width of a matrix whose product takes about a millisecond on a core.
_MATRIX = 256


class _Waiting(StandIn):
    """The training thread sleeps between launches: it waits for a neighbour."""

    def launch(self, position: int) -> None:
        time.sleep(0.9 * self.UNIT_S)

    def end_iteration(self) -> list[float]:
        while not self.end_ns(self._count - 1):
            time.sleep(_LOOK_S)
        return [float(self.end_ns(unit)) for unit in range(self._first, self._count)]


class _Computing(_Waiting):
    """The training thread is inside torch, which gives up the interpreter lock."""

    def __init__(self) -> None:
        super().__init__()
        self._matrix = torch.randn(_MATRIX, _MATRIX)

    def launch(self, position: int) -> None:
        end_s = time.perf_counter() + 0.9 * self.UNIT_S
        while time.perf_counter() < end_s:
            self._matrix @ self._matrix


#: What the training thread does, in words, and a stand-in for the GPU beside such a thread.
THREADS: dict[str, Callable[[], StandIn]] = {
    "waits": _Waiting,
    "is inside torch": _Computing,
    "runs pure Python": StandIn,
}


def measure_latency(
    thread: str, switch_interval_s: float, seconds: float
) -> dict[str, float] | None:
    """Units for some time beside one kind of training thread, a key of `THREADS`.

    Gives `median`, `p99`, `max` (microseconds from a unit's end to the driver's call) and `count`;
    None where the machine was too busy to answer any request in that time.
    """
    torch.set_num_threads(1)  # as in a rank: more would compete with the controller for cores
    found = measure(THREADS[thread](), switch_interval_s, seconds)["trigger_us"]
    return found if found["count"] else None


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


def controller_measures(seconds: float) -> Iterator[Measure]:
    """From a unit's end to the driver's call; pure Python also at Python's own switch interval."""
    settings = [(thread, SWITCH_INTERVAL_S) for thread in THREADS]
    settings.append(("runs pure Python", _USUAL_INTERVAL_S))
    for thread, interval_s in settings:
        latency = measure_latency(thread, interval_s, seconds)
        if latency is None:
            continue
        what = f"training thread {thread}"
        if interval_s != SWITCH_INTERVAL_S:
            what += f", switch interval {1e3 * interval_s:g} ms"
        yield _spread_measure("controller", what, "us after a unit's end", latency)


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
