"""Pictures of what was metered over a job: steps, power, shares, nodes."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from envpipe_megatron.core.arrays import FloatArray
from envpipe_megatron.formats.energy import (
    PHASES,
    EnergyWindow,
    name_of_run,
    split_phase,
)
from envpipe_megatron.report.drawing.style import (
    BLUE,
    GREEN,
    GREY,
    INK,
    MUTED,
    ORANGE,
    PURPLE,
    SERIES,
    SKY,
    YELLOW,
    add_colour_bar,
    dress,
    legend_below,
    new_figure,
    set_title,
)
from envpipe_megatron.report.facts import StageFacts
from envpipe_megatron.report.pipelines import StartAndNode

#: Colours of phases, in a job's order.
PHASE_COLOURS = dict(zip(PHASES, (GREY, ORANGE, SKY, PURPLE, YELLOW, GREEN, GREY), strict=True))
#: With more GPUs, lines of power would hide each other.
MOST_LINES = 8
_TIME_BINS = 600
_MOST_NAMED = 24


@dataclass(frozen=True)
class StepSeries:
    """Energy and time of the steps of a run.

    Args:
        run: empty if the job has only one.
        iteration: [n] those that were metered; of a window of many, the first and the last.
        time_s: [n] of each, on an average GPU.
        energy_j: [n] of each, on all GPUs.
        phases: for each span of iterations of one phase, its name, first and last iteration.
    """

    run: str
    iteration: NDArray[np.int64]
    time_s: FloatArray
    energy_j: FloatArray
    phases: tuple[tuple[str, int, int], ...]


def step_series(windows: Iterable[EnergyWindow]) -> list[StepSeries]:
    """Steps of each run, over all starts; a window of several steps stands for their mean."""
    by_run: dict[str, list[EnergyWindow]] = {}
    for window in windows:
        if window.steps:
            by_run.setdefault(name_of_run(window.run), []).append(window)
    return [_series_of(run, own) for run, own in by_run.items()]


def _member(window: EnergyWindow) -> Hashable:
    """A key for a job's members: ranks, whose GPUs may be others after a restart."""
    return window.gpu_key if window.rank is None else window.rank


def _series_of(run: str, windows: Sequence[EnergyWindow]) -> StepSeries:
    first, last = (
        np.array([getattr(window, name) for window in windows])
        for name in ("first_iteration", "last_iteration")
    )
    steps = last - first + 1
    corners = np.unique(np.concatenate([first, last + 1]))

    def covering(values: FloatArray) -> FloatArray:
        """[pieces] for an iteration between two corners, the sum over the windows it lies in."""
        change = np.zeros(len(corners))
        np.add.at(change, np.searchsorted(corners, first), values)
        np.add.at(change, np.searchsorted(corners, last + 1), -values)
        return np.asarray(np.cumsum(change)[:-1])

    # A step that was repeated after a restart is covered more than once by each GPU.
    count = np.rint(covering(np.ones(len(windows))))
    seen = count > 0
    times_s = covering(np.array([window.duration_s for window in windows]) / steps)
    members: dict[str, set[Hashable]] = {}
    for window in windows:
        members.setdefault(window.run, set()).add(_member(window))  # a start may have had others
    of_all_j = np.array([len(members[window.run]) * window.energy_j for window in windows])
    energies_j = covering(of_all_j / steps)
    begin = corners[:-1][seen]
    iteration = np.unique(np.concatenate([begin, corners[1:][seen] - 1]))
    at = np.flatnonzero(seen)[np.searchsorted(begin, iteration, "right") - 1]
    return StepSeries(
        run,
        iteration,
        times_s[at] / count[at],
        energies_j[at] / count[at],
        _phase_spans(windows),
    )


def _phase_spans(windows: Sequence[EnergyWindow]) -> tuple[tuple[str, int, int], ...]:
    """The phases in one rank's order, and their iterations."""
    own = sorted(
        (w.first_iteration or 0, w.last_iteration or 0, w.phase)
        for w in windows
        if _member(w) == _member(windows[0])
    )
    spans = []
    for phase, group in groupby(own, key=lambda window: window[2]):
        members = list(group)
        spans.append((phase, members[0][0], max(last for _, last, _ in members)))
    return tuple(spans)


