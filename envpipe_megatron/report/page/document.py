"""The report of a run: summary with stills, trace, and the page.

The page is one file of HTML that holds its data and the library (Bokeh) that draws them. Enter at
`write_report`, or with tables only at `page_text`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from bokeh.embed import components
from bokeh.models import DataRange1d, Range1d
from bokeh.plotting import figure
from bokeh.resources import Resources
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from envpipe_megatron import __version__
from envpipe_megatron.files import refuse_foreign, replace_files
from envpipe_megatron.report.charts import View
from envpipe_megatron.report.facts import ReportFacts
from envpipe_megatron.report.page.plots import (
    colourings,
    draw,
    timeline_figures,
)
from envpipe_megatron.report.run_folder import RunFolder
from envpipe_megatron.report.stills import save
from envpipe_megatron.report.summary import Section, marks_of, sections_of, to_markdown
from envpipe_megatron.report.trace import write_trace
from envpipe_megatron.report.units import MOST_UNITS, UnitTable, measured_charts, unit_table
from envpipe_megatron.report.views import views_of

TRACE_FILE = "trace.json.gz"
SUMMARY_FILE = "summary.md"
PAGE_FILE = "index.html"
#: Views that the summary has as pictures; the page has all.
_STILLS = ("timeline", "iterations", "energy_valley")


class Choice(NamedTuple):
    """A control: values with their names, and the value at first.

    That of a chart's groups has the chart's name, and `-group`, for a key.
    """

    key: str
    title: str
    options: list[tuple[str, str]]
    chosen: str = ""


class Plot(NamedTuple):
    """A plot below its title and the choice that is its own."""

    title: str
    figure: figure
    choice: Choice | None = None


class Block(NamedTuple):
    """A part of the page that can be zoomed and asked: plots by name, on one x axis.

    The script finds plots by these names; `choices` are for all of them.
    """

    key: str
    title: str
    text: str
    plots: dict[str, Plot]
    choices: Sequence[Choice] = ()


def write_report(folder: RunFolder, facts: ReportFacts, output: Path) -> list[Section]:
    """Write a report into a folder, which is made; files of an earlier one are replaced.

    Returns what the summary says. EnvPipeError: the folder holds such files, and no report.
    """
    mark = (" (emulated)" if folder.emulated else "") + (" (dry run)" if folder.dry_run else "")
    views, table, timelines = list(views_of(folder, facts)), None, []
    if folder.timelines.iterations:
        table = unit_table(folder.timelines.iterations, folder.num_stages, folder.profile)
        text = "An iteration as it was before, and one as it is."
        timelines = [View("timeline", "Measured iterations", text, measured_charts(table))]
    stills = {
        f"{view.key}.png": view
        for view in (*timelines, *views)
        if view.key in _STILLS and view.charts
    }
    refuse_foreign(output, [SUMMARY_FILE, PAGE_FILE, *stills], TRACE_FILE)
    output.mkdir(parents=True, exist_ok=True)
    trace = write_trace(
        output / TRACE_FILE, folder.timelines, folder.windows, dry_run=folder.dry_run
    )
    for name, view in stills.items():
        save(view.charts, f"{view.title}{mark}", output / name)
    captions = {name: view.text for name, view in stills.items()}
    sections = sections_of(folder, facts, trace, captions)
    title = f"EnvPipe: {folder.path.resolve().name}"
    tiles = tiles_of(facts, "emulated" if folder.emulated else "measured")
    blocks = blocks_of(table, views)
    page = page_text(title, marks_of(folder), sections, "report", tiles, blocks)
    replace_files(
        {output / SUMMARY_FILE: [to_markdown(title, sections)], output / PAGE_FILE: [page]}
    )
    return sections


def page_text(
    title: str,
    marks: Iterable[str],
    sections: Iterable[Section],
    command: str,
    tiles: Iterable[tuple[str, str]] = (),
    blocks: Sequence[Block] = (),
) -> str:
    """Return a page that one of EnvPipe's commands made: marks, tiles, blocks and tables."""
    figures = {name: plot.figure for block in blocks for name, plot in block.plots.items()}
    script, divs = components(figures) if figures else ("", {})
    own = files("envpipe_megatron.report.page")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    return environment.from_string((own / "page.html").read_text()).render(
        version=__version__,
        style=Markup((own / "page.css").read_text()),
        behaviour=Markup((own / "page.js").read_text()),
        library=Markup("\n".join(Resources(mode="inline", components=["bokeh"]).js_raw)),
        script=Markup(script),
        title=title,
        tiles=list(tiles),
        marks=marks,
        views=blocks,
        divs={plot: Markup(div) for plot, div in divs.items()},
        sections=[section for section in sections if section.rows or section.lines],
        command=command,
    )


