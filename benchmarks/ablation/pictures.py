"""Pictures of an ablation: a panel for each ingredient, a group of bars for each workload."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from benchmarks.ablation.rows import Ablation, Row, Start
from benchmarks.outputs import grouped_bars

#: A plan that takes this much longer than the baseline is marked (%).
_SLOWER_PERCENT = 0.05


def ablation_figure(rows: Sequence[Row], ablations: Sequence[Ablation], title: str) -> Figure:
    """What each setting saves against 1F1B at full clock; a star marks plans that are slower."""
    workloads = list(dict.fromkeys(row.workload.name for row in rows))
    figure = Figure(
        figsize=(6.0 + 3.0 * len(workloads), 3.6 * len(ablations)), layout="constrained"
    )
    panels = figure.subplots(len(ablations), squeeze=False)[:, 0]
    for axes, ablation in zip(panels, ablations, strict=True):
        series: dict[str, list[tuple[float, str]]] = {}
        for row in rows:
            if row.ablation is ablation:
                own = "" if row.start is Start.FULL else ", in the baseline"
                series.setdefault(f"{row.setting}{own}", []).append(_bar(row))
        grouped_bars(axes, workloads, series)
        axes.set_title(ablation, fontsize=10, fontweight="bold", loc="left")
        axes.set_ylabel("energy saved (%)")
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize="small")
    figure.suptitle(f"{title}; *: slower than the baseline", fontsize=11)
    return figure


def _bar(row: Row) -> tuple[float, str]:
    star = "*" if row.slowdown_percent >= _SLOWER_PERCENT else ""
    return row.saving_percent, f"{round(row.saving_percent, 1) + 0.0:.1f}{star}"  # no -0.0
