"""Cuts that are cheap with clocks: what is even in time need not be what takes the least energy."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, islice

import numpy as np

from envpipe_megatron.core.arrays import FloatArray
from envpipe_megatron.policies.partitions.search import cheapest_splits
from envpipe_megatron.search.configuration import Configuration
from envpipe_megatron.search.candidates import Candidate
from envpipe_megatron.search.cuts import Shape, StageRuns, stage_runs
from envpipe_megatron.search.runs import Runs, running
from envpipe_megatron.search.space import MegatronSpace

#: Models of more pieces are cut for time alone: the list of cuts takes their square.
_MOST_PIECES = 256
#: 1F1B takes more than a stage forces: so many cuts are simulated at most for each that is wanted.
_CUTS_FOR_ONE = 8


def estimate_j(candidate: Candidate, blocking_power_w: float, longest_s: float) -> float:
    """Energy (J) of all GPUs if each stage runs at its cheapest clock that leaves it in time.

    In time for all its microbatches and the way of the first there and of the last back. Plans,
    which mix clocks, come close to it, so it says which candidates are worth one.
    """
    configuration, total_j, ahead_s = candidate.configuration, 0.0, 0.0
    for layout, work in zip(configuration.stages, candidate.works, strict=True):
        busy_s = configuration.num_microbatches * (work.forward_s + work.backward_s).sum(axis=0)
        busy_j = configuration.num_microbatches * (work.forward_j + work.backward_j).sum(axis=0)
        energy_j = _cheapest_j(busy_s, busy_j, longest_s - ahead_s, longest_s, blocking_power_w)
        total_j += layout.num_gpus * float(energy_j)
        ahead_s += float(work.forward_s[0, 0] + work.backward_s[0, 0])
    return total_j


def cheap_cuts(
    megatron: MegatronSpace, shape: Shape, blocking_power_w: float, longest_s: float
) -> Iterator[Configuration]:
    """Cuts of a shape without virtual stages, the cheapest by the same estimate first."""
    pieces = megatron.pieces(shape)
    count = pieces.num_pieces
    if shape.num_chunks > 1 or not shape.num_stages <= count <= _MOST_PIECES:
        return
    runs = Runs(pieces, np.arange(count + 1), range(count + 1), count)
    stages = stage_runs(
        [runs] * shape.num_stages, shape, megatron.job, megatron.static_bytes(shape)
    )
    sums = _by_clock(megatron, shape)
    cost = np.full((shape.num_stages, count + 1, count + 1), np.inf)
    for stage, each in enumerate(stages):
        energy_j = _run_energies_j(each, sums, shape, blocking_power_w, longest_s)
        node, column = np.nonzero(np.isfinite(energy_j))
        cost[stage, node, node + column + 1] = energy_j[node, column]
    for split in cheapest_splits(cost, np.isfinite(cost)):
        cut = [0, *accumulate(split)]
        recomputed = [each.recomputed(cut[s], cut[s + 1]) for s, each in enumerate(stages)]
        yield megatron.configuration(shape, cut, recomputed)


def alternatives(
    megatron: MegatronSpace, shape: Shape, blocking_power_w: float, longest_s: float, most: int
) -> list[Candidate]:
    """The cheapest cuts of a shape, among the first ones, that are in time by the simulator."""
    cuts = islice(cheap_cuts(megatron, shape, blocking_power_w, longest_s), most * _CUTS_FOR_ONE)
    candidates = (Candidate(each, megatron.profile, megatron.job) for each in cuts)
    in_time = (each for each in candidates if each.iteration_time_s <= longest_s)
    return list(islice(in_time, most))


def _run_energies_j(
    stage: StageRuns,
    sums: dict[str | None, tuple[FloatArray, FloatArray]],
    shape: Shape,
    blocking_power_w: float,
    longest_s: float,
) -> FloatArray:
    """[rows, width] energy (J) of runs as a stage for an iteration; infinite if out of time."""
    runs = stage.runs
    time_s, energy_j = (of[runs.end] - of[runs.first] for of in sums[None])
    for name, until, way_s in stage.ways:
        taken = (way_s == stage.time_s) & (way_s > runs.time_s) & np.isfinite(way_s)
        upto = np.where(taken, until, runs.first)
        again_s, again_j = (of[upto] - of[runs.first] for of in sums[name])
        time_s, energy_j = time_s + again_s, energy_j + again_j
    left_s = (longest_s - runs.pieces.time_s[runs.first])[..., None]
    least_j = _cheapest_j(
        shape.num_microbatches * time_s,
        shape.num_microbatches * energy_j,
        left_s,
        longest_s,
        blocking_power_w,
    )
    return np.where(np.isfinite(stage.time_s), least_j, np.inf)


def _cheapest_j(
    busy_s: FloatArray,
    busy_j: FloatArray,
    left_s: FloatArray | float,
    longest_s: float,
    blocking_power_w: float,
) -> FloatArray:
    """The least over [..., num_frequencies] clocks that are in time; the highest where none is."""
    energy_j = busy_j + blocking_power_w * np.maximum(longest_s - busy_s, 0.0)
    in_time = (busy_s <= left_s) | (busy_s <= busy_s[..., :1])
    least_j: FloatArray = np.where(in_time, energy_j, np.inf).min(axis=-1)
    return least_j


def _by_clock(
    megatron: MegatronSpace, shape: Shape
) -> dict[str | None, tuple[FloatArray, FloatArray]]:
    """Running sums [n + 1, num_frequencies] of s and J: of pieces, and of each recomputation."""
    profile, sizes = megatron.pieces(shape).profile, shape.sizes
    columns = {
        name: profile.column(sizes, name)
        for name in ("forward_s", "backward_s", "forward_j", "backward_j")
    }
    sums: dict[str | None, tuple[FloatArray, FloatArray]] = {
        None: (
            _running(columns["forward_s"] + columns["backward_s"]),
            _running(columns["forward_j"] + columns["backward_j"]),
        )
    }
    measures, nothing = profile.at(sizes), np.zeros(len(profile.frequency_mhz))
    for name in megatron.pieces(shape).ways:
        ways = [measures[piece].way(name) for piece in profile.pieces]
        sums[name] = (
            _running([nothing if way is None else way.time_s for way in ways]),
            _running(
                [nothing if way is None or way.energy_j is None else way.energy_j for way in ways]
            ),
        )
    return sums


def _running(values: FloatArray | list[FloatArray]) -> FloatArray:
    return np.stack([running(column) for column in np.asarray(values).T], axis=1)