def blocks_of(table: UnitTable | None, views: Iterable[View]) -> list[Block]:
    """Draw a run's timelines, if it recorded any, and its views."""
    return [*([] if table is None else [_timelines(table)]), *map(_block, views)]


def tiles_of(facts: ReportFacts, metered: str) -> Iterator[tuple[str, str]]:
    """Yield the figures above all else: a name, and the figure; the verdict comes first.

    Args:
        metered: how joules were metered, for people.
    """
    if facts.changed_nothing and facts.bubbles is not None:
        yield "in bubbles", f"{100 * facts.bubbles.share:.1f} % of the time"
        levels = {} if facts.predicted is None else facts.predicted.levels
        if levels:
            most_percent, level = max((saving, level) for level, (saving, _) in levels.items())
            yield "predicted to save", f"{most_percent:z.1f} % at level {level}"
    if facts.steady is None:
        return
    if facts.compared and facts.baseline and not facts.changed_nothing:
        time, *energy = facts.compared.parts()
        for said in energy:
            yield f"energy, {metered}, 95 % interval", said
        yield "time", time
    for when, step in (("before", facts.baseline), ("after", facts.steady)):
        if step is not None:
            joules = "" if step.energy_j is None else f"{step.energy_j:.5g} J in "
            yield f"{when}: an iteration, {step.name}", f"{joules}{step.mean.time_s:.4g} s"


def _block(view: View) -> Block:
    """Draw a view; its charts share one x axis."""
    ends = view.charts[0].x_range
    shared = DataRange1d() if ends is None else Range1d(*ends, bounds=ends)
    plots: dict[str, Plot] = {}
    known: set[str] = set()
    for chart in view.charts:
        options = [(group, group) for group in chart.legends if group]
        choice = Choice(f"{chart.name}-group", chart.choice, options) if chart.choice else None
        plots[chart.name] = Plot(chart.title, draw(chart, shared, known), choice)
        known |= {name for names in chart.legends.values() for name in names}
    return Block(view.key, view.title, view.text, plots)


def _timelines(table: UnitTable) -> Block:
    ways = colourings(table)
    figures = timeline_figures(table, ways)
    end_ms, iteration = table.columns["end"], table.columns["iteration"]
    iterations = [
        (str(number), f"{phase}, {at}: {end_ms[iteration == number].max() / 1e3:.4g} s")
        for number, (phase, at) in enumerate(table.iterations)
    ]
    plots = {}
    for (name, plot), shown in zip(figures.items(), table.shown, strict=True):
        choice = Choice(f"{name}-iteration", "iteration", iterations, str(shown))
        plots[name] = Plot(name.title(), plot, choice)
    choices = [Choice("colour", "Colour by", [(way.title, way.title) for way in ways])]
    rows: dict[int, list[int]] = {}
    for row, gpu in enumerate(table.gpus):
        rows.setdefault(gpu.pipeline, []).append(row)
    if len(rows) > 1:
        options = [(f"{own[0]} {own[-1]}", f"pipeline {number}") for number, own in rows.items()]
        every = (f"0 {len(table.gpus) - 1}", "all")
        choices.append(Choice("pipeline", "Pipeline", [every, *options]))
    text = (
        "An iteration before and one after, on one axis. F: forward of a microbatch, B: backward, "
        "or its two parts, I (gradient of the input) and W (of the weights). Hatched: the GPU "
        "waits. Slack and path follow from the measured durations; energy is the "
        "profile's at the clock that was asked for. Ctrl and the wheel, or + and -, zoom; dragging "
        "or arrow keys move; 0 shows all."
    )
    if len(table.iterations) < table.recorded:
        text += (
            f" {len(table.iterations)} of {table.recorded} recorded iterations are here: a page "
            f"holds some {MOST_UNITS:,} units."
        )
    return Block("timeline", "Timelines", text, plots, choices)
