"""Measured iterations of a whole pipeline, as they are drawn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.formats.energy import name_of_run
from envpipe_megatron.formats.timeline import RankIteration
from envpipe_megatron.report.drawing.plots import order_figure
from envpipe_megatron.report.drawing.style import scale_range
from envpipe_megatron.report.pipelines import (
    by_iteration,
    gpus_of,
    node_offsets_s,
    whole_pipelines,
)


@dataclass(frozen=True)
class MeasuredIteration:
    """One iteration of one pipeline; arrays are [num_stages, units_per_stage].

    Args:
        run: empty if the job has only one.
        start_s: after the pipeline's first unit.
        frequency_mhz: None if clocks were not controlled.
    """

    run: str
    phase: str
    iteration: int
    schedule: Schedule
    start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]
    frequency_mhz: NDArray[np.int64] | None

    @property
    def time_s(self) -> float:
        """From the first unit's begin to the last one's end."""
        return float(self.end_s.max())


#: So many of the latest iterations tell what is usual.
_LATEST = 16


def last_iteration(
    recorded: Sequence[RankIteration], run: str, phase: str, num_stages: int
) -> MeasuredIteration | None:
    """The last iteration of a phase that all stages of a pipeline of `num_stages` recorded.

    One that is like most of the latest: now and then a closed loop looks at other clocks.
    Of replicas and tensor-parallel peers, the lowest rank of each stage is taken. None if there
    is none, or what was recorded is no order of a whole pipeline.
    """
    own = [read for read in recorded if (name_of_run(read.labels.run), read.phase) == (run, phase)]
    # Of a job that was started again, the last start: labels end in their instants.
    for start in sorted({read.labels.run for read in own}, reverse=True):
        whole = list(_whole([read for read in own if read.labels.run == start], num_stages))
        if whole:
            break
    else:
        return None
    latest = sorted(whole, key=lambda found: found[1][0].iteration)[-_LATEST:]
    ran = [tuple(map(_what_ran, stages)) for _, stages in latest]
    usual, _ = Counter(ran).most_common(1)[0]
    schedule, stages = next(
        found for found, one in zip(latest[::-1], ran[::-1], strict=True) if one == usual
    )
    offsets_s = node_offsets_s(read for read in recorded if read.labels.run == start)
    begin_s = np.array([[read.begin_s - offsets_s[start, read.labels.node]] for read in stages])
    start_s, end_s = (
        1e-6 * np.stack(times) + begin_s
        for times in ([read.start_us for read in stages], [read.end_us for read in stages])
    )
    first_s = start_s.min()
    clocks = [read.frequency_mhz for read in stages if read.frequency_mhz is not None]
    return MeasuredIteration(
        run,
        phase,
        stages[0].iteration,
        schedule,
        start_s - first_s,
        end_s - first_s,
        np.stack(clocks) if len(clocks) == num_stages else None,
    )


def _whole(
    recorded: Sequence[RankIteration], num_stages: int
) -> Iterator[tuple[Schedule, Sequence[RankIteration]]]:
    """The pipeline of the lowest ranks in each iteration that all of its stages recorded."""
    for reads in by_iteration(recorded).values():
        gpus = {gpu.rank: gpu for gpu in gpus_of(read.labels for read in reads)}
        first = [read for read in reads if gpus[read.labels.rank].pipeline == 0]
        yield from whole_pipelines(first, gpus, num_stages)


def _what_ran(read: RankIteration) -> tuple[str, bytes]:
    clocks = read.frequency_mhz
    return read.order, b"" if clocks is None else clocks.tobytes()


def measured_figure(
    measured: MeasuredIteration,
    *,
    title: str,
    x_max_s: float,
    frequency_range_mhz: tuple[float, float] | None,
) -> Figure:
    """The units of one iteration, each at its measured time."""
    in_flight = ", ".join(f"{count:g}" for count in measured.schedule.microbatches_in_flight)
    return order_figure(
        measured.schedule,
        measured.frequency_mhz,
        measured.start_s,
        measured.end_s,
        title=title,
        caption=f"measured {measured.time_s:.4g} s  ·  peak in flight {in_flight}",
        note="one GPU of each stage",
        x_max_s=x_max_s,
        frequency_range_mhz=frequency_range_mhz,
    )


def clock_range_mhz(iterations: Iterable[MeasuredIteration]) -> tuple[float, float] | None:
    """One colour scale for several iterations; None if no clock is known."""
    known = [one.frequency_mhz for one in iterations if one.frequency_mhz is not None]
    if not known:
        return None
    return scale_range(min(f.min() for f in known), max(f.max() for f in known))
