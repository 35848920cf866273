"""The report of a run: summary with stills, trace, and the page.

The page is one file of HTML that holds its data and the library (Bokeh) that draws them. Enter at
`write_report`, or with tables only at `page_text`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from bokeh.embed import components
from bokeh.resources import Resources
from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from envpipe_megatron import __version__
from envpipe_megatron.files import refuse_foreign, replace_files
from envpipe_megatron.report.charts import View
from envpipe_megatron.report.facts import ReportFacts
from envpipe_megatron.report.page.plots import draw_view
from envpipe_megatron.report.run_folder import RunFolder
from envpipe_megatron.report.stills import save
from envpipe_megatron.report.summary import Section, marks_of, sections_of
from envpipe_megatron.report.trace import write_trace
from envpipe_megatron.report.units import measured_charts, unit_table
from envpipe_megatron.report.views import timelines_view, views_of

TRACE_FILE = "trace.json.gz"
SUMMARY_FILE = "summary.md"
PAGE_FILE = "index.html"
#: Views that the summary has as pictures; the page has all.
_STILLS = ("timeline", "iterations", "energy_valley")
_TEMPLATES = Environment(
    loader=PackageLoader(__package__, "."),
    autoescape=select_autoescape(["html"]),
    undefined=StrictUndefined,
    trim_blocks=True,
    keep_trailing_newline=True,
)
_TEMPLATES.globals["version"] = __version__


def write_report(folder: RunFolder, facts: ReportFacts, output: Path) -> list[Section]:
    """Write a report into a folder, which is made; files of an earlier one are replaced.

    Returns what the summary says. EnvPipeError: the folder holds such files, and no report.
    """
    mark = (" (emulated)" if folder.emulated else "") + (" (dry run)" if folder.dry_run else "")
    views = list(views_of(folder, facts))
    shown, drawn = views, views
    if recorded := folder.recorded:
        table = unit_table(recorded, folder.num_stages, folder.profile)
        text = "An iteration as it was before, and one as it is."
        shown = [timelines_view(table), *views]
        drawn = [View("timeline", "Measured iterations", text, measured_charts(table)), *views]
    stills = {f"{view.key}.png": view for view in drawn if view.key in _STILLS and view.charts}
    refuse_foreign(output, [SUMMARY_FILE, PAGE_FILE, *stills], TRACE_FILE)
    output.mkdir(parents=True, exist_ok=True)
    trace = write_trace(output / TRACE_FILE, folder.timelines, folder.energy.windows)
    for name, view in stills.items():
        save(view.charts, f"{view.title}{mark}", output / name)
    captions = {name: view.text for name, view in stills.items()}
    sections = sections_of(folder, facts, trace, captions)
    title = f"EnvPipe: {folder.path.resolve().name}"
    tiles = tiles_of(facts, "emulated" if folder.emulated else "measured")
    page = page_text(title, marks_of(folder), sections, "report", tiles, shown)
    replace_files(
        {output / SUMMARY_FILE: [to_markdown(title, sections)], output / PAGE_FILE: [page]}
    )
    return sections


def page_text(
    title: str,
    marks: Iterable[str],
    sections: Sequence[Section],
    command: str,
    tiles: Iterable[tuple[str, str]] = (),
    views: Sequence[View] = (),
) -> str:
    """Return a page that one of EnvPipe's commands made: marks, tiles, views and tables."""
    figures = {name: plot for view in views for name, plot in draw_view(view).items()}
    script, divs = components(figures) if figures else ("", {})
    return _TEMPLATES.get_template("page.html").render(
        title=title,
        sections=sections,
        command=command,
        library=Markup("\n".join(Resources(mode="inline", components=["bokeh"]).js_raw)),
        script=Markup(script),
        tiles=list(tiles),
        marks=marks,
        views=views,
        divs={plot: Markup(div) for plot, div in divs.items()},
    )


def to_markdown(title: str, sections: Sequence[Section], command: str = "report") -> str:
    """Return Markdown, made by one of EnvPipe's commands; pictures are linked."""
    template = _TEMPLATES.get_template("summary.md")
    return template.render(title=title, sections=sections, command=command)


def tiles_of(facts: ReportFacts, metered: str) -> Iterator[tuple[str, str]]:
    """Yield the figures above all else: a name, and the figure; the verdict comes first.

    Args:
        metered: how joules were metered, for people.
    """
    if facts.changed_nothing and facts.bubbles is not None:
        yield "in bubbles", f"{100 * facts.bubbles.share:.1f} % of the time"
        if levels := facts.predicted.levels:
            most_percent, level = max((saving, level) for level, (saving, _) in levels.items())
            yield "predicted to save", f"{most_percent:z.1f} % at level {level}"
    if facts.steady is None:
        return
    if facts.compared and facts.baseline and not facts.changed_nothing:
        time, *energy = facts.compared.parts()
        for said in energy:
            yield f"energy, {metered}, 95 % interval", said
        yield "time", time
    for when, step in {
        "before: an iteration, baseline": facts.baseline,
        "after: an iteration, steady": facts.steady,
    }.items():
        if step is not None:
            joules = "" if step.energy_j is None else f"{step.energy_j:.5g} J in "
            yield when, f"{joules}{step.mean.time_s:.4g} s"
