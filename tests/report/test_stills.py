"""Stills are checked by what is on the axes, not by pixels."""

from dataclasses import replace

import numpy as np
import pytest
import run_made
from combined_cases import combined_profile
from matplotlib.colors import to_rgba

from envpipe_megatron.core.conditions import Conditions
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.plan import Plan
from envpipe_megatron.policies.frequencies import POLICIES
from envpipe_megatron.report.charts import INK, Chart, Marks, columns_of
from envpipe_megatron.report.stills import draw, save
from envpipe_megatron.report.units import plan_charts

#: A valley whose bottom is 1200 MHz.
VALLEY = [(1500, 1.0, 14.0), (1200, 1.25, 10.0), (900, 1.6, 11.0)]


def plan(schedule, policy="envelope", conditions=None):
    prof = run_made.profile(schedule.num_stages, VALLEY).for_chunks(schedule.num_chunks)
    conditions = conditions or Conditions((80.0,) * schedule.num_stages)
    return Plan(policy, schedule, POLICIES[policy](schedule, prof), prof, conditions)


def chart_of(a_plan, x_max_s=None):
    (chart,) = plan_charts([a_plan])
    return chart if x_max_s is None else replace(chart, x_range=(0.0, 1e3 * x_max_s))


def boxes(chart):
    """Columns of waits, units and envelope."""
    return [marks.columns for marks in chart.marks if marks.shape == "box"]


def labels(figure):
    return {text.get_text() for text in figure.axes[0].texts}


def test_units_waits_envelope_and_critical_path_are_where_the_timeline_has_them():
    p = plan(builders.one_f_one_b(3, 4))
    waits, units, envelope = boxes(chart_of(p))
    timeline = p.timeline
    assert units["begin"] == pytest.approx(1e3 * timeline.start_s.ravel())
    assert units["end"] == pytest.approx(1e3 * timeline.end_s.ravel())
    assert units["row"] == np.repeat(range(3), 8).tolist()
    assert units["mhz"] == p.frequency_mhz.ravel().tolist()
    heights = np.array(units["height"])
    backward = p.schedule.is_backward.ravel()
    assert set(heights[backward]).isdisjoint(heights[~backward]), "they differ without colour"
    waiting = np.zeros(3)
    for row, begin, end in zip(*(waits[name] for name in ("row", "begin", "end")), strict=True):
        waiting[row] += end - begin
    busy = 1e3 * timeline.duration_s.sum(axis=1)
    assert busy + waiting == pytest.approx(1e3 * p.cost.iteration_time_s)
    outlined = np.flatnonzero(p.schedule.outer_envelope)
    assert envelope["begin"] == pytest.approx(1e3 * timeline.start_s.ravel()[outlined])
    (path,) = (marks.columns for marks in chart_of(p).marks if marks.shape == "line")
    (x,) = path["x"]
    assert (x[0], x[-1]) == (0, pytest.approx(1e3 * p.cost.iteration_time_s))
    assert np.all(np.diff(x) >= -1e-9)


def test_a_pair_is_one_box():
    schedule = builders.interleaved(2, 4, 2, combined=True)
    profile = combined_profile()
    clocks = POLICIES["envelope"](schedule, profile)
    _, units, _ = boxes(chart_of(Plan("x", schedule, clocks, profile, Conditions((80.0, 80.0)))))
    named = dict(zip(units["label"], units["height"], strict=True))
    assert {"F0.0", "F3.0+B0.1", "F1.1+B0.1", "B3.0"} <= named.keys()
    assert named["F3.0+B0.1"] == named["B3.0"] > named["F0.0"]
    assert len(units["label"]) == schedule.num_units - schedule.combined.sum()


def test_labels_name_the_units_and_drop_out_where_boxes_are_narrow(tmp_path):
    p = plan(builders.one_f_one_b(2, 4))
    every = {name for order in p.schedule.labels() for name in order}
    save([chart_of(p)], "t", tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert labels(draw([chart_of(p)], "t")) == every
    assert labels(draw([chart_of(p, x_max_s=1e3)], "t")) == set()
    unequal = plan(builders.one_f_one_b(2, 32), "baseline")
    assert {name[0] for name in labels(draw([chart_of(unequal)], "t"))} == {"B"}


def test_colours_are_clocks_and_letters_contrast_with_them():
    p = plan(builders.one_f_one_b(3, 4), "envelope")
    axes, bar = draw([chart_of(p, x_max_s=30.0)], "t").axes
    assert bar.get_ylim() == (p.frequency_mhz.min(), p.frequency_mhz.max())
    assert axes.get_xlim() == (0, 30e3)
    assert axes.get_ylim()[0] > axes.get_ylim()[1], "stage 0 is on top"
    _, units, _ = axes.collections
    colours = {tuple(colour) for colour in units.get_facecolor()}
    assert len(colours) == len(set(p.frequency_mhz.ravel()))
    by_row = {
        row: {t.get_color() for t in axes.texts if t.get_position()[1] == row} for row in (1, 2)
    }
    # The last stage runs at the highest clock (bright yellow), its neighbour mostly does not.
    assert by_row == {1: {INK, "white"}, 2: {INK}}


def test_the_caption_says_time_energy_memory_and_gpus():
    p = plan(builders.one_f_one_b(3, 4))
    said = chart_of(p).title
    for wanted in (
        f"{p.cost.iteration_time_s:.4g} s", f"{p.cost.energy_j:,.0f} J", "in flight 3, 2, 1",
        "one GPU a stage",
    ):  # fmt: skip
        assert wanted in said
    tails = Conditions((80.0,) * 3, tail_time_s=(2.0,) * 3, gpus_per_stage=(2, 2, 4))
    p = plan(builders.one_f_one_b(3, 4), conditions=tails)
    said = chart_of(p).title
    assert f"{p.timeline.end_s.max() + 2:.4g} s" in said
    assert f"{p.cost.energy_j:,.0f} J (8 GPUs)" in said


def test_marks_of_every_shape_are_drawn_and_named_once_for_all_charts():
    boxes_of_two = columns_of("colour row begin end", [("red", 0, 0, 2), ("blue", 1, -1, 0)])
    marks = [
        Marks("span", "warm-up", "#e69f00", {"begin": [0], "end": [1]}),
        Marks("dot", "a dot", INK, {"x": [1, 2], "y": [5, 6]}, marker="star"),
        Marks("box", "", INK, boxes_of_two),
        Marks("line", "", INK, {"x": [[0, 1]], "y": [[0, 1]]}, look="dashed"),
    ]
    charts = [
        Chart("a", "x", "y", [*marks[:2], marks[3]], from_zero=True),
        Chart("b", "time (s)", "row", marks[:1] + marks[2:3], rows=["0", "1"]),
    ]
    figure = draw(charts, "t")
    above, below = figure.axes
    assert (len(above.patches), len(above.lines), len(above.collections)) == (1, 1, 1)
    assert above.get_ylim()[0] == 0
    assert (below.get_xlabel(), below.get_ylim()) == ("time (s)", (1.5, -0.5))
    colours = below.collections[0].get_facecolor()
    assert colours.tolist() == [list(to_rgba("red")), list(to_rgba("blue"))]
    ends = [
        (path.get_extents().x0, path.get_extents().x1) for path in below.collections[0].get_paths()
    ]
    assert ends == [(0, 2), (-1, 0)]
    named = [text.get_text() for text in figure.legends[0].get_texts()]
    assert named == ["warm-up", "a dot"]
