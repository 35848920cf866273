"""Units of recorded iterations, as the page's timelines show them."""

from dataclasses import replace

import numpy as np
import pytest
from page_made import MICROBATCHES, ROWS, STAGES, durations_ms, two_pipelines
from run_made import BACKWARD_S, FORWARD_S, iterations, profile

from envpipe_megatron.core.kinds import TRAITS
from envpipe_megatron.report import units
from envpipe_megatron.report.page.plots import draw_view
from envpipe_megatron.report.units import HEIGHTS, KINDS, measured_charts, unit_table
from envpipe_megatron.report.views import timelines_view

UNITS = 2 * MICROBATCHES


def test_gpus_stand_by_pipeline_and_stage():
    table = unit_table(two_pipelines(), STAGES, None)
    assert [(gpu.pipeline, gpu.stage, gpu.rank) for gpu in table.gpus] == [
        (0, 0, 0), (0, 1, 2), (0, 2, 4), (1, 0, 1), (1, 1, 3), (1, 2, 5)
    ]  # fmt: skip
    assert table.iterations == (("warm-up", 0), ("steady", 1))
    assert len(table.columns["row"]) == 2 * 2 * STAGES * UNITS
    assert sorted(durations_ms(table, 4)) == MICROBATCHES * [1e3 * FORWARD_S] + MICROBATCHES * [
        1e3 * BACKWARD_S
    ]


def test_units_have_slack_but_for_those_of_the_critical_path():
    table = unit_table(iterations(STAGES, MICROBATCHES), STAGES, None)
    columns = table.columns
    on_path = columns["critical"] == 1
    assert columns["slack_ms"][on_path] == pytest.approx(0.0, abs=1e-3)
    # 1F1B: down to the last stage, all of its units, and back.
    last = (columns["row"] == STAGES - 1) & (columns["iteration"] == 1)
    assert on_path[last].all()
    assert on_path.sum() == 2 * (UNITS + 2 * (STAGES - 1))
    first = columns["row"] == 0
    assert columns["slack_ms"][first & ~on_path].max() > 0


def test_joules_are_the_profiles_at_the_clock_asked_for():
    table = unit_table(iterations(STAGES, MICROBATCHES), STAGES, profile(STAGES, ROWS))
    columns = table.columns
    forwards = columns["kind"] == KINDS.index("forward")
    for mhz, _, joules in ROWS[:2]:
        at = columns["mhz"] == mhz
        assert columns["joules"][at & forwards] == pytest.approx(joules)
        assert columns["joules"][at & ~forwards] == pytest.approx(2 * joules)
    assert columns["watts"][forwards] == pytest.approx(columns["joules"][forwards] / FORWARD_S)
    unpriced = unit_table(iterations(STAGES, MICROBATCHES), STAGES, profile(STAGES, ROWS[2:]))
    assert np.isnan(unpriced.columns["joules"]).all()


@pytest.mark.parametrize(
    ("phases", "kept"),
    [
        (
            ("warm-up",) * 3 + ("steady",) * 10,
            [("warm-up", 2), ("steady", 4), ("steady", 8), ("steady", 12)],
        ),
        (
            ("steady", "baseline") * 4,
            [("steady", 2), ("baseline", 3), ("steady", 6), ("baseline", 7)],
        ),
    ],
)
def test_of_too_many_iterations_every_nth_of_a_phase_is_kept_and_the_last(
    phases, kept, monkeypatch
):
    monkeypatch.setattr(units, "MOST_UNITS", 4 * STAGES * UNITS)
    table = unit_table(iterations(STAGES, MICROBATCHES, phases), STAGES, None)
    assert table.recorded == len(phases)
    assert [*table.iterations] == kept


@pytest.mark.parametrize("lacking", [1, STAGES - 1])
def test_what_is_no_whole_pipeline_is_shown_without_slack(lacking):
    recorded = [read for read in iterations(STAGES, MICROBATCHES) if read.labels.stage != lacking]
    table = unit_table(recorded, STAGES, None)
    assert np.isnan(table.columns["slack_ms"]).all()
    assert not table.columns["critical"].any()
    unclocked = [replace(read, frequency_mhz=None) for read in recorded]
    assert not unit_table(unclocked, STAGES, None).columns["mhz"].any()


def test_parts_that_run_as_one_are_drawn_as_the_backward_that_they_are():
    """They were a low box with the name of the second part, as a weight gradient is."""
    (read,) = iterations(1, 1, ("warm-up",))
    start_us, end_us = np.array([0, 10, 10]), np.array([10, 10, 40])
    read = replace(read, order="F0 I0+ W0", start_us=start_us, end_us=end_us, frequency_mhz=None)
    columns = unit_table([read], 1, None).columns
    assert [columns["label"][place] for place in (0, 2)] == ["F0", "I0+W0"]
    assert columns["height"][2] == HEIGHTS[KINDS.index("backward")]


def test_a_job_of_one_clock_is_coloured_by_kind_and_the_bar_has_their_names():
    recorded = [
        replace(read, frequency_mhz=np.full(len(read.start_us), 1410)) for read in two_pipelines()
    ]
    for plot in draw_view(timelines_view(unit_table(recorded, STAGES, None))).values():
        (bar,) = plot.right
        assert bar.title == "kind"
        assert [bar.major_label_overrides[at] for at in bar.ticker.ticks] == [*TRAITS]


def test_names_lie_on_their_units_and_the_legend_is_of_all_iterations():
    before = draw_view(timelines_view(unit_table(two_pipelines(), STAGES, None)))["before"]
    drawn = [renderer.name for renderer in before.renderers]
    assert drawn.index("before labels") > drawn.index("before units")
    (legend,) = before.legend
    named = [(item.label.value, item.visible, item.index) for item in legend.items]
    assert named == [("GPU waits", True, None), ("critical path", True, None)]


def test_the_first_to_look_at_are_the_last_that_all_gpus_recorded():
    recorded = iterations(STAGES, MICROBATCHES, ("warm-up",) * 2 + ("steady",) * 3)
    table = unit_table(recorded[:-1], STAGES, None)  # the last stage was killed before
    assert [table.iterations[shown] for shown in table.shown] == [
        ("warm-up", 1), ("steady", 3)
    ]  # fmt: skip
    based = [replace(read, phase="baseline") if read.iteration == 2 else read for read in recorded]
    table = unit_table(based, STAGES, None)
    assert table.iterations[table.shown[0]] == ("baseline", 2)


def test_a_still_is_of_one_pipeline_from_its_own_first_unit():
    late = [
        replace(read, begin_s=read.begin_s + (0.05 if read.labels.rank % 2 == 0 else 0.0),
                labels=replace(read.labels, node="n"))
        for read in two_pipelines()
    ]  # fmt: skip
    first, later = measured_charts(unit_table(late, STAGES, None))
    own, _ = measured_charts(unit_table(two_pipelines(), STAGES, None))
    assert first.title == own.title
    assert "warm-up, iteration 0: measured 0.18 s" in first.title
    assert "steady, iteration 1: measured 0.18 s" in later.title
    assert first.x_range == later.x_range == pytest.approx(own.x_range)
    parted = [
        read for read in two_pipelines() if (read.labels.rank % 2 == 0) == (read.phase == "warm-up")
    ]
    (only,) = measured_charts(unit_table(parted, STAGES, None))
    assert only.title == first.title, "the other pipeline's has no still"
