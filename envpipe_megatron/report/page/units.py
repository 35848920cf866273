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
from envpipe_megatron.core.kinds import TRAITS
from envpipe_megatron.core.profile import Profile
from envpipe_megatron.core.profile_rows import ProfileError
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.core.timeline import Timeline
from envpipe_megatron.formats.timeline import RankIteration, parse_order
from envpipe_megatron.report.alignment import node_offsets_s
from envpipe_megatron.report.pipelines import (
    Gpu,
    IterationKey,
    by_iteration,
    gpus_of,
    whole_pipelines,
)

#: A page holds so many units: some 6 MB.
MOST_UNITS = 200_000
#: What column `kind` counts.
KINDS = tuple(TRAITS)


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


def unit_table(
    recorded: Sequence[RankIteration],
    num_stages: int,
    profile: Profile | None,
    most_units: int = MOST_UNITS,
) -> UnitTable:
    """The units of a job's recorded iterations, thinned to at most about `most_units`."""
    iterations = by_iteration(recorded)
    gpus = gpus_of(read.labels for read in recorded)
    offsets_s = node_offsets_s(recorded)
    kept = _thinned(iterations, most_units)
    several = len({key[0] for key in kept}) > 1
    parts = [
        _columns(number, iterations[key], gpus, num_stages, offsets_s, profile)
        for number, key in enumerate(kept)
    ]
    names = [f"{run} {phase}, {at}" if several else f"{phase}, {at}" for run, phase, at in kept]
    return UnitTable(
        gpus,
        tuple(name.strip() for name in names),
        len(iterations),
        {name: np.concatenate([part[name] for part in parts]) for name in parts[0]},
    )


def _thinned(
    iterations: Mapping[IterationKey, Sequence[RankIteration]], most_units: int
) -> list[IterationKey]:
    """The iterations to show, in the order they ran; of each phase the last is among them."""
    units = sum(len(read.start_us) for reads in iterations.values() for read in reads)
    stride = max(1, math.ceil(units / most_units))
    return [
        key
        for _, phase in groupby(iterations, key=lambda key: key[:2])
        for key in list(phase)[::-1][::stride][::-1]
    ]


def _columns(
    number: int,
    reads: Sequence[RankIteration],
    gpus: Sequence[Gpu],
    num_stages: int,
    offsets_s: Mapping[tuple[str, str], float],
    profile: Profile | None,
) -> dict[str, NDArray[Any]]:
    row_of = {gpu.rank: row for row, gpu in enumerate(gpus)}
    begins_s = [
        read.begin_s - offsets_s[read.labels.run, read.labels.node] + 1e-6 * read.start_us[0]
        for read in reads
    ]
    first_s = min(begins_s)
    told = {
        read.labels.rank: one
        for schedule, stages in whole_pipelines(reads, {gpu.rank: gpu for gpu in gpus}, num_stages)
        for read, one in zip(stages, _told(schedule, stages, profile), strict=True)
    }
    parts = []
    for read, begin_s in zip(reads, begins_s, strict=True):
        count = len(read.start_us)
        begin_ms = 1e3 * (begin_s - first_s) - 1e-3 * read.start_us[0]
        none = np.full(count, np.nan, dtype=np.float32)
        slack_ms, critical, joules = told.get(read.labels.rank, (none, np.zeros(count), none))
        parts.append(
            {
                "iteration": np.full(count, number, dtype=np.int32),
                "gpu": np.full(count, row_of[read.labels.rank], dtype=np.int32),
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
    schedule: Schedule, reads: Sequence[RankIteration], profile: Profile | None
) -> Iterable[Told]:
    """For each stage slack (ms), whether critical, and joules of its units.

    Slack and path are those of the measured durations alone.
    """
    timeline = Timeline(schedule, [1e-6 * (read.end_us - read.start_us) for read in reads])
    critical = np.zeros(schedule.num_units)
    critical[timeline.critical_path()] = 1
    on_path = critical.reshape(schedule.num_stages, -1)
    return zip(1e3 * timeline.slack_s, on_path, _joules(schedule, reads, profile), strict=True)


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
