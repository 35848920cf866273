"""Pictures of compared plans: savings by kind of plan, and what memory buys."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from benchmarks.outputs import BLUE, GREEN, ORANGE, PINK, RED, SKY, YELLOW, bare, grouped_bars
from benchmarks.planner.plans import EXTRA_FORWARDS, Comparison, PlanKind, Row

#: Kind, limit and colour.
_BARS = (
    (PlanKind.ENVPIPE_ON_1F1B, None, YELLOW),
    (PlanKind.ENVPIPE, None, ORANGE),
    (PlanKind.LOWTIME, None, SKY),
    (PlanKind.OURS_ON_1F1B, None, BLUE),
    (PlanKind.OURS_JOINT, 1, PINK),
    (PlanKind.OURS_JOINT, None, RED),
)
#: A plan that takes this much longer than all-maximum is marked (%).
_SLOWER_PERCENT = 0.05
_LINES = ((BLUE, "o"), (GREEN, "s"), (PINK, "^"), (RED, "D"))


def savings_figure(comparisons: Sequence[Comparison]) -> Figure:
    """Saving at the all-maximum time by kind of plan, a group of bars for each workload."""
    panels = [
        (title, some)
        for title, emulated in (("GPT-3 175B, 8 stages", True), ("Measured workloads", False))
        if (some := [c for c in comparisons if c.workload.emulated == emulated])
    ]
    figure = Figure(figsize=(12.5, 4.3 * len(panels) + 0.9), layout="constrained")
    for axes, (title, some) in zip(
        figure.subplots(len(panels), squeeze=False)[:, 0], panels, strict=True
    ):
        _draw_bars(axes, some)
        axes.set_title(title)
        axes.set_ylabel("energy saved against all-maximum (%)")
    handles, labels = axes.get_legend_handles_labels()
    handles.append(Line2D([], [], color="black", ls="", marker="_", ms=14, mew=1.5))
    labels.append("no order at all saves more")
    handles.append(Line2D([], [], ls="", marker="*", color="black", ms=5))
    labels.append(f"takes over {_SLOWER_PERCENT} % longer than all-maximum")
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    return figure


def _draw_bars(axes: Axes, comparisons: Sequence[Comparison]) -> None:
    series: dict[str, list[tuple[float, str]]] = {}
    for kind, limit, _ in _BARS:
        rows = [_bar_row(comparison, kind, limit) for comparison in comparisons]
        label = "1F1B + lowtime, recipe zeus"
        if kind is not PlanKind.LOWTIME:
            label = next(row.label for row in rows if row is not None)
        series[label] = [_bar(row) for row in rows]
    names = [
        f"{c.workload.model}\n{c.workload.gpu}, M = {c.workload.num_microbatches}"
        for c in comparisons
    ]
    grouped_bars(axes, names, series, [colour for _, _, colour in _BARS])
    for group, comparison in enumerate(comparisons):
        bound = comparison.row(PlanKind.OURS_JOINT).any_order_saving_percent
        if bound is not None:
            axes.plot((group - 0.42, group + 0.42), (bound, bound), color="black", linewidth=1.2)


def _bar(row: Row | None) -> tuple[float, str]:
    if row is None:
        return 0.0, "not run"
    slower = row.slowdown_percent >= _SLOWER_PERCENT
    return row.saving_percent, f"{row.saving_percent:.1f}{'*' if slower else ''}"


def _bar_row(comparison: Comparison, kind: PlanKind, limit: int | None) -> Row | None:
    if kind is not PlanKind.LOWTIME:
        return comparison.row(kind, limit)
    # A run that ended at its limit has no plan for the all-maximum time.
    rows = [row for row in comparison.lowtime_rows if row.recipe == "zeus" and row.finished]
    return rows[0] if rows else None


def memory_figure(comparisons: Sequence[Comparison]) -> Figure | None:
    """Saving of joint plans against microbatches in flight; None without emulated pipelines."""
    emulated = [c for c in comparisons if c.workload.emulated]
    gpus = list(dict.fromkeys(c.workload.gpu for c in emulated))
    if not gpus:
        return None
    figure = Figure(figsize=(5.7 * len(gpus), 4.9), layout="constrained")
    panels = figure.subplots(1, len(gpus), squeeze=False, sharey=True)[0]
    for axes, gpu in zip(panels, gpus, strict=True):
        some = [c for c in emulated if c.workload.gpu == gpu]
        for comparison, (colour, marker) in zip(some, _LINES, strict=False):
            _draw_memory(axes, comparison, colour, marker)
        axes.set_title(f"GPT-3 175B, {gpu}")
        axes.set_xlabel("peak in flight on the fullest stage (microbatches)")
        bare(axes)
        axes.grid(axis="y", color="0.9")
    panels[0].set_ylabel("energy saved against all-maximum (%)")
    handles, labels = panels[0].get_legend_handles_labels()
    handles += [Line2D([], [], marker=sign, color="0.3", ls="", ms=7) for sign in ("*", "x")]
    labels += ["EnvPipe in full", "1F1B + lowtime (zeus)"]
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    return figure


def _draw_memory(axes: Axes, comparison: Comparison, colour: str, marker: str) -> None:
    rows = [comparison.row(PlanKind.OURS_JOINT, limit) for limit in EXTRA_FORWARDS]
    axes.plot(
        [row.peak_in_flight for row in rows],
        [row.saving_percent for row in rows],
        color=colour,
        marker=marker,
        ms=4.5,
        label=f"ours joint, M = {comparison.workload.num_microbatches}",
    )
    rivals = (PlanKind.ENVPIPE, "*"), (PlanKind.LOWTIME, "x")
    for kind, sign in rivals:
        row = _bar_row(comparison, kind, None)
        if row is not None:
            axes.plot(row.peak_in_flight, row.saving_percent, color=colour, marker=sign, ms=8)
