"""Pictures of an ablation: a bar for each plan, a column of panels for each workload."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from benchmarks.ablation.rows import Ablation, Row, Start
from benchmarks.outputs import BLUE, ORANGE, bare

_COLOURS = {Start.FULL: BLUE, Start.BASELINE: ORANGE}
_NAMES = {
    Start.FULL: "switched in the full configuration",
    Start.BASELINE: "switched in the baseline (1F1B, highest clock)",
}
#: A plan that takes this much longer than the baseline is marked (%).
_SLOWER_PERCENT = 0.05
_BAR_HEIGHT = 0.8
_INCH_A_BAR = 0.27
#: Ablations whose orders differ, so that memory differs from bar to bar.
_SHOWS_MEMORY = (Ablation.ORDER, Ablation.MEMORY)


def ablation_figure(rows: Sequence[Row], ablations: Sequence[Ablation], title: str) -> Figure:
    """Panels of some ablations, one below the other, and of all workloads side by side."""
    workloads = {row.workload.name: row.workload for row in rows}
    settings = {
        ablation: list(dict.fromkeys(row.setting for row in rows if row.ablation is ablation))
        for ablation in ablations
    }
    bars = [_num_bars(rows, ablation, rows[0].workload.name) for ablation in ablations]
    figure = Figure(
        figsize=(
            3.0 + 3.1 * max(2, len(workloads)),
            1.9 + sum(0.75 + _INCH_A_BAR * n for n in bars),
        ),
        layout="constrained",
    )
    panels = figure.subplots(
        len(ablations), len(workloads), squeeze=False, height_ratios=[n + 1.5 for n in bars]
    )
    widest = max(row.saving_percent for row in rows)
    for line, ablation in zip(panels, ablations, strict=True):
        for axes, workload in zip(line, workloads, strict=True):
            own = [r for r in rows if r.ablation is ablation and r.workload.name == workload]
            _draw(axes, own, settings[ablation], named=axes is line[0])
            axes.set_xlim(0, 1.75 * widest)  # room for the figures behind the bars
        line[0].set_ylabel(ablation, fontsize=10, fontweight="bold")
    for top, bottom, shown in zip(panels[0], panels[-1], workloads.values(), strict=True):
        name = f"{shown.model}\n{shown.gpu}, M = {shown.num_microbatches}"
        top.set_title(name, fontsize=10)
        bottom.set_xlabel("energy saved (%)")
    figure.align_ylabels(panels[:, 0])
    figure.suptitle(title, fontsize=11)
    handles = [Patch(color=colour, label=_NAMES[start]) for start, colour in _COLOURS.items()]
    handles.append(
        Patch(facecolor="white", edgecolor="black", hatch="////", label="slower than the baseline")
    )
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
    return figure


def _num_bars(rows: Sequence[Row], ablation: Ablation, workload: str) -> int:
    return sum(row.ablation is ablation and row.workload.name == workload for row in rows)


def _draw(axes: Axes, rows: Sequence[Row], settings: Sequence[str], *, named: bool) -> None:
    """One panel; a setting that is switched in both configurations has two bars."""
    position = 0.0
    ticks = []
    for setting in settings:
        own = [row for row in rows if row.setting == setting]
        for number, row in enumerate(own):
            _draw_bar(axes, row, position + number)
        ticks.append(position + (max(len(own), 1) - 1) / 2)
        position += max(len(own), 1) + 0.3
    axes.set_ylim(position - 0.7, -0.6)
    axes.set_yticks(ticks, settings if named else [""] * len(ticks), fontsize=9)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8)
    axes.grid(axis="x", color="0.9")
    axes.set_axisbelow(True)
    bare(axes)


def _draw_bar(axes: Axes, row: Row, position: float) -> None:
    slower = row.slowdown_percent >= _SLOWER_PERCENT
    axes.barh(
        position,
        row.saving_percent,
        _BAR_HEIGHT,
        color=_COLOURS[row.start],
        hatch="////" if slower else None,
        edgecolor="white" if slower else "none",
        linewidth=0,
    )
    text = f"{round(row.saving_percent, 1) + 0.0:.1f} %"  # + 0.0: no -0.0
    if slower:
        text += f" ({row.slowdown_percent:.1f} % slower)"
    if row.ablation in _SHOWS_MEMORY:
        text += f" ({row.peak_in_flight} in flight)"
    axes.annotate(
        text,
        (max(0.0, row.saving_percent), position),
        (3, 0),
        textcoords="offset points",
        va="center",
        fontsize=7.5,
    )
