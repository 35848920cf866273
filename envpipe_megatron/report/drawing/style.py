"""Shared by all pictures: colours that no colour vision confuses, plain axes, and their files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import matplotlib
import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Colormap, LinearSegmentedColormap
from matplotlib.figure import Figure

from envpipe_megatron.files import written_beside

DPI = 150
#: Stands in every PNG of ours.
PICTURE_MARK = "EnvPipe for Megatron"
_MOST_PIXELS = 2000  # of a side: the pictures of large pipelines
INK, MUTED, GRID = "#1a1a1a", "#5f6368", "#e6e6e6"
#: Okabe and Ito's, less black; https://jfly.uni-koeln.de/color/
ORANGE, SKY, GREEN, YELLOW = "#e69f00", "#56b4e9", "#009e73", "#f0e442"
BLUE, VERMILION, PURPLE, GREY = "#0072b2", "#d55e00", "#cc79a7", "#999999"
SERIES = (BLUE, ORANGE, GREEN, PURPLE, VERMILION, SKY, INK, YELLOW)


def new_figure(width_in: float, height_in: float) -> Figure:
    """An empty figure that lays itself out."""
    return Figure(figsize=(width_in, height_in), dpi=DPI, layout="constrained")


def set_title(figure: Figure, title: str) -> None:
    """A headline on the left."""
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=12, color=INK)


def dress(
    axes: Axes,
    x_label: str = "",
    y_label: str = "",
    *,
    grid: Literal["both", "x", "y"] = "y",
) -> None:
    """Plain axes: a light grid, no box, small muted numbers."""
    axes.set_xlabel(x_label, color=MUTED, fontsize=9)
    axes.set_ylabel(y_label, color=MUTED, fontsize=9)
    axes.grid(axis=grid, color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=MUTED, labelsize=8)


def add_colour_bar(figure: Figure, axes: Axes, scale: ScalarMappable, label: str) -> None:
    """Add a bar that says what the colours on axes mean."""
    bar = figure.colorbar(scale, ax=axes, pad=0.012, aspect=18, fraction=0.05)
    bar.set_label(label, color=MUTED, fontsize=9)
    bar.outline.set_visible(False)
    bar.ax.tick_params(colors=MUTED, labelsize=8)


def legend_below(figure: Figure, handles: Sequence[Any], columns: int, **style: Any) -> None:
    """A legend under all axes."""
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=max(1, columns),
        frameon=False,
        fontsize=8,
        **style,
    )


def letters_on(colour: Sequence[float], dark: str) -> str:
    """Dark or white letters, by the perceived brightness of what is behind them."""
    return dark if np.dot(colour[:3], (0.299, 0.587, 0.114)) > 0.5 else "white"


def scale_range(low: float, high: float) -> tuple[float, float]:
    """The ends of a colour scale, which needs some length if all units run at one clock."""
    return (float(low), float(high)) if low < high else (high - 1.0, float(high))


def clock_map() -> Colormap:
    """Viridis less its darkest end, where outlines would drown."""
    return LinearSegmentedColormap.from_list("clock", colormaps["viridis"](np.linspace(0.16, 1)))


def save_picture(figure: Figure, path: Path, dpi: float = DPI) -> None:
    """Write a figure in the format of the file's name; a PNG is marked as ours."""
    mark = {"Software": PICTURE_MARK} if path.suffix == ".png" else {"Date": None}
    with written_beside(path) as draft:
        figure.savefig(draft, dpi=dpi, metadata=mark, format=path.suffix[1:])


def save(figure: Figure, folder: Path, name: str) -> None:
    """Write a figure as PNG and as SVG; the same figure gives the same bytes."""
    dpi = min(DPI, _MOST_PIXELS / max(figure.get_size_inches()))
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # laid out once, and not again for each file
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        for ending in (".png", ".svg"):
            save_picture(figure, folder / f"{name}{ending}", dpi)
