"""Models of time and power over the clock, on presets and on published profiles."""

from pathlib import Path

import numpy as np
import pytest

from envpipe_megatron.core.kinds import WHOLE
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.profile import read_profile
from envpipe_megatron.core.sidecar import Sidecar
from envpipe_megatron.gpu.presets import load_preset
from envpipe_megatron.tuning.measured.fit import Times, fit_times_s
from envpipe_megatron.tuning.measured.powers import RESOLUTION_J, fit_powers, meter_sums
from envpipe_megatron.tuning.measured.store import Store

DATA = Path(__file__).resolve().parents[3] / "shared" / "data" / "perseus_sosp24"
CLOCKS = np.arange(800.0, 1411.0, 15.0)
NODES = np.linspace(630.0, 1410.0, 23)


def test_five_clocks_give_the_times_at_all_others():
    preset = load_preset("a100-sxm")
    times_s = [preset.unit_time_s("backward", clock, 0.06) for clock in CLOCKS]
    known = [800.0, 950.0, 1100.0, 1250.0, 1410.0]
    fitted_s, limit_mhz = fit_times_s(
        CLOCKS, known, [preset.unit_time_s("backward", clock, 0.06) for clock in known]
    )
    np.testing.assert_allclose(fitted_s, times_s, rtol=2e-3)
    assert limit_mhz == pytest.approx(preset.power_cap_frequency_mhz, rel=0.02)


def test_times_are_what_was_measured_where_it_was():
    known, measured_s = [900.0, 1100.0, 1410.0], [0.21, 0.16, 0.13]
    fitted_s, _ = fit_times_s(np.array(known), known, measured_s)
    np.testing.assert_allclose(fitted_s, measured_s)


def test_of_one_clock_all_time_follows_the_clock():
    fitted_s, _ = fit_times_s(np.array([705.0, 1410.0]), [1410.0], [0.1])
    np.testing.assert_allclose(fitted_s, [0.2, 0.1])


@pytest.mark.parametrize("name", ["gpt3-175b_a100_sxm.csv", "gpt3-175b_a40.csv"])
def test_five_clocks_of_a_published_profile_give_the_others(name):
    path = DATA / "emulation" / "stage_profile" / name
    if not path.exists():
        pytest.skip("the published profiles are not there")
    profile = read_profile(path)
    missed = []
    for kinds in profile.rows:
        for kind in WHOLE:
            rows = sorted(kinds[kind], key=lambda row: row.frequency_mhz)
            clocks = np.array([row.frequency_mhz for row in rows], dtype=float)
            times_s = np.array([row.time_s for row in rows])
            at = [int(np.abs(clocks - share * clocks[-1]).argmin()) for share in (0.6, 0.7, 0.8)]
            at += [int(np.abs(clocks - 0.9 * clocks[-1]).argmin()), len(clocks) - 1]
            fitted_s, _ = fit_times_s(clocks, clocks[at].tolist(), times_s[at].tolist())
            missed.append(np.abs(fitted_s / times_s - 1)[at[0] :])
    assert np.concatenate(missed).mean() < 0.005


@pytest.mark.parametrize("seed", range(30))
def test_a_few_noisy_refreshes_of_a_constant_power_give_some_power_to_all(seed):
    """As on a GPU that several ranks share: what one of them does is hardly seen."""
    rng = np.random.default_rng(seed)
    store = Store(builders.one_f_one_b(1, 2), NODES.astype(int).tolist(), Sidecar())
    ends_s = np.cumsum(rng.uniform(0.01, 0.05, 24))
    spent = np.stack([ends_s, rng.integers(-1, 2, 24), rng.choice(NODES[-4:], 24)])
    refreshes_s = np.arange(0.0, ends_s[-1], 0.1)
    energy_j = np.cumsum(rng.uniform(5.0, 20.0, len(refreshes_s)))
    clocks, count = store.powers.nodes_mhz, len(WHOLE)
    store.powers.sums[0] += meter_sums(0.0, spent, refreshes_s, energy_j, clocks, count)
    power_w, _ = store._fitted_w(0)
    assert (power_w.max(axis=1) > 0).all()
    assert power_w.max() < 2000


