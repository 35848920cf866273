"""What ranks of a pool exchange in the tests of collectives."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import numpy as np

from envpipe_megatron.runtime.channel import collectives
from envpipe_megatron.runtime.channel.collectives import SUM, HostGroup, make_collectives


def exchange(rank: int, pipelines: Sequence[Sequence[int]], fan_in: int) -> dict[str, Any]:
    """What each kind of exchange gives this rank."""
    with (
        patch.object(collectives, "FAN_IN", fan_in),
        patch.object(collectives, "HostGroup", side_effect=HostGroup) as groups,
    ):
        made = make_collectives(pipelines, timedelta(seconds=20))
    numbers = np.array([[rank, 0.1 * rank]])
    hiccup_s = np.array([1000.0 if rank == 3 else 1.0])
    return {
        "groups": [list(call.args[0]) for call in groups.call_args_list],
        "is_planner": made.is_planner,
        "num_replicas": made.num_replicas,
        "in_pipeline": made.in_pipeline(rank),
        "sum": [stage.tolist() for stage in made.by_stage(numbers, SUM)],
        "median": [stage.tolist() for stage in made.medians(hiccup_s)],
        "to_planner": made.to_planner(rank, max),
        "objects": made.by_stage({rank}, lambda parts: set().union(*parts)),
        "all": made.all_to_planner(rank),
        "latest": made.latest(float(rank)),
        "on_all": [made.on_all(True), made.on_all(rank != 3)],
        "first": [made.first(None), made.first(rank if rank == 5 else None)],
        "from_planner": made.from_planner(str(rank)),
        "agreed": made.agreed(lambda: rank),
    }


def come_late(rank: int, late_s: float) -> list[int]:
    """What the first of two ranks gathers, whose other comes when it would have given up."""
    if rank > 1:
        return []
    with patch.object(collectives, "_CONNECT", timedelta(seconds=0.05)):
        time.sleep(rank * late_s)
        return HostGroup([0, 1], "late", timedelta(seconds=20), leader=0).gather(rank)


def lengths(rank: int, sizes: Sequence[int]) -> list[bool]:
    """Whether values of these lengths come as they were: from the planner, all and a neighbour."""
    made = make_collectives([range(12)], timedelta(seconds=20))
    before, behind = (rank - 1) % 12, (rank + 1) % 12
    sent = [made.pipeline.send(bytes([rank]) * size, behind, 1) for size in sizes]
    same = [
        made.from_planner(bytes([rank]) * size) == bytes([0]) * size
        and made.in_pipeline(bytes([rank]) * (size + rank))
        == [bytes([other]) * (size + other) for other in range(12)]
        and made.pipeline.receive(before, 1) == bytes([before]) * size
        for size in sizes
    ]
    made.on_all(True)  # what was sent has left
    assert len(sent) == len(sizes)
    return same
