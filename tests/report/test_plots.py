"""Pictures are checked by what stands on the axes, not by pixels."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import run_made
from combined_cases import combined_profile
from matplotlib.figure import Figure

from envpipe_megatron.core.conditions import Conditions
from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.plan import Plan
from envpipe_megatron.core.profile import make_profile
from envpipe_megatron.core.profile_rows import ProfileRow
from envpipe_megatron.policies.frequencies import POLICIES
from envpipe_megatron.report.drawing import gantt, plots, style

#: A valley whose bottom is 1200 MHz.
VALLEY = [(1500, 1.0, 14.0), (1200, 1.25, 10.0), (900, 1.6, 11.0)]


def plan(schedule, policy="envelope"):
    prof = run_made.profile(schedule.num_stages, VALLEY).for_chunks(schedule.num_chunks)
    return Plan(
        policy,
        schedule,
        POLICIES[policy](schedule, prof),
        prof,
        Conditions((80.0,) * schedule.num_stages),
    )


@pytest.fixture
def saved(monkeypatch, tmp_path):
    """Draws a plan; the figure that would be saved."""

    def save(figure, path, **_):
        figures.append(figure)
        path.touch()

    figures = []
    monkeypatch.setattr(Figure, "savefig", save)

    def figure_of(a_plan, **options):
        plots.plot_timeline(a_plan, tmp_path / "x.png", title="t", **options)
        return figures.pop()

    return figure_of


def draw(a_plan, *, width_in=12.0):
    figure = Figure(figsize=(width_in, 3))
    axes = figure.add_subplot()
    timeline = a_plan.timeline
    axes.set_xlim(0, timeline.iteration_time_s)
    scale = plots.ScalarMappable(plots.Normalize(900, 1500), "viridis")
    gantt.draw_timeline(
        axes,
        a_plan.schedule,
        a_plan.frequency_mhz,
        timeline.start_s,
        timeline.end_s,
        scale=scale,
    )
    names = ("waits", "forwards", "backwards", "envelope")
    return SimpleNamespace(
        **dict(zip(names, axes.collections, strict=True)), labels=tuple(axes.texts)
    )


def extents(collection):
    """(x0, x1, row) of each box."""
    boxes = [path.get_extents() for path in collection.get_paths()]
    return [(box.x0, box.x1, round((box.y0 + box.y1) / 2)) for box in boxes]


def texts(figure):
    return [text.get_text() for text in figure.axes[0].texts]


def test_each_unit_is_a_box_at_its_times_and_in_its_row():
    p = plan(builders.one_f_one_b(3, 4))
    drawn = draw(p)
    backward, timeline = p.schedule.is_backward, p.timeline
    for collection, mask in ((drawn.forwards, ~backward), (drawn.backwards, backward)):
        rows = np.nonzero(mask)[0]
        expected = sorted(zip(timeline.start_s[mask], timeline.end_s[mask], rows, strict=True))
        assert np.allclose(sorted(extents(collection)), expected)
    heights = [
        {round(path.get_extents().height, 6) for path in boxes.get_paths()}
        for boxes in (drawn.forwards, drawn.backwards)
    ]
    assert [len(height) for height in heights] == [1, 1]
    assert heights[0].isdisjoint(heights[1]), "they differ without colour"
    waiting = np.zeros(3)
    for x0, x1, row in extents(drawn.waits):
        waiting[row] += x1 - x0
    busy = timeline.duration_s.sum(axis=1)
    assert np.allclose(busy + waiting, p.cost.iteration_time_s), "waits and boxes fill it exactly"


def test_a_pair_is_one_box():
    schedule = builders.interleaved(2, 4, 2, combined=True)
    profile = combined_profile()
    clocks = POLICIES["envelope"](schedule, profile)
    drawn = draw(Plan("x", schedule, clocks, profile, Conditions((80.0, 80.0))), width_in=40)
    names = {text.get_text() for text in drawn.labels}
    assert {"F0.0", "F3.0+B0.1", "F1.1+B0.1", "B3.0"} <= names
    assert len(drawn.labels) == schedule.num_units - schedule.combined.sum()


def test_colour_is_the_frequency():
    p = plan(builders.one_f_one_b(3, 4))
    drawn = draw(p)
    scale = plots.ScalarMappable(plots.Normalize(900, 1500), "viridis")
    expected = [scale.to_rgba(float(f)) for f in p.frequency_mhz[p.schedule.is_backward]]
    assert np.allclose(drawn.backwards.get_facecolor(), expected)
    assert len({tuple(colour) for colour in expected}) == 2


def test_the_envelope_is_outlined_unit_by_unit_and_in_runs_where_narrow():
    p = plan(builders.one_f_one_b(3, 6))
    wide, narrow = draw(p), draw(p, width_in=1.0)
    starts = p.timeline.start_s.ravel()
    envelope = sorted(p.schedule.outer_envelope)
    assert sorted(x0 for x0, _, _ in extents(wide.envelope)) == pytest.approx(
        sorted(starts[envelope])
    )
    # Two ends on each of two stages, and one run for the whole last stage.
    assert len(extents(narrow.envelope)) == 5
    last = [(x0, x1) for x0, x1, row in extents(narrow.envelope) if row == 2]
    assert last == [pytest.approx((p.timeline.start_s[2, 0], p.timeline.end_s[2, -1]))]


def test_labels_name_the_units_and_drop_out_where_boxes_are_narrow():
    p = plan(builders.one_f_one_b(2, 4))
    wide, narrow = draw(p), draw(p, width_in=1.2)
    assert sorted(text.get_text() for text in wide.labels) == sorted(
        name for order in p.schedule.labels() for name in order
    )
    assert narrow.labels == ()
    unequal = draw(plan(builders.one_f_one_b(2, 16), "baseline"), width_in=8)
    assert {text.get_text()[0] for text in unequal.labels} == {"B"}


def test_letters_contrast_with_their_box():
    drawn = draw(plan(builders.one_f_one_b(3, 4), "envelope"))
    # The last stage runs at the highest clock (bright yellow), its neighbour mostly does not.
    assert {t.get_color() for t in drawn.labels if t.get_position()[1] == 2} == {gantt.INK}
    assert {t.get_color() for t in drawn.labels if t.get_position()[1] == 1} == {gantt.INK, "white"}


def test_the_critical_path_runs_from_start_to_end_of_the_iteration(saved):
    p = plan(builders.one_f_one_b(3, 4))
    xs = saved(p).axes[0].lines[-1].get_xdata()
    assert xs[0] == 0
    assert xs[-1] == pytest.approx(p.cost.iteration_time_s)
    assert np.all(np.diff(xs) >= -1e-12)


def test_pictures_of_one_profile_share_the_frequency_scale_by_default():
    schedule = builders.one_f_one_b(3, 4)
    ranges = {
        plots.default_frequency_range_mhz(plan(schedule, policy))
        for policy in ("baseline", "envelope", "uniform")
    }
    assert ranges == {(1200.0, 1500.0)}
    assert style.scale_range(1500, 1500) == (1499.0, 1500.0)  # of a single one


def test_x_max_and_frequency_range_are_kept(saved):
    axes, bar = saved(
        plan(builders.one_f_one_b(2, 2)), x_max_s=99.0, frequency_range_mhz=(500.0, 2000.0)
    ).axes
    assert axes.get_xlim() == (0.0, 99.0)
    assert bar.get_ylim() == (500.0, 2000.0)
    assert axes.get_ylim()[0] > axes.get_ylim()[1]  # stage 0 on top


@pytest.mark.parametrize(
    "schedule",
    [
        builders.one_f_one_b(1, 1),
        builders.interleaved(2, 4, 2),
        builders.forward_only(2, 4, 2),
        builders.envpipe(4, 8, [4, 3, 2, 0]),
    ],
    ids=lambda s: f"{s.name}-{s.num_stages}x{s.num_microbatches}x{s.num_chunks}",
)
def test_files_are_made_for_every_schedule(tmp_path, schedule):
    p = plan(schedule)
    p = replace(p, profile=p.profile.for_chunks(schedule.num_chunks))
    path = tmp_path / "timeline.png"
    plots.plot_timeline(p, path, title="Plan", note="a note")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_8_by_96_is_drawn_without_labels(tmp_path):
    p = plan(builders.one_f_one_b(8, 96))
    drawn = draw(p, width_in=16)
    assert len(drawn.forwards.get_paths()) == len(drawn.backwards.get_paths()) == 768
    assert drawn.labels == ()
    path = tmp_path / "timeline.svg"
    plots.plot_timeline(p, path, title="Plan")
    assert path.stat().st_size > 0


def test_the_caption_says_time_energy_memory_and_gpus(saved):
    p = plan(builders.one_f_one_b(3, 4))
    said = texts(saved(p, note="a note"))
    caption = next(text for text in said if "iteration" in text)
    assert f"{p.cost.iteration_time_s:.4g} s" in caption
    assert f"{p.cost.energy_j:,.0f} J" in caption
    assert "peak in flight 3, 2, 1" in caption
    assert "one GPU a stage" in caption
    assert "a note" in said
    tails = Conditions((80.0,) * 3, tail_time_s=(2.0,) * 3, gpus_per_stage=(2, 2, 4))
    p = replace(p, conditions=tails)
    caption = next(text for text in texts(saved(p)) if "iteration" in text)
    assert f"{p.timeline.end_s.max() + 2:.4g} s" in caption
    assert f"{p.cost.energy_j:,.0f} J (8 GPUs)" in caption


def test_valley_marks_optimum_and_highest_clock_of_each_stage(tmp_path):
    figure = plots.energy_valley_figure(run_made.profile(5, VALLEY), title="Valley")
    assert [axes.get_title(loc="left").split(":")[0] for axes in figure.axes] == [
        f"stage {stage}" for stage in range(5)
    ]
    axes = figure.axes[4]
    points = {
        line.get_marker(): (line.get_xdata()[0], line.get_ydata()[0])
        for line in axes.lines
        if line.get_marker() != "None"
    }
    assert points == {"D": (1200, 30.0), "^": (1500, 42.0)}
    curves = {tuple(line.get_ydata()) for line in axes.lines if len(line.get_xdata()) == 3}
    assert curves == {(11.0, 10.0, 14.0), (22.0, 20.0, 28.0), (33.0, 30.0, 42.0)}
    path = tmp_path / "valley.png"
    plots.plot_energy_valley(run_made.profile(5, VALLEY), path, title="Valley")
    assert path.stat().st_size > 0


def test_valley_of_a_stage_without_common_frequencies_shows_its_two_curves():
    rows = [
        (0, Kind.FORWARD, ProfileRow(900, 1.0, 1.0)),
        (0, Kind.BACKWARD, ProfileRow(1500, 1.0, 1.0)),
    ]
    figure = plots.energy_valley_figure(make_profile(rows, source="test"), title="Valley")
    assert len(figure.axes[0].lines) == 2
