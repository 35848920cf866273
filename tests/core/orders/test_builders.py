"""Orders against those written by hand, and EnvPipe's formula with each of its caps."""

import pytest
from core_cases import parse_stages

from envpipe_megatron.core.kinds import ScheduleError
from envpipe_megatron.core.orders import builders
from envpipe_megatron.policies.problem import order_limits


@pytest.mark.parametrize(
    ("built", "stages"),
    [
        (
            builders.one_f_one_b(4, 8),
            [
                "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7",
                "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7",
                "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7",
                "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7",
            ],
        ),
        (builders.one_f_one_b(4, 2), [*["F0 F1 B0 B1"] * 3, "F0 B0 F1 B1"]),
        (builders.gpipe(2, 3), ["F0 F1 F2 B0 B1 B2"] * 2),  # backwards in 1F1B's order
        (
            # Megatron's own example: PP2 N3 M5 with VP2. Warm-ups are 5 and 3. Other jobs' orders
            # are held against its table in integrations/test_megatron_orders.
            builders.interleaved(2, 5, 2, 3),
            [
                "F0.0 F1.0 F2.0 F0.1 F1.1 F2.1 B0.1 F3.0 B1.1 F4.0 B2.1 F3.1 B0.0 F4.1 B1.0 B2.0 "
                "B3.1 B4.1 B3.0 B4.0",
                "F0.0 F1.0 F2.0 F0.1 B0.1 F1.1 B1.1 F2.1 B2.1 F3.0 B0.0 F4.0 B1.0 F3.1 B2.0 F4.1 "
                "B3.1 B4.1 B3.0 B4.0",
            ],
        ),
        (
            builders.envpipe(4, 8, [2, 2, 1, 0]),
            [
                "F0 F1 F2 F3 F4 F5 B0 F6 B1 F7 B2 B3 B4 B5 B6 B7",
                "F0 F1 F2 F3 F4 B0 F5 B1 F6 B2 F7 B3 B4 B5 B6 B7",
                "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7",
                "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7",
            ],
        ),
    ],
)
def test_orders_by_hand(built, stages):
    assert built.stages == parse_stages(*stages)


def test_interleaved_with_all_microbatches_in_the_warm_up():
    forwards = "F0.0 F1.0 F2.0 F0.1 F1.1 F2.1"
    backwards = "B0.1 B1.1 B2.1 B0.0 B1.0 B2.0"
    assert builders.interleaved(3, 3, 2).stages[0] == parse_stages(f"{forwards} {backwards}")[0]
    # Groups larger than the batch are the batch, and one group runs on any pipeline.
    assert builders.interleaved(3, 3, 2, 5) == builders.interleaved(3, 3, 2, 3)
    assert builders.interleaved(4, 2, 2).peak_in_flight == (4, 4, 4, 3)


@pytest.mark.parametrize(
    ("build", "value"),
    [
        (lambda: builders.one_f_one_b(0, 4), "0"),
        (lambda: builders.interleaved(2, 4, 1), "1"),
        (lambda: builders.interleaved(4, 8, 2, 0), "0"),
        (lambda: builders.interleaved(4, 5, 3), "5"),
    ],
)
def test_impossible_jobs_are_refused_with_the_value(build, value):
    with pytest.raises(ScheduleError, match=rf"\(got {value}\)"):
        build()


#: Wanted of each stage: floor(6 / 1.25, 4 / 1.25, 2 / 1.25) = 4 3 1 0.
TIMES = [2.0] * 4, [1.25] * 4


def extra(backward, forward, microbatches, more=None, most=None):
    own = builders.one_f_one_b(len(backward), microbatches)
    if more is not None:
        most = [peak + more for peak in own.peak_in_flight]
    caps = order_limits(own, most).most
    return builders.envpipe_extra_forwards(backward, forward, caps)


@pytest.mark.parametrize(
    ("times", "microbatches", "limits", "expected"),
    [
        (TIMES, 96, {}, [4, 3, 1, 0]),
        # Stage 0 has 6 - 4 = 2 to spare and is at its cap, so stage 1 may exceed it by one.
        (TIMES, 6, {}, [2, 3, 1, 0]),
        (TIMES, 3, {}, [0, 0, 1, 0]),
        (TIMES, 96, {"more": 2}, [2, 2, 1, 0]),
        (TIMES, 96, {"more": 0}, [0, 0, 0, 0]),
        (TIMES, 96, {"most": [6, 6, 2, 1]}, [2, 3, 0, 0]),  # 1F1B holds 4, 3, 2, 1
        (([1.0, 4, 1, 1], [1.0] * 4), 96, {"most": [5, 99, 99, 99]}, [1, 2, 1, 0]),
        # 0.1 * 3 / 0.3 is 1.0000000000000002 and 0.7 * 3 / 2.1 is 0.9999999999999999.
        (([0.7] * 4, [2.1] * 4), 96, {}, [1, 0, 0, 0]),
    ],
)
def test_extra_forwards_fill_the_wait_for_the_first_gradient(times, microbatches, limits, expected):
    """floor(backward at maximum x stages behind / forward at the optimum), then the caps."""
    assert extra(*times, microbatches, **limits) == expected
