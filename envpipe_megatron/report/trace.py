"""A run as a trace for ui.perfetto.dev and chrome://tracing, in the Trace Event Format's JSON.

Each GPU is a process: its units are slices of one thread, and its clock and power are counters. One
more process has the job's phases and iterations, as the lowest rank saw them. Instants are
microseconds after the first one in the trace. The power is the mean of each window of the energy
log, which is much longer than a unit.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby
from pathlib import Path

import numpy as np

from envpipe_megatron.files import written_beside
from envpipe_megatron.formats.energy import EnergyWindow
from envpipe_megatron.formats.timeline import (
    ClockSamples,
    GpuLabels,
    RankIteration,
    TimelineLogs,
    parse_order,
)
from envpipe_megatron.report.pipelines import (
    IterationKey,
    by_iteration,
    kept_iterations,
    node_offsets_s,
)

#: Viewers hold a trace in the browser's memory. Of more units, whole iterations are left out.
MAX_UNITS = 1_000_000

_JOB, _UNITS, _PHASES, _ITERATIONS = 0, 1, 1, 2
_FASTEST_COMPRESSION = 1
_NEXT = ",\n"  # every event follows another one

#: An instant of a node in a start of the job, in microseconds of the trace.
_Axis = Callable[[GpuLabels | EnergyWindow, float], int]


@dataclass(frozen=True)
class TraceFacts:
    """Counts of a trace.

    Args:
        iterations: iterations of the job whose units are in the trace.
        recorded: iterations of the job that were recorded.
        overlapping: iterations of a rank that are left out since they overlap its others, as after
            a restart of the machine, whose clock starts again.
    """

    units: int
    iterations: int
    recorded: int
    overlapping: int


def write_trace(
    path: Path,
    timelines: TimelineLogs,
    windows: Sequence[EnergyWindow],
    *,
    dry_run: bool = False,
    max_units: int = MAX_UNITS,
) -> TraceFacts:
    """Write a trace, compressed by gzip, as both viewers take it.

    Where more than `max_units` units were recorded, those of every n-th iteration of each phase are
    written, the same ones of all GPUs. The clocks of a dry run, which sets none, are called so.
    """
    kept = set(kept_iterations(by_iteration(timelines.iterations), max_units))
    gpus, axis = _gpus(timelines, windows), _axis(timelines, windows)
    units = 0
    with (
        written_beside(path) as draft,
        gzip.open(draft, "wt", compresslevel=_FASTEST_COMPRESSION, encoding="utf-8") as file,
    ):
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        file.write(_named(_JOB, 0, "process_name", "job").removeprefix(_NEXT))
        file.writelines(_job_events(gpus, axis))
        for pid, gpu in enumerate(gpus, start=1):
            file.write(_named(pid, 0, "process_name", gpu.name))
            file.write(_event("M", pid, "process_sort_index", tid=0, args={"sort_index": pid}))
            file.write(_named(pid, _UNITS, "thread_name", "units"))
            end_us = 0
            for read in gpu.iterations:
                if _iteration_of(read) in kept:
                    begin_us = max(end_us, axis(read.labels, read.begin_s))
                    file.write(_unit_events(pid, read, begin_us))
                    end_us = begin_us + int(read.end_us[-1])
                    units += len(read.start_us)
            file.writelines(_counters(pid, gpu, axis, dry_run=dry_run))
        file.write("\n]}\n")
    there = {_iteration_of(read) for gpu in gpus for read in gpu.iterations}
    overlapping = len(timelines.iterations) - sum(len(gpu.iterations) for gpu in gpus)
    return TraceFacts(units, len(kept & there), len(there), overlapping)


@dataclass
class _GpuRecords:
    """Records of one GPU, in the order of time."""

    name: str
    rank: float
    iterations: list[RankIteration] = field(default_factory=list)
    clocks: list[ClockSamples] = field(default_factory=list)
    windows: list[EnergyWindow] = field(default_factory=list)


def _gpus(timelines: TimelineLogs, windows: Sequence[EnergyWindow]) -> list[_GpuRecords]:
    """Return GPUs in the order of their ranks; those that are only metered come last."""
    gpus: dict[tuple[str, str], _GpuRecords] = {}

    def of(line: GpuLabels | EnergyWindow) -> _GpuRecords:
        rank = f"stage {line.stage} · rank {line.rank}"
        name = f"{line.node} · {line.gpu_uid if line.rank is None else rank} · {line.gpu}"
        place = math.inf if line.rank is None else line.rank
        return gpus.setdefault((line.node, line.gpu_uid), _GpuRecords(name, place))

    for read in sorted(timelines.iterations, key=lambda read: read.begin_s):
        own = of(read.labels).iterations
        end_s = own[-1].begin_s + 1e-6 * float(own[-1].end_us[-1]) if own else -math.inf
        if read.begin_s >= end_s - 1e-6:  # both ends are rounded to microseconds
            own.append(read)
    for samples in timelines.clocks:
        of(samples.labels).clocks.append(samples)
    for window in windows:
        of(window).windows.append(window)
    return sorted(gpus.values(), key=lambda gpu: gpu.rank)


def _axis(timelines: TimelineLogs, windows: Sequence[EnergyWindow]) -> _Axis:
    """Return the trace's time: microseconds after the first instant, on all nodes."""
    offsets_s = node_offsets_s(timelines.iterations)

    def common_s(whose: GpuLabels | EnergyWindow, instant_s: float) -> float:
        return instant_s - offsets_s.get((whose.run, whose.node), 0.0)

    instants = [common_s(read.labels, read.begin_s) for read in timelines.iterations]
    instants += [common_s(each, each.begin_s) for each in windows if each.begin_s is not None]
    instants += [common_s(read.labels, min(read.time_s)) for read in timelines.clocks]
    first_s = min(instants, default=0.0)
    return lambda whose, instant_s: round(1e6 * (common_s(whose, instant_s) - first_s))


