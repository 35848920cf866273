"""What is on the charts of profiles and frontiers."""

import numpy as np
import pytest
import run_made

from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.core.profile import make_profile
from envpipe_megatron.core.profile_rows import ProfileRow, SplitBackward
from envpipe_megatron.policies.planner import make_frontier
from envpipe_megatron.policies.request import PlanRequest
from envpipe_megatron.report.charts import INK
from envpipe_megatron.report.views import (
    configurations_chart,
    frontier_charts,
    valley_chart,
)

PROFILE = run_made.profile(3, [(1500, 1.0, 140.0), (1200, 1.2, 110.0), (900, 1.6, 100.0)])
REQUEST = PlanRequest(6, "auto", "optimal", blocking_power_w=30.0)


def by_name(chart):
    return {marks.name: marks.columns for marks in chart.marks}


def test_a_frontier_shows_plans_bound_baseline_and_power():
    plans = make_frontier(PROFILE, REQUEST, 8)
    energy, power = frontier_charts(plans, plans[2])
    found = by_name(energy)
    times_s = [plan.cost.iteration_time_s for plan in plans]
    assert found["plans"]["x"] == times_s
    assert found["plans"]["y"] == [plan.cost.energy_j for plan in plans]
    (bounds_j,) = found["lower bound"]["y"]
    assert np.all(np.array(bounds_j) <= np.array(found["plans"]["y"]) * (1 + 1e-12))
    baseline = plans[0].baseline.cost
    assert found["1f1b at the highest clocks"]["y"] == [baseline.energy_j]
    assert found["the plan that ran"]["x"] == [times_s[2]]
    powers = by_name(power)
    assert powers["plans"]["y"] == pytest.approx(found["plans"]["y"] / np.array(times_s))
    assert powers["1f1b at the highest clocks"]["y"] == [baseline.mean_power_w]
    assert ("(J)" in energy.y_label, "(W)" in power.y_label) == (True, True)
    assert all("(s)" in chart.x_label for chart in (energy, power))


def test_each_configuration_is_a_line():
    marks, dots = configurations_chart({"a": [(1.0, 5.0), (2.0, 4.0)], "b": [(3.0, 2.0)]}).marks
    assert marks.columns["name"] == ["a", "b"]
    assert marks.columns["x"] == [[1.0, 2.0], [3.0]]
    assert marks.columns["y"] == [[5.0, 4.0], [2.0]]
    assert dots.columns["name"] == ["a", "a", "b"], "one plan is no line"


def test_a_valley_marks_the_optimum_of_each_stage():
    chart = valley_chart(PROFILE)
    lines, optima, dots = chart.marks
    assert lines.columns["name"] == ["stage 0", "stage 1", "stage 2"]
    assert lines.columns["x"][0] == [900, 1200, 1500]
    assert lines.columns["y"][0] == [300.0, 330.0, 420.0]
    assert (optima.columns["x"], optima.columns["y"]) == ([900] * 3, [300.0] * 3)
    assert optima.colour != INK, "which a page in dark mode has for its background"
    assert len(dots.columns["x"]) == 9


def test_a_valley_counts_a_backward_once_that_was_measured_in_two_parts_too():
    split = PROFILE.with_split_backwards(SplitBackward(overhead=0.01))
    lines, *_ = valley_chart(split).marks
    assert lines.columns["y"][0] == [300.0, 330.0, 420.0]


def test_a_stage_without_common_clocks_has_no_valley():
    rows = [
        (0, Kind.FORWARD, ProfileRow(900, 1.0, 1.0)),
        (0, Kind.BACKWARD, ProfileRow(1500, 1.0, 1.0)),
    ]
    chart = valley_chart(make_profile(rows, source="test"))
    lines, *others = chart.marks
    assert lines.columns["x"] == []
    assert not any(marks.columns["x"] for marks in others)
