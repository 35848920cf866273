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
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
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
)
from envpipe_megatron.report.pipelines import (
    IterationKey,
    by_iteration,
    kept_iterations,
)

#: Viewers hold a trace in the browser's memory. Of more units, whole iterations are left out.
MAX_UNITS = 1_000_000

_JOB, _UNITS, _PHASES, _ITERATIONS = 0, 1, 1, 2
_FASTEST_COMPRESSION = 1

#: The process of each GPU, by node, name and rank: iterations of ranks that share one overlap.
_Processes = Mapping[tuple[str, str, int | None], int]


def write_trace(path: Path, timelines: TimelineLogs, windows: Sequence[EnergyWindow]) -> list[str]:
    """Write a trace, compressed by gzip, as both viewers take it; return what is in it, in words.

    Where more than `MAX_UNITS` units were recorded, those of every n-th iteration of each phase are
    written, the same ones of all GPUs; and of more looks at clocks, every n-th of each GPU. The
    clocks of a dry run, which sets none, are called so.
    """
    looks = sum(len(samples.time_s) for samples in timelines.clocks)
    recorded = by_iteration(timelines.iterations)
    kept = set(kept_iterations(recorded, MAX_UNITS))
    gpus = _gpus(timelines, windows)
    pids = {_place(gpu): pid for pid, gpu in enumerate(gpus, start=1)}
    reads = sorted(timelines.iterations, key=lambda read: read.begin_s)
    with (
        written_beside(path) as draft,
        gzip.open(draft, "wt", compresslevel=_FASTEST_COMPRESSION, encoding="utf-8") as file,
    ):
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        file.write(_named(_JOB, 0, "process_name", "job"))
        for events in (
            _names(gpus),
            _job_events(reads),
            _iteration_events(reads, pids, kept),
            _meter_events(timelines.clocks, windows, pids, every=math.ceil(looks / MAX_UNITS)),
        ):
            file.writelines(f",\n{event}" for event in events)
        file.write("\n]}\n")
    units = sum(len(read.start_us) for read in reads if (read.phase, read.iteration) in kept)
    said = [
        "`trace.json.gz` opens in https://ui.perfetto.dev and chrome://tracing as it is: a process "
        "a GPU with its units, the requested clock and the power.",
        f"{units} units of {len(kept)} iterations; {len(recorded)} were recorded.",
    ]
    if len(kept) < len(recorded):
        said.append(
            "More would be too much for a browser: those of every n-th iteration are in it."
        )
    return said


def _gpus(
    timelines: TimelineLogs, windows: Iterable[EnergyWindow]
) -> list[GpuLabels | EnergyWindow]:
    """Return the labels of each GPU, by rank; those that are only metered come last."""
    gpus: dict[tuple[str, str, int | None], GpuLabels | EnergyWindow] = {}
    lines: list[GpuLabels | EnergyWindow] = [read.labels for read in timelines.iterations]
    for line in (*lines, *(samples.labels for samples in timelines.clocks), *windows):
        gpus.setdefault(_place(line), line)
    return sorted(gpus.values(), key=lambda gpu: math.inf if gpu.rank is None else gpu.rank)


def _place(whose: GpuLabels | EnergyWindow) -> tuple[str, str, int | None]:
    return whose.node, whose.gpu_uid, whose.rank


def _us(instant_s: float) -> int:
    return round(1e6 * instant_s)


def _event(shape: str, pid: int, name: str, **fields: object) -> str:
    return json.dumps({"ph": shape, "pid": pid, "name": name, **fields})


def _named(pid: int, tid: int, kind: str, name: str) -> str:
    return _event("M", pid, kind, tid=tid, args={"name": name})


def _counter(pid: int, name: str, at_us: int, **value: float) -> str:
    return _event("C", pid, name, ts=at_us, args=value)


def _names(gpus: Iterable[GpuLabels | EnergyWindow]) -> Iterator[str]:
    for pid, gpu in enumerate(gpus, start=1):
        place = gpu.gpu_uid if gpu.rank is None else f"stage {gpu.stage} · rank {gpu.rank}"
        yield _named(pid, 0, "process_name", f"{gpu.node} · {place} · {gpu.gpu}")
        yield _event("M", pid, "process_sort_index", tid=0, args={"sort_index": pid})
        yield _named(pid, _UNITS, "thread_name", "units")


