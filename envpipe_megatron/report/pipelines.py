"""The pipelines of a job, from what its ranks recorded, on one axis of time."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from envpipe_megatron.core.kinds import ScheduleError, Unit
from envpipe_megatron.core.schedule import Placement, Schedule
from envpipe_megatron.core.timeline import Timeline
from envpipe_megatron.formats.energy import EnergyNote, EnergyWindow, Phase, split_phase
from envpipe_megatron.formats.timeline import GpuLabels, RankIteration, TimelineLogs

#: Phase and number of an iteration.
IterationKey = tuple[str, int]


def on_one_axis(
    timelines: TimelineLogs, lines: Iterable[EnergyWindow | EnergyNote]
) -> tuple[TimelineLogs, tuple[EnergyWindow | EnergyNote, ...]]:
    """Bring the instants of all nodes and starts to one axis, on which the first of them is 0.

    The stages of a pipeline begin an iteration together, so the median difference between the
    begins of the iterations that two nodes recorded is taken to be 0. A node without an iteration
    in common with that of the lowest rank keeps its time. A start comes after the one before it: a
    node that was booted between them has a clock that begins anew.
    """
    lines = tuple(lines)
    windows = [line for line in lines if isinstance(line, EnergyWindow)]
    ahead_s = _ahead_s(timelines.iterations)
    seen: list[tuple[GpuLabels | EnergyWindow, float, float]] = [
        *((read.labels, read.begin_s, read.iteration_time_s) for read in timelines.iterations),
        *((read.labels, min(read.time_s), 0.0) for read in timelines.clocks),
        *((own, own.begin_s, own.duration_s) for own in windows if own.begin_s is not None),
    ]
    spans_s: dict[str, tuple[float, float]] = {}
    for whose, begin_s, length_s in seen:
        begin_s -= ahead_s[whose.run, whose.node]
        first_s, last_s = spans_s.get(whose.run, (begin_s, begin_s))
        spans_s[whose.run] = min(first_s, begin_s), max(last_s, begin_s + length_s)
    shift_s, shifts_s, last_s = None, dict[str, float](), 0.0
    for run, (begin_s, end_s) in sorted(spans_s.items()):
        shift_s = -begin_s if shift_s is None else max(shift_s, last_s - begin_s)
        shifts_s[run], last_s = shift_s, end_s + shift_s

    def on_axis(whose: GpuLabels | EnergyWindow, instant_s: float) -> float:
        return instant_s - ahead_s[whose.run, whose.node] + shifts_s[whose.run]

    iterations = (
        replace(read, begin_s=on_axis(read.labels, read.begin_s)) for read in timelines.iterations
    )
    clocks = (
        replace(read, time_s=tuple(on_axis(read.labels, at_s) for at_s in read.time_s))
        for read in timelines.clocks
    )
    moved = (
        line
        if isinstance(line, EnergyNote) or line.begin_s is None
        else replace(line, begin_s=on_axis(line, line.begin_s))
        for line in lines
    )
    return replace(timelines, iterations=tuple(iterations), clocks=tuple(clocks)), tuple(moved)


def _ahead_s(iterations: Iterable[RankIteration]) -> Mapping[tuple[str, str], float]:
    """Return by how much nodes' clocks are ahead of the lowest rank's node's, by run and node."""
    begins: dict[str, dict[str, dict[int, float]]] = {}
    first_rank: dict[str, int] = {}
    for read in iterations:
        node, rank = read.labels.node, read.labels.rank
        first_rank[node] = min(rank, first_rank.get(node, rank))
        own = begins.setdefault(read.labels.run, {}).setdefault(node, {})
        own[read.iteration] = min(read.begin_s, own.get(read.iteration, read.begin_s))
    ahead_s = defaultdict[tuple[str, str], float](float)
    for run, nodes in begins.items():
        reference = nodes[min(nodes, key=first_rank.__getitem__)]
        for node, own in nodes.items():
            if common := own.keys() & reference.keys():
                ahead_s[run, node] = statistics.median(own[at] - reference[at] for at in common)
    return ahead_s


@dataclass(frozen=True)
class PlacedGpu:
    """One GPU of the job: of the ranks of a stage, the n-th belongs to pipeline n."""

    node: str
    rank: int
    stage: int
    pipeline: int


