"""What a stage does behind its last unit."""

from __future__ import annotations

import pytest

from envpipe_megatron.tuning.commands import tail_times_s


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
