"""Units of iterations as a table, and one iteration of it as a chart."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from envpipe_megatron.core.arrays import FloatArray
from envpipe_megatron.core.kinds import TRAITS, Kind
from envpipe_megatron.core.plan import Plan
from envpipe_megatron.core.profile import Profile
from envpipe_megatron.core.profile_rows import ProfileError
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.core.timeline import Timeline
from envpipe_megatron.formats.timeline import RankIteration, parse_order
from envpipe_megatron.report.charts import GREY, INK, PATH, SKY, Chart, Colouring, Marks
from envpipe_megatron.report.pipelines import (
    IterationKey,
    PlacedGpu,
    before_and_after,
    by_iteration,
    gpus_of,
    kept_iterations,
    marked_path,
    whole_pipelines,
)

#: Most units of a page: some 6 MB.
MOST_UNITS = 200_000
#: Kinds, by their number in column `kind`.
KINDS = tuple(TRAITS)
#: Height of a unit in its row by kind, which is seen without colours too.
HEIGHTS = np.array(
    [{Kind.FORWARD: 0.54, Kind.WEIGHT_GRADIENT: 0.38}.get(kind, 0.82) for kind in KINDS], np.float32
)
#: Columns of a `UnitTable`.
_COLUMNS: Mapping[str, type] = {
    "label": object,
    **dict.fromkeys(("iteration", "row", "kind", "mhz", "critical", "envelope"), np.int32),
    **dict.fromkeys(("begin", "end", "height", "slack_ms", "joules", "watts"), np.float32),
}
#: What a chart shows: a title, its rows' names, and units of one iteration, as a `UnitTable`'s.
_Drawn = tuple[str, Sequence[str], Mapping[str, NDArray[Any]]]
#: A smaller share of an iteration cannot be seen.
_LEAST = 1e-6


@dataclass(frozen=True)
class UnitTable:
    """Units of some iterations.

    Args:
        gpus: in the order of pipelines and stages; column `row` counts them.
        iterations: in the order of time; column `iteration` counts them.
        shown: which of them are the first to look at: one before, one after.
        recorded: how many iterations were recorded.
        columns: of equal length. `begin` and `end` are ms after the iteration's first unit;
            `height` is a share of the row; `kind` counts `KINDS`; `mhz` is 0 where no clock was
            controlled; `joules` and `watts` are NaN where no profile prices the unit, `slack_ms`
            where its order is no whole pipeline's; `critical` is 1 for units on the path that sets
            the iteration's time, `envelope` for those of the outer envelope.
    """

    gpus: tuple[PlacedGpu, ...]
    iterations: tuple[IterationKey, ...]
    shown: tuple[int, int]
    recorded: int
    columns: Mapping[str, NDArray[Any]]


def unit_table(
    recorded: Sequence[RankIteration], num_stages: int, profile: Profile | None
) -> UnitTable:
    """Return the units of a job's recorded iterations, at most about `MOST_UNITS` of them.

    Of more, those of every n-th iteration are left out, of all GPUs alike. The first to look at are
    iterations that all GPUs recorded, if there are any.
    """
    iterations = by_iteration(recorded)
    gpus = gpus_of(read.labels for read in recorded)
    kept = kept_iterations(iterations, MOST_UNITS)
    whole = [key for key in kept if len(iterations[key]) == len(gpus)]
    before, after = before_and_after(whole or kept)
    parts = [
        part
        for number, key in enumerate(kept)
        for part in _parts(number, iterations[key], gpus, num_stages, profile)
    ]
    columns: dict[str, NDArray[Any]] = {
        name: np.concatenate([part[name] for part in parts], dtype=kind, casting="unsafe")
        for name, kind in _COLUMNS.items()
    }
    shown = kept.index(before), kept.index(after)
    return UnitTable(gpus, tuple(kept), shown, len(iterations), columns)


def _parts(
    number: int,
    reads: Sequence[RankIteration],
    gpus: Sequence[PlacedGpu],
    num_stages: int,
    profile: Profile | None,
) -> Iterable[dict[str, NDArray[Any]]]:
    """Return the columns of an iteration's units on each GPU."""
    row_of = {gpu.rank: row for row, gpu in enumerate(gpus)}
    first_s = min(read.begin_s + 1e-6 * read.start_us[0] for read in reads)
    parts: dict[int, dict[str, NDArray[Any]]] = {}
    for read in reads:
        none = np.zeros(len(read.start_us), np.int32)
        begin_ms = 1e3 * (read.begin_s - first_s)
        parts[read.labels.rank] = {
            "iteration": none + number,
            "row": none + row_of[read.labels.rank],
            "begin": begin_ms + 1e-3 * read.start_us,
            "end": begin_ms + 1e-3 * read.end_us,
            **_described(read.order),
            "mhz": none if read.frequency_mhz is None else read.frequency_mhz,
            **dict.fromkeys(("critical", "envelope"), none),
            **dict.fromkeys(("slack_ms", "joules", "watts"), none + np.nan),
        }
    for schedule, stages in whole_pipelines(reads, {gpu.rank: gpu for gpu in gpus}, num_stages):
        timeline = Timeline(schedule, [1e-6 * (read.end_us - read.start_us) for read in stages])
        joules = _joules(schedule, stages, profile)
        with np.errstate(divide="ignore", invalid="ignore"):  # units that run as one with the next
            watts = joules / timeline.duration_s
        known = {
            "critical": marked_path(timeline), "envelope": schedule.outer_envelope,
            "slack_ms": 1e3 * timeline.slack_s, "joules": joules, "watts": watts,
        }  # fmt: skip
        for stage, read in enumerate(stages):
            parts[read.labels.rank] |= {name: values[stage] for name, values in known.items()}
    return parts.values()


