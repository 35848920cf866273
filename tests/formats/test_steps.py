"""Average steps: their errors, means over GPUs, and comparisons."""

import math
from dataclasses import replace

import numpy as np
import pytest
from energy_lines import bill, error_of, window

from envpipe_megatron.formats.account import Tariff, account_lines
from envpipe_megatron.formats.steps import (
    ComparedSteps,
    Comparison,
    StepEnergy,
    compare,
    mean_steps,
    step_sums,
)


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


def fieller(own: float, own_error: float, base: float, base_error: float) -> float:
    """How far the 95 % interval of a ratio reaches at most, in points, over 1.96."""
    coefficients = (
        base**2 - (1.96 * base_error) ** 2,
        -2 * own * base,
        own**2 - (1.96 * own_error) ** 2,
    )
    ends = np.roots(coefficients)
    return float(100 * np.abs(ends - own / base).max() / 1.96)


def test_savings_and_slowdowns_carry_their_uncertainty():
    baseline = StepEnergy(10, 1.0, 0.01, 400.0, 3.0)
    step = StepEnergy(100, 1.02, 0.0, 320.0, 0.0)
    found = compare(step, baseline)
    assert found.saving_percent == pytest.approx(20)
    assert found.saving_uncertainty_percent == pytest.approx(fieller(320, 0, 400, 5))
    assert found.slowdown_percent == pytest.approx(2)
    assert found.slowdown_uncertainty_percent == pytest.approx(fieller(1.02, 0, 1, 0.01))
    once = compare(replace(step, time_uncertainty_s=None), baseline)
    assert once.saving_percent == pytest.approx(20)
    assert once.saving_uncertainty_percent is None
    unmetered = compare(replace(step, energy_j=None), baseline)
    nothing_saved = replace(found, saving_percent=None, saving_uncertainty_percent=None)
    assert unmetered == replace(nothing_saved, energy_j=None)
    assert compare(step, replace(baseline, energy_j=None)) == nothing_saved
    # 320 +- 4 J in 1.02 +- 0.02 s, of which 3.5 J by the scatter of the time.
    both = StepEnergy(100, 1.25, 0.02, 320.0, 4.0)
    assert both.power_w == 256
    assert both.energy_uncertainty_j == pytest.approx(math.hypot(4, 256 * 0.02))
    found = compare(both, baseline)
    assert found.saving_uncertainty_percent == pytest.approx(
        fieller(320, both.energy_uncertainty_j, 400, 5)
    )
    assert found.slowdown_percent == pytest.approx(25)
    assert found.slowdown_uncertainty_percent == pytest.approx(fieller(1.25, 0.02, 1, 0.01))
    longer = replace(baseline, time_s=4.0)
    assert compare(both, longer).slowdown_percent == pytest.approx(-68.75)
    assert compare(both, longer).slowdown_uncertainty_percent == pytest.approx(
        fieller(1.25, 0.02, 4, 0.01)
    )
    assert compare(both, replace(baseline, time_uncertainty_s=None)) == replace(
        found, saving_uncertainty_percent=None, slowdown_uncertainty_percent=None
    )
    nothing = StepEnergy(2, 0.0, 0.0, 0.0, 0.001)
    assert nothing.power_w is None
    assert nothing.energy_uncertainty_j is None
    assert compare(step, replace(baseline, energy_j=0.0)).saving_percent is None


def test_a_mean_of_two_has_an_error_and_of_one_none():
    assert error_of([3.0]) is None
    # 12.706 of 1.96 is Student's t of one degree of freedom at 95 %; the deviation is sqrt(2).
    assert error_of([3.0, 5.0]) == pytest.approx(12.706 / 1.96, rel=1e-4)


def mean_of(*steps: StepEnergy | None) -> StepEnergy | None:
    """Of a GPU each."""
    means = mean_steps(np.sum([step_sums(step) for step in steps], axis=0))
    return means and means[0]


def test_gpus_stand_in_for_those_that_are_not_metered():
    metered = [StepEnergy(4, 1.0, 0.1, energy_j, 3.0) for energy_j in (100.0, 300.0, 320.0)]
    unmetered = StepEnergy(4, 1.0, 0.1, None, None)
    assert mean_of(unmetered, unmetered) == unmetered
    assert mean_of(*metered, None) is None
    mean = mean_of(*metered, unmetered)
    assert mean == StepEnergy(4, 1.0, 0.1, 240.0, pytest.approx(3 / math.sqrt(3)))
    unlike = [StepEnergy(4, 1.0, 0.1, 100.0, 3.0), StepEnergy(2, 2.0, 0.3, 300.0, 4.0)]
    of_steps = (8 / 6, 1.0 / 6, 1000 / 6, math.hypot(12, 8) / 6)
    assert mean_of(*unlike) == StepEnergy(3, *map(pytest.approx, of_steps))
    single = replace(unlike[1], time_uncertainty_s=None)
    assert mean_of(unlike[0], single).time_uncertainty_s == pytest.approx(0.1), "as of the others"
    assert mean_of(single, single).time_uncertainty_s is None


def sums_of(*windows: tuple[StepEnergy, int, float, float]) -> np.ndarray:
    """Of one GPU: each window's baseline, steps, s and J of each."""
    compared = ComparedSteps()
    for baseline, steps, time_s, energy_j in windows:
        compared.add(baseline, steps, steps * time_s, steps * energy_j, 0.5)
    return np.array(compared.sums)


