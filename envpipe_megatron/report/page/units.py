"""The units of recorded iterations as columns of a table, for views that show them all.

Of more units than a page can hold, those of every n-th iteration are left out, of all GPUs alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from envpipe_megatron.core.arrays import FloatArray
from envpipe_megatron.core.kinds import TRAITS, ScheduleError, Unit
from envpipe_megatron.core.profile import Profile
from envpipe_megatron.core.profile_rows import ProfileError
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.core.timeline import Timeline
from envpipe_megatron.formats.energy import name_of_run
from envpipe_megatron.formats.timeline import GpuLabels, RankIteration, parse_order
from envpipe_megatron.report.alignment import node_offsets_s

#: A page holds so many units: some 6 MB.
MOST_UNITS = 200_000
#: What column `kind` counts.
KINDS = tuple(TRAITS)


@dataclass(frozen=True)
class Gpu:
    """One GPU of the job: of the ranks of a stage, the n-th belongs to pipeline n."""

    node: str
    rank: int
    stage: int
    pipeline: int


@dataclass(frozen=True)
class UnitTable:
    """Units of some iterations.

    Args:
        gpus: in the order of pipelines and stages; column `gpu` counts them.
        iterations: names, in the order of time; column `iteration` counts them.
        recorded: how many iterations were recorded.
        columns: of equal length. `begin_ms` and `end_ms` are after the iteration's first unit;
            `kind` counts `KINDS`; `mhz` is 0 where no clock was controlled; `joules` and `watts`
            are NaN where no profile prices the unit, `slack_ms` where its order is no whole
            pipeline's; `critical` is 1 for units on the path that sets the iteration's time.
    """

    gpus: tuple[Gpu, ...]
    iterations: tuple[str, ...]
    recorded: int
    columns: Mapping[str, NDArray[Any]]


Key = tuple[str, str, int]


def unit_table(
    recorded: Sequence[RankIteration], profile: Profile | None, most_units: int = MOST_UNITS
) -> UnitTable:
    """The units of recorded iterations, thinned to at most about `most_units`."""
    by_iteration: dict[Key, list[RankIteration]] = {}
    for read in recorded:
        by_iteration.setdefault(_key(read), []).append(read)
    gpus = _gpus(read.labels for read in recorded)
    place = {(gpu.node, gpu.rank): number for number, gpu in enumerate(gpus)}
    offsets_s = node_offsets_s(recorded)
    kept = _thinned(by_iteration, most_units)
    several = len({key[0] for key in kept}) > 1
    parts = [
        _columns(number, by_iteration[key], gpus, place, offsets_s, profile)
        for number, key in enumerate(kept)
    ]
    names = [f"{run} {phase}, {at}" if several else f"{phase}, {at}" for run, phase, at in kept]
    return UnitTable(
        gpus,
        tuple(name.strip() for name in names),
        len(by_iteration),
        {name: np.concatenate([part[name] for part in parts]) for name in parts[0]},
    )


def _key(read: RankIteration) -> Key:
    return name_of_run(read.labels.run), read.phase, read.iteration


def _gpus(labels: Iterable[GpuLabels]) -> tuple[Gpu, ...]:
    """GPUs by pipeline and stage; Megatron's ranks of a stage stand in the order of pipelines."""
    ranks: dict[int, tuple[str, int]] = {one.rank: (one.node, one.stage) for one in labels}
    met: dict[int, int] = {}
    gpus = []
    for rank, (node, stage) in sorted(ranks.items()):
        met[stage] = met.get(stage, -1) + 1
        gpus.append(Gpu(node, rank, stage, met[stage]))
    return tuple(sorted(gpus, key=lambda gpu: (gpu.pipeline, gpu.stage)))


def _thinned(by_iteration: Mapping[Key, Sequence[RankIteration]], most_units: int) -> list[Key]:
    """The iterations to show, in the order they ran; of each phase the last is among them."""
    units = sum(len(read.start_us) for reads in by_iteration.values() for read in reads)
    stride = max(1, math.ceil(units / most_units))
    return [
        key
        for _, phase in groupby(by_iteration, key=lambda key: key[:2])
        for key in list(phase)[::-1][::stride][::-1]
    ]


