"""Every order of a small pipeline without chunks, by trying them all."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

from core_cases import B, F, I, W

from envpipe_megatron.core.kinds import Kind

StageOrder = list[tuple[Kind, int]]


def stage_orders(microbatches: int, *, whole: bool) -> list[StageOrder]:
    """Every order of one stage in which each kind goes by microbatch; backwards in two parts.

    With `whole` each may be whole too.
    """

    def extended(
        order: StageOrder, forwards: int, inputs: int, weights: int
    ) -> Iterator[StageOrder]:
        if weights == microbatches:
            yield order
        if forwards < microbatches:
            yield from extended([*order, (F, forwards)], forwards + 1, inputs, weights)
        if inputs < forwards:
            yield from extended([*order, (I, inputs)], forwards, inputs + 1, weights)
            if whole and weights == inputs:
                yield from extended([*order, (B, inputs)], forwards, inputs + 1, weights + 1)
        if weights < inputs:
            yield from extended([*order, (W, weights)], forwards, inputs, weights + 1)

    return [*extended([], 0, 0, 0)]


def peak(order: StageOrder, weight_share: float = 1.0) -> float:
    """The most microbatches that a stage holds; `weight_share` of one between both parts."""
    change = {F: 1.0, B: -1.0, I: weight_share - 1.0, W: -weight_share}
    return max(itertools.accumulate(change[kind] for kind, _ in order))


def least_time_s(
    fitting: Sequence[StageOrder],
    duration_s: Callable[[int, Kind, int], float],
    latency_s: Sequence[float],
    tail_s: Sequence[float],
) -> float:
    """The time of the best of all orders; units take `duration_s` by stage, kind, microbatch."""
    stages = len(tail_s)
    return min(
        _time_s(orders, duration_s, latency_s, tail_s)
        for orders in itertools.product(fitting, repeat=stages)
    )


def _time_s(
    orders: Sequence[StageOrder],
    duration_s: Callable[[int, Kind, int], float],
    latency_s: Sequence[float],
    tail_s: Sequence[float],
) -> float:
    """How long orders of all stages take, unit by unit; infinite if they wait in circles."""
    ends: dict[tuple[bool, int, int], float] = {}
    at, now = [0] * len(orders), [0.0] * len(orders)
    progress = True
    while progress:
        progress = False
        for stage, order in enumerate(orders):
            while at[stage] < len(order):
                kind, microbatch = order[at[stage]]
                source = stage + {F: -1, W: len(orders)}.get(kind, 1)
                arrival_s = 0.0
                if 0 <= source < len(orders):
                    if (kind is F, source, microbatch) not in ends:
                        break
                    arrival_s = ends[kind is F, source, microbatch] + latency_s[min(source, stage)]
                now[stage] = max(now[stage], arrival_s) + duration_s(stage, kind, microbatch)
                if kind is not W:
                    ends[kind is F, stage, microbatch] = now[stage]
                at[stage] += 1
                progress = True
    if any(place < len(order) for place, order in zip(at, orders, strict=True)):
        return math.inf
    return max(end + tail for end, tail in zip(now, tail_s, strict=True))
