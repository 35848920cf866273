"""How many iterations fill a window."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from envpipe_megatron.control.window import tail_times_s
from envpipe_megatron.runtime.execution.executor import StageRecord, make_record
from envpipe_megatron.runtime.execution.orders import Stretches, ends_and_gaps_s


def ran(phase: Any, times_s: list[float]) -> int:
    """How many iterations a phase runs, if these last so long, and others as the last."""
    times_s = [*times_s]
    count = 0
    try:
        next(phase)
        while True:
            count += 1
            time_s = times_s.pop(0) if len(times_s) > 1 else times_s[0]
            phase.send(SimpleNamespace(iteration_time_s=time_s, whole=True))
    except StopIteration:
        return count


@pytest.mark.parametrize(
    ("settled_s", "others_s", "count"),
    [
        ([0.3, 0.25], 0.5, 4),  # the longest of this rank's, the shortest of all ranks
        ([0.5, 0.0], 0.5, 2),  # the last one had no units
        ([0.0, 0.0], 0.5, 1000),
        ([5.0, 5.0], 5.0, 2),
    ],
)
def test_a_step_without_units_does_not_set_how_long_a_window_is(settled_s, others_s, count):
    def by_stage(own: Any, reduce: Any) -> list[Any]:
        return [own, others_s if isinstance(own, float) else own]

    collectives: Any = SimpleNamespace(by_stage=by_stage)
    stretches = Stretches(2, 1.0, collectives)
    order: Any = "order"
    assert ran(stretches.settle(order), settled_s) == 2
    assert ran(stretches.measure(order, 2), [0.5]) == count


def records(ends_s: list[float], begins_s: list[float]) -> list[StageRecord]:
    return [
        make_record([0.0, 0.5 * end], [0.4 * end, end], begin, end, end)
        for end, begin in zip(ends_s, begins_s, strict=True)
    ]


def test_gaps_reach_from_the_last_unit_to_the_next_begin():
    ends_s, gaps_s = ends_and_gaps_s(records([1.0, 1.5, 1.2], [10.0, 11.3, 13.0]))
    assert ends_s == pytest.approx([1.0, 1.5])
    assert gaps_s == pytest.approx([0.3, 0.2])


def test_of_one_iteration_nothing_is_known():
    ends_s, gaps_s = ends_and_gaps_s(records([1.0], [10.0]))
    assert ends_s.size == gaps_s.size == 0


def test_the_wait_for_the_slowest_stage_is_no_tail():
    """Stages that synchronise: what the slowest takes until the next iteration is the tail."""
    end_s = np.array([[1.0], [0.9], [0.7]])
    period_s = 1.25
    tails_s = tail_times_s(end_s, period_s - end_s)
    assert tails_s == pytest.approx([0.25] * 3)
    assert (end_s[:, 0] + tails_s).max() == pytest.approx(period_s)


def test_a_stage_that_does_not_wait_has_its_gap_as_tail():
    tails_s = tail_times_s([[1.0], [0.9], [0.5]], [[0.25], [0.35], [0.1]])
    assert tails_s == pytest.approx([0.25, 0.25, 0.1])


def test_an_odd_iteration_does_not_move_the_median():
    end_s = np.array([[1.0, 1.0, 3.0, 1.0, 1.0], [0.8, 0.8, 0.8, 0.8, 0.8]])
    gap_s = np.array([[0.2, 0.21, 0.2, 0.19, 5.0], [0.4, 0.41, 2.4, 0.39, 5.2]])
    assert tail_times_s(end_s, gap_s) == pytest.approx([0.2, 0.2])


def test_rounding_makes_no_tail_below_zero():
    tails_s = tail_times_s([[1.0], [0.9]], [[-1e-12], [0.1 - 1e-12]])
    assert tails_s == pytest.approx([0.0, 0.0], abs=1e-9)
    assert (tails_s >= 0).all()
