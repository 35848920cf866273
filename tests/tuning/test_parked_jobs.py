"""Parking in jobs: it saves energy where waiting takes less at lower clocks, and costs no time."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from on_request import on_request
from window_reports import iteration

from emulated_pipelines import Faults
from envpipe_megatron.core.conditions import known_conditions
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.plan import Plan, max_frequencies
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.core.sidecar import Sidecar
from envpipe_megatron.core.timeline import Timeline
from envpipe_megatron.gpu.presets import load_preset
from envpipe_megatron.runtime.job.options import JobOptions
from envpipe_megatron.tuning import planner
from envpipe_megatron.tuning.commands import Clocked, Parking
from envpipe_megatron.tuning.measured.store import Store
from envpipe_megatron.tuning.parking import park, parked
from job_runs import Ran, exact_profile, run_job, slower

PRESET, MICROBATCHES = load_preset("a100-sxm"), 12
TOP_MHZ = PRESET.max_frequency_mhz
#: The last stage takes so long that others wait even at the clocks of their energy valleys.
FORWARD_S = (0.03, 0.03, 0.12)
#: The loop is steady by then.
STEADY = 40


def run(
    iterations: int = 70,
    *,
    min_dwell_s: float = 0.0,
    own_order: Schedule | None = None,
    forward_s: Sequence[float] = FORWARD_S,
    replicas: int = 1,
    faults: Faults = lambda iteration: {},
    **emulated: float,
) -> Ran:
    request = JobOptions(
        num_microbatches=MICROBATCHES,
        scheduling="auto" if own_order is None else "1f1b",
        min_dwell_ms=1000.0 * min_dwell_s,
        baseline_steps=3,
    )
    return run_job(
        request,
        PRESET,
        forward_s,
        iterations=iterations,
        replicas=replicas,
        faults=faults,
        emulated={"wait_follows": 0.6, **emulated},
        own_order=own_order,
    )


@pytest.mark.parametrize(
    "what",
    [
        pytest.param({"scatter": 0.02}, marks=on_request("CONTROL")),
        pytest.param({"replicas": 2, "scatter": 0.01}, marks=on_request("CONTROL")),
        pytest.param(
            {"own_order": builders.one_f_one_b(3, MICROBATCHES)}, marks=on_request("CONTROL")
        ),
        {"min_dwell_s": 0.1},
    ],
    ids=", ".join,
)
def test_parking_saves_energy_and_no_unit_begins_at_the_clock_of_a_wait(monkeypatch, what):
    ran = run(**what)
    assert (ran.state.plan.park_mhz[:, 0] == 0).all()  # the optimizer is in that wait
    assert ran.pipelines.parked[True] > 20
    assert not ran.pipelines.parked[False]
    monkeypatch.setattr(planner, "parked", lambda plan, *known: plan)
    plain = run(**what)
    assert not plain.pipelines.parked
    assert ran.saved(STEADY, 70) > plain.saved(STEADY, 70) + 1e-3
    assert ran.slower(STEADY, 70) < 0.005


@on_request("CONTROL")
def test_waits_that_become_much_shorter_are_parked_in_for_less_long():
    """Sequences shrink: until that is seen, units find the clock of their wait."""
    shrunk = dict.fromkeys([(0, stage) for stage in range(3)], slower(0.6))
    ran, seen = (run(last, faults=lambda at: shrunk if at >= 50 else {}) for last in (90, 65))
    assert ran.state.plan.park_mhz is not None
    assert 0 < seen.pipelines.parked[False] == ran.pipelines.parked[False]
    assert ran.slower(STEADY, 50) < 0.005
    assert ran.slower(65, 90) < 0.005


# --- what is known of waiting ---------------------------------------------------------------------


def test_a_plan_parks_where_that_is_worth_it_and_changes_of_the_clock_were_seen():
    exact = exact_profile(PRESET, FORWARD_S, {})
    curve = {clock: 40.0 + 44.0 * clock / TOP_MHZ for clock in exact.clocks_mhz(0)}
    exact = replace(exact, sidecar=replace(exact.sidecar, wait_power_w=(curve,) * 3))
    order = builders.one_f_one_b(3, MICROBATCHES)
    at_top = max_frequencies(order, exact)
    plan = Plan("baseline", order, at_top, exact, known_conditions(exact))
    store = Store(order, exact.clocks_mhz(0), Sidecar())
    store.take_profile(exact)
    assert parked(plan, store, 0.0, 5e-4).park_mhz is not None
    assert parked(plan, store, 0.0, 0.1).park_mhz is None  # less than it must be worth
    longest_s = float(plan.timeline.wait_s[:, 1:].max())
    dwell_s = longest_s - 2 * PRESET.frequency_change_s  # leaves no room for the margin
    lowest = np.array(list(map(min, plan.conditions.wait_power_w)))
    assert park(plan, dwell_s, lowest, 0.0).park_mhz is not None
    assert parked(plan, store, dwell_s, 0.0).park_mhz is None
    store.lateness.change_s = None
    assert parked(plan, store, 0.0, 5e-4).park_mhz is None


# --- what is learned of units after a parked wait -------------------------------------------------


@pytest.mark.parametrize("early", [True, False])
def test_a_unit_counts_whose_clock_was_asked_for_long_before_it_began(early):
    """The first backward of stage 0 is the only unit at its clock, and takes longer than known."""
    order, clock_mhz, change_s = builders.one_f_one_b(2, 4), 990, 0.01
    exact = exact_profile(PRESET, (0.03, 0.06), {})
    store = Store(order, exact.clocks_mhz(0), Sidecar())
    store.take_profile(exact)
    clocks = np.full((2, order.units_per_stage), TOP_MHZ)
    first = int(order.is_backward[0].argmax())
    clocks[0, first] = clock_mhz
    known_s = store.durations_s(order, clocks)
    unit_s = known_s.copy()
    unit_s[0, first] *= 1.2
    wait_s = float(Timeline(order, unit_s).wait_s[0, first])
    assert wait_s > 0.1
    own_after_s = np.zeros(clocks.shape)
    own_after_s[0, first] = wait_s - (3 * change_s if early else change_s)
    parking = Parking(np.where(clocks == clock_mhz, 705, 0), own_after_s)
    store.learn(Clocked(order, clocks, parking), iteration(store, unit_s), [0])
    learned_s = store.durations_s(order, clocks)[0, first]
    assert learned_s == pytest.approx((unit_s if early else known_s)[0, first], rel=1e-3)
