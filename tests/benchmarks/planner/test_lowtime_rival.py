"""The rival's harness: plans in our order, kept when time runs out, and not made twice."""

import math

import numpy as np
import pytest

from envpipe_megatron.core.conditions import Conditions
from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.plan import Plan
from envpipe_megatron.core.profile import make_profile
from envpipe_megatron.core.profile_rows import ProfileRow
from envpipe_megatron.errors import EnvPipeError

pytest.importorskip("lowtime", reason="the rival is installed with the extra 'rivals'")
from benchmarks.planner import lowtime_rival
from benchmarks.planner.lowtime_rival import run_lowtime

POWER_W = 80.0
CLOCKS = range(1400, 700, -100)


def exponential_profile(num_stages=2, slowness=1.0):
    """Costs that lowtime's curve fits: energy less waiting falls exponentially with time."""
    rows = []
    for stage in range(num_stages):
        for kind, weight in ((Kind.FORWARD, 1.0), (Kind.BACKWARD, 2.0)):
            for clock in CLOCKS:
                time_s = slowness * weight * (1 + 0.3 * stage) * 56 / clock
                cost_j = weight * (400 * math.exp(-30 * time_s / weight) + 10)
                rows.append((stage, kind, ProfileRow(clock, time_s, cost_j + POWER_W * time_s)))
    return make_profile(rows, source="made for a test")


@pytest.fixture
def run_small(tmp_path):
    profile = exponential_profile()

    def run(**options):
        options = {"time_limit_s": 60, "output_dir": tmp_path} | options
        return run_lowtime(profile, 3, POWER_W, **options)

    return profile, run


def test_plans_are_priced_as_ours_and_near_the_time_that_lowtime_states(run_small):
    profile, run = run_small
    found = run()
    assert found.finished
    assert len(found.plans) == len(found.stated_energy_j) > 10
    stated_s = [time_s for time_s, _ in found.plans]
    assert stated_s == sorted(stated_s, reverse=True)
    assert found.seconds_total < math.inf
    schedule = builders.one_f_one_b(2, 3)
    for (time_s, clocks), energy_j in zip(found.plans, found.stated_energy_j, strict=True):
        cost = Plan("lowtime", schedule, clocks, profile, Conditions((POWER_W,) * 2)).cost
        # Each unit's time is rounded down to 1 ms, and its clock to the slowest that fits.
        assert cost.iteration_time_s <= time_s + 0.001 * schedule.units_per_stage * 2
        assert cost.energy_j == pytest.approx(energy_j, rel=0.1)


def test_a_stored_run_is_read_and_another_question_is_not_taken_for_it(run_small, monkeypatch):
    _, run = run_small
    first = run()

    def refuse(*_):
        raise AssertionError("lowtime was run again")

    monkeypatch.setattr(lowtime_rival, "_run_in_process", refuse)
    again = run(time_limit_s=120)
    assert again.seconds_total == first.seconds_total
    assert all(
        a[0] == b[0] and np.array_equal(a[1], b[1])
        for a, b in zip(first.plans, again.plans, strict=True)
    )
    with pytest.raises(AssertionError, match="run again"):
        run(unit_time_s=0.002)


def test_a_run_that_ends_at_its_limit_keeps_its_plans_and_is_repeated_with_more_time(tmp_path):
    profile = exponential_profile()
    # 10 us steps: many thousands of plans, far more than seconds make.
    options = {"unit_time_s": 1e-5, "output_dir": tmp_path}
    cut = run_lowtime(profile, 32, POWER_W, time_limit_s=2, **options)
    assert not cut.finished
    assert len(cut.plans) > 0
    longer = run_lowtime(profile, 32, POWER_W, time_limit_s=3, **options)
    assert len(longer.plans) > len(cut.plans)
    assert np.array_equal(longer.plans[len(cut.plans) - 1][1], cut.plans[-1][1])


def test_a_failure_of_lowtime_is_an_error_and_leaves_nothing(tmp_path, capfd):
    steep = exponential_profile(slowness=1e-5)  # all times round down to 0
    with pytest.raises(EnvPipeError, match="lowtime failed"):
        run_lowtime(steep, 2, POWER_W, time_limit_s=60, output_dir=tmp_path)
    assert capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []
