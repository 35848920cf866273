"""Charts over the time of a job: its steps, and the power of its GPUs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from envpipe_megatron.core.arrays import FloatArray
from envpipe_megatron.formats.energy import PHASES, EnergyWindow, split_phase
from envpipe_megatron.report.charts import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SKY,
    YELLOW,
    Chart,
    Choice,
    Marks,
    columns_of,
    series_colours,
)

#: Colours of phases, in a job's order.
_PHASES = dict(zip(PHASES, (GREY, ORANGE, SKY, PURPLE, YELLOW, GREEN, GREY, GREY), strict=True))
#: Most points of a line: more than a screen has pixels would not be seen.
_MOST_POINTS = 800
_TIME_BINS = 600


def thinned(count: int) -> NDArray[np.intp]:
    """Return places of some of a line's points, the first and the last among them."""
    return np.unique(np.linspace(0, count - 1, min(count, _MOST_POINTS)).round().astype(np.intp))


def step_charts(metered: Iterable[EnergyWindow]) -> list[Chart]:
    """Draw time and energy of the steps of all starts, on one axis of iterations; none without any.

    The time is on an average GPU, the energy on all. Steps of a longer window are their mean, and
    its first and last are drawn.
    """
    windows = [window for window in metered if window.steps]
    if not windows:
        return []
    members = defaultdict[str, set[Hashable]](set)
    for window in windows:
        members[window.run].add(window.member)  # a start may have had others
    first, last = np.array([(own.first_iteration, own.last_iteration) for own in windows]).T
    steps = last - first + 1
    of_all_j = np.array([len(members[window.run]) * window.energy_j for window in windows])
    durations_s = np.array([window.duration_s for window in windows])
    # A step that was repeated after a restart is covered more than once by each GPU.
    corners, count, times_s, energies_j = _covered(
        first, last + 1, durations_s / steps, of_all_j / steps
    )
    seen = count > 0
    begin = corners[:-1][seen]
    iteration = np.unique(np.concatenate([begin, corners[1:][seen] - 1]))
    iteration = iteration[thinned(len(iteration))]
    at = np.flatnonzero(seen)[np.searchsorted(begin, iteration, "right") - 1]
    shades = columns_of("name begin end", _phase_spans(windows))
    shades["colour"] = [_PHASES.get(name, GREY) for name in shades["name"]]
    x, charts = iteration.tolist(), []
    for name, label, sums in (
        ("time_s", "iteration time (s)", times_s),
        ("energy_j", "energy of all GPUs (J)", energies_j),
    ):
        y = (sums[at] / count[at]).tolist()
        tips = ("iteration", "@x"), (label, "@y{0.0000}")
        marks = [
            Marks("span", "", GREY, shades),
            Marks("line", "", BLUE, {"x": [x], "y": [y]}),
            Marks("dot", "", BLUE, {"x": x, "y": y}, tips),
        ]
        charts.append(
            Chart(
                f"iterations-{name}", "iteration", label, marks,
                x_range=(-0.5, x[-1] + 0.5), from_zero=True,
            )
        )  # fmt: skip
    return charts


def _covered(begin: FloatArray, end: FloatArray, *values: FloatArray) -> list[FloatArray]:
    """Return the ends of all intervals, and for each piece between two of them sums over intervals.

    First how many cover it, then the sum of each of `values` over these.
    """
    corners = np.unique(np.concatenate([begin, end]))
    sums = []
    for each in (np.ones(len(begin)), *values):
        change = np.zeros(len(corners))
        np.add.at(change, np.searchsorted(corners, begin), each)
        np.add.at(change, np.searchsorted(corners, end), -each)
        sums.append(np.cumsum(change)[:-1])
    return [corners, np.rint(sums[0]), *sums[1:]]


def _phase_spans(windows: Sequence[EnergyWindow]) -> list[tuple[str, float, float]]:
    """Return the phases in one rank's order, and where each begins and ends among iterations."""
    own = sorted(
        (w.first_iteration or 0, w.last_iteration or 0, split_phase(w.phase)[0])
        for w in windows
        if w.member == windows[0].member
    )
    spans = []
    for phase, group in groupby(own, key=lambda window: window[2]):
        first, last, _ = zip(*group, strict=True)
        spans.append((phase, first[0] - 0.5, max(last) + 0.5))
    return spans


def power_chart(windows: Iterable[EnergyWindow]) -> Chart | None:
    """Draw the mean power of each GPU, by rank, and the sum of each node's; None without any.

    Powers of windows that overlap add up: times of all bins by their powers give all energy.
    """
    by_gpu: dict[tuple[str, str], list[EnergyWindow]] = {}
    for window in windows:
        if window.begin_s is not None and window.duration_s > 0:
            by_gpu.setdefault(window.gpu_key, []).append(window)
    if not by_gpu:
        return None
    gpus = sorted(by_gpu.values(), key=lambda own: (own[0].rank is None, own[0].rank or 0))
    spans: list[FloatArray] = [
        np.array([(each.begin_s, each.duration_s, each.energy_j) for each in own]).T for own in gpus
    ]
    begin_s = min(float(begin.min()) for begin, *_ in spans)
    end_s = max(float((begin + length).max()) for begin, length, _ in spans)
    edges_s = np.linspace(begin_s, end_s, _TIME_BINS + 1)
    power_w = np.array([_binned_power_w(span, edges_s) for span in spans])
    names = [
        f"rank {own[0].rank} · stage {own[0].stage}" if own[0].rank is not None else own[0].gpu_uid
        for own in gpus
    ]
    nodes = np.array([own[0].node for own in gpus])
    by_node = {
        node: np.nansum(power_w[nodes == node], axis=0) for node in dict.fromkeys(nodes.tolist())
    }
    groups = "each GPU", "each node"
    middle_s = ((edges_s[1:] + edges_s[:-1]) / 2 - begin_s).astype(np.float32)
    columns = {
        "name": [*names, *by_node],
        "colour": series_colours(len(names)) + series_colours(len(by_node)),
        "x": [middle_s] * (len(names) + len(by_node)),
        "y": [line.astype(np.float32) for line in (*power_w, *by_node.values())],
        "group": [groups[0]] * len(names) + [groups[1]] * len(by_node),
    }
    tips = ("", "@name"), ("s", "$x{0.00}"), ("W", "$y{0.0}")
    return Chart(
        "power", "time (s)", "power (W)", [Marks("line", "", GREY, columns, tips)],
        x_range=(0.0, end_s - begin_s), from_zero=True, choice=Choice.of("Power of", groups),
    )  # fmt: skip


def _binned_power_w(spans: FloatArray, edges_s: FloatArray) -> FloatArray:
    """Return [bins] mean power, NaN where no window lies; windows give their energy evenly.

    `spans` are [begin, length and energy, windows].
    """
    begin_s, length_s, energy_j = spans
    # [bins, windows] shares of windows.
    share = np.diff(np.clip((edges_s[:, None] - begin_s) / length_s, 0.0, 1.0), axis=0)
    return np.where(share.any(axis=1), share @ energy_j / np.diff(edges_s), np.nan)
