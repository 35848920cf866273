"""Measures over the time of a job: steps beside what plans predicted, and the power of GPUs."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from envpipe_megatron.core.arrays import FloatArray
from envpipe_megatron.formats.energy import EnergyWindow, Phase, name_of_run
from envpipe_megatron.report.facts import ReportFacts
from envpipe_megatron.report.pipelines import StartAndNode
from envpipe_megatron.report.run_folder import RunFolder

_TIME_BINS = 600


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


def _series_of(run: str, windows: Sequence[EnergyWindow]) -> StepSeries:
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
        run,
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
    """The phases in one rank's order, and their iterations."""
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
    corners_s, count, sum_w = _covered(begin_s, begin_s + length_s, energy_j / length_s)

    def in_bins(rate: FloatArray) -> FloatArray:
        up_to = np.concatenate([[0.0], np.cumsum(rate * np.diff(corners_s))])
        return np.diff(np.interp(edges_s, corners_s, up_to))

    metered_s, bins_s = in_bins((count > 0).astype(float)), np.diff(edges_s)
    return np.where(metered_s > 0, in_bins(np.where(count > 0, sum_w, 0.0)) / bins_s, np.nan)


class Prediction(NamedTuple):
    """Cost of an iteration on all GPUs, from `begin` up to `end`, not included, if it ended.

    `said` is what the job said when it began.
    """

    begin: int
    end: int | None
    time_s: float
    energy_j: float
    said: str


def predictions_of(folder: RunFolder, facts: ReportFacts) -> list[Prediction]:
    """Predictions for batches of full size, in order; by the last plan without a closed loop.

    While the loop is back in the framework's order nothing is predicted.
    """
    steps, plan = facts.steady or facts.baseline, folder.plan
    if steps is None or not folder.num_stages:
        return []
    pipelines = steps.num_gpus / folder.num_stages
    told = _of_latest_starts([entry for entry in folder.loop if not entry.get("batch")])
    if told:
        return list(_predictions(told, pipelines))
    if plan is None:
        return []
    joules = pipelines * plan.cost.energy_j
    return [Prediction(0, None, plan.cost.iteration_time_s, joules, "the plan of the job")]


def _of_latest_starts(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """In the order of iterations: a start that begins at an earlier one replaces what came before.

    The runs of starts end with their instants, so that they sort.
    """
    kept: list[dict[str, Any]] = []
    for entry in sorted(entries, key=lambda one: (str(one.get("run", "")), one["iteration"])):
        while kept and kept[-1]["iteration"] > entry["iteration"]:
            kept.pop()
        kept.append(entry)
    return kept


def _predictions(told: list[dict[str, Any]], pipelines: float) -> Iterator[Prediction]:
    cost: tuple[float, float] | None = None
    for now, after in pairwise([*told, None]):
        assert now is not None
        if now["time_s"] is not None:
            cost = now["time_s"], pipelines * now["energy_j"]
        end = None if after is None else after["iteration"]
        if cost is not None and now["phase"] != Phase.BASELINE:
            yield Prediction(now["iteration"], end, *cost, now["note"])
        if after is not None and after.get("run") != now.get("run"):
            cost = None
