"""The page: one file of HTML that holds its data and the library (Bokeh) that draws them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path

from bokeh.embed import components
from bokeh.models import Model
from bokeh.plotting import figure
from bokeh.resources import Resources
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from envpipe_megatron import __version__
from envpipe_megatron.report.drawing.metered import power_series, step_series
from envpipe_megatron.report.facts import ReportFacts
from envpipe_megatron.report.page.gpu_rows import bubbles_figure, clock_figures, ranks_of
from envpipe_megatron.report.page.plans import frontier_figure, frontier_of, valley_figure
from envpipe_megatron.report.page.series import power_figure, predictions_of, steps_figures
from envpipe_megatron.report.page.timelines import (
    AFTER,
    BEFORE,
    MOST_UNITS,
    UnitTable,
    colourings,
    first_shown,
    timeline_figures,
    unit_table,
)
from envpipe_megatron.report.pipelines import node_offsets_s
from envpipe_megatron.report.run_folder import RunFolder
from envpipe_megatron.report.summary import Section, marks_of

#: Pictures that a view of the page stands for.
_VIEWED = re.compile("timeline_.*|iterations|power|energy_valley")


@dataclass(frozen=True)
class Choice:
    """A control: its values and their names, and which is chosen at first."""

    key: str
    title: str
    options: Sequence[tuple[str, str]]
    chosen: str = ""


@dataclass(frozen=True)
class Part:
    """A plot with its name."""

    figure: Model
    title: str = ""

    @property
    def plot(self) -> str:
        """Name by which the script finds the plot, and the page the place where it is drawn."""
        return str(self.figure.name)


@dataclass(frozen=True)
class View:
    """A part of the page that can be zoomed and asked."""

    key: str
    title: str
    text: str
    parts: Sequence[Part]
    choices: Sequence[Choice] = field(default=())


def page_text(
    title: str, folder: RunFolder, facts: ReportFacts, sections: Sequence[Section], stills: Path
) -> str:
    """The page of a run. Pictures that no view stands for are taken from a folder, as SVG."""
    views = list(_views(folder, facts))
    figures = {part.plot: part.figure for view in views for part in view.parts}
    script, divs = components(figures) if figures else ("", {})
    kept = [_without_viewed(section) for section in sections]
    return _rendered(
        title=title,
        tiles=_tiles(facts),
        marks=marks_of(folder),
        views=views,
        divs={plot: Markup(div) for plot, div in divs.items()},
        sections=[part for part in kept if part.rows or part.lines or part.pictures],
        stills={
            picture.name: Markup(
                _inlined((stills / f"{picture.name}.svg").read_text(), picture.name)
            )
            for section in kept
            for picture in section.pictures
        },
        library=Markup("\n".join(Resources(mode="inline", components=["bokeh"]).js_raw)),
        script=Markup(script),
        command="report",
    )


def tables_page(title: str, marks: Sequence[str], sections: Sequence[Section], command: str) -> str:
    """A page of tables alone, made by one of EnvPipe's commands; `marks` stand above them."""
    return _rendered(
        title=title,
        tiles=(),
        marks=marks,
        views=(),
        sections=sections,
        stills={},
        command=command,
    )


def _rendered(**parts: object) -> str:
    own = files("envpipe_megatron.report.page")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    return environment.from_string((own / "page.html").read_text()).render(
        version=__version__,
        style=Markup((own / "page.css").read_text()),
        behaviour=Markup((own / "page.js").read_text()),
        **parts,
    )


def _tiles(facts: ReportFacts) -> Iterator[tuple[str, str]]:
    if facts.changed_nothing and facts.bubbles is not None:
        yield "in bubbles", f"{100 * facts.bubbles.share:.1f} % of the time"
        levels = () if facts.predicted is None else facts.predicted.levels
        if levels:
            most = max(levels, key=lambda one: one.saving_percent)
            yield "predicted to save", f"{most.saving_percent:z.1f} % at level {most.level}"
    if facts.steady is None:
        return
    if facts.baseline is not None and not facts.changed_nothing:
        yield "energy saved", facts.saved
        yield "slower", facts.slower
    for step in filter(None, (facts.baseline, facts.steady)):
        joules = "" if step.energy_j is None else f", {step.energy_j:.5g} J"
        yield step.name, f"{step.time_s:.4g} s{joules} an iteration"


