"""The units of iterations over time: two plots, one above the other, on one axis of time.

Of more units than a page can hold, those of every n-th iteration are left out, of all GPUs alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from bokeh.models import (
    BasicTicker,
    CDSView,
    ColumnDataSource,
    CustomJSHover,
    FixedTicker,
    HoverTool,
    IndexFilter,
    LinearColorMapper,
    Range1d,
    Ticker,
)
from bokeh.models.annotations import ColorBar
from bokeh.palettes import Cividis256
from bokeh.plotting import figure
from bokeh.transform import transform
from numpy.typing import NDArray

from envpipe_megatron.core.arrays import FloatArray
from envpipe_megatron.core.kinds import TRAITS, Kind
from envpipe_megatron.core.profile import Profile
from envpipe_megatron.core.profile_rows import ProfileError
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.core.timeline import Timeline
from envpipe_megatron.formats.energy import Phase
from envpipe_megatron.formats.timeline import RankIteration, parse_order
from envpipe_megatron.report.drawing.style import BLUE, ORANGE, SKY, VERMILION
from envpipe_megatron.report.page.plots import gpu_rows_plot
from envpipe_megatron.report.pipelines import (
    Gpu,
    by_iteration,
    gpus_of,
    kept_iterations,
    node_offsets_s,
    whole_pipelines,
)

#: A page holds so many units: some 6 MB.
MOST_UNITS = 200_000
#: What column `kind` counts.
KINDS = tuple(TRAITS)

#: Of a row, by kind, which no colour vision or print can lose.
_HEIGHTS = {Kind.FORWARD: 0.5, Kind.WEIGHT_GRADIENT: 0.34}
_TALL = 0.84
_KIND_COLOURS = {
    Kind.FORWARD: SKY,
    Kind.BACKWARD: BLUE,
    Kind.INPUT_GRADIENT: ORANGE,
    Kind.WEIGHT_GRADIENT: VERMILION,
}
_PATH = "#d1116b"
#: Without its darkest quarter, which the page's dark mode has for a background.
_PALETTE = Cividis256[64:]
#: The outlines of more units would be all that is seen.
_MOST_OUTLINED = 1_000
#: What the page's script finds the two plots by.
BEFORE, AFTER = "before", "after"


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
    """The units of a job's recorded iterations, kept_iterations to at most about `most_units`."""
    iterations = by_iteration(recorded)
    gpus = gpus_of(read.labels for read in recorded)
    offsets_s = node_offsets_s(recorded)
    kept = kept_iterations(iterations, most_units)
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


@dataclass(frozen=True)
class _Colouring:
    """A way to colour units: by a column, through a mapper; with names of some values."""

    title: str
    column: str
    mapper: LinearColorMapper
    ticker: Ticker
    names: list[str]


def timeline_figures(table: UnitTable, ways: list[_Colouring]) -> dict[str, figure]:
    """The plots before and after; each shows an iteration, coloured in the first of the ways."""
    height = np.array([_HEIGHTS.get(kind, _TALL) for kind in KINDS], dtype=np.float32)
    source = ColumnDataSource({**table.columns, "height": height[table.columns["kind"]]})
    end_ms, which = table.columns["end_ms"], first_shown(table)
    longest_ms = float(end_ms.max())
    time = Range1d(
        start=0.0,
        end=float(end_ms[np.isin(table.columns["iteration"], which)].max()),
        bounds=(-0.02 * longest_ms, 1.02 * longest_ms),
    )
    return {
        name: _figure(table, source, time, name, shown, ways)
        for name, shown in zip((BEFORE, AFTER), which, strict=True)
    }


def first_shown(table: UnitTable) -> tuple[int, int]:
    """The last iteration of a baseline, or before clocks or order were another; and the last."""
    phases = [name.rpartition(",")[0] for name in table.iterations]
    baseline = [at for at, phase in enumerate(phases) if phase.startswith(Phase.BASELINE.value)]
    warmup = [at for at, phase in enumerate(phases) if phase.endswith(Phase.WARMUP.value)]
    return (baseline or warmup or [0])[-1], len(phases) - 1


