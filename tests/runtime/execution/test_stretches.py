"""How many iterations fill a window."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from envpipe_megatron.runtime.execution.orders import Stretches
from envpipe_megatron.tuning.commands import tail_times_s


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