def _views(folder: RunFolder, facts: ReportFacts) -> Iterator[View]:
    if folder.timelines.iterations:
        table = unit_table(folder.timelines.iterations, folder.num_stages, folder.profile)
        yield _timelines(table)
    if facts.bubbles is not None:
        yield View(
            "bubbles",
            "Where the time goes",
            "Between a pipeline's first unit and its last, at full clock. What the bubbles are "
            "worth stands in the tables of bubbles and levels.",
            [Part(_called(bubbles_figure(facts.bubbles), "bubbles"))],
        )
    series = step_series(folder.windows)
    if series:
        names, predicted = ("time", "energy"), predictions_of(folder, facts)
        shaded = "The phases of the job are shaded. " if len(series) == 1 else ""
        yield View(
            "steps",
            "Iterations of the job",
            "Time and energy of each iteration; a metered window of several stands for their mean. "
            f"{shaded}The dashed lines are what each plan that ran predicted, without what lies "
            "outside of its units.",
            [
                Part(_called(plot, f"steps {name}"), name)
                for name, plot in zip(names, steps_figures(series, predicted), strict=True)
            ],
        )
    offsets_s = node_offsets_s(folder.timelines.iterations)
    power = power_series(folder.windows, offsets_s)
    if power.names:
        yield View(
            "power",
            "Power over time",
            "The mean of each metered window, which is much longer than a unit.",
            [Part(_called(power_figure(power), "power"))],
            [Choice("power-of", "Power of", [("GPUs", "each GPU"), ("nodes", "each node")])],
        )
    if folder.timelines.clocks:
        ranks = ranks_of(folder.timelines.clocks)
        clocks, held_back = clock_figures(folder.timelines.clocks, offsets_s)
        parts = [Part(_called(clocks, "clocks"))]
        if held_back is not None:
            parts.append(Part(_called(held_back, "held back"), "held back by"))
        options = [(str(rank), name) for rank, name in ranks.items()]
        yield View(
            "clocks",
            "Clocks asked for, and seen",
            "Looks at a GPU's clock, in the first hour; at most 800 are shown. Below, "
            "what GPUs said held their clocks back, if they were not idle.",
            parts,
            [Choice("clock-rank", "Clock of", options)],
        )
    if folder.profile is not None:
        yield View(
            "valley",
            "Energy over the clock",
            "Energy of one microbatch, forward and backward, on each stage, by the profile.",
            [Part(_called(valley_figure(folder.profile), "valley"))],
        )
    plans = [] if folder.plan is None else frontier_of(folder.plan)
    if folder.plan is not None and plans:
        yield View(
            "frontier",
            "Time against energy",
            "Plans of this order of which no other is both faster and cheaper, by the profile.",
            [Part(_called(frontier_figure(plans, folder.plan), "frontier"))],
        )


def _timelines(table: UnitTable) -> View:
    ways = colourings(table)
    figures = timeline_figures(table, ways)
    iterations = [(str(number), name) for number, name in enumerate(table.iterations)]
    titles = {BEFORE: "Above", AFTER: "Below"}
    choices = [
        Choice(f"{name}-iteration", f"{titles[name]}: iteration", iterations, str(shown))
        for name, shown in zip((BEFORE, AFTER), first_shown(table), strict=True)
    ]
    choices.append(Choice("colour", "Colour by", [(way.title, way.title) for way in ways]))
    pipelines = sorted({gpu.pipeline for gpu in table.gpus})
    if len(pipelines) > 1:
        rows = [
            [row for row, gpu in enumerate(table.gpus) if gpu.pipeline == pipeline]
            for pipeline in pipelines
        ]
        options = [
            (f"{own[0]} {own[-1]}", f"pipeline {pipeline}")
            for pipeline, own in zip(pipelines, rows, strict=True)
        ]
        every = (f"0 {len(table.gpus) - 1}", "all")
        choices.append(Choice("pipeline", "Pipeline", [every, *options]))
    text = (
        "The units of two iterations: low boxes are forwards, tall ones backwards, red frames the "
        "critical path. Slack and path are those of the measured durations alone; energy is the "
        "profile's at the clock that was asked for. Ctrl and the wheel, or + and -, zoom; dragging "
        "or arrow keys move; 0 shows all."
    )
    if len(table.iterations) < table.recorded:
        text += (
            f" {len(table.iterations)} of {table.recorded} recorded iterations are here: a page "
            f"holds some {MOST_UNITS:,} units."
        )
    parts = [Part(figures[BEFORE], "Before"), Part(figures[AFTER], "After")]
    return View("timeline", "Timelines", text, parts, choices)


def _called(plot: figure, name: str) -> figure:
    plot.name = name
    return plot


def _without_viewed(section: Section) -> Section:
    pictures = tuple(p for p in section.pictures if not _VIEWED.fullmatch(p.name))
    return Section(section.title, section.header, section.rows, section.lines, pictures)


def _inlined(svg: str, name: str) -> str:
    """An SVG without its prologue, its names made its own: those of a page must differ."""
    body = svg[svg.index("<svg") :]
    body = re.sub(r'\bid="', f'id="{name}-', body)
    return re.sub(r'(url\(#|href="#)', rf"\g<1>{name}-", body)
