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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

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
from envpipe_megatron.report.pipelines import IterationKey, kept_iterations, node_offsets_s

#: Viewers hold a trace in the browser's memory. Of more units, whole iterations are left out.
MAX_UNITS = 1_000_000

_JOB, _UNITS, _PHASES, _ITERATIONS = 0, 1, 1, 2
_REQUESTED, _NOT_SET = "SM clock requested", "SM clock (dry run, not set)"
_FASTEST_COMPRESSION = 1
_NEXT = ",\n"  # every event follows another one


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
    by_key: dict[IterationKey, list[RankIteration]] = {}
    for read in sorted(timelines.iterations, key=_iteration_of):
        by_key.setdefault(_iteration_of(read), []).append(read)
    kept = set(kept_iterations(by_key, max_units))
    gpus = _gpus(timelines, windows)
    axis = _Axis(timelines, windows)
    units = 0
    with (
        written_beside(path) as draft,
        gzip.open(draft, "wt", compresslevel=_FASTEST_COMPRESSION, encoding="utf-8") as file,
    ):
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        file.write(_named(_JOB, 0, "process_name", name="job").removeprefix(_NEXT))
        file.writelines(_job_events(gpus, axis))
        for pid, gpu in enumerate(gpus, start=1):
            file.writelines(_gpu_names(pid, gpu))
            end_us = 0
            for read in gpu.iterations:
                if _iteration_of(read) in kept:
                    begin_us = max(end_us, axis.us(read.labels, read.begin_s))
                    file.write(_unit_events(pid, read, begin_us))
                    end_us = begin_us + int(read.end_us[-1])
                    units += len(read.start_us)
            file.writelines(_clock_events(pid, gpu, axis, _NOT_SET if dry_run else _REQUESTED))
            file.writelines(_power_events(pid, gpu.windows, axis))
        file.write("\n]}\n")
    there = {_iteration_of(read) for gpu in gpus for read in gpu.iterations}
    overlapping = len(timelines.iterations) - sum(len(gpu.iterations) for gpu in gpus)
    return TraceFacts(units, len(kept & there), len(there), overlapping)


@dataclass
class _Gpu:
    """Records of one GPU, in the order of time."""

    name: str
    rank: float
    iterations: list[RankIteration] = field(default_factory=list)
    clocks: list[ClockSamples] = field(default_factory=list)
    windows: list[EnergyWindow] = field(default_factory=list)


def _who(line: GpuLabels | EnergyWindow) -> tuple[str, str, str, int | None, int | None]:
    return line.node, line.gpu_uid, line.gpu, line.stage, line.rank


def _gpus(timelines: TimelineLogs, windows: Sequence[EnergyWindow]) -> list[_Gpu]:
    """In the order of their ranks; those that are only metered come last."""
    gpus: dict[tuple[str, str], _Gpu] = {}

    def of(node: str, uid: str, gpu: str, stage: int | None, rank: int | None) -> _Gpu:
        parts = [node, f"stage {stage}", f"rank {rank}"] if rank is not None else [node, uid]
        name = " · ".join((*parts, gpu))
        place = math.inf if rank is None else rank
        return gpus.setdefault((node, uid), _Gpu(name, place))

    for read in timelines.iterations:
        of(*_who(read.labels)).iterations.append(read)
    for samples in timelines.clocks:
        of(*_who(samples.labels)).clocks.append(samples)
    for window in windows:
        of(*_who(window)).windows.append(window)
    for gpu in gpus.values():
        gpu.iterations = _one_after_another(gpu.iterations)
    return sorted(gpus.values(), key=lambda gpu: gpu.rank)


class _Axis:
    """The trace's time: microseconds after the first instant, on all nodes."""

    def __init__(self, timelines: TimelineLogs, windows: Sequence[EnergyWindow]) -> None:
        self._offsets_s = node_offsets_s(timelines.iterations)
        self._begin_s = 0.0
        instants = [self._common_s(read.labels, read.begin_s) for read in timelines.iterations]
        instants += [self._common_s(w, w.begin_s) for w in windows if w.begin_s is not None]
        instants += [self._common_s(read.labels, min(read.time_s)) for read in timelines.clocks]
        self._begin_s = min(instants, default=0.0)

    def us(self, whose: GpuLabels | EnergyWindow, instant_s: float) -> int:
        """An instant of a node in a start of the job."""
        return round(1e6 * (self._common_s(whose, instant_s) - self._begin_s))

    def _common_s(self, whose: GpuLabels | EnergyWindow, instant_s: float) -> float:
        return instant_s - self._offsets_s.get((whose.run, whose.node), 0.0)


def _iteration_of(read: RankIteration) -> IterationKey:
    return read.labels.run, read.phase, read.iteration


def _one_after_another(own: list[RankIteration]) -> list[RankIteration]:
    """Keep the iterations of a GPU that do not overlap earlier ones, in the order of time."""
    kept: list[RankIteration] = []
    end_s = -math.inf
    for read in sorted(own, key=lambda read: read.begin_s):
        if read.begin_s >= end_s - 1e-6:  # both ends are rounded to microseconds
            kept.append(read)
            end_s = read.begin_s + 1e-6 * float(read.end_us[-1])
    return kept