def test_powers_are_as_unsure_as_readings_scatter():
    """Errors of a fit lie within what it states, of noise that is known."""
    rng, watts, noise_j = np.random.default_rng(3), 300.0, 2.0
    off, stated = [], []
    for _ in range(60):
        sums = np.zeros((2 * len(NODES) + 3,) * 2)
        for clock in NODES[[2, 6, 10, 16, 22]].tolist():
            now_s = np.arange(41) / 10
            energy_j = watts * clock / NODES[-1] * now_s + rng.normal(0, noise_j / 2**0.5, 41)
            spent = np.array([[4.0], [0], [clock]])
            sums += meter_sums(0.0, spent, now_s, energy_j, NODES, 1)
        power_w, errors_w = fit_powers(sums, NODES, 1, 1410.0)
        off.append(power_w[0, 6] - watts * NODES[6] / NODES[-1])
        stated.append(errors_w[0, 6])
    assert np.std(off) < 1.2 * np.mean(stated)
    # The counter resolves no less than a millijoule.
    exact = meter_sums(0.0, spent, now_s, watts * now_s, NODES, 1)
    noisy = exact.copy()
    noisy[-2, -2] += 39 * (10 * RESOLUTION_J) ** 2  # squares of energies, of 40 readings
    (_, least_w), (_, errors_w) = (fit_powers(sums, NODES, 1, 1410.0) for sums in (exact, noisy))
    assert least_w == pytest.approx(errors_w / 10, rel=0.02)


def test_refreshes_outside_of_what_is_known_count_for_nothing():
    spent = np.array([[1.0], [0], [1410.0]])
    late = meter_sums(0.0, spent, np.array([0.95, 1.5]), np.array([1.0, 2.0]), NODES, 1)
    assert not late.any()


CLOCKS_MHZ = np.array([990.0, 1125.0, 1260.0, 1410.0])


def learned(times: Times, measured_s: dict[int, list[float]]) -> float:
    change = times.learn({mhz: np.array(values) for mhz, values in measured_s.items()}, 4)
    times.fit()
    return change


def test_scatter_stays_known_where_no_two_units_run_alike():
    """With few microbatches each unit has a clock of its own, for thousands of windows."""
    times, random = Times(CLOCKS_MHZ), np.random.default_rng(1)

    def units(count: int) -> list[float]:
        return (0.03 * (1 + random.choice([-0.015, 0.015], count))).tolist()

    learned(times, {1410: units(100)})
    for _ in range(1000):
        assert learned(times, {1410: units(1)}) == 0.0
    assert learned(times, {1410: [1.2 * 0.03]}) == pytest.approx(0.2, abs=0.02)


def test_what_passes_leaves_no_trace_at_a_clock_that_was_not_seen():
    """The slowest stage runs at the highest clock alone."""
    times = Times(CLOCKS_MHZ)
    learned(times, {1410: [0.03] * 3, 1125: [0.036] * 3})
    for _ in range(20):
        assert learned(times, {1410: [0.0306] * 3}) == pytest.approx(0.02)
        assert times.points[1125].time_s == pytest.approx(1.02 * 0.036)
        assert learned(times, {1410: [0.03] * 3}) == pytest.approx(-0.02, abs=0.001)
    assert times.points[1125].time_s == pytest.approx(0.036, rel=1e-3)


def test_after_weeks_a_small_change_is_followed_and_more_scatter_is_no_change():
    times, random = Times(CLOCKS_MHZ), np.random.default_rng(1)

    def windows(count: int, time_s: float, scatter: float) -> int:
        """How many of them seem a change."""
        return sum(
            learned(times, {1410: (time_s * random.normal(1, scatter, 8)).tolist()}) != 0
            for _ in range(count)
        )

    windows(3000, 0.03, 0.005)
    windows(100, 0.03 * 1.005, 0.005)
    assert times.points[1410].time_s == pytest.approx(0.03 * 1.005, rel=0.001)
    assert windows(1000, 0.03 * 1.005, 0.02) < 20
