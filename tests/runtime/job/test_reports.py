"""What a rank reports of a window: how it spent its time, at which clocks."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from envpipe_megatron.core.kinds import WHOLE
from envpipe_megatron.core.orders import builders
from envpipe_megatron.formats.energy import Phase
from envpipe_megatron.runtime.energy.meter import MeterError
from envpipe_megatron.runtime.execution.executor import StageRecord
from envpipe_megatron.runtime.job.online import make_report
from envpipe_megatron.tuning.commands import Command
from host_executor import make_record

NODES = np.array([1000.0, 1200.0, 1400.0])
FORWARD, BACKWARD, WAITING, TAIL = 0, 3, 6, 9  # the first column of each


def meter() -> Any:
    """It says 100 W, but ten times that from 2 s to 4 s."""
    times_s = np.arange(0.0, 20.0, 0.1)

    def window(begin_s: float, end_s: float) -> Any:
        if begin_s < 0:
            raise MeterError("Of a test")
        more_s = max(min(end_s, 4.0) - max(begin_s, 2.0), 0.0)
        return SimpleNamespace(energy_j=100 * (end_s - begin_s + 9 * more_s), uncertainty_j=3.0)

    return SimpleNamespace(
        refreshes=lambda begin_s: (times_s, 100 * times_s),
        window=window,
        last_refresh_s=20.0,
    )


def record(begin_s: float) -> StageRecord:
    """A forward, a wait of 0.2 s, a backward; a second goes by to the next begin."""
    return make_record([0.0, 0.5], [0.3, 0.9], begin_s, 0.9)


def report(
    records: list[StageRecord], late_s: float = 0.0, tail_s: float = 0.0, parked: Any = None
) -> Any:
    job: Any = SimpleNamespace(
        stage=0, meter=meter(), clock=SimpleNamespace(problems=tuple, error=None)
    )
    order: Any = SimpleNamespace(
        schedule=builders.one_f_one_b(1, 1),
        frequency_mhz=np.array([[1400, 1000]]),
        parked=lambda stage: parked or {},
    )
    command = Command(Phase.STEADY, len(records), late_s=late_s, tail_s=(tail_s,), metered=True)
    return make_report(job, records, order, command, WHOLE, NODES)


def test_times_are_medians_and_steps_those_that_follow_each_other():
    made = report([record(0.0), record(1.0), record(2.5), record(9.0)])
    np.testing.assert_allclose(made.unit_s, [[0.3, 0.4]])
    np.testing.assert_allclose(made.ends_s, [[0.9] * 4])
    np.testing.assert_allclose(made.steps_s, [[1.0, 1.5, np.nan, np.nan]])  # a pause is no step


def test_what_lies_between_iterations_that_do_not_follow_each_other_is_no_tail():
    """A pause, or an iteration of another batch, however short."""
    first, paused, *others = (
        replace(record(begin_s), number=number)
        for begin_s, number in ((0.0, 4), (1.0, 5), (2.5, 6), (4.0, 8), (5.0, 9))
    )
    made = report([first, replace(paused, followed=False), *others])
    np.testing.assert_allclose(made.steps_s, [[1.0, np.nan, np.nan, 1.0, np.nan]])


def test_what_a_meter_says_behind_a_pause_counts_too():
    """Jobs that evaluate every few steps would else have no powers."""
    before = [record(0.0), replace(record(1.0), followed=False)]
    behind = [replace(record(5.0), whole=False), record(6.0), record(7.0)]
    made, *parts = (report(records).meter for records in (before + behind, before, behind[1:]))
    assert made[-1, -1] > 30, "readings"
    np.testing.assert_allclose(made, sum(parts))


def test_a_stage_that_ends_long_before_others_has_steps():
    made = report([record(begin_s) for begin_s in (0.0, 4.0, 8.0)])
    np.testing.assert_allclose(made.steps_s, [[4.0, 4.0, np.nan]])


def test_power_is_that_of_steps_that_were_not_held_up():
    records = [record(begin_s) for begin_s in (0.0, 1.0, 2.0, 3.9, 5.0, 6.0)]
    made = report(records)
    # From 0 s to 2 s, and from 3.9 s to 6 s.
    power_w, error_w = (410 + 90) / 4.1, math.hypot(3.0, 3.0) / 4.1
    np.testing.assert_allclose(made.power_w, [[power_w * 1.0, error_w]])


def test_where_no_step_follows_another_power_is_that_of_units():
    records = [replace(record(begin_s), followed=False) for begin_s in (0.0, 1.0)]
    made = report(records)
    np.testing.assert_allclose(made.power_w, [[100.0, math.hypot(3.0, 3.0) / 1.8]])


def test_the_power_that_a_meter_does_not_know_is_not_known():
    assert np.isnan(report([record(-1.0), record(0.0)]).power_w).all()


@pytest.mark.parametrize("late_s", [0.0, 0.25])
def test_what_a_meter_says_goes_to_the_clock_that_ran(late_s):
    made = report([record(0.0), record(1.0)], late_s, tail_s=0.1)
    # Two equal iterations at one power: what was spent in each way adds up to all of the time.
    weighted = made.meter[:-2, -2] / 100.0
    assert made.metered
    assert weighted.sum() == pytest.approx(made.meter[:-2, :-2].sum())
    spent = np.flatnonzero(weighted > 1e-9).tolist()
    at_top, at_low = 2, 0
    if late_s:  # the wait, and a part of the backward, still at the forward's clock
        assert WAITING + at_top in spent
        assert BACKWARD + at_top in spent
    else:
        assert BACKWARD + at_top not in spent
        assert WAITING + at_low in spent
    assert {FORWARD + at_top, BACKWARD + at_low, TAIL} <= set(spent)


@pytest.mark.parametrize(
    ("late_s", "waited_s"), [(0.0, [0.1, 0.1, 0.0]), (0.05, [0.05, 0.1, 0.05])]
)
def test_a_parked_wait_goes_to_the_clock_that_it_was_spent_at(late_s, waited_s):
    parked = {1: (1200, 0.1)}
    made = report([record(0.0), record(1.0)], late_s, tail_s=0.1, parked=parked)
    # Each refresh is 0.1 s long, and power is the same in all of them: two iterations add up.
    spent_s = made.meter[:-2, -2] / 100.0 / 0.1
    np.testing.assert_allclose(spent_s[WAITING:TAIL] / 2, waited_s, atol=1e-9)
