"""A row for each GPU: clocks asked for and seen, what held them back, and where its time goes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import numpy as np
from bokeh.models import CDSView, ColumnDataSource, IndexFilter, Range1d
from bokeh.plotting import figure

from envpipe_megatron.core.arrays import FloatArray
from envpipe_megatron.formats.timeline import IDLE, ClockSamples
from envpipe_megatron.report.drawing.style import BLUE, GREY, ORANGE, SERIES, SKY
from envpipe_megatron.report.facts import Bubbles
from envpipe_megatron.report.page.plots import (
    add_legend,
    add_tips,
    gpu_rows_plot,
    over_time_plot,
    thinned,
)
from envpipe_megatron.report.pipelines import Gpu, gpus_of

#: So many reasons have a colour of their own; rarer ones share one.
_MOST_REASONS = 4


@dataclass(frozen=True)
class _Looks:
    """Some looks at a GPU's clock in their order; NaN where none was asked for."""

    gpu: Gpu
    time_s: FloatArray
    requested_mhz: FloatArray
    observed_mhz: FloatArray
    reasons: tuple[str, ...]


def clock_figures(
    samples: Sequence[ClockSamples], offsets_s: Mapping[Any, float]
) -> tuple[figure, figure | None]:
    """Clocks asked for and seen, of the GPU that the page's script chooses; what held all back.

    The latter is None where nothing did, but for idle GPUs.
    """
    looks = [_looks(gpu, samples, offsets_s) for gpu in gpus_of(read.labels for read in samples)]
    first_s = min(own.time_s[0] for own in looks)
    last_s = max(own.time_s[-1] for own in looks)
    shared = Range1d(start=0.0, end=max(float(last_s - first_s), 1e-3))
    return _clocks(looks, first_s, shared), _held_back(looks, first_s, shared)


def ranks_of(samples: Sequence[ClockSamples]) -> dict[int, str]:
    """Names of the ranks that clocks were seen of."""
    gpus = gpus_of(read.labels for read in samples)
    return {gpu.rank: f"rank {gpu.rank}, stage {gpu.stage}" for gpu in gpus}


def _looks(gpu: Gpu, samples: Sequence[ClockSamples], offsets_s: Mapping[Any, float]) -> _Looks:
    rows = sorted(
        (at - offsets_s.get((read.labels.run, read.labels.node), 0.0), asked, seen, why)
        for read in samples
        if read.labels.rank == gpu.rank
        for at, asked, seen, why in zip(
            read.time_s,
            (math.nan if mhz is None else float(mhz) for mhz in read.requested_mhz),
            read.observed_mhz,
            read.throttle_reasons or ("",) * len(read.time_s),
            strict=True,
        )
    )
    rows = [rows[place] for place in thinned(len(rows))]
    time_s, requested, observed = np.array([row[:3] for row in rows], dtype=float).T
    return _Looks(gpu, time_s, requested, observed, tuple(row[3] for row in rows))


def _clocks(looks: Sequence[_Looks], first_s: float, shared: Range1d) -> figure:
    columns: dict[str, list[Any]] = {"x": [], "y": [], "rank": [], "what": [], "colour": []}
    for own in looks:
        for what, values, colour in (
            ("seen", own.observed_mhz, BLUE),
            ("asked for", own.requested_mhz, ORANGE),
        ):
            # Each look's clock up to the next look.
            columns["x"].append(np.repeat(own.time_s - first_s, 2)[1:].astype(np.float32))
            columns["y"].append(np.repeat(values, 2)[:-1].astype(np.float32))
            columns["rank"].append(own.gpu.rank)
            columns["what"].append(what)
            columns["colour"].append(colour)
    plot = over_time_plot("s after the first look", "MHz", shared)
    drawn = plot.multi_line(
        "x", "y", source=ColumnDataSource(columns), color="colour", line_width=1.5,
        legend_field="what", name="clock lines",
        view=CDSView(filter=IndexFilter(indices=[0, 1])),
    )  # fmt: skip
    (legend,) = plot.legend
    legend.orientation = "horizontal"
    plot.add_layout(legend, "below")
    add_tips(plot, drawn, ("rank", "@rank"), ("", "@what"), ("s", "$x{0.00}"), ("MHz", "$y{0}"))
    return plot


