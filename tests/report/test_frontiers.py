"""What stands on the axes of the frontiers' pictures."""

import numpy as np
import pytest
import run_made

from envpipe_megatron.policies.planner import make_frontier, make_memory_frontier
from envpipe_megatron.policies.request import PlanRequest
from envpipe_megatron.report.drawing import planned

PROFILE = run_made.profile(3, [(1500, 1.0, 140.0), (1200, 1.2, 110.0), (900, 1.6, 100.0)])
REQUEST = PlanRequest(6, "auto", "optimal", blocking_power_w=30.0)


@pytest.fixture
def drawn(monkeypatch):
    """The axes of the picture that is written."""
    kept = []
    save = planned.save_picture

    def keep(figure, path):
        kept.extend(figure.axes)
        save(figure, path)

    monkeypatch.setattr(planned, "save_picture", keep)
    return kept


def test_a_frontier_shows_plans_bound_baseline_and_power(drawn, tmp_path):
    plans = make_frontier(PROFILE, REQUEST, 8)
    planned.plot_frontier(plans, tmp_path / "f.png", title="a job")
    lines = {line.get_label(): line for line in drawn[0].get_lines()}
    times_s = [plan.cost.iteration_time_s for plan in plans]
    np.testing.assert_allclose(lines["plans"].get_xdata(), times_s)
    np.testing.assert_allclose(lines["plans"].get_ydata(), [p.cost.energy_j for p in plans])
    bounds = lines["lower bound"].get_ydata()
    assert np.all(bounds <= lines["plans"].get_ydata() * (1 + 1e-12))
    assert lines["1f1b at the highest clocks"].get_ydata() == plans[0].baseline.cost.energy_j
    assert "(J)" in drawn[0].get_ylabel()
    powers = {line.get_label(): line.get_ydata() for line in drawn[1].get_lines()}
    np.testing.assert_allclose(
        powers["plans"], [p.cost.energy_j for p in plans] / np.array(times_s)
    )
    assert powers["1f1b at the highest clocks"] == plans[0].baseline.cost.mean_power_w
    assert "(s)" in drawn[1].get_xlabel()
    assert "(W)" in drawn[1].get_ylabel()
    assert (tmp_path / "f.png").stat().st_size > 0


def test_a_memory_frontier_shows_saving_over_microbatches_held(drawn, tmp_path):
    points = make_memory_frontier(PROFILE, REQUEST)
    planned.plot_memory_frontier(points, tmp_path / "m.svg", title="a job")
    (line,) = drawn[0].get_lines()
    assert list(line.get_xdata()) == [point.peak_in_flight for point in points]
    assert list(line.get_ydata()) == sorted(line.get_ydata())
    assert "(%)" in drawn[0].get_ylabel()
    assert (tmp_path / "m.svg").read_text().lstrip().startswith("<?xml")