def _iteration_of(read: RankIteration) -> IterationKey:
    return read.phase, read.iteration


def _event(shape: str, pid: int, name: str, **fields: object) -> str:
    return _NEXT + json.dumps({"ph": shape, "pid": pid, "name": name, **fields})


def _named(pid: int, tid: int, kind: str, name: str) -> str:
    return _event("M", pid, kind, tid=tid, args={"name": name})


def _job_events(gpus: Sequence[_GpuRecords], axis: _Axis) -> Iterator[str]:
    """Yield phases and iterations, as the first GPU that recorded any saw them."""
    recorded = next((gpu.iterations for gpu in gpus if gpu.iterations), [])
    for tid, thread in (_PHASES, "phases"), (_ITERATIONS, "iterations"):
        if recorded:
            yield _named(_JOB, tid, "thread_name", thread)
        named = [(read.phase if tid == _PHASES else read.iteration, read) for read in recorded]
        end_us = 0
        for name, group in groupby(named, lambda each: f"{each[1].labels.run} {each[0]}".strip()):
            members = [read for _, read in group]
            first, last = members[0], members[-1]
            begin_us = max(end_us, axis(first.labels, first.begin_s))
            end_us = max(begin_us, axis(last.labels, last.begin_s + last.iteration_time_s))
            yield _event(
                "X", _JOB, name, tid=tid, ts=begin_us, dur=end_us - begin_us, cat=first.phase,
                args={"first": first.iteration, "last": last.iteration},
            )  # fmt: skip


@lru_cache(maxsize=256)
def _unit_template(order: str, phase: str, clocked: bool) -> str:
    """Return events of an iteration's units, with places for pid, begin, time, MHz, iteration."""
    clock = '"MHz":%d,' if clocked else ""
    category = json.dumps(phase).replace("%", "%%")
    return "".join(
        f'{_NEXT}{{"ph":"X","pid":%d,"tid":{_UNITS},"ts":%d,"dur":%d,"name":"{name}",'
        f'"cat":{category},"args":{{"microbatch":{unit.microbatch},{clock}"iteration":%d}}}}'
        for name, unit in zip(order.split(), parse_order(order), strict=True)
    )


def _unit_events(pid: int, read: RankIteration, begin_us: int) -> str:
    """Return all units of an iteration by one format operation: there may be millions."""
    columns = [
        np.full_like(read.start_us, pid),
        read.start_us + begin_us,
        read.end_us - read.start_us,
        *([] if read.frequency_mhz is None else [read.frequency_mhz]),
        np.full_like(read.start_us, read.iteration),
    ]
    template = _unit_template(read.order, read.phase, read.frequency_mhz is not None)
    return template % tuple(np.stack(columns, axis=1).ravel().tolist())


def _counters(pid: int, gpu: _GpuRecords, axis: _Axis, *, dry_run: bool) -> Iterator[str]:
    """Yield a GPU's requested clock where it changes, observed ones when read, and its power."""

    def counter(name: str, at_us: int, **value: float) -> str:
        return _event("C", pid, name, ts=at_us, args=value)

    requested = "SM clock (dry run, not set)" if dry_run else "SM clock requested"
    present = 0
    for read in gpu.iterations:
        if read.frequency_mhz is None:
            continue
        begin_us = axis(read.labels, read.begin_s)
        before = np.concatenate(([present], read.frequency_mhz[:-1]))
        for at in np.flatnonzero(read.frequency_mhz != before).tolist():
            # Requested when the unit before has ended: the wait runs at the clock that follows it.
            at_us = begin_us + (int(read.end_us[at - 1]) if at else 0)
            yield counter(requested, at_us, MHz=int(read.frequency_mhz[at]))
        present = int(read.frequency_mhz[-1])
    for samples in gpu.clocks:
        for time_s, mhz in zip(samples.time_s, samples.observed_mhz, strict=True):
            yield counter("SM clock observed", axis(samples.labels, time_s), MHz=mhz)
    for window in gpu.windows:
        if window.begin_s is not None and window.duration_s > 0:
            power_w = window.energy_j / window.duration_s
            yield counter("power", axis(window, window.begin_s), W=power_w)
