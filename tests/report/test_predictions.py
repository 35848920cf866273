"""What plans predicted, over restarts and stretches in which none ran."""

from dataclasses import replace
from pathlib import Path

import page_made
import pytest

from envpipe_megatron.formats.steps import Comparison
from envpipe_megatron.report.facts import ReportFacts, StepFacts
from envpipe_megatron.report.page.document import page_text
from envpipe_megatron.report.series import predictions_of
from envpipe_megatron.report.summary import comparison_section, sections_of
from envpipe_megatron.report.trace import TraceFacts

#: Two pipelines of three stages.
STEPS = tuple(StepFacts(name, 1, 6, 0.2, 240.0, 1.0) for name in ("baseline", "steady"))
COMPARED = Comparison(0.2, 40.0, 12.0, 0.1, -10.0, 0.2)
FACTS = ReportFacts((), *STEPS, COMPARED, COMPARED.told(6, None, clocks_kept=True))
OLD, NEW = "2026-05-04T10:11:12.345+00:00", "2026-05-04T11:00:00.000+00:00"


def entry(iteration, time_s=None, *, phase="steady", run=OLD, **more):
    energy_j = None if time_s is None else 100 * time_s
    return {
        "run": run, "iteration": iteration, "phase": phase, "note": "", "time_s": time_s,
        "energy_j": energy_j, **more,
    }  # fmt: skip


def spans(*loop):
    folder = replace(page_made.folder(Path("job")), loop=loop)
    return [(one.begin, one.end, one.time_s) for one in predictions_of(folder, FACTS)]


def test_each_goes_up_to_the_next_and_tells_all_gpus_joules():
    folder = replace(page_made.folder(Path("job")), loop=(entry(36, 0.5), entry(60, 0.4)))
    one, two = predictions_of(folder, FACTS)
    assert (one.begin, one.end, two.begin, two.end) == (36, 60, 60, None)
    assert (one.energy_j, two.energy_j) == (100.0, 80.0)


def test_nothing_is_predicted_while_the_framework_s_order_runs():
    found = spans(entry(36, 0.5), entry(50, phase="baseline"), entry(60, note="again"))
    assert found == [(36, 50, 0.5), (60, None, 0.5)]


def test_a_later_start_replaces_what_it_repeats():
    found = spans(
        entry(30, run=NEW), entry(50, 0.4, run=NEW), entry(20, 0.6), entry(40, 0.5), entry(90)
    )
    assert found == [(20, 30, 0.6), (50, None, 0.4)]


def test_batches_of_other_sizes_are_left_out():
    assert spans(entry(36, 0.5), entry(40, 0.7, batch="m24")) == [(36, None, 0.5)]


def test_without_a_loop_it_is_the_plan_s():
    (only,) = spans()
    assert only[:2] == (0, None)


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
