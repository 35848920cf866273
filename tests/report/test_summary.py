"""What a report says of a run in words."""

from dataclasses import replace

import page_made
import pytest
from page_made import STEPS

from envpipe_megatron.formats.steps import Comparison
from envpipe_megatron.report.facts import ReportFacts
from envpipe_megatron.report.page.document import page_text
from envpipe_megatron.report.summary import comparison_section, sections_of
from envpipe_megatron.report.trace import TraceFacts

COMPARED = Comparison(0.2, 40.0, 12.0, 0.1, -10.0, 0.2)
FACTS = ReportFacts((), *STEPS, COMPARED, COMPARED.told(6, None, clocks_kept=True))


@pytest.mark.parametrize("changed_nothing", [True, False])
def test_where_nothing_was_changed_nothing_was_saved(tmp_path, changed_nothing):
    facts = replace(FACTS, changed_nothing=changed_nothing)
    (line,) = comparison_section(facts).lines
    told = "Against baseline: a step takes 200 ms (10.00 +- 0.39 % less time) and 40 J a GPU"
    assert (told in line, "is chance" in line) == (not changed_nothing, changed_nothing)
    page = page_text("A job", page_made.folder(tmp_path), facts, None, [], [])
    assert ("10.00 +- 0.39 % less time, 12.00" in page) == (not changed_nothing)


def test_a_baseline_alone_is_compared_with_nothing():
    facts = ReportFacts((), STEPS[0], changed_nothing=True)
    assert comparison_section(facts).lines == ()


def test_a_peak_of_memory_that_is_not_known_is_left_out_of_its_table(tmp_path):
    peaks = {"predicted_peak_bytes": 2.5 * 2**30, "measured_peak_bytes": None}
    ran = replace(page_made.folder(tmp_path), summary={"memory": [peaks]})
    sections = sections_of(ran, ReportFacts(), TraceFacts(0, 0, 0, 0), {})
    (memory,) = (section for section in sections if section.title.startswith("Memory"))
    assert memory.rows == (("0", "2.50", ""),)
