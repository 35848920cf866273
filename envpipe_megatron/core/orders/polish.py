"""Orders a little shorter: units of the longest path are moved behind their next neighbours."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from envpipe_megatron.core.orders.fill import TIME_TOLERANCE, Filled, fill
from envpipe_megatron.core.orders.job import (
    FORWARD,
    HELD_TOLERANCE,
    WEIGHTS,
    OrderJob,
    Turns,
)

#: How many places later a unit may be moved at once.
_REACH = 9


def polished(job: OrderJob, filled: Filled) -> Iterator[Filled]:
    """Orders beside one, and then beside the first that is better than it, and so on.

    To shorten an order, some unit must leave its longest path.
    """
    moved = True
    while moved:
        moved = False
        for orders in _beside(job, filled):
            other = fill(job, orders, 0.0)
            yield other
            if _rank(job, other) < _rank(job, filled):
                filled, moved = other, True
                break


def _rank(job: OrderJob, filled: Filled) -> tuple[float, float]:
    """Time, and then how late stages end together: with less of it, one move is missing less."""
    squares = sum((end_s / job.floor_s) ** 2 for end_s in filled.stage_end_s)
    return round(filled.time_s / job.floor_s, 9), round(squares, 9)


def _beside(job: OrderJob, filled: Filled) -> Iterator[Turns]:
    """Orders in which one unit of the longest path runs some places later on its stage."""
    for stage, at in _longest_path(job, filled):
        order = filled.orders[stage]
        kind, part, microbatch = order[at]
        for later in range(at + 1, min(len(order), at + 1 + _REACH)):
            other = order[later]
            if other[1] == part and (other[0] == kind or other[2] == microbatch):
                break
            if job.in_order and other[0] == kind != WEIGHTS:
                break  # messages would be out of order
            moved = [*order[:at], *order[at + 1 : later + 1], order[at], *order[later + 1 :]]
            if not _fits(job, stage, moved):
                break
            yield [*filled.orders[:stage], moved, *filled.orders[stage + 1 :]]


def _fits(job: OrderJob, stage: int, order: list[tuple[int, int, int]]) -> bool:
    most = job.stage_limits[stage] + HELD_TOLERANCE
    return all(held <= most for held in accumulate(job.holds[kind] for kind, _, _ in order))


def _longest_path(job: OrderJob, filled: Filled) -> list[tuple[int, int]]:
    """Stage and position of the units that set the time, first to last."""
    tolerance_s = TIME_TOLERANCE * filled.time_s
    place = [{turn: at for at, turn in enumerate(order)} for order in filled.orders]
    stage = filled.stage_end_s.index(filled.time_s)
    at = len(filled.orders[stage]) - 1
    path = [(stage, at)]
    while True:
        kind, part, microbatch = filled.orders[stage][at]
        start_s = filled.end_s[stage][at] - job.durations_s[kind][part][microbatch]
        if at and filled.end_s[stage][at - 1] >= start_s - tolerance_s:
            at -= 1
        else:
            source = job.neighbours[1 - kind][part]
            if source < 0:
                if kind == FORWARD:
                    return path[::-1]
                kind, source = FORWARD, part
            stage = source // job.shape[1]
            at = place[stage][kind, source, microbatch]
        path.append((stage, at))
