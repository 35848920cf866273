"""The sweep: what it looks at, what that costs, and how well its profile tells what units cost."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from window_reports import report_of

from emulated_job import EmulatedJob
from emulated_pipelines import Conditions, Faults, Pipelines
from envpipe_megatron.core.kinds import SPLIT, WHOLE, Kind
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.orders.builders import zero_bubble
from envpipe_megatron.core.profile import Profile
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.core.sidecar import Sidecar
from envpipe_megatron.gpu.presets import load_preset, override_for, sweep_range
from envpipe_megatron.runtime.job.options import JobOptions
from envpipe_megatron.tuning.commands import Command, Report, Window
from envpipe_megatron.tuning.measured.powers import meter_sums
from envpipe_megatron.tuning.measured.store import Store
from envpipe_megatron.tuning.sweep import (
    measured_profile,
    sweep_probe,
)
from job_runs import Ran, exact_profile, run_job

STAGES, MICROBATCHES = 3, 12
FORWARD_S = (0.03, 0.03, 0.0375)
CONFIG = JobOptions(num_microbatches=MICROBATCHES, sweep=True, baseline_steps=3)
PRESET = load_preset("a100-sxm")
TOP_MHZ = PRESET.max_frequency_mhz
CLOCKS_MHZ = sweep_range(PRESET.supported_frequencies_mhz, override_for(PRESET.gpu))


def swept(preset: str, faults: Faults = lambda iteration: {}, **what: Any) -> EmulatedJob:
    """A job that has just ended its profile, or has no plan after so many iterations."""
    pipelines = Pipelines(load_preset(preset), FORWARD_S, faults=faults, **what)
    with EmulatedJob(pipelines, CONFIG) as job:
        for _ in range(150):
            job.run(1)
            assert job.planner is not None
            if job.planner.state.profile is not None:
                break
    return job


@pytest.mark.parametrize(
    ("preset", "scatter", "within"), [("a100-sxm", 0, 1.0), ("a40", 0, 1.0), ("a40", 0.02, 1.3)]
)
def test_a_profile_tells_what_units_cost_and_how_sure_that_is(preset, scatter, within):
    job = swept(preset, scatter=scatter, wait_follows=0.3)
    assert job.planner is not None
    profile = job.planner.state.profile
    exact = exact_profile(load_preset(preset), FORWARD_S, {})
    sure = []
    for stage in range(STAGES):
        for clock in profile.clocks_mhz(stage):
            found, true = (
                [of.row(stage, kind, clock) for kind in WHOLE] for of in (profile, exact)
            )
            for one, other in zip(found, true, strict=True):
                assert one.time_s == pytest.approx(other.time_s, rel=0.004 + scatter / 3)
                assert one.energy_j == pytest.approx(other.energy_j, rel=0.03 * within)
                sure.append(abs(one.energy_j - other.energy_j) < 2 * one.energy_uncertainty_j)
                assert one.energy_uncertainty_j > 0.005 * one.energy_j
            pair_j, true_j = (sum(row.energy_j for row in rows) for rows in (found, true))
            assert pair_j == pytest.approx(true_j, rel=0.02 * within)
    assert np.mean(sure) > 0.95
    facts, gpu = profile.sidecar, load_preset(preset)
    assert facts.frequency_change_s == pytest.approx(gpu.frequency_change_s, rel=0.2)
    for curve in facts.wait_power_w[:-1]:  # the last stage hardly waits
        low, high = min(profile.clocks_mhz(0)), max(curve)
        assert curve[high] == pytest.approx(gpu.wait_power_w, rel=0.05)
        below = 1 - 0.3 * (1 - low / high)
        assert np.interp(low, [*curve], [*curve.values()]) == pytest.approx(
            below * gpu.wait_power_w, rel=0.1
        )


def test_a_sweep_costs_little_and_its_plan_saves_what_the_best_would():
    ran: Ran = run_job(CONFIG, PRESET, FORWARD_S, iterations=120)
    assert ran.lost(0, ran.profiled) < 7
    assert ran.slower(ran.profiled, 120) < 2e-3


def test_a_meter_that_fails_in_the_middle_ends_profiling_on_all_ranks():
    silent = {(0, 1): Conditions(silent=True)}
    job = swept("a100-sxm", lambda iteration: silent if iteration > 20 else {})
    assert job.planner is not None
    (note,) = job.planner.state.notes
    assert "Stage 1: The energy counter failed while profiling" in note
    assert job.pipelines.iterations[-1].phase == "steady"


def known(order: Schedule) -> Store:
    """Of a job without errors."""
    store = Store(order, CLOCKS_MHZ, Sidecar())
    store.take_profile(exact_profile(PRESET, FORWARD_S, {}))
    return store


def test_clocks_are_left_where_all_stages_are_past_their_valley(monkeypatch):
    order = builders.one_f_one_b(STAGES, MICROBATCHES)
    store = known(order)
    monkeypatch.setattr(store, "valley_mhz", lambda *, waiting: 700.0 if waiting else 1000.0)
    looks = list(sweep_probe(store, JobOptions(profile_steps=3).steps_at_clock))
    alike = [look for look in looks if np.ptp(look.clocked.frequency_mhz) == 0]
    clocks = [int(look.clocked.frequency_mhz[0, 0]) for look in alike]
    assert looks[: len(clocks)] == alike
    assert clocks[0] == TOP_MHZ
    assert clocks == sorted(clocks, reverse=True)
    assert max(np.diff(clocks)) < 0  # each once
    assert min(np.diff(clocks)) > -0.13 * TOP_MHZ
    assert clocks[-1] < 1000 <= clocks[-2]
    backward = order.is_backward
    apart = looks[len(clocks) : 2 * len(clocks) - 1]
    for look, clock in zip(apart, clocks[1:], strict=True):
        assert set(look.clocked.frequency_mhz[backward].tolist()) == {TOP_MHZ}
        assert set(look.clocked.frequency_mhz[~backward].tolist()) == {clock}
    # What is lower is seen by units that have the time for it.
    free = looks[2 * len(clocks) - 1 :]
    own_s = store.iteration_s(order, looks[0].clocked.frequency_mhz)
    for look in free:
        assert look.clocked.frequency_mhz.min() < clocks[-1]
        assert store.iteration_s(order, look.clocked.frequency_mhz) < 1.001 * own_s
    *lower, lowest = (int(look.clocked.frequency_mhz.min()) for look in free)
    assert store.powers.nodes_mhz[0] <= lowest < 700 <= min(lower)


def test_a_clock_settles_and_short_iterations_are_repeated_until_they_fill_a_window():
    order = builders.one_f_one_b(STAGES, MICROBATCHES)
    for options in (JobOptions(profile_steps=3), JobOptions(profile_steps=2, window_s=20.0)):
        store = known(order)
        for look in sweep_probe(store, options.steps_at_clock):
            iteration_s = store.iteration_s(order, look.clocked.frequency_mhz)
            assert look.settle == 1
            assert look.iterations >= options.profile_steps
            assert look.iterations * iteration_s >= options.window_s
            assert (look.iterations - 1) * iteration_s < max(
                options.window_s, options.profile_steps * iteration_s
            )


#: Of one unit of the first chunk, at the highest clock.
TIMES_S = {
    Kind.FORWARD: 0.03,
    Kind.BACKWARD: 0.06,
    Kind.INPUT_GRADIENT: 0.035,
    Kind.WEIGHT_GRADIENT: 0.03,
    Kind.COMBINED: 0.08,
}


@dataclass
class Hand:
    """A job of any kinds of units, whose windows are made by hand; no unit waits.

    Args:
        order: the framework's.
        slowness: of each chunk, what its units take over those above.
        spoilt: what becomes of a report of the last stage, from the third window on.
    """

    order: Schedule
    slowness: tuple[float, ...] = (1.0,)
    spoilt: Callable[[Report], Report] = lambda report: report

    def profile(self) -> Profile:
        store = Store(self.order, CLOCKS_MHZ, Sidecar())
        clocks = np.full((self.order.num_stages, self.order.units_per_stage), TOP_MHZ)
        steps = JobOptions(profile_steps=2).steps_at_clock
        run = measured_profile(store, steps, self.window(store, clocks, None))
        windows = 1
        try:
            command = next(run)
            while True:
                if command.orders:
                    clocks = command.orders[0].frequency_mhz
                window = self.window(store, clocks, command)
                if windows > 1:
                    *others, last = window.stages
                    window = Window((*others, self.spoilt(last)))
                command, windows = run.send(window), windows + 1
        except StopIteration as ended:
            return ended.value

    def window(self, store: Store, clocks: Any, command: Command | None) -> Window:
        count = 2 if command is None else command.iterations
        keys = store.keys(self.order)
        reports = []
        for stage, own in enumerate(keys):
            units = list(zip(own.tolist(), clocks[stage].tolist(), strict=True))
            unit_s = np.array([self.time_s(store, key, clock) for key, clock in units])
            ends_s = np.cumsum(np.tile(unit_s, count))
            places = np.where(own >= 0, own % len(store.kinds), 0)
            spent = np.stack([ends_s, np.tile(places, count), np.tile(clocks[stage], count)])
            powers_w = np.tile([self.power_w(store, key, clock) for key, clock in units], count)
            bounds_s = np.concatenate([[0.0], ends_s])
            energy_j = np.concatenate([[0.0], np.cumsum(np.diff(bounds_s) * powers_w)])
            refreshes_s = np.arange(0.05, ends_s[-1], 0.1)
            refreshed_j = np.interp(refreshes_s, bounds_s, energy_j)
            meter = meter_sums(
                0.0,
                spent,
                refreshes_s,
                refreshed_j,
                store.powers.nodes_mhz,
                len(store.kinds),
            )
            step_s = np.full((1, count), unit_s.sum())
            reports.append(report_of(unit_s[np.newaxis], step_s, step_s, meter))
        return Window(tuple(reports))

    def time_s(self, store: Store, key: int, clock: int) -> float:
        if key < 0:
            return 0.0
        part, place = divmod(key, len(store.kinds))
        slow = self.slowness[part % len(self.slowness)]
        return slow * true_s(store.kinds[place], clock)

    @staticmethod
    def power_w(store: Store, key: int, clock: int) -> float:
        return true_w(store.kinds[key % len(store.kinds)], clock)


def true_s(kind: Kind, clock: int) -> float:
    return PRESET.unit_time_s("forward", clock, TIMES_S[kind])


def true_w(kind: Kind, clock: int) -> float:
    """Both parts of a backward draw less and more than a whole one."""
    share = {Kind.INPUT_GRADIENT: 1.05, Kind.WEIGHT_GRADIENT: 0.9}.get(kind, 1.0)
    return share * PRESET.busy_power_w("forward" if kind is Kind.FORWARD else "backward", clock)


def check(profile: Profile, part: int, kind: Kind, slow: float) -> None:
    for row in profile.rows[part][kind]:
        time_s = slow * true_s(kind, row.frequency_mhz)
        joules = time_s * true_w(kind, row.frequency_mhz)
        assert row.time_s == pytest.approx(time_s, rel=0.01)
        assert row.energy_j == pytest.approx(joules, rel=0.03)


def test_chunks_are_measured_one_by_one_and_draw_the_same_power():
    hand = Hand(builders.interleaved(2, 4, 3), (0.5, 1.7, 0.8))
    profile = hand.profile()
    assert (profile.num_stages, profile.listed_chunks, profile.sidecar.num_chunks) == (2, 3, 3)
    for part in range(6):
        for kind in WHOLE:
            check(profile, part, kind, hand.slowness[part % 3])


def test_parts_of_split_backwards_are_told_apart():
    profile = Hand(zero_bubble(2, 8)).profile()
    for stage in range(2):
        for kind in SPLIT:
            check(profile, stage, kind, 1.0)
        assert {row.frequency_mhz for row in profile.rows[stage][Kind.BACKWARD]}  # both, added


@pytest.mark.parametrize("microbatches", [2, 6])
def test_pairs_have_rows_of_their_own(microbatches):
    order = builders.interleaved(2, microbatches, 2, combined=True)
    hand = Hand(order, (0.5, 1.7))
    profile = hand.profile()
    store = Store(order, CLOCKS_MHZ, Sidecar())
    ran = set(store.keys(order).ravel().tolist())
    for part in range(4):
        slow = hand.slowness[part % 2]
        for place, kind in enumerate(store.kinds):
            if part * len(store.kinds) + place in ran:
                check(profile, part, kind, slow)
            else:  # a chunk in no pair: as if one unit followed the other
                for row in profile.rows[part][kind]:
                    alone_s = sum(true_s(one, row.frequency_mhz) for one in WHOLE)
                    assert row.time_s == pytest.approx(slow * alone_s, rel=0.01)


def test_a_counter_that_missed_two_windows_is_waited_for():
    """After a pause few iterations follow each other, and some counters refresh each second."""
    missed = iter([True, True])
    Hand(
        builders.one_f_one_b(2, 8),
        spoilt=lambda report: (
            replace(report, meter=0 * report.meter) if next(missed, False) else report
        ),
    ).profile()
    assert next(missed, None) is None