SHORT, LONG = StepEnergy(9, 1.0, 0.01, 100.0, 1.0), StepEnergy(2, 2.0, 0.01, 200.0, 1.0)


def test_errors_of_one_baseline_do_not_average_out_and_those_of_several_do():
    other = replace(SHORT, time_s=1.0 + 1e-9)
    one = mean_steps(sums_of(*[(SHORT, 10, 1.0, 80.0)] * 4))[1]
    two = mean_steps(sums_of(*[(SHORT, 10, 1.0, 80.0), (other, 10, 1.0, 80.0)] * 2))[1]
    assert one.time_uncertainty_s == pytest.approx(0.01)
    assert two.time_uncertainty_s == pytest.approx(0.01 / 2)
    gpus = sums_of(*[(SHORT, 10, 1.0, 80.0)] * 2)
    assert mean_steps(gpus + gpus)[1].time_uncertainty_s == pytest.approx(0.01), "all step together"


def test_steps_scatter_about_what_baselines_expect_of_them():
    """That sequences grow is no scatter; a GPU of one window does not hide that of others."""
    steady = sums_of((SHORT, 5, 1.1, 90.0), (LONG, 5, 2.2, 180.0))
    assert mean_steps(steady)[0].time_uncertainty_s == pytest.approx(0.0)
    noisy = sums_of(*[(SHORT, 1, time_s, 90.0) for time_s in (1.0, 1.1, 0.9)])
    error_s = mean_steps(noisy)[0].time_uncertainty_s
    assert error_s == pytest.approx(error_of([1.0, 1.1, 0.9]))
    single = sums_of((SHORT, 3, 1.0, 90.0))
    assert mean_steps(single)[0].time_uncertainty_s is None
    assert mean_steps(noisy + single)[0].time_uncertainty_s == pytest.approx(error_s)


def test_a_saving_against_a_baseline_that_may_be_nothing_is_not_known():
    """One that was taken on an overloaded host: 6.7 +- 5.7 s."""
    overloaded = StepEnergy(9, 6.7, 5.7, 670.0, 1.0)
    found = compare(StepEnergy(50, 1.3, 0.01, 130.0, 1.0), overloaded)
    assert (found.saving_percent, found.slowdown_percent) == (None, None)
    assert str(found) == "not known whether less time, not known whether less energy"


@pytest.mark.parametrize(
    ("compared", "said"),
    [
        ((-10.0, 0.2, 4.4, 0.3), "10.00 +- 0.39 % less time, 4.40 +- 0.59 % less energy"),
        ((1.2, 0.2, -0.7, 0.1), "1.20 +- 0.39 % more time, 0.70 +- 0.20 % more energy"),
        ((0.2, 0.2, -0.5, 0.3), "0.20 +- 0.39 % more time, within noise, "
         "0.50 +- 0.59 % more energy, within noise"),
        ((-1.0, None, 2.0, None), "1.00 % less time, 2.00 % less energy"),
        ((None, None, None, None), "not known whether less time, not known whether less energy"),
    ],
)  # fmt: skip
def test_a_comparison_in_words_says_more_where_it_is(compared, said):
    slowdown, slowdown_error, saving, saving_error = compared
    found = Comparison(0.3293, 214.4, saving, saving_error, slowdown, slowdown_error)
    assert str(found) == said
    time_said = str(replace(found, energy_j=None))  # as without a meter
    energy_said = said.removeprefix(f"{time_said}, ")
    assert energy_said != said
    line = next(account_lines(bill(window(clock_backend="nvml")), Tariff(), {"": found}))
    line = line.partition(": ")[2]
    assert line == f"a step takes 329.3 ms ({time_said}) and 214.4 J a GPU ({energy_said})"


def drifting_job(rng: np.random.Generator, drift: np.ndarray) -> tuple[Comparison, float]:
    """Steps that take 5 % less, in windows of four, against nine of the framework's before them.

    `drift` is each step's factor; the other value is what the job truly saves of its own time.
    """
    steps_s = drift * (1 + 0.002 * rng.standard_normal(len(drift)))
    base_s, own_s = steps_s[1:10], 0.95 * steps_s[10:]
    energy_j = 100 * base_s.mean()
    base = StepEnergy(9, base_s.mean(), error_of(base_s), energy_j, 0.1)
    compared = ComparedSteps()
    for first in range(0, len(own_s) - 3, 4):
        time_s = own_s[first : first + 4].sum()
        compared.add(base, 4, time_s, 100 * time_s, 0.1)
    return compare(*mean_steps(compared.sums)), 100 * (own_s.sum() / drift[10:].sum() - 1)


@pytest.mark.parametrize("drift", [0.0, 0.005, -0.005])
def test_an_interval_of_time_holds_what_is_true_of_a_job_that_drifts(drift):
    """By half a percent over 200 steps, as GPUs get warm; the mean error would be far less."""
    rng, missed, widths = np.random.default_rng(5), 0, []
    for _ in range(200):
        found, true = drifting_job(rng, 1 + drift * np.linspace(0, 1, 210))
        widths.append(1.96 * found.slowdown_uncertainty_percent)
        missed += abs(found.slowdown_percent - true) > widths[-1]
    assert missed / 200 <= 0.05
    assert np.mean(widths) < (0.6 if drift else 0.2)
