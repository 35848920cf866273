"""What is known of units, when conditions change under which few clocks run."""

import numpy as np
import pytest
from window_reports import iteration

from emulated_pipelines import Conditions
from envpipe_megatron.core.arrays import FloatArray, IntArray
from envpipe_megatron.core.kinds import SPLIT, WHOLE, Kind
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.orders.builders import half_split, zero_bubble
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.core.sidecar import Sidecar
from envpipe_megatron.gpu.presets import load_preset
from envpipe_megatron.tuning.commands import Clocked, tail_times_s
from envpipe_megatron.tuning.measured.fit import Times
from envpipe_megatron.tuning.measured.store import Store
from job_runs import BACKWARD_RATIO, exact_profile

PRESET, FORWARD_S = load_preset("a100-sxm"), 0.03
TOP_MHZ = PRESET.max_frequency_mhz
SCHEDULE = builders.one_f_one_b(1, 12)


def known() -> Store:
    """Of one stage, all clocks down to a half."""
    profile = exact_profile(PRESET, [FORWARD_S], {})
    clocks = [mhz for mhz in profile.clocks_mhz(0) if mhz > TOP_MHZ / 2]
    store = Store(SCHEDULE, clocks, Sidecar())
    store.take_profile(profile)
    return store


def learn(store: Store, low_mhz: int, conditions: Conditions) -> None:
    """Half of an iteration ran at one clock, and half at the highest."""
    kinds = [unit.kind for unit in SCHEDULE.stages[0]]
    clocks = np.where(np.arange(len(kinds)) < len(kinds) // 2, low_mhz, TOP_MHZ)
    unit_s = np.array(
        [seconds(conditions, kind, mhz) for kind, mhz in zip(kinds, clocks, strict=True)]
    )
    take(store, clocks, unit_s)


def take(store: Store, clocks: IntArray, unit_s: FloatArray, order: Schedule = SCHEDULE) -> None:
    window = iteration(store, unit_s[np.newaxis])
    store.learn(Clocked(order, clocks[np.newaxis]), window, [0])


def seconds(conditions: Conditions, kind, mhz: float) -> float:
    at_max_s = FORWARD_S * (BACKWARD_RATIO if kind is WHOLE[1] else 1.0)
    return conditions.unit_time_s(PRESET, kind, mhz, at_max_s)


def assert_knows(store: Store, conditions: Conditions) -> None:
    for kind, times_s in zip(WHOLE, store.time_s, strict=True):
        true_s = [seconds(conditions, kind, mhz) for mhz in store.clocks_mhz]
        assert times_s == pytest.approx(true_s, rel=0.01)


def test_two_clocks_tell_a_limit_that_comes_and_goes():
    store = known()
    for conditions in (Conditions(limit_mhz=0.85 * TOP_MHZ), Conditions()):
        learn(store, 990, conditions)
        assert_knows(store, conditions)


def test_clocks_that_were_measured_once_stay_in_the_profile():
    store = known()
    lowest_mhz = min(store.profile(careful=True).clocks_mhz(0))
    learn(store, 990, Conditions(stuck=True, slower=dict.fromkeys(WHOLE, 1.3)))
    learn(store, 1110, Conditions(limit_mhz=0.85 * TOP_MHZ))
    assert min(store.profile(careful=True).clocks_mhz(0)) == lowest_mhz


def test_changes_while_counters_are_silent_leave_what_they_said_before():
    store = known()
    before = store.profile(careful=False)
    for _ in range(1000):
        store.forget(np.array([False]))
    for kind, rows in store.profile(careful=False).rows[0].items():
        for row, was in zip(rows, before.rows[0][kind], strict=True):
            assert row.energy_j == pytest.approx(was.energy_j, rel=0.01)


def test_a_window_fits_the_times_of_each_kind_once(monkeypatch):
    """All ranks wait meanwhile, and with many stages and chunks there are hundreds of kinds."""
    store, fits, fit = known(), [], Times.fit
    monkeypatch.setattr(Times, "fit", lambda times: fits.append(times) or fit(times))
    learn(store, 990, Conditions())
    assert len(fits) == len({id(times) for times in fits}) == len(store.kinds)


def test_with_one_clock_no_unit_waits_for_another():
    """Or what only runs as an iteration begins, as one of DualPipeV's backwards, stays unknown."""
    order = builders.one_f_one_b(1, 1)
    store = Store(order, [TOP_MHZ], Sidecar())
    window = iteration(store, np.array([[1e-3, 2e-3]]))
    store.learn(store.at_top(order), window, [0], fresh=True)
    assert store.time_s[:, 0] == pytest.approx([1e-3, 2e-3])


def known_parts() -> Store:
    """Of one stage whose backwards were measured whole and in parts, that take half as long."""
    store = Store(half_split(SCHEDULE), [TOP_MHZ, 990], Sidecar())
    measured = half_split(SCHEDULE)
    for clock in (TOP_MHZ, 990):
        ran(store, measured, clock)
    return store


def ran(store: Store, order: Schedule, clock: int, longer: float = 1.0) -> None:
    """An iteration at a clock, in which backwards, whole or in parts, took so much longer."""
    one_s = FORWARD_S * TOP_MHZ / clock
    by_kind = {Kind.FORWARD: one_s, Kind.BACKWARD: 2 * longer * one_s, Kind.NOTHING: 0.0}
    by_kind |= dict.fromkeys(SPLIT[1:], longer * one_s)
    unit_s = np.array([by_kind[tuple(Kind)[place]] for place in order.priced_kinds[0]])
    take(store, np.full(len(unit_s), clock), unit_s, order)


def backwards(store: Store) -> list[float]:
    """Return the times of a whole one and both parts, in forwards, at both clocks."""
    forward, *others = store.time_s[:, -1]
    assert store.time_s[:, 0] == pytest.approx(store.time_s[:, -1] * TOP_MHZ / 990, rel=0.01)
    return [other / forward for other in others]


def test_what_ran_by_itself_just_before_does_not_follow():
    """A GPU that splitting costs more than before: whole backwards are what they were."""
    split, whole = zero_bubble(1, 12), SCHEDULE
    store = known_parts()
    for order in (split, whole):
        ran(store, order, TOP_MHZ)
    ran(store, split, TOP_MHZ, 1.2)
    assert backwards(store) == pytest.approx([2, 1.2, 1.2], rel=0.01)
    ran(store, whole, TOP_MHZ)
    assert backwards(store) == pytest.approx([2, 1.2, 1.2], rel=0.01)


def test_until_parts_were_seen_profiles_have_whole_backwards():
    store = Store(half_split(SCHEDULE), [TOP_MHZ, 990], Sidecar())
    for place in range(len(store.kinds) + 1):
        store.powers.look(0, place if place < len(store.kinds) else -1, TOP_MHZ, 300.0)
    ran(store, SCHEDULE, TOP_MHZ)
    assert store.profile(careful=True).kinds == WHOLE
    ran(store, half_split(SCHEDULE), TOP_MHZ)
    assert {*SPLIT, *WHOLE} <= {*store.profile(careful=True).kinds}


def test_how_late_changes_are_is_told_by_units_that_are_longer():
    kinds = [unit.kind for unit in SCHEDULE.stages[0]]
    clocks = np.full(len(kinds), TOP_MHZ)
    clocks[8:16] = 990  # both changes are before a forward
    late_s = 0.02
    times_s, left_s, old = [], 0.0, TOP_MHZ
    for kind, before, clock in zip(kinds, [TOP_MHZ, *clocks], clocks, strict=False):
        if clock != before:
            left_s, old = late_s, before
        at_old_s = min(left_s, seconds(Conditions(), kind, old))
        rest = 1 - at_old_s / seconds(Conditions(), kind, old)
        times_s.append(at_old_s + rest * seconds(Conditions(), kind, clock))
        left_s -= at_old_s
    store = known()
    store.lateness.change_s = None  # the profile knows none
    take(store, clocks, np.array(times_s))
    assert store.lateness.change_s == pytest.approx(late_s, rel=0.02)


def test_units_that_run_as_one_tell_nothing_of_late_changes():
    """The first of each pair takes no time of its own."""
    order = builders.interleaved(2, 8, 2, 2, combined=True)
    store = Store(order, range(600, TOP_MHZ + 1, 15), Sidecar())
    clocks = np.full((2, order.units_per_stage), TOP_MHZ)
    for low_mhz in (TOP_MHZ, 990):
        clocks[:, 10:20] = low_mhz
        clocks = order.pair_clocks(clocks)
        unit_s = np.where(order.combined, 0.0, FORWARD_S * TOP_MHZ / clocks)
        store.learn(Clocked(order, clocks), iteration(store, unit_s), [0])
    assert store.lateness.change_s is None or np.isfinite(store.lateness.change_s)
    assert np.isfinite(store.time_s).all()


@pytest.mark.parametrize(
    ("end_s", "gap_s", "tails_s"),
    [
        # What the slowest takes until the next iteration is the tail, and no wait for it.
        ([[1.0], [0.9], [0.7]], [[0.25], [0.35], [0.55]], [0.25] * 3),
        ([[1.0], [0.9], [0.5]], [[0.25], [0.35], [0.1]], [0.25, 0.25, 0.1]),  # it does not wait
        (
            [[1.0, 1.0, 3.0, 1.0, 1.0], [0.8, 0.8, 0.8, 0.8, 0.8]],
            [[0.2, 0.21, 0.2, 0.19, 5.0], [0.4, 0.41, 2.4, 0.39, 5.2]],
            [0.2, 0.2],  # the medians: odd iterations do not move them
        ),
        ([[1.0], [0.9]], [[-1e-12], [0.1 - 1e-12]], [0.0, 0.0]),  # rounding
    ],
)
def test_a_tail_is_what_a_stage_takes_behind_its_last_unit(end_s, gap_s, tails_s):
    found_s = tail_times_s(end_s, gap_s)
    assert found_s == pytest.approx(tails_s, abs=1e-9)
    assert (found_s >= 0).all()