def steps_figure(series: Sequence[StepSeries], title: str) -> Figure:
    """Time and energy of each iteration over the job, phases shaded; a column a run."""
    figure = new_figure(max(8.0, 5.2 * len(series)), 5.4)
    panels = figure.subplots(2, len(series), sharex="col", sharey="row", squeeze=False)
    for column, run in zip(panels.T, series, strict=True):
        for axes, values in zip(column, (run.time_s, run.energy_j), strict=True):
            for phase, first, last in run.phases:
                colour = PHASE_COLOURS.get(split_phase(phase)[0], GREY)
                axes.axvspan(
                    first - 0.5, last + 0.5, color=colour, alpha=0.22,
                    linewidth=0,
                )  # fmt: skip
            axes.plot(
                run.iteration, values, color=INK, linewidth=1.1, marker=".",
                markersize=3 if len(values) < 300 else 0,
            )  # fmt: skip
            dress(axes)
        if len(series) > 1:
            column[0].set_title(run.run, loc="left", fontsize=10, color=INK)
        column[1].set_xlabel("iteration", fontsize=9, color=MUTED)
        column[1].xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes, label in zip(
        panels[:, 0], ("iteration time (s)", "energy of all GPUs (J)"), strict=True
    ):
        axes.set_ylabel(label, fontsize=9, color=MUTED)
        axes.set_ylim(bottom=0)
    found = {split_phase(phase)[0] for run in series for phase, *_ in run.phases}
    handles = [
        Patch(color=colour, alpha=0.4, label=phase)
        for phase, colour in PHASE_COLOURS.items()
        if phase in found
    ]
    legend_below(figure, handles, len(handles))
    set_title(figure, title)
    return figure


@dataclass(frozen=True)
class PowerSeries:
    """Mean power of GPUs over time.

    Args:
        names, nodes: of each GPU.
        edges_s: [bins + 1] after the first instant.
        power_w: [num_gpus, bins] NaN where a GPU was not metered.
    """

    names: tuple[str, ...]
    nodes: tuple[str, ...]
    edges_s: FloatArray
    power_w: FloatArray


def power_series(
    windows: Iterable[EnergyWindow], offsets_s: Mapping[StartAndNode, float]
) -> PowerSeries:
    """The power of each GPU, in the order of ranks; `offsets_s` brings nodes to one time axis.

    Powers of windows that overlap add up: times of all bins by their powers give all energy.
    """
    by_gpu: dict[tuple[str, str], list[EnergyWindow]] = {}
    for window in windows:
        if window.begin_s is not None and window.duration_s > 0:
            by_gpu.setdefault(window.gpu_key, []).append(window)
    gpus = sorted(by_gpu.values(), key=lambda own: (own[0].rank is None, own[0].rank or 0))
    spans = [_spans(own, offsets_s) for own in gpus]
    begin_s = min((float(begin.min()) for begin, *_ in spans), default=0.0)
    end_s = max((float((begin + length).max()) for begin, length, _ in spans), default=0.0)
    edges_s = np.linspace(begin_s, end_s, _TIME_BINS + 1)
    power_w = np.array([_binned_power_w(*span, edges_s) for span in spans])
    names = tuple(
        f"rank {own[0].rank} · stage {own[0].stage}" if own[0].rank is not None else own[0].gpu_uid
        for own in gpus
    )
    nodes = tuple(own[0].node for own in gpus)
    return PowerSeries(names, nodes, edges_s - begin_s, power_w)


