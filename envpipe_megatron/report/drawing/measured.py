"""Measured iterations of a whole pipeline, as they are drawn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from envpipe_megatron.core.kinds import ScheduleError
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.formats.energy import name_of_run
from envpipe_megatron.formats.timeline import RankIteration
from envpipe_megatron.report.drawing.plots import order_figure
from envpipe_megatron.report.drawing.style import scale_range
from envpipe_megatron.report.pipelines import node_offsets_s


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


def _what_ran(read: RankIteration) -> tuple[str, bytes]:
    clocks = read.frequency_mhz
    return read.order, b"" if clocks is None else clocks.tobytes()


def last_iteration(
    recorded: Iterable[RankIteration], run: str, phase: str, num_stages: int
) -> MeasuredIteration | None:
    """The last iteration of a phase that all stages of a pipeline of `num_stages` recorded.

    One that is like most of the latest: now and then a closed loop looks at other clocks.
    Of replicas and tensor-parallel peers, the lowest rank of each stage is taken. None if there
    is none, or what was recorded is no order of a whole pipeline.
    """
    recorded = list(recorded)
    own = [read for read in recorded if (name_of_run(read.labels.run), read.phase) == (run, phase)]
    by_iteration: dict[tuple[str, int], dict[int, RankIteration]] = {}
    for read in sorted(own, key=lambda read: -read.labels.rank):
        # Of a job that was started again, the last start: labels end in their instants.
        key = read.labels.run, read.iteration
        by_iteration.setdefault(key, {})[read.labels.stage] = read
    whole = [key for key, stages in by_iteration.items() if len(stages) == num_stages]
    if not whole:
        return None
    latest = [key for key in sorted(whole)[-_LATEST:] if key[0] == max(whole)[0]]
    ran = {
        key: tuple(_what_ran(by_iteration[key][stage]) for stage in range(num_stages))
        for key in latest
    }
    usual, _ = Counter(ran.values()).most_common(1)[0]
    last = max(key for key in latest if ran[key] == usual)
    stages = [by_iteration[last][stage] for stage in range(num_stages)]
    units = [read.units for read in stages]
    try:
        schedule = Schedule(
            "recorded",
            1 + max(unit.microbatch for order in units for unit in order),
            1 + max(unit.chunk for order in units for unit in order),
            tuple(units),
        )
    except ScheduleError:
        return None
    start, _ = last
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
