"""Where pipelines wait, where the time and energy of GPUs went, and what a report says of it."""

from dataclasses import replace

import numpy as np
import page_made
import pytest
from energy_lines import bill, window
from page_made import MICROBATCHES, STAGES, STEP, two_pipelines
from run_made import BACKWARD_S, FORWARD_S, iterations

from envpipe_megatron.core.timeline import Timeline
from envpipe_megatron.formats.account import Tariff, account_lines
from envpipe_megatron.formats.steps import Comparison
from envpipe_megatron.report.bubbles import find_bubbles
from envpipe_megatron.report.facts import ReportFacts
from envpipe_megatron.report.page.document import page_text, tiles_of
from envpipe_megatron.report.summary import comparison_section, sections_of

BOTH_S = FORWARD_S + BACKWARD_S
#: 1F1B of equal stages.
PIPELINE_S = (MICROBATCHES + STAGES - 1) * BOTH_S


def slower(recorded, factor, chosen):
    """Some ranks take longer for each unit; what others wait for moves along with theirs."""
    return [
        replace(
            read,
            start_us=np.rint(read.start_us * factor).astype(np.int64),
            end_us=np.rint(
                read.start_us * factor
                + (read.end_us - read.start_us) * (factor if chosen(read) else 1.0)
            ).astype(np.int64),
        )
        for read in recorded
    ]


def test_equal_stages_wait_as_the_formula_says():
    found = find_bubbles(iterations(STAGES, MICROBATCHES), STAGES)
    assert found.iterations == 1  # at the highest clock
    assert found.pipeline_s == pytest.approx(PIPELINE_S)
    assert found.share == pytest.approx((STAGES - 1) / (MICROBATCHES + STAGES - 1))
    assert found.even_s == pytest.approx(PIPELINE_S)
    assert found.slowest_stage[1] == pytest.approx(0.0)
    assert not found.stragglers
    assert found.units_s == pytest.approx(STAGES * [MICROBATCHES * BOTH_S])
    assert found.bubbles_s == pytest.approx(STAGES * [(STAGES - 1) * BOTH_S])
    assert found.critical_s.sum() == pytest.approx(PIPELINE_S)
    assert max(found.critical_s) == found.critical_s[-1]


def test_iterations_at_lower_clocks_are_not_looked_at():
    recorded = iterations(STAGES, MICROBATCHES, ("warm-up", "steady"))
    lower = slower(recorded, 1.5, lambda read: True)
    mixed = [
        old if old.phase == "warm-up" else new for old, new in zip(recorded, lower, strict=True)
    ]
    assert find_bubbles(mixed, STAGES).pipeline_s == pytest.approx(PIPELINE_S)
    watched = [replace(read, frequency_mhz=None) for read in recorded]
    assert find_bubbles(watched, STAGES).iterations == 2


def test_the_slowest_stage_is_named_and_what_even_stages_would_win():
    recorded = slower(iterations(STAGES, MICROBATCHES), 1.2, lambda read: read.labels.stage == 1)
    found = find_bubbles(recorded, STAGES)
    stage, beyond = found.slowest_stage
    assert stage == 1
    assert beyond == pytest.approx(1.2 / (3.2 / 3) - 1)
    # The same order, of stages that all take the mean's time.
    now_s = Timeline(found.schedule, found.unit_s).iteration_time_s
    assert found.pipeline_s - found.even_s == pytest.approx(now_s - 3.2 / 3 * PIPELINE_S)
    assert found.even_s < found.pipeline_s


def test_a_replica_that_is_slower_is_a_straggler():
    recorded = slower(two_pipelines(), 1.1, lambda read: read.labels.rank == 3)
    found = find_bubbles(recorded, STAGES)
    (gpu, share), *others = found.stragglers
    assert (gpu.rank, gpu.stage, gpu.pipeline) == (3, 1, 1)
    assert share == pytest.approx(0.1, abs=1e-3)
    assert not others