@lru_cache(maxsize=256)
def _described(order: str) -> dict[str, NDArray[Any]]:
    """Return columns `kind`, `label` and `height` of an order.

    Units that run as one are named by the last of them, which is as tall as a backward.
    """
    units, labels = parse_order(order), order.split()
    kind = np.array([KINDS.index(unit.kind) for unit in units], np.int32)
    heights = HEIGHTS[kind]
    for place, unit in enumerate(units):
        if unit.combined:
            labels[place + 1] = labels[place] + labels[place + 1]
            heights[place + 1] = HEIGHTS[KINDS.index(Kind.BACKWARD)]
    return {"kind": kind, "label": np.array(labels, object), "height": heights}


def waits_of(units: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return columns `iteration`, `row`, `begin` and `end` of what lies between units of a row.

    Rows begin at 0, and end with the last unit of their iteration. Units of a row lie together, in
    the order of time.
    """
    last = np.zeros(1 + units["iteration"].max(), units["end"].dtype)
    np.maximum.at(last, units["iteration"], units["end"])
    least = _LEAST * last[units["iteration"]]
    # A unit that runs as one with the next takes no time.
    there = units["end"] - units["begin"] > least
    iteration, row, begin, end = (
        units[name][there] for name in ("iteration", "row", "begin", "end")
    )
    ends_row = (np.diff(iteration, append=-1) != 0) | (np.diff(row, append=-1) != 0)
    begins_row = np.roll(ends_row, 1)
    columns = {
        "iteration": np.concatenate([iteration, iteration[ends_row]]),
        "row": np.concatenate([row, row[ends_row]]),
        "begin": np.concatenate([np.where(begins_row, 0, np.roll(end, 1)), end[ends_row]]),
        "end": np.concatenate([begin, last[iteration[ends_row]]]),
    }
    seen = columns["end"] - columns["begin"] > _LEAST * last[columns["iteration"]]
    return {name: values[seen] for name, values in columns.items()}


def _joules(
    schedule: Schedule, reads: Sequence[RankIteration], profile: Profile | None
) -> FloatArray:
    """Return [num_stages, units_per_stage] J, by the profile at the clocks asked for, or NaN."""
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


def plan_charts(plans: Collection[Plan]) -> list[Chart]:
    """Draw one iteration of each plan, on equal axes and colours; its critical path is dotted."""
    longest_s = max(plan.cost.iteration_time_s for plan in plans)
    return _charts([_drawn(plan) for plan in plans], 1e3 * longest_s)


def _drawn(plan: Plan) -> _Drawn:
    """Return what a chart of a plan shows."""
    schedule, timeline = plan.schedule, plan.timeline
    gpus = plan.conditions.gpus_by_stage.sum()
    of_gpus = f"{gpus} GPUs" if plan.conditions.gpus_per_stage else "one GPU a stage"
    energy_j = plan.cost.energy_j  # four figures, never in powers of ten
    joules = f"{energy_j:,.0f}" if energy_j >= 1000 else f"{energy_j:.4g}"
    in_flight = ", ".join(f"{count:g}" for count in schedule.microbatches_in_flight)
    caption = (
        f"iteration {plan.cost.iteration_time_s:.4g} s  ·  energy {joules} J ({of_gpus})  ·  "
        f"peak in flight {in_flight}"
    )
    orders = [_described(" ".join(names)) for names in schedule.labels()]
    columns: dict[str, NDArray[Any]] = {
        **{name: np.stack([order[name] for order in orders]) for name in ("label", "height")},
        "iteration": np.zeros(schedule.combined.shape, np.int32),
        "row": np.broadcast_to(np.arange(schedule.num_stages)[:, None], schedule.combined.shape),
        "begin": 1e3 * timeline.start_s,
        "end": 1e3 * timeline.end_s,
        "mhz": plan.frequency_mhz,
        "critical": marked_path(timeline),
        "envelope": schedule.outer_envelope,
    }
    units = {name: values.ravel() for name, values in columns.items()}
    return caption, [str(stage) for stage in range(schedule.num_stages)], units


def measured_charts(table: UnitTable) -> list[Chart]:
    """Draw the first iterations to look at, of the first pipeline, on equal axes and colours."""
    rows = [str(gpu.stage) for gpu in table.gpus if gpu.pipeline == 0]
    drawn: list[_Drawn] = []
    for shown in dict.fromkeys(table.shown):
        own = table.columns["iteration"] == shown
        own &= table.columns["row"] < len(rows)
        if own.any():  # else it was recorded by other pipelines only
            units = {name: values[own] for name, values in table.columns.items()}
            first_ms = units["begin"].min()  # another pipeline may have begun before
            units |= {name: units[name] - first_ms for name in ("begin", "end")}
            phase, number = table.iterations[shown]
            title = (
                f"{phase}, iteration {number}: measured "
                f"{units['end'].max() / 1e3:.4g} s  ·  one GPU of each stage"
            )
            drawn.append((title, rows, units))
    return _charts(drawn, max((float(units["end"].max()) for *_, units in drawn), default=0.0))


def _charts(drawn: Sequence[_Drawn], x_max_ms: float) -> list[Chart]:
    """Draw units coloured by their clocks, on equal axes and colours."""
    clocks_mhz = [mhz for *_, units in drawn for mhz in units["mhz"][units["mhz"] > 0].tolist()]
    colourings = []
    if clocks_mhz:
        ends = float(min(clocks_mhz)), float(max(clocks_mhz))
        colourings = [Colouring("SM clock (MHz)", "mhz", ends)]
    said = "low boxes are forwards, tall ones backwards"
    return [
        Chart(
            "timeline", "time (ms)", "stage", _marks(units, colourings), f"{title}\n{said}", rows,
            x_range=(0.0, x_max_ms),
        )
        for title, rows, units in drawn
    ]  # fmt: skip


def _marks(units: Mapping[str, NDArray[Any]], colourings: Sequence[Colouring]) -> list[Marks]:
    """Mark units, waits between them, envelope and critical path."""
    there = units["end"] - units["begin"] > _LEAST * units["end"].max()

    def boxes(mask: NDArray[np.bool_]) -> dict[str, list[Any]]:
        shown = ("row", "begin", "end", "height", "label", "mhz")
        return {name: units[name][mask].tolist() for name in shown}

    waits = {name: values.tolist() for name, values in waits_of(units).items()}
    critical = np.flatnonzero(there & (units["critical"] == 1))
    path = critical[np.argsort(units["begin"][critical], kind="stable")]
    # Below the label in each row, so that both stay readable.
    ends = np.stack([units["begin"][path], units["end"][path]], axis=1)
    line = {"x": [ends.ravel()], "y": [np.repeat(units["row"][path], 2) + 0.2]}
    envelope = boxes(there & (units["envelope"] == 1))
    marks = [
        Marks("box", "GPU waits", GREY, waits, look="hatched"),
        Marks("box", "", SKY, boxes(there), colourings=colourings),
        Marks("box", "outer envelope", INK, envelope, look="outlined"),
        *([Marks("line", "critical path", PATH, line, look="dotted")] if len(path) else []),
    ]
    return [mark for mark in marks if any(mark.columns.values())]
