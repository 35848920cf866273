"""The order in which stages exchange the messages that the latency of a hop is measured by."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from envpipe_megatron.core.kinds import WHOLE, Kind
from envpipe_megatron.runtime.job.latency import measure_p2p_latency_s


@pytest.mark.parametrize("stages", [2, 3, 4, 5])
def test_no_transfer_waits_for_one_behind_it_on_a_single_communicator(stages):
    """As if a host stood still in each until its neighbour came to the same."""
    left = [transfers_of(stage, stages) for stage in range(stages)]
    while any(left):
        first = {stage: transfers[0] for stage, transfers in enumerate(left) if transfers}
        pairs = [
            (stage, peer)
            for stage, (way, peer, kind) in first.items()
            if way == "send" and first.get(peer) == ("receive", stage, kind)
        ]
        assert pairs, first
        for stage in pairs[0]:
            del left[stage][0]


def transfers_of(stage: int, stages: int) -> list[tuple[str, int, Kind]]:
    """What a stage sends and receives, with which neighbour, in its order."""
    done: list[tuple[str, int, Kind]] = []
    back = {Kind.FORWARD: -1, Kind.BACKWARD: 1}
    channel: Any = SimpleNamespace(
        expect=lambda counts, specs: None,
        send=lambda unit, _: done.append(("send", stage - back[unit.kind], unit.kind)),
        receive=lambda unit: done.append(("receive", stage + back[unit.kind], unit.kind)),
        end_step=lambda: None,
    )
    executor: Any = SimpleNamespace(
        meet=lambda: 0.0, now_s=lambda: 0.0, wait_for_messages=lambda: None
    )
    spec = SimpleNamespace(make=lambda zeros: None)
    specs: Any = SimpleNamespace(sends=dict.fromkeys(WHOLE, spec))
    measure_p2p_latency_s(stage, stages, channel, specs, executor)
    return done
