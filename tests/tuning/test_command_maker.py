"""What ranks and the bill hear of a run, and when."""

from __future__ import annotations

from envpipe_megatron.core.kinds import WHOLE
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.sidecar import Sidecar
from envpipe_megatron.formats.energy import Phase
from envpipe_megatron.tuning.command_maker import CommandMaker
from envpipe_megatron.tuning.measured.store import Store


def test_the_bill_keeps_what_splitting_won_beside_what_was_too_slow():
    """The lines of a command take the place of all that were before."""
    store = Store(1, 1, WHOLE, [1000, 2000], Sidecar())
    commands, order = CommandMaker(store), store.at_top(builders.one_f_one_b(1, 2))

    def billed(late: str = "", won: str = "") -> str:
        commands.billed, commands.won = late, won
        return commands.for_all(Phase.STEADY, order, 1).billed

    assert billed() == ""
    assert billed(won="5 %") == "5 %"
    assert billed() == ""
    assert billed(late="slow") == "slow\n5 %"
    assert billed(late="slower", won="4 %") == "slower\n4 %"
    refused = commands.for_all(Phase.STEADY, order, 1)
    commands.take_back(refused)
    assert commands.for_all(Phase.STEADY, order, 1).billed == "slower\n4 %"
