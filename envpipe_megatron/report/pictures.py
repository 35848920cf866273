"""Which pictures a run's folder has enough for."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure

from envpipe_megatron.formats.energy import Phase, name_of_run
from envpipe_megatron.report.alignment import node_offsets_s
from envpipe_megatron.report.drawing.measured import (
    clock_range_mhz,
    last_iteration,
    measured_figure,
)
from envpipe_megatron.report.drawing.metered import (
    nodes_figure,
    power_figure,
    power_series,
    shares_figure,
    step_series,
    steps_figure,
)
from envpipe_megatron.report.drawing.planned import clocks_figure, memory_figure
from envpipe_megatron.report.drawing.plots import energy_valley_figure
from envpipe_megatron.report.facts import ReportFacts
from envpipe_megatron.report.run_folder import RunFolder

#: With more stages, some of them are drawn.
_MOST_VALLEYS = 12


@dataclass(frozen=True)
class Picture:
    """A picture that can be drawn; its files have its name."""

    name: str
    caption: str
    draw: Callable[[], Figure]


def pictures_of(folder: RunFolder, facts: ReportFacts) -> Iterator[Picture]:
    """The pictures of a run, the most telling first."""
    mark = " (emulated)" if folder.emulated else ""
    if folder.dry_run:
        mark += " (dry run)"
    yield from _timelines(folder, mark)
    if facts.stages:
        yield Picture(
            "energy_by_stage",
            "Energy of an iteration on one GPU of each stage: in units by the profile, in receives "
            "by the waiting power, and the rest of what was metered.",
            lambda: shares_figure(facts.stages, f"Where the energy goes{mark}"),
        )
    series = step_series(folder.windows)
    if series:
        yield Picture(
            "iterations",
            "Time and energy of each iteration over the job; a metered window of several "
            "iterations stands for their mean.",
            lambda: steps_figure(series, f"Iterations of the job{mark}"),
        )
    power = power_series(folder.windows, node_offsets_s(folder.timelines.iterations))
    if power.names:
        yield Picture(
            "power",
            "Power of each GPU over time: the mean of each metered window.",
            lambda: power_figure(power, f"Power of the GPUs{mark}"),
        )
    plan, profile = folder.plan, folder.profile
    if plan is not None:
        yield Picture(
            "clocks",
            "How long the units of each stage run at each clock, by the plan.",
            lambda: clocks_figure(
                plan.frequency_mhz, plan.timeline.duration_s, f"Clocks of the plan{mark}"
            ),
        )
    if profile is not None:
        stages = _spread(profile.num_stages, _MOST_VALLEYS)
        yield Picture(
            "energy_valley",
            f"Energy of one microbatch over the clock, by the profile: {len(stages)} of "
            f"{profile.num_stages} stages.",
            lambda: energy_valley_figure(profile, title=f"Energy valley{mark}", stages=stages),
        )
    memory = (folder.summary or {}).get("memory")
    if memory:
        yield Picture(
            "memory",
            "Peak of allocated memory on each stage: predicted from the warm-up, and measured.",
            lambda: memory_figure(memory, f"Memory{mark}"),
        )
    nodes = (folder.bill or {}).get("nodes")
    if nodes:
        yield Picture(
            "nodes",
            "Energy of each node, as the launcher billed it.",
            lambda: nodes_figure(nodes, f"Energy bill{mark}"),
        )


def _spread(count: int, most: int) -> list[int]:
    """Numbers from 0 to the last of `count`, evenly spread if there are more than `most`."""
    return sorted({round(i) for i in np.linspace(0, count - 1, min(count, most))})


def _timelines(folder: RunFolder, mark: str) -> Iterator[Picture]:
    """The last iteration of the baseline and of the steady phase, on the same axes of time."""
    recorded = folder.timelines.iterations
    runs = list(dict.fromkeys(name_of_run(read.labels.run) for read in recorded))
    if len(runs) > 1:
        wanted = [(run, Phase.STEADY.value) for run in runs]
    else:
        wanted = [(run, phase.value) for run in runs for phase in (Phase.WARMUP, Phase.STEADY)]
    known = [
        one
        for pair in wanted
        if (one := last_iteration(recorded, *pair, folder.num_stages)) is not None
    ]
    if not known:
        return
    longest_s, clocks = max(one.time_s for one in known), clock_range_mhz(known)
    for one in known:
        which = one.run if len(runs) > 1 else one.phase
        yield Picture(
            re.sub(r"[^\w.-]+", "_", f"timeline_{which}"),
            f"Measured timeline of iteration {one.iteration}, the last one of "
            f"{which} that was recorded.",
            lambda one=one, which=which: measured_figure(  # type: ignore[misc]  # its own
                one,
                title=f"Measured: {which}, iteration {one.iteration}{mark}",
                x_max_s=longest_s,
                frequency_range_mhz=clocks,
            ),
        )