def _unbroken(
    places: list[int], times_s: Sequence[float], most_s: float
) -> Iterator[tuple[int, int]]:
    """First and last of neighbouring looks, without longer gaps than that."""
    first = places[0]
    for one, after in pairwise(places):
        if times_s[after] - times_s[one] > most_s:
            yield first, one
            first = after
    yield first, places[-1]


def _held_back(looks: Sequence[_Looks], first_s: float, shared: Range1d) -> figure | None:
    """A row for each GPU, with a box as long as it gave a reason: up to the next look.

    Nobody looks after a start's first hour: a box goes on for no longer than looks usually do.
    """
    boxes: dict[str, list[tuple[int, float, float]]] = {}
    for row, own in enumerate(looks):
        times_s = (own.time_s - first_s).tolist()
        usual_s = float(np.median(np.diff(own.time_s))) if len(times_s) > 1 else 0.0
        for reasons, group in groupby(range(len(times_s)), key=own.reasons.__getitem__):
            if reasons and IDLE not in reasons.split(", "):
                boxes.setdefault(reasons, []).extend(
                    (row, times_s[first], times_s[last] + usual_s)
                    for first, last in _unbroken(list(group), times_s, 2 * usual_s)
                )
    if not boxes:
        return None
    plot = gpu_rows_plot("s after the first look", [own.gpu for own in looks], 160, x_range=shared)
    most = sorted(boxes, key=lambda why: -sum(end - begin for _, begin, end in boxes[why]))
    items = []
    for number, reasons in enumerate(most):
        rows, begins, ends = (list(column) for column in zip(*boxes[reasons], strict=True))
        ranks = [looks[int(row)].gpu.rank for row in rows]
        source = ColumnDataSource(
            {"row": rows, "begin": begins, "end": ends, "rank": ranks, "why": [reasons] * len(rows)}
        )
        colour = SERIES[number] if number < _MOST_REASONS else GREY
        drawn = plot.hbar(
            y="row", left="begin", right="end", height=0.8, color=colour, source=source
        )
        items.append((reasons, drawn))
        add_tips(plot, drawn, ("rank", "@rank"), ("held back by", "@why"), ("s", "$x{0.00}"))
    add_legend(plot, items)
    return plot


def bubbles_figure(found: Bubbles) -> figure:
    """A bar for each GPU: units on the critical path, other units, bubbles."""
    plot = gpu_rows_plot(
        "ms of an iteration",
        [each.gpu for each in found.gpus],
        160,
        x_range=Range1d(start=0.0, end=1.02e3 * found.pipeline_s),
    )
    times_ms = 1e3 * np.array(
        [(each.critical_s, each.units_s - each.critical_s, each.bubbles_s) for each in found.gpus]
    )
    source = ColumnDataSource(
        {
            "row": list(range(len(found.gpus))),
            "rank": [each.gpu.rank for each in found.gpus],
            "critical": times_ms[:, 0],
            "others": times_ms[:, 1],
            "bubbles": times_ms[:, 2],
        }
    )
    columns = {"critical": ORANGE, "others": SKY, "bubbles": GREY}
    bars = plot.hbar_stack(
        list(columns), y="row", height=0.8, color=list(columns.values()), source=source
    )
    names = ("units on the critical path", "other units", "bubbles")
    add_legend(plot, zip(names, bars, strict=True))
    tips = [(name, f"@{column}{{0.0}} ms") for name, column in zip(names, columns, strict=True)]
    for bar in bars:
        add_tips(plot, bar, ("rank", "@rank"), *tips)
    return plot