def _job_events(reads: Sequence[RankIteration]) -> Iterator[str]:
    """Yield phases and iterations, as the lowest rank that recorded any saw them."""
    lowest = min((read.labels.rank for read in reads), default=0)
    own = [read for read in reads if read.labels.rank == lowest]
    for tid, thread in (_PHASES, "phases"), (_ITERATIONS, "iterations"):
        if own:
            yield _named(_JOB, tid, "thread_name", thread)
        named = [(read.phase if tid == _PHASES else read.iteration, read) for read in own]
        end_us = 0
        for name, group in groupby(named, lambda each: f"{each[1].labels.run} {each[0]}".strip()):
            members = [read for _, read in group]
            first, last = members[0], members[-1]
            begin_us = max(end_us, _us(first.begin_s))
            end_us = max(begin_us, _us(last.begin_s + last.iteration_time_s))
            yield _event(
                "X", _JOB, name, tid=tid, ts=begin_us, dur=end_us - begin_us, cat=first.phase,
                args={"first": first.iteration, "last": last.iteration},
            )  # fmt: skip


def _iteration_events(
    reads: Iterable[RankIteration],
    pids: _Processes,
    kept: Container[IterationKey],
) -> Iterator[str]:
    """Yield units of kept iterations, and their requested clocks where they change.

    Slices of a thread come one after another, though both ends are rounded to microseconds.
    """
    ends_us, clocks_mhz = dict.fromkeys(pids.values(), 0), dict.fromkeys(pids.values(), 0)
    for read in reads:
        pid = pids[_place(read.labels)]
        begin_us = max(ends_us[pid], _us(read.begin_s))
        ends_us[pid] = begin_us + int(read.end_us[-1])
        if (read.phase, read.iteration) not in kept:
            continue
        yield from _unit_events(pid, read, begin_us)
        if read.frequency_mhz is None:
            continue
        only_logged = read.labels.clock_backend == "dry_run"
        requested = "SM clock (dry run, not set)" if only_logged else "SM clock requested"
        before = np.concatenate(([clocks_mhz[pid]], read.frequency_mhz[:-1]))
        for at in np.flatnonzero(read.frequency_mhz != before).tolist():
            # Requested when the unit before has ended: the wait runs at the clock that follows it.
            at_us = begin_us + (int(read.end_us[at - 1]) if at else 0)
            yield _counter(pid, requested, at_us, MHz=int(read.frequency_mhz[at]))
        clocks_mhz[pid] = int(read.frequency_mhz[-1])


def _unit_events(pid: int, read: RankIteration, begin_us: int) -> Iterator[str]:
    """Yield all units of an iteration, written by hand: there may be millions."""
    head = f'{{"ph":"X","pid":{pid},"tid":{_UNITS},"cat":{json.dumps(read.phase)}'
    clocks = read.start_us if read.frequency_mhz is None else read.frequency_mhz
    table = np.stack([read.start_us + begin_us, read.end_us - read.start_us, clocks], axis=1)
    for name, unit, (at_us, length_us, mhz) in zip(
        read.order.split(), read.units, table.tolist(), strict=True
    ):
        clock = "" if read.frequency_mhz is None else f'"MHz":{mhz},'
        args = f'"microbatch":{unit.microbatch},{clock}"iteration":{read.iteration}'
        yield f'{head},"name":"{name}","ts":{at_us},"dur":{length_us},"args":{{{args}}}}}'


def _meter_events(
    clocks: Iterable[ClockSamples],
    windows: Iterable[EnergyWindow],
    pids: _Processes,
    *,
    every: int,
) -> Iterator[str]:
    """Yield the clocks of GPUs at every n-th look, and their power."""
    for samples in clocks:
        pid = pids[_place(samples.labels)]
        looks = zip(samples.time_s[::every], samples.observed_mhz[::every], strict=True)
        for time_s, mhz in looks:
            yield _counter(pid, "SM clock observed", _us(time_s), MHz=mhz)
    for window in windows:
        if window.begin_s is not None and window.duration_s > 0:
            power_w = window.energy_j / window.duration_s
            at_us = _us(window.begin_s)
            yield _counter(pids[_place(window)], "power", at_us, W=power_w)
