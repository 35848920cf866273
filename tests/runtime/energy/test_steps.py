"""Average steps: their errors, means over GPUs and laps, and comparisons."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest

from envpipe_megatron.runtime.energy.steps import (
    PhaseMean,
    RunningMean,
    StepEnergy,
    compare,
    mean_over_gpus,
    percent,
    step_sums,
)


def error_of(values: Iterable[float]) -> float | None:
    mean = RunningMean()
    for value in values:
        mean.add(value)
    return mean.uncertainty


@pytest.mark.parametrize(("saved", "noise", "count"), [(0.0, 0.02, 3), (0.0, 0.05, 10)])
def test_a_saving_is_not_claimed_where_there_is_none(saved, noise, count):
    """Short baselines of noisy steps: a claim is wrong in 2.5 % of jobs at most, and a bit."""
    rng = np.random.default_rng(7)
    claims = 0
    for _ in range(2000):
        steps = []
        for n in (count, 50):
            times_s = 1 + noise * rng.standard_normal(n)
            steps.append(StepEnergy(n, times_s.mean(), error_of(times_s), 300 * times_s.mean(), 0))
        found = compare(steps[1], steps[0])
        claims += found.saving_percent > 1.96 * found.saving_uncertainty_percent
    assert claims / 2000 <= 0.035


def test_savings_and_slowdowns_carry_their_uncertainty():
    baseline = StepEnergy(10, 1.0, 0.01, 400.0, 3.0)
    step = StepEnergy(100, 1.02, 0.0, 320.0, 0.0)
    found = compare(step, baseline)
    assert found.saving_percent == pytest.approx(20)
    assert found.saving_uncertainty_percent == pytest.approx(100 * 0.8 * 5 / 400)
    assert found.slowdown_percent == pytest.approx(2)
    assert found.slowdown_uncertainty_percent == pytest.approx(100 * 1.02 * 0.01)
    once = compare(replace(step, time_uncertainty_s=None), baseline)
    assert once.saving_percent == pytest.approx(20)
    assert once.saving_uncertainty_percent is None
    unmetered = compare(replace(step, energy_j=None), baseline)
    assert unmetered == replace(found, saving_percent=None, saving_uncertainty_percent=None)
    assert compare(step, replace(baseline, energy_j=None)) == unmetered
    # 320 +- 4 J in 1.02 +- 0.02 s, of which 3.5 J by the scatter of the time.
    both = StepEnergy(100, 1.25, 0.02, 320.0, 4.0)
    assert both.power_w == 256
    assert both.energy_uncertainty_j == pytest.approx(math.hypot(4, 256 * 0.02))
    found = compare(both, baseline)
    assert found.saving_uncertainty_percent == pytest.approx(
        100 * math.hypot(both.energy_uncertainty_j, 0.8 * 5) / 400
    )
    assert found.slowdown_percent == pytest.approx(25)
    assert found.slowdown_uncertainty_percent == pytest.approx(100 * math.hypot(0.02, 1.25 * 0.01))
    longer = replace(baseline, time_s=4.0)
    assert compare(both, longer).slowdown_percent == pytest.approx(-68.75)
    assert compare(both, longer).slowdown_uncertainty_percent == pytest.approx(
        25 * math.hypot(0.02, 1.25 / 4 * 0.01)
    )
    assert compare(both, replace(baseline, time_uncertainty_s=None)) == replace(
        found, saving_uncertainty_percent=None, slowdown_uncertainty_percent=None
    )
    nothing = StepEnergy(2, 0.0, 0.0, 0.0, 0.001)
    assert nothing.power_w is None
    assert nothing.energy_uncertainty_j is None
    assert compare(step, replace(baseline, energy_j=0.0)).saving_percent is None


@pytest.mark.parametrize(
    ("value", "uncertainty", "said"),
    [
        (None, None, "not known"),
        (12.345, None, "12.35 %"),
        (-0.5, 0.25, "-0.50 +- 0.49 %"),
        (0.0, 0.0, "0.00 +- 0.00 %"),
    ],
)
def test_percent_has_its_interval_where_that_is_known(value, uncertainty, said):
    assert percent(value, uncertainty) == said


def test_a_mean_of_two_has_an_error_and_of_one_none():
    assert error_of([3.0]) is None
    # 12.706 of 1.96 is Student's t of one degree of freedom at 95 %; the deviation is sqrt(2).
    assert error_of([3.0, 5.0]) == pytest.approx(12.706 / 1.96, rel=1e-4)


def test_gpus_of_a_stage_stand_in_for_each_other():
    def step(energy_j):
        return StepEnergy(4, 1.0, 0.1, energy_j, None if energy_j is None else 3.0)

    def stage(*energies_j):
        return sum(step_sums(step(energy_j)) for energy_j in energies_j)

    mean = mean_over_gpus([stage(100.0, None), stage(300.0, 320.0)])
    assert mean.energy_j == pytest.approx((100 + 100 + 300 + 320) / 4)
    assert mean.metering_uncertainty_j == pytest.approx(math.hypot(6, 3, 3) / 4)
    unmetered = mean_over_gpus([stage(None), stage(300.0)])
    assert unmetered == StepEnergy(4, 1.0, 0.1, None, None)
    assert mean_over_gpus([stage(100.0), step_sums(None)]) is None
    unlike = [StepEnergy(4, 1.0, 0.1, 100.0, 3.0), StepEnergy(2, 2.0, 0.3, 300.0, 4.0)]
    assert mean_over_gpus([step_sums(step) for step in unlike]) == StepEnergy(
        3, 1.5, 0.2, 200.0, 2.5
    )
    unlike[1] = replace(unlike[1], time_uncertainty_s=None)
    assert mean_over_gpus([step_sums(step) for step in unlike]).time_uncertainty_s is None


def test_a_job_of_single_steps_a_lap_has_a_mean_with_an_error():
    mean = PhaseMean()
    assert mean.step is None
    only = StepEnergy(5, 1.0, 0.01, 100.0, 1.0)
    mean.add(only)
    assert mean.step == only
    mean.add(StepEnergy(3, 2.0, 0.02, 300.0, 2.0))
    # A lap counts by its steps: 5 of 1 s, 3 of 2 s; their uncertainties are 5 and 6 J.
    assert mean.step == StepEnergy(
        8, 11 / 8, error_of([1.0, 2.0]), 1400 / 8, pytest.approx(math.hypot(5, 6) / 8)
    )
    mean = PhaseMean()
    for time_s in (1.0, 1.1, 0.9):
        mean.add(StepEnergy(1, time_s, None, 100 * time_s, 1.0))
    mean.add(StepEnergy(1, 50.0, None, None, None))
    assert mean.step.time_s == pytest.approx(1.0)
    assert mean.step.energy_j == pytest.approx(100)
    assert mean.step.time_uncertainty_s == pytest.approx(
        4.303 / 1.96 * 0.1 / math.sqrt(3), rel=1e-3
    )
    assert mean.step.iterations == 3