@pytest.mark.parametrize("lacking", [1, STAGES - 1])
def test_without_a_whole_pipeline_nothing_is_said(lacking):
    recorded = [read for read in iterations(STAGES, MICROBATCHES) if read.labels.stage != lacking]
    assert find_bubbles(recorded, STAGES) is None
    assert find_bubbles(iterations(1, MICROBATCHES), 1) is None


def test_a_lower_clock_is_not_taken_for_the_highest():
    lower = iterations(STAGES, MICROBATCHES, ("steady",))
    assert find_bubbles(lower, STAGES) is None
    assert find_bubbles(lower, STAGES, top_mhz=1410) is None
    assert find_bubbles(lower, STAGES, top_mhz=1200).iterations == 1


def test_without_control_another_order_that_runs_is_not_taken_for_the_jobs():
    """It saves time at the same clocks; what its bubbles are worth is asked of the job's own."""
    own = iterations(STAGES, MICROBATCHES, ("warm-up",))
    other = iterations(STAGES, 2 * MICROBATCHES, ("", "steady"))[STAGES:]
    recorded = [replace(read, frequency_mhz=None) for read in (*own, *other)]
    assert find_bubbles(recorded, STAGES).schedule.num_microbatches == MICROBATCHES
    assert find_bubbles(recorded[STAGES:], STAGES).schedule.num_microbatches == 2 * MICROBATCHES


def test_an_order_that_only_measures_is_not_taken_for_the_jobs():
    """Half of its backwards are in two parts, and it comes after the warm-up."""
    own = iterations(STAGES, MICROBATCHES, ("warm-up",))
    profiled = iterations(STAGES, 2 * MICROBATCHES, ("", "profile"))[STAGES:]
    at_top = [replace(read, frequency_mhz=0 * read.frequency_mhz + 1410) for read in profiled]
    found = find_bubbles([*own, *at_top], STAGES, top_mhz=1410)
    assert found.schedule.num_microbatches == MICROBATCHES


def test_iterations_of_another_order_are_not_counted():
    others = iterations(STAGES, 2 * MICROBATCHES, ("warm-up",) * 3)
    last = [replace(read, iteration=3) for read in iterations(STAGES, MICROBATCHES, ("warm-up",))]
    assert find_bubbles([*others, *last], STAGES).iterations == 1


COMPARED = Comparison(0.2, 40.0, 12.0, 0.1, -10.0, 0.2)
ACCOUNT = tuple(account_lines(bill(window()), Tariff(), {"": COMPARED}))
FACTS = ReportFacts({"steady": STEP}, STEP, COMPARED, ACCOUNT)


@pytest.mark.parametrize("changed_nothing", [True, False])
def test_where_nothing_was_changed_nothing_was_saved(tmp_path, changed_nothing):
    facts = replace(FACTS, changed_nothing=changed_nothing)
    line, *_, total = comparison_section(facts).lines
    assert total.startswith("energy of 1 GPUs")
    told = "own baseline: a step takes 200 ms (10.00 +- 0.39 % less time) and 40 J a GPU"
    assert (told in line, "is chance" in line) == (not changed_nothing, changed_nothing)
    tiles = [*tiles_of(facts, "measured")]
    verdict = [("energy, measured, 95 % interval", "12.00 +- 0.20 % less energy")]
    assert (tiles[:1] == verdict) == (not changed_nothing)
    assert (("time", "10.00 +- 0.39 % less time") in tiles) == (not changed_nothing)
    assert "40 J" in page_text("A job", (), [], "report", tiles)


def test_a_baseline_alone_is_compared_with_nothing():
    facts = ReportFacts({}, STEP, changed_nothing=True)
    assert comparison_section(facts).lines == ()


def test_a_peak_of_memory_that_is_not_known_is_left_out_of_its_table(tmp_path):
    peaks = {"predicted_peak_bytes": 2.5 * 2**30, "measured_peak_bytes": None}
    ran = replace(page_made.folder(tmp_path), summary={"memory": [peaks]})
    sections = sections_of(ran, ReportFacts(), [], {})
    (memory,) = (section for section in sections if section.title.startswith("Memory"))
    assert memory.rows == (("0", "2.50", ""),)
