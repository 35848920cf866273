"""Orders with split backwards: ZB-H1, ZB-H2, in a V, and others' backwards split where they are.

In the first three weight gradients fill waits; fewer microbatches than stages is a valid job.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from envpipe_megatron.core.kinds import SPLIT, Kind, ScheduleError, Unit, unit
from envpipe_megatron.core.orders.builders import check_job
from envpipe_megatron.core.orders.greedy import shortest
from envpipe_megatron.core.orders.job import OrderJob
from envpipe_megatron.core.schedule import Placement, Schedule


def zero_bubble(
    num_stages: int, num_microbatches: int, max_in_flight: int | None = None
) -> Schedule:
    """Return ZB-H1, or with more memory up to ZB-H2 (Qi et al., ICLR'24, sections 2.1 and 2.2).

    Stage s warms up with 1F1B's `p - s` forwards, and up to `p - s - 1` more as memory allows. Then
    input gradients and forwards take turns, and each weight gradient comes as much later than its
    input gradient as memory allows. `max_in_flight` microbatches are held by every stage at most:
    p by default, which stage 0 of 1F1B holds (ZB-H1); `2 p - 1` is ZB-H2, and more buys nothing.
    ScheduleError: less than p.
    """
    check_job(num_stages, num_microbatches)
    most = num_stages if max_in_flight is None else max_in_flight
    if most < num_stages:
        raise ScheduleError(
            "Zero-bubble orders hold as many microbatches as there are stages, or more",
            value=most,
            remedy=f"Allow {num_stages} in flight.",
        )
    most = min(most, 2 * num_stages - 1)
    forwards, inputs, weights = ([unit(kind, m) for m in range(num_microbatches)] for kind in SPLIT)
    stages = []
    for stage in range(num_stages):
        behind = num_stages - stage - 1
        warmup = 1 + behind + min(behind, most - num_stages)
        lag = most - warmup
        order = forwards[:warmup]
        for m in range(num_microbatches):
            order.append(inputs[m])
            order += weights[max(0, m - lag) : max(0, m - lag + 1)]
            order += forwards[warmup + m : warmup + m + 1]
        stages.append((*order, *weights[max(0, num_microbatches - lag) :]))
    name = "zb-h1" if most == num_stages else "zb-h2"
    return Schedule(name, num_microbatches, 1, tuple(stages))


def zero_bubble_v(
    num_stages: int, num_microbatches: int, max_in_flight: int | None = None
) -> Schedule:
    """Return two chunks a stage that lie in a V, with split backwards: ZB-V.

    (Qi et al., ICLR'24, section 6; with less memory as V-Half and V-Min of Qi et al., NeurIPS'24.)
    The first stage holds the model's first layers and its last, so all stages hold equally much.
    The order is the shortest that the list scheduler finds for units that all take as long, where
    stages end as they begin, each one unit before the next: so iterations can follow without a gap.
    `max_in_flight` counts microbatches of one chunk: 2 p by default, which is what 1F1B's first
    stage holds. ScheduleError: less than 2.
    """
    check_job(num_stages, num_microbatches, 2)
    most = 2 * num_stages if max_in_flight is None else max_in_flight
    job = OrderJob(
        dict.fromkeys(SPLIT, np.ones((num_stages, 2, num_microbatches))),
        placement=Placement.V,
        limits=[most] * num_stages,
        tail_s=range(num_stages)[::-1],
    )
    return shortest(job, "zb-v")


def split_in_place(schedule: Schedule, last: int) -> Schedule:
    """Return an order whose `last` backwards of each stage are in two parts, one behind the other.

    The stage before gets their gradients earlier; no more activations are held. For the last ones,
    on the way out of the pipeline, that is nearly all that splitting gains, and it is paid for on a
    few units only.
    """
    most = schedule.num_microbatches * schedule.num_chunks
    return _with_split(schedule, "split", lambda own, seen: seen < most - last)


def split_from(schedule: Schedule, microbatch: int, of_stage: int | None = None) -> Schedule:
    """Return a split order in which the backwards of the microbatches before one are whole.

    On all stages, or on one.
    """
    stages: list[list[Unit]] = [[] for _ in schedule.stages]
    for stage, order in enumerate(schedule.stages):
        units, first = stages[stage], microbatch if of_stage in (None, stage) else 0
        for own in order:
            if own.kind is Kind.FORWARD or own.microbatch >= first:
                units.append(own)
            elif own.kind is Kind.INPUT_GRADIENT:
                units.append(unit(own.kind, own.microbatch, own.chunk, combined=True))
                units.append(unit(Kind.WEIGHT_GRADIENT, own.microbatch, own.chunk))
    return replace(schedule, stages=tuple(map(tuple, stages)))


def half_split(schedule: Schedule) -> Schedule:
    """Return an order with every other microbatch's backwards in two parts, one behind the other.

    So whole backwards and both parts are measured in the same iterations and the same memory. Were
    the last half split, parts would be seen on the way out of the pipeline and whole ones before,
    where waits, and so heat, are others. Of two microbatches or more, each chunk of each stage has
    both, in whichever order backwards come.
    """
    return _with_split(schedule, "split", lambda own, seen: own.microbatch % 2 == 0)


def split_late(schedule: Schedule) -> Schedule:
    """Return an order as unlike its whole backwards as may be, to test whether a bit changes.

    Each second part waits for the first one of the backward that follows, so a microbatch more is
    held. Of more than two backwards, the middle one stays whole. Gradients keep their sequence.
    """
    most = schedule.num_microbatches * schedule.num_chunks
    return _with_split(schedule, "late", lambda own, seen: most > 2 and seen == most // 2, lag=1)


def _with_split(
    schedule: Schedule, how: str, whole: Callable[[Unit, int], bool], lag: int = 0
) -> Schedule:
    """Split the backwards in two parts, but those for which `whole` (of unit and number) holds.

    `lag` second parts wait while first parts of backwards that follow run.
    """
    stages = (tuple(_split(order, whole, lag)) for order in schedule.stages)
    return replace(schedule, name=f"{schedule.name}-{how}", stages=tuple(stages))


def _split(order: tuple[Unit, ...], whole: Callable[[Unit, int], bool], lag: int) -> Iterator[Unit]:
    waiting: deque[Unit] = deque()
    seen = 0
    for own in order:
        if own.kind is Kind.FORWARD:
            yield own
            continue
        as_one = whole(own, seen)
        seen += 1
        while as_one and waiting:
            yield waiting.popleft()
        yield unit(Kind.INPUT_GRADIENT, own.microbatch, own.chunk, as_one)
        waiting.append(unit(Kind.WEIGHT_GRADIENT, own.microbatch, own.chunk))
        if as_one or len(waiting) > lag:
            yield waiting.popleft()
    yield from waiting
