"""Writes all that is known of a run: pictures, summary, page and trace."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from envpipe_megatron.files import refuse_foreign, replace_files
from envpipe_megatron.formats.energy import Phase, name_of_run
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
from envpipe_megatron.report.drawing.style import save
from envpipe_megatron.report.facts import ReportFacts
from envpipe_megatron.report.page.document import page_text
from envpipe_megatron.report.pipelines import node_offsets_s
from envpipe_megatron.report.run_folder import RunFolder
from envpipe_megatron.report.summary import Picture, Section, sections_of, to_markdown
from envpipe_megatron.report.trace import write_trace

#: With more stages, some of them are drawn.
_MOST_VALLEYS = 12

TRACE_FILE = "trace.json.gz"
SUMMARY_FILE = "summary.md"
PAGE_FILE = "index.html"


def write_report(folder: RunFolder, facts: ReportFacts, output: Path) -> list[Section]:
    """Write a report into a folder, which is made; files of an earlier one are replaced.

    Returns what the summary says. EnvPipeError: the folder holds such files, and no report.
    """
    pictures = list(_pictures_of(folder, facts))
    files = [f"{picture.name}.{kind}" for picture in pictures for kind in ("png", "svg")]
    refuse_foreign(output, [SUMMARY_FILE, PAGE_FILE, *files], TRACE_FILE)
    output.mkdir(parents=True, exist_ok=True)
    trace = write_trace(
        output / TRACE_FILE, folder.timelines, folder.windows, dry_run=folder.dry_run
    )
    for picture in pictures:
        save(picture.draw(), output, picture.name)
    sections = sections_of(folder, facts, trace, pictures)
    title = f"EnvPipe: {folder.path.resolve().name}"
    page = page_text(title, folder, facts, sections, output)
    replace_files(
        {output / SUMMARY_FILE: [to_markdown(title, sections)], output / PAGE_FILE: [page]}
    )
    return sections


def _pictures_of(folder: RunFolder, facts: ReportFacts) -> Iterator[Picture]:
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
