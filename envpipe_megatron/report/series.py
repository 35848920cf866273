"""Measures over the time of a job: its steps, and the power of its GPUs."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from envpipe_megatron.core.arrays import FloatArray
from envpipe_megatron.formats.energy import EnergyWindow

_TIME_BINS = 600


@dataclass(frozen=True)
class StepSeries:
    """Energy and time of the steps of a job.

    Args:
        iteration: [n] those that were metered; of a window of many, the first and the last.
        time_s: [n] of each, on an average GPU.
        energy_j: [n] of each, on all GPUs.
        phases: for each span of iterations of one phase, its name, first and last iteration.
    """

    iteration: NDArray[np.int64]
    time_s: FloatArray
    energy_j: FloatArray
    phases: tuple[tuple[str, int, int], ...]


def step_series(metered: Iterable[EnergyWindow]) -> StepSeries | None:
    """Return steps over all starts, None without any; those of a longer window are their mean."""
    windows = [window for window in metered if window.steps]
    if not windows:
        return None
    first, last = (
        np.array([getattr(window, name) for window in windows])
        for name in ("first_iteration", "last_iteration")
    )
    steps = last - first + 1
    members: dict[str, set[Hashable]] = {}
    for window in windows:
        members.setdefault(window.run, set()).add(window.member)  # a start may have had others
    of_all_j = np.array([len(members[window.run]) * window.energy_j for window in windows])
    durations_s = np.array([window.duration_s for window in windows])
    # A step that was repeated after a restart is covered more than once by each GPU.
    corners, count, times_s, energies_j = _covered(
        first, last + 1, durations_s / steps, of_all_j / steps
    )
    seen = count > 0
    begin = corners[:-1][seen]
    iteration = np.unique(np.concatenate([begin, corners[1:][seen] - 1]))
    at = np.flatnonzero(seen)[np.searchsorted(begin, iteration, "right") - 1]
    return StepSeries(
        iteration,
        times_s[at] / count[at],
        energies_j[at] / count[at],
        _phase_spans(windows),
    )


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


def _phase_spans(windows: Sequence[EnergyWindow]) -> tuple[tuple[str, int, int], ...]:
    """Return the phases in one rank's order, and their iterations."""
    own = sorted(
        (w.first_iteration or 0, w.last_iteration or 0, w.phase)
        for w in windows
        if w.member == windows[0].member
    )
    spans = []
    for phase, group in groupby(own, key=lambda window: window[2]):
        members = list(group)
        spans.append((phase, members[0][0], max(last for _, last, _ in members)))
    return tuple(spans)


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


def power_series(windows: Iterable[EnergyWindow]) -> PowerSeries:
    """Return the power of each GPU, by rank.

    Powers of windows that overlap add up: times of all bins by their powers give all energy.
    """
    by_gpu: dict[tuple[str, str], list[EnergyWindow]] = {}
    for window in windows:
        if window.begin_s is not None and window.duration_s > 0:
            by_gpu.setdefault(window.gpu_key, []).append(window)
    gpus = sorted(by_gpu.values(), key=lambda own: (own[0].rank is None, own[0].rank or 0))
    spans: list[FloatArray] = [
        np.array([(each.begin_s, each.duration_s, each.energy_j) for each in own]).T for own in gpus
    ]
    begin_s = min((float(begin.min()) for begin, *_ in spans), default=0.0)
    end_s = max((float((begin + length).max()) for begin, length, _ in spans), default=0.0)
    edges_s = np.linspace(begin_s, end_s, _TIME_BINS + 1)
    power_w = np.array([_binned_power_w(span, edges_s) for span in spans])
    names = tuple(
        f"rank {own[0].rank} · stage {own[0].stage}" if own[0].rank is not None else own[0].gpu_uid
        for own in gpus
    )
    nodes = tuple(own[0].node for own in gpus)
    return PowerSeries(names, nodes, edges_s - begin_s, power_w)


def _binned_power_w(spans: FloatArray, edges_s: FloatArray) -> FloatArray:
    """Return [bins] mean power, NaN where no window lies; windows give their energy evenly.

    `spans` are [begin, length and energy, windows].
    """
    begin_s, length_s, energy_j = spans
    corners_s, count, sum_w = _covered(begin_s, begin_s + length_s, energy_j / length_s)

    def in_bins(rate: FloatArray) -> FloatArray:
        up_to = np.concatenate([[0.0], np.cumsum(rate * np.diff(corners_s))])
        return np.diff(np.interp(edges_s, corners_s, up_to))

    metered_s, bins_s = in_bins((count > 0).astype(float)), np.diff(edges_s)
    return np.where(metered_s > 0, in_bins(np.where(count > 0, sum_w, 0.0)) / bins_s, np.nan)