def _named(pid: int, tid: int, kind: str, **arguments: Any) -> str:
    event = {"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": arguments}
    return _NEXT + json.dumps(event)


def _job_events(gpus: Sequence[_Gpu], axis: _Axis) -> Iterator[str]:
    """Phases and iterations, as the first GPU that recorded any saw them."""
    recorded = [gpu.iterations for gpu in gpus if gpu.iterations]
    if not recorded:
        return
    yield _named(_JOB, _PHASES, "thread_name", name="phases")
    yield _named(_JOB, _ITERATIONS, "thread_name", name="iterations")

    def slices(tid: int, key: Callable[[RankIteration], str]) -> Iterator[str]:
        end_us = 0
        for name, group in groupby(recorded[0], key=key):
            members = list(group)
            first, last = members[0], members[-1]
            begin_us = max(end_us, axis.us(first.labels, first.begin_s))
            end_us = max(begin_us, axis.us(last.labels, last.begin_s + last.iteration_time_s))
            yield (
                f'{_NEXT}{{"ph":"X","pid":{_JOB},"tid":{tid},"ts":{begin_us},'
                f'"dur":{end_us - begin_us},"name":{json.dumps(name)},'
                f'"cat":{json.dumps(first.phase)},'
                f'"args":{{"first":{first.iteration},"last":{last.iteration}}}}}'
            )

    yield from slices(_PHASES, lambda read: f"{read.labels.run} {read.phase}".strip())
    yield from slices(_ITERATIONS, lambda read: f"{read.labels.run} {read.iteration}".strip())


def _gpu_names(pid: int, gpu: _Gpu) -> Iterator[str]:
    yield _named(pid, 0, "process_name", name=gpu.name)
    yield _named(pid, 0, "process_sort_index", sort_index=pid)
    yield _named(pid, _UNITS, "thread_name", name="units")


@lru_cache(maxsize=256)
def _unit_template(order: str, phase: str, clocked: bool) -> str:
    """The events of an iteration's units, with places for pid, begin, duration, MHz, iteration."""
    clock = '"MHz":%d,' if clocked else ""
    category = json.dumps(phase).replace("%", "%%")
    return "".join(
        f'{_NEXT}{{"ph":"X","pid":%d,"tid":{_UNITS},"ts":%d,"dur":%d,"name":"{name}",'
        f'"cat":{category},"args":{{"microbatch":{unit.microbatch},{clock}"iteration":%d}}}}'
        for name, unit in zip(order.split(), parse_order(order), strict=True)
    )


def _unit_events(pid: int, read: RankIteration, begin_us: int) -> str:
    """All units of an iteration: one format operation, since there may be millions."""
    columns = [
        np.full_like(read.start_us, pid),
        read.start_us + begin_us,
        read.end_us - read.start_us,
        *([] if read.frequency_mhz is None else [read.frequency_mhz]),
        np.full_like(read.start_us, read.iteration),
    ]
    template = _unit_template(read.order, read.phase, read.frequency_mhz is not None)
    return template % tuple(np.stack(columns, axis=1).ravel().tolist())


def _counter(pid: int, name: str, at_us: int, value: float, unit: str) -> str:
    event = f'"ph":"C","pid":{pid},"ts":{at_us},"name":"{name}","args":{{"{unit}":{value:.10g}}}'
    return f"{_NEXT}{{{event}}}"


def _clock_events(pid: int, gpu: _Gpu, axis: _Axis, requested: str) -> Iterator[str]:
    """The `requested` clock when it changes, and the observed one each time it was read."""
    present = 0
    for read in gpu.iterations:
        if read.frequency_mhz is None:
            continue
        begin_us = axis.us(read.labels, read.begin_s)
        before = np.concatenate(([present], read.frequency_mhz[:-1]))
        for at in np.flatnonzero(read.frequency_mhz != before).tolist():
            # Requested when the unit before has ended: the wait runs at the clock that follows it.
            at_us = begin_us + (int(read.end_us[at - 1]) if at else 0)
            mhz = int(read.frequency_mhz[at])
            yield _counter(pid, requested, at_us, mhz, "MHz")
        present = int(read.frequency_mhz[-1])
    for samples in gpu.clocks:
        for time_s, mhz in zip(samples.time_s, samples.observed_mhz, strict=True):
            at_us = axis.us(samples.labels, time_s)
            yield _counter(pid, "SM clock observed", at_us, mhz, "MHz")


def _power_events(pid: int, windows: Iterable[EnergyWindow], axis: _Axis) -> Iterator[str]:
    for window in windows:
        if window.begin_s is not None and window.duration_s > 0:
            at_us = axis.us(window, window.begin_s)
            yield _counter(pid, "power", at_us, window.energy_j / window.duration_s, "W")
