"""A peer that dies or falls silent: clear errors, clocks given back."""

import faults
import pytest
from on_request import each_of
from rank_pool import RankPool

from envpipe_megatron.gpu.emulated.emulated_gpu import EmulatedGpu

pytestmark = pytest.mark.xdist_group("pipeline")

#: For a peer to be called silent, and for an error to get from it to a test on a busy machine.
TIMEOUT_S, GRACE_S = 4.0, 4.0

FAULTS = {
    "killed in its forward": ("kill", 1, "F2"),
    "killed in its backward": ("kill", 1, "B1"),
    "first stage killed in its last backward": ("kill", 0, "B3"),
    "last stage killed": ("kill", 2, "F1"),
    "silent": ("stop", 1, "F2"),
    "last stage silent": ("stop", 2, "B0"),
    "first stage silent in its last backward": ("stop", 0, "B3"),
    "raises in its forward": ("raise", 1, "F2"),
}


#: Each waits for the time-out.
SLOW = {"silent", "last stage silent", "first stage killed in its last backward"}


@pytest.mark.parametrize("fault", each_of(FAULTS, FAULTS.keys() - SLOW))
def test_peer_lost_in_the_middle_of_a_step(fault, tmp_path):
    how, victim, unit = FAULTS[fault]
    with RankPool(3, timeout_s=TIMEOUT_S) as pool:
        pool.start(faults.train, tmp_path, how, victim, unit, TIMEOUT_S)
        survivors = {0, 1, 2} - {victim}
        outcomes = pool.outcomes(ranks=survivors)
        for rank in survivors:
            worked, seen = outcomes[rank]
            assert worked, seen
            assert seen["steps"] == 1
            if "last backward" in fault and seen["error"] == "CollectivesError":
                # A stage that has run all its units learns of it where all stages meet.
                assert f"Stage {rank} lost another rank" in seen["text"]
            else:
                # Of the message, or of the time at which an emulated GPU sent it.
                assert seen["error"] in ("ChannelError", "CollectivesError"), seen
                sides = [f"its neighbour, stage {stage}" for stage in (rank - 1, rank + 1)]
                assert any(side in seen["text"] for side in sides)
            # One that is no neighbour learns of it from a neighbour that has fallen silent.
            silences = 2 if how == "stop" else 1
            assert seen["after_s"] < GRACE_S + silences * TIMEOUT_S
            assert seen["closing_s"] < TIMEOUT_S - 1  # of those that a collective would wait
            assert seen["locked_mhz"] == 1410  # there was a lock to undo
        neighbours = survivors & {victim - 1, victim + 1}
        if "last backward" not in fault:
            assert any(
                f"neighbour, stage {victim}" in outcomes[rank][1]["text"] for rank in neighbours
            )
    returned = survivors | ({victim} if how == "raise" else set())
    assert {
        r: EmulatedGpu.open(tmp_path, r).requested_frequency_mhz for r in returned
    } == dict.fromkeys(returned)
