"""The page's timelines of units: an iteration before and one after, of all that were recorded."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.report.charts import (
    BLUE,
    GREY,
    ORANGE,
    PATH,
    SKY,
    VERMILION,
    Chart,
    Choice,
    Colouring,
    Marks,
    View,
)
from envpipe_megatron.report.units import KINDS, MOST_UNITS, UnitTable, waits_of
from envpipe_megatron.report.views import gpu_rows

_KIND_COLOURS = {
    Kind.FORWARD: SKY,
    Kind.BACKWARD: BLUE,
    Kind.INPUT_GRADIENT: ORANGE,
    Kind.WEIGHT_GRADIENT: VERMILION,
}
_TEXT = (
    "An iteration before and one after, on one axis. F: forward of a microbatch, B: backward, "
    "or its two parts, I (gradient of the input) and W (of the weights). Hatched: the GPU "
    "waits. Slack and path follow from the measured durations; energy is the "
    "profile's at the clock that was asked for. Ctrl and the wheel, or + and -, zoom; dragging "
    "or arrow keys move; 0 shows all."
)
_TIPS = (
    ("unit", "@label"),
    ("time (ms)", "@begin{0.000} to @end{0.000}"),
    ("clock (MHz)", "@mhz{custom}"),
    ("energy (J)", "@joules{custom}"),
    ("power (W)", "@watts{custom}"),
    ("slack (ms)", "@slack_ms{custom}"),
    ("on the critical path", "@critical{custom}"),
)
_TIP_CODES = {
    "mhz": "return value > 0 ? String(value) : 'not controlled'",
    "critical": "return value ? 'yes' : 'no'",
    **dict.fromkeys(
        ("joules", "watts", "slack_ms"),
        "return isFinite(value) ? value.toPrecision(4) : 'not known'",
    ),
}


def timelines_view(table: UnitTable) -> View:
    """Return the timelines of a job's recorded iterations."""
    columns = {name: values for name, values in table.columns.items() if name != "envelope"}
    columns["middle"] = (columns["begin"] + columns["end"]) / 2
    columns["group"] = columns.pop("iteration")
    waits = waits_of(table.columns)
    waits["group"] = waits.pop("iteration")
    on_path = columns["critical"] == 1
    path = {name: columns[name][on_path] for name in ("group", "row", "begin", "end")}
    ways = _colourings(columns)
    marks = (
        Marks("box", "GPU waits", GREY, waits, look="hatched"),
        Marks("box", "", SKY, columns, _TIPS, colourings=ways, tip_codes=_TIP_CODES),
        Marks("box", "critical path", PATH, path, look="outlined"),
    )
    ends_ms = [
        float(columns["end"][columns["group"] == number].max())
        for number in range(len(table.iterations))
    ]
    iterations = [
        (str(number), f"{phase}, {at}: {end_ms / 1e3:.4g} s")
        for number, ((phase, at), end_ms) in enumerate(zip(table.iterations, ends_ms, strict=True))
    ]
    label, rows = gpu_rows(table.gpus)
    charts = [
        Chart(
            name, "ms after the first unit", label, marks, name.title(), rows,
            x_range=(0.0, max(ends_ms[shown] for shown in table.shown)),
            x_bounds=(-0.02 * max(ends_ms), 1.02 * max(ends_ms)),
            choice=Choice("iteration", iterations, str(shown)),
        )
        for name, shown in zip(("before", "after"), table.shown, strict=True)
    ]  # fmt: skip
    choices = {"colour": Choice.of("Colour by", [way.title for way in ways])}
    pipelines: dict[int, list[int]] = {}
    for row, gpu in enumerate(table.gpus):
        pipelines.setdefault(gpu.pipeline, []).append(row)
    if len(pipelines) > 1:
        every = f"0 {len(rows) - 1}"
        options = [(f"{own[0]} {own[-1]}", f"pipeline {n}") for n, own in pipelines.items()]
        choices["pipeline"] = Choice("Pipeline", [(every, "all"), *options], every)
    text = _TEXT
    if len(table.iterations) < table.recorded:
        text += (
            f" {len(table.iterations)} of {table.recorded} recorded iterations are here: a page "
            f"holds some {MOST_UNITS:,} units."
        )
    return View("timeline", "Timelines", text, charts, choices)


def _colourings(columns: dict[str, NDArray[Any]]) -> list[Colouring]:
    """Return all ways to colour units, the most telling first: one clock tells nothing."""
    known = [
        Colouring(title, column, _ends(columns[column][there]))
        for title, column, there in (
            ("clock (MHz)", "mhz", columns["mhz"] > 0),
            ("power (W)", "watts", np.isfinite(columns["watts"])),
            ("slack (ms)", "slack_ms", np.isfinite(columns["slack_ms"])),
        )
        if there.any()
    ]
    colours, names = [_KIND_COLOURS[kind] for kind in KINDS], [kind.value for kind in KINDS]
    by_kind = Colouring("kind", "kind", (-0.5, len(KINDS) - 0.5), colours, names)
    one_clock = np.ptp(columns["mhz"]) == 0
    return [by_kind, *known] if one_clock else [*known[:1], by_kind, *known[1:]]


def _ends(values: NDArray[Any]) -> tuple[float, float]:
    low, high = float(values.min()), float(values.max())
    return low, high if high > low else low + 1.0
