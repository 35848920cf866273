"""The channel over gloo, between three ranks without a training framework; and its messages."""

import channel_ranks
import pytest
import torch
from on_request import examples

pytestmark = pytest.mark.xdist_group("pipeline")


def test_sends_return_at_once_and_keep_their_order_and_what_is_freed(three_ranks):
    (times_s, _), (_, messages), _ = three_ranks.run(channel_ranks.many_pending, 64)
    # Returned while the receiver stood at a barrier behind them: none waited for it.
    assert len(times_s) == 64
    assert sorted(times_s)[32] < 0.01
    assert messages == list(range(64))


def test_messages_of_several_tensors(three_ranks):
    upstream, downstream, _ = three_ranks.run(channel_ranks.several_tensors)
    for number in range(2):
        assert upstream[number] == [(torch.bfloat16, [-number] * 7, False)]
        assert downstream[number] == [
            (
                torch.float32,
                [[number, number + 2, number + 4], [number + 1, number + 3, number + 5]],
                True,
            ),
            (torch.int64, [number] * 5, False),
            (torch.bool, [position % 2 == number for position in range(4)], False),
        ]


@pytest.mark.parametrize("vary", [False, True])
def test_units_take_their_own_messages_in_any_order(three_ranks, vary):
    """Posted ahead, and with headers."""
    found = three_ranks.run(channel_ranks.random_orders, range(examples(15)), vary)
    assert [wrong for wrong, _ in found] == [[], [], []]
    assert all(kept > 0 for _, kept in found)


def test_both_sides_of_a_boundary_exchange_what_they_share(three_ranks):
    """Boundaries one after another, the one from the last stage to the first among them."""
    for rank, got in enumerate(three_ranks.run(channel_ranks.exchanged, 3)):
        assert set(got) == {rank, (rank - 1) % 3}
        for boundary, values in got.items():
            side = int(rank == boundary)
            assert values == [(boundary, side, n, bytes(300 * n)) for n in range(3)]
