"""Writes all that is known of a run: pictures, summary, page and trace."""

from __future__ import annotations

from pathlib import Path

from envpipe_megatron.files import refuse_foreign, replace_files
from envpipe_megatron.report.drawing.style import save
from envpipe_megatron.report.facts import ReportFacts
from envpipe_megatron.report.page.document import page_text
from envpipe_megatron.report.pictures import pictures_of
from envpipe_megatron.report.run_folder import RunFolder
from envpipe_megatron.report.summary import Section, sections_of, to_markdown
from envpipe_megatron.report.trace import write_trace

TRACE_FILE = "trace.json.gz"
SUMMARY_FILE = "summary.md"
PAGE_FILE = "index.html"


def write_report(folder: RunFolder, facts: ReportFacts, output: Path) -> list[Section]:
    """Write a report into a folder, which is made; files of an earlier one are replaced.

    Returns what the summary says. EnvPipeError: the folder holds such files, and no report.
    """
    pictures = list(pictures_of(folder, facts))
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