def _spans(
    own: Sequence[EnergyWindow], offsets_s: Mapping[StartAndNode, float]
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Begin, length and energy of windows; a start is behind the one before it.

    The clock of a node that was rebooted begins anew.
    """
    rows: list[tuple[float, float, float]] = []
    run, end_s, shift_s = "", -math.inf, 0.0
    for window in own:
        if window.begin_s is None:
            continue
        begin_s = window.begin_s - offsets_s.get((window.run, window.node), 0.0)
        if window.run != run:
            run, shift_s = window.run, max(0.0, end_s - begin_s)
        rows.append((begin_s + shift_s, window.duration_s, window.energy_j))
        end_s = max(end_s, begin_s + shift_s + window.duration_s)
    begin, length, energy_j = np.array(rows).T
    return begin, length, energy_j


def _binned_power_w(
    begin_s: FloatArray, length_s: FloatArray, energy_j: FloatArray, edges_s: FloatArray
) -> FloatArray:
    """[bins] mean power in each, NaN where no window lies; windows give their energy evenly."""
    corners_s = np.concatenate([begin_s, begin_s + length_s])
    order = np.argsort(corners_s, kind="stable")
    # Of what lies between two corners: how many windows, and their power.
    count = np.cumsum(np.repeat([1, -1], len(begin_s))[order])
    power_w = energy_j / length_s
    sum_w = np.where(count > 0, np.cumsum(np.concatenate([power_w, -power_w])[order]), 0.0)
    between_s = np.diff(corners_s[order])

    def in_bins(rate: FloatArray) -> FloatArray:
        up_to = np.concatenate([[0.0], np.cumsum(rate[:-1] * between_s)])
        return np.diff(np.interp(edges_s, corners_s[order], up_to))

    metered_s, bins_s = in_bins((count > 0).astype(float)), np.diff(edges_s)
    return np.where(metered_s > 0, in_bins(sum_w) / bins_s, np.nan)


def power_figure(series: PowerSeries, title: str) -> Figure:
    """Lines of up to eight GPUs; of more, a map of GPU and time."""
    count = len(series.names)
    if count > MOST_LINES:
        return _power_map(series, title)
    figure = new_figure(9.5, 3.9)
    axes = figure.add_subplot()
    for name, power_w, colour in zip(series.names, series.power_w, SERIES, strict=False):
        axes.stairs(power_w, series.edges_s, color=colour, linewidth=1.2, label=name, baseline=None)
    axes.set_ylim(bottom=0)
    axes.set_xlim(0, series.edges_s[-1])
    dress(axes, "time (s)", "power of a GPU (W)")
    legend_below(figure, axes.get_legend_handles_labels()[0], 4)
    set_title(figure, title)
    return figure


def _power_map(series: PowerSeries, title: str) -> Figure:
    count = len(series.names)
    figure = new_figure(10.0, float(np.clip(0.16 * count, 3.0, 12.0)) + 1.3)
    axes = figure.add_subplot()
    image = axes.imshow(
        series.power_w, aspect="auto", interpolation="nearest", cmap="viridis",
        extent=(0.0, float(series.edges_s[-1]), count - 0.5, -0.5),
    )  # fmt: skip
    add_colour_bar(figure, axes, image, "power of a GPU (W)")
    dress(axes, "time (s)")
    axes.grid(visible=False)
    every = -(-count // _MOST_NAMED)
    axes.set_yticks(range(0, count, every), series.names[::every], fontsize=7)
    set_title(figure, title)
    return figure


_SHARES = (("compute", "units", BLUE), ("blocking", "receives", ORANGE), ("idle", "the rest", GREY))


def shares_figure(stages: Sequence[StageFacts], title: str) -> Figure:
    """Energy of a step on the mean GPU of each stage, of baseline and steady phase."""
    names = list(dict.fromkeys(facts.name for facts in stages))
    numbers = sorted({facts.stage for facts in stages})
    figure = new_figure(float(np.clip(0.95 * len(numbers) + 2.5, 7.0, 18.0)), 4.2)
    axes = figure.add_subplot()
    width = 0.8 / len(names)
    for facts in stages:
        x = facts.stage + width * (names.index(facts.name) - (len(names) - 1) / 2)
        _draw_shares(axes, facts, x, 0.92 * width, hatched=facts.name != names[-1])
    axes.axhline(0, color=MUTED, linewidth=0.8)
    dress(axes, "stage", "energy of an iteration on one GPU (J)")
    axes.set_xlim(numbers[0] - 0.6, numbers[-1] + 0.6)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=32, integer=True))
    parts = _SHARES if all(facts.shares for facts in stages) else (("", "all", BLUE),)
    handles = [Patch(color=colour, label=name) for _, name, colour in parts]
    handles += [
        Patch(facecolor="white", edgecolor=MUTED, hatch="" if n == names[-1] else "////", label=n)
        for n in names
    ]
    legend_below(figure, handles, 5)
    set_title(figure, title)
    return figure


def _draw_shares(axes: Axes, facts: StageFacts, x: float, width: float, *, hatched: bool) -> None:
    parts = [(facts.energy_j, BLUE)]
    if facts.shares is not None:
        parts = [(getattr(facts.shares, f"{key}_j"), colour) for key, _, colour in _SHARES]
    above = below = 0.0
    for energy_j, colour in parts:
        bottom = above if energy_j >= 0 else below
        axes.bar(
            x, energy_j, width, bottom=bottom, color=colour, edgecolor="white", linewidth=0.4,
            hatch="////" if hatched else None,
        )  # fmt: skip
        above, below = above + max(energy_j, 0.0), below + min(energy_j, 0.0)


def nodes_figure(nodes: Sequence[Mapping[str, Any]], title: str) -> Figure:
    """Energy of each node of a bill."""
    figure = new_figure(7.5, float(np.clip(0.32 * len(nodes), 1.2, 12.0)) + 1.3)
    axes = figure.add_subplot()
    names = [f"{node['node']} ({node['num_gpus']} GPUs)" for node in nodes]
    bars = axes.barh(range(len(nodes)), [node["energy_j"] / 1e3 for node in nodes], color=BLUE)
    axes.set_yticks(range(len(nodes)), names)
    axes.invert_yaxis()
    axes.bar_label(bars, fmt="%.4g", padding=3, fontsize=8, color=INK)
    axes.margins(x=0.12)
    dress(axes, "energy (kJ)", grid="x")
    set_title(figure, title)
    return figure