def colourings(table: UnitTable) -> list[_Colouring]:
    """All ways to colour these units, the most telling first: one clock for all tells nothing."""
    columns = table.columns
    known = [
        _Colouring(title, column, _scale(columns[column][there]), BasicTicker(), [])
        for title, column, there in (
            ("clock (MHz)", "mhz", columns["mhz"] > 0),
            ("power (W)", "watts", np.isfinite(columns["watts"])),
            ("slack (ms)", "slack_ms", np.isfinite(columns["slack_ms"])),
        )
        if there.any()
    ]
    colours = [_KIND_COLOURS[kind] for kind in KINDS]
    steps = LinearColorMapper(palette=colours, low=-0.5, high=len(KINDS) - 0.5)
    ticker = FixedTicker(ticks=list(range(len(KINDS))))
    by_kind = _Colouring("kind", "kind", steps, ticker, [kind.value for kind in KINDS])
    one_clock = np.ptp(columns["mhz"]) == 0
    return [by_kind, *known] if one_clock else [*known[:1], by_kind, *known[1:]]


def _scale(values: NDArray[Any]) -> LinearColorMapper:
    low, high = float(values.min()), float(values.max())
    high = high if high > low else low + 1.0
    return LinearColorMapper(palette=_PALETTE, low=low, high=high, nan_color="#999999")


def _figure(
    table: UnitTable,
    source: ColumnDataSource,
    time: Range1d,
    name: str,
    shown: int,
    ways: list[_Colouring],
) -> figure:
    plot = gpu_rows_plot("ms after the first unit", table.gpus, 90, name=name, x_range=time)
    of_iteration = table.columns["iteration"] == shown
    few = np.count_nonzero(of_iteration) < _MOST_OUTLINED
    fill = transform(ways[0].column, ways[0].mapper)
    units = plot.hbar(
        y="gpu", left="begin_ms", right="end_ms", height="height", source=source,
        view=_view(of_iteration), name=f"{name} units",
        fill_color=fill, line_color="#7f7f7f" if few else None, line_alpha=0.6, line_width=0.6,
    )  # fmt: skip
    plot.hbar(
        y="gpu", left="begin_ms", right="end_ms", height=0.96, source=source,
        view=_view(of_iteration & (table.columns["critical"] == 1)), name=f"{name} path",
        fill_alpha=0.0, line_color=_PATH, line_width=1.6,
    )  # fmt: skip
    first = ways[0]
    bar = ColorBar(color_mapper=first.mapper, ticker=first.ticker, title=first.title, width=12)
    bar.major_label_overrides = dict(enumerate(first.names))
    # What the page's script turns the bar and the units into.
    bar.name, bar.tags = f"{name} colours", [list(vars(way).values()) for way in ways]
    plot.add_layout(bar, "right")
    plot.add_tools(_hover(units, source))
    return plot


def _view(there: NDArray[np.bool_]) -> CDSView:
    return CDSView(filter=IndexFilter(indices=np.flatnonzero(there).tolist()))


def _hover(units: Any, source: ColumnDataSource) -> HoverTool:
    several = bool(np.any(source.data["chunk"]))
    letters = "".join(kind.letter for kind in KINDS)
    chunk = " + '.' + source.data.chunk[i]" if several else ""
    name = (
        f"const i = special_vars.index; "
        f"return '{letters}'[value] + source.data.microbatch[i]{chunk}"
    )
    known = CustomJSHover(code="return isFinite(value) ? value.toPrecision(4) : 'not known'")
    return HoverTool(
        renderers=[units],
        tooltips=[
            ("unit", "@kind{custom}"),
            ("time (ms)", "@begin_ms{0.000} to @end_ms{0.000}"),
            ("clock (MHz)", "@mhz{custom}"),
            ("energy (J)", "@joules{custom}"),
            ("power (W)", "@watts{custom}"),
            ("slack (ms)", "@slack_ms{custom}"),
            ("on the critical path", "@critical{custom}"),
        ],
        formatters={
            "@kind": CustomJSHover(args={"source": source}, code=name),
            "@mhz": CustomJSHover(code="return value > 0 ? String(value) : 'not controlled'"),
            "@critical": CustomJSHover(code="return value ? 'yes' : 'no'"),
            **dict.fromkeys(("@joules", "@watts", "@slack_ms"), known),
        },
    )