def gpus_of(labels: Iterable[GpuLabels]) -> tuple[PlacedGpu, ...]:
    """Return GPUs by pipeline and stage; Megatron's ranks of a stage are in pipelines' order."""
    ranks: dict[int, tuple[str, int]] = {one.rank: (one.node, one.stage) for one in labels}
    met: dict[int, int] = {}
    gpus = []
    for rank, (node, stage) in sorted(ranks.items()):
        met[stage] = met.get(stage, -1) + 1
        gpus.append(PlacedGpu(node, rank, stage, met[stage]))
    return tuple(sorted(gpus, key=lambda gpu: (gpu.pipeline, gpu.stage)))


def by_iteration(recorded: Iterable[RankIteration]) -> dict[IterationKey, list[RankIteration]]:
    """Group ranks' records by iteration, in the order they were recorded.

    Of an iteration that was repeated after a restart, only those of the last start.
    """
    found: dict[IterationKey, dict[int, RankIteration]] = {}
    runs: dict[IterationKey, str] = {}
    for read in recorded:
        key, run = (read.phase, read.iteration), read.labels.run
        if run > runs.setdefault(key, run):
            runs[key], found[key] = run, {}
        if run == runs[key]:
            found.setdefault(key, {})[read.labels.rank] = read
    return {key: list(reads.values()) for key, reads in found.items()}


def kept_iterations(
    iterations: Mapping[IterationKey, Sequence[RankIteration]], most_units: int
) -> list[IterationKey]:
    """Return every n-th iteration of each phase, and its last, with at most about `most_units`.

    The same ones of all GPUs, in their order.
    """
    units = sum(len(read.start_us) for reads in iterations.values() for read in reads)
    stride = max(1, math.ceil(units / most_units))
    left, kept = Counter(phase for phase, _ in iterations), []
    for phase, number in iterations:  # phases take turns
        left[phase] -= 1
        if left[phase] % stride == 0:
            kept.append((phase, number))
    return kept


def before_and_after(keys: Sequence[IterationKey]) -> tuple[IterationKey, IterationKey]:
    """Return the last iteration of a baseline, or of a warm-up, and the last of no baseline.

    Without any baseline or warm-up, the first comes first.
    """
    named = [(split_phase(phase)[0], (phase, number)) for phase, number in keys]
    baseline = [key for phase, key in named if phase == Phase.BASELINE.value]
    warmup = [key for phase, key in named if phase == Phase.WARMUP.value]
    others = [key for phase, key in named if phase != Phase.BASELINE.value]
    return (baseline or warmup or keys[:1])[-1], (others or keys)[-1]


def whole_pipelines(
    reads: Iterable[RankIteration], gpus: Mapping[int, PlacedGpu], num_stages: int
) -> Iterator[tuple[Schedule, Sequence[RankIteration]]]:
    """Yield each pipeline of one iteration that all its stages recorded: its order, its stages.

    Args:
        gpus: by rank.
        num_stages: of the job, some of which may have recorded nothing.
    """
    stages = range(num_stages)
    pipelines: dict[int, dict[int, RankIteration]] = {}
    for read in reads:
        gpu = gpus[read.labels.rank]
        pipelines.setdefault(gpu.pipeline, {})[gpu.stage] = read
    for whole in pipelines.values():
        if whole.keys() == set(stages):
            own = [whole[stage] for stage in stages]
            schedule = _schedule(tuple(read.units for read in own))
            if schedule is not None:
                yield schedule, own


def marked_path(timeline: Timeline) -> NDArray[np.int8]:
    """Return [num_stages, units_per_stage] 1 for the units that set an iteration's time, else 0."""
    marked = np.zeros(timeline.duration_s.shape, dtype=np.int8)
    np.put(marked, timeline.critical_path(), 1)
    return marked


@lru_cache(maxsize=64)
def _schedule(units: tuple[tuple[Unit, ...], ...]) -> Schedule | None:
    """Return the order of a whole pipeline; None if it is none."""
    every = [unit for order in units for unit in order]
    if len({len(order) for order in units}) != 1:
        return None
    # Chunks lie one after the other, or in a V: what one of them cannot run is the other's.
    for placement in (Placement.LOOPED, Placement.V):
        with suppress(ScheduleError):
            return Schedule(
                "recorded",
                1 + max(unit.microbatch for unit in every),
                1 + max(unit.chunk for unit in every),
                units,
                placement,
            )
    return None