def _columns(
    number: int,
    reads: Sequence[RankIteration],
    gpus: Sequence[Gpu],
    place: Mapping[tuple[str, int], int],
    offsets_s: Mapping[tuple[str, str], float],
    profile: Profile | None,
) -> dict[str, NDArray[Any]]:
    reads = [read for read in reads if (read.labels.node, read.labels.rank) in place]
    rows = [place[read.labels.node, read.labels.rank] for read in reads]
    begins_s = [
        read.begin_s - offsets_s[read.labels.run, read.labels.node] + 1e-6 * read.start_us[0]
        for read in reads
    ]
    first_s = min(begins_s)
    pipelines: dict[int, dict[int, RankIteration]] = {}
    for row, read in zip(rows, reads, strict=True):
        pipelines.setdefault(gpus[row].pipeline, {})[gpus[row].stage] = read
    stages = range(1 + max(gpu.stage for gpu in gpus))
    told = {
        id(read): one
        for whole in pipelines.values()
        if whole.keys() == set(stages)
        for read, one in _told([whole[stage] for stage in stages], profile)
    }
    parts = []
    for row, read, begin_s in zip(rows, reads, begins_s, strict=True):
        count = len(read.start_us)
        begin_ms = 1e3 * (begin_s - first_s) - 1e-3 * read.start_us[0]
        none = np.full(count, np.nan, dtype=np.float32)
        slack_ms, critical, joules = told.get(id(read), (none, np.zeros(count), none))
        parts.append(
            {
                "iteration": np.full(count, number, dtype=np.int32),
                "gpu": np.full(count, row, dtype=np.int32),
                "begin_ms": (begin_ms + 1e-3 * read.start_us).astype(np.float32),
                "end_ms": (begin_ms + 1e-3 * read.end_us).astype(np.float32),
                **_what(read.order),
                "mhz": np.zeros(count, np.int32)
                if read.frequency_mhz is None
                else read.frequency_mhz.astype(np.int32),
                "slack_ms": np.asarray(slack_ms, dtype=np.float32),
                "critical": np.asarray(critical, dtype=np.int8),
                "joules": np.asarray(joules, dtype=np.float32),
            }
        )
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    length_s = 1e-3 * (columns["end_ms"] - columns["begin_ms"])
    columns["watts"] = np.divide(
        columns["joules"], length_s, out=np.full_like(length_s, np.nan), where=length_s > 0
    )
    return columns


@lru_cache(maxsize=256)
def _what(order: str) -> dict[str, NDArray[np.int32]]:
    """Columns `kind`, `microbatch` and `chunk` of an order."""
    rows = [(KINDS.index(u.kind), u.microbatch, u.chunk) for u in parse_order(order)]
    return dict(zip(("kind", "microbatch", "chunk"), np.array(rows, np.int32).T, strict=True))


Told = tuple[FloatArray, NDArray[Any], FloatArray]


def _told(
    reads: Sequence[RankIteration], profile: Profile | None
) -> Iterable[tuple[RankIteration, Told]]:
    """Slack (ms), whether critical, and joules of the units of one pipeline's iteration.

    `reads` are those of its stages. Slack and path are those of the measured durations alone.
    """
    schedule = _schedule(tuple(read.units for read in reads))
    if schedule is None:
        return
    timeline = Timeline(schedule, [1e-6 * (read.end_us - read.start_us) for read in reads])
    critical = np.zeros(schedule.num_units)
    critical[timeline.critical_path()] = 1
    on_path = critical.reshape(schedule.num_stages, -1)
    slack_ms, joules = 1e3 * timeline.slack_s, _joules(schedule, reads, profile)
    for stage, read in enumerate(reads):
        yield read, (slack_ms[stage], on_path[stage], joules[stage])


@lru_cache(maxsize=64)
def _schedule(units: tuple[tuple[Unit, ...], ...]) -> Schedule | None:
    """The order of a whole pipeline; None if it is none."""
    every = [unit for order in units for unit in order]
    if len({len(order) for order in units}) != 1:
        return None
    try:
        return Schedule(
            "recorded",
            1 + max(unit.microbatch for unit in every),
            1 + max(unit.chunk for unit in every),
            units,
        )
    except ScheduleError:
        return None


def _joules(
    schedule: Schedule, reads: Sequence[RankIteration], profile: Profile | None
) -> FloatArray:
    """[num_stages, units_per_stage] by the profile at the clocks asked for; NaN if not known."""
    joules = np.full((schedule.num_stages, schedule.units_per_stage), np.nan)
    clocks = [read.frequency_mhz for read in reads if read.frequency_mhz is not None]
    if profile is None or len(clocks) != len(reads) or profile.num_stages != len(reads):
        return joules
    try:
        keys = profile.keys(schedule)
    except ProfileError:
        return joules
    for key, (profiled_mhz, _, energies_j) in enumerate(profile.curves):
        mask = keys == key
        joules[mask] = np.interp(
            np.stack(clocks)[mask], profiled_mhz, energies_j, left=np.nan, right=np.nan
        )
    return joules
