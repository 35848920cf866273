"""What is said of steps that were too slow, and of counters that say nothing."""

from __future__ import annotations

import numpy as np
import pytest

from envpipe_megatron.control.baseline import Harm, Silence
from envpipe_megatron.control.window import MeterSums, Report, Window


def window(steps_s: list[float], metered: tuple[int, ...] = (1,)) -> Window:
    steps = np.array([[*steps_s, np.nan]])
    return Window(
        tuple(
            Report(np.ones((1, 2)), np.ones(steps.shape), steps - 1, steps, MeterSums.none(1), seen)
            for seen in metered
        )
    )


def test_harm_is_added_up():
    harm = Harm()
    harm.add(window([2.0, 2.02, 2.04]), 2.0, "heat")
    told = harm.add(window([2.2, 2.2, 2.2]), 2.0, "a power cap")
    assert "6 steps took 0.66 s longer" in told
    assert "one 10.0 % longer" in told
    assert told.endswith("a power cap")


def test_counters_are_silent_after_a_while_and_may_come_back():
    silence = Silence(2)
    assert silence.add(window([1.0, 1.0], (1, 0))) == []  # a short window sees no refresh
    (news,) = silence.add(window([1.0, 1.0], (1, 0)))
    assert news.startswith("energy counters of stage 1 say nothing")
    assert silence.add(window([1.0, 1.0], (1, 0))) == []
    (news,) = silence.add(window([1.0, 1.0], (1, 1)))
    assert news == "energy counters of stage 1 are back"
    assert silence.add(window([1.0, 1.0], (1, 1))) == []


@pytest.mark.parametrize("seen", [(0, 1), (1, 1)])
def test_counters_that_come_in_time_are_not_silent(seen):
    silence = Silence(2)
    for _ in range(4):
        assert silence.add(window([1.0], (0, 1))) == []
        assert silence.add(window([1.0], (1, 1))) == []
    assert silence.add(window([1.0], seen)) == []
