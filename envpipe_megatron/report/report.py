"""Writes all that is known of a run: summary with stills, page and trace."""

from __future__ import annotations

from pathlib import Path

from envpipe_megatron.files import refuse_foreign, replace_files
from envpipe_megatron.report.charts import View
from envpipe_megatron.report.facts import ReportFacts
from envpipe_megatron.report.page.document import page_text
from envpipe_megatron.report.run_folder import RunFolder
from envpipe_megatron.report.stills import save
from envpipe_megatron.report.summary import Section, sections_of, to_markdown
from envpipe_megatron.report.trace import write_trace
from envpipe_megatron.report.units import measured_charts, unit_table
from envpipe_megatron.report.views import views_of

TRACE_FILE = "trace.json.gz"
SUMMARY_FILE = "summary.md"
PAGE_FILE = "index.html"
#: Views that the summary has as pictures; the page has all.
_STILLS = ("timeline", "iterations", "energy_valley")


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
    page = page_text(title, folder, facts, table, views, sections)
    replace_files(
        {output / SUMMARY_FILE: [to_markdown(title, sections)], output / PAGE_FILE: [page]}
    )
    return sections
