"""A list scheduler: a good order for any durations, placement and limit of memory.

Forwards and gradients take turns in a simulation, by a handful of rules (`turns`). Weight gradients
go between them, for a few targets (`job.fill`), and the best orders are polished: units of the
longest path are moved after their next neighbours. `shortest` is the entry; builders call it with
equal units, policies with planned durations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import accumulate, islice

from envpipe_megatron.core.kinds import SPLIT, unit
from envpipe_megatron.core.orders.job import (
    HELD_TOLERANCE,
    Filled,
    OrderJob,
    Turns,
    fill,
)
from envpipe_megatron.core.orders.turns import (
    TurnRule,
    block_turns,
    squeezed_blocks,
    take_turns,
)
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.core.timeline import RELATIVE_TOLERANCE, Timeline

#: What turns are taken with, and by which rule; the first is the best where only one is tried.
#: With level units or free messages turns stay regular where an input comes a little late.
_RULES: tuple[tuple[Callable[[OrderJob], OrderJob], TurnRule], ...] = (
    (lambda job: job.level(weight_s=0.5), TurnRule(patience=0.75, hurried=True)),
    (lambda job: job, TurnRule(patience=0.75, hurried=True)),
    (lambda job: job, TurnRule(patience=0.5)),
    (lambda job: job.level(weight_s=0.3), TurnRule(pace=0.9)),
    (lambda job: job, TurnRule(strict=False, pace=1.0)),
    (lambda job: job, TurnRule(patience=1.0)),
    (lambda job: replace(job, latency_s=0.0), TurnRule(patience=0.25)),
    (lambda job: job.level(weight_s=0.3), TurnRule(patience=0.5)),
    (lambda job: job.level(weight_s=0.3), TurnRule(pace=0.75)),
    (lambda job: job.level(weight_s=0.3), TurnRule(strict=False, pace=0.8)),
    (lambda job: job.level(weight_s=0.3), TurnRule(strict=False, pace=1.1)),
)
#: How weight gradients are placed: the least waits that they fill though they delay others, in
#: their own durations, and whether the target rises. The last is tried after all turns.
_Way = tuple[float, bool]
_WAYS: tuple[_Way, ...] = ((0.5, False), (0.0, False))
_RISING: _Way = (0.0, True)
#: Targets that are tried for all turns, as ways from the floor (0) to the best order (1) ...
_TARGETS = (0.3, 0.6, 0.8, 1.0)
#: ... and how far from them for the best few.
_STEPS = (0.1, 0.05)
_BEST = 4
#: Units of all orders that are looked at if nothing else is said: half a second.
_LOOK_BUDGET = 300_000
#: All turns, those of four blocks with them, in three ways, and squeezed blocks.
_FEWEST_LOOKS = 49


def shortest(job: OrderJob, name: str = "greedy", looks: int | None = None) -> Schedule:
    """Return the shortest order found within the job's limits; of equal ones that of least memory.

    `looks` limits how many orders are looked at; two take 40 ms for 8 stages x 96 microbatches x
    2 chunks with split backwards, and without it that job takes about a second.
    """
    if looks is None:
        units = len(job.kinds) * job.num_per_kind * job.shape[0]
        looks = max(_FEWEST_LOOKS, _LOOK_BUDGET // units)
    least_s = job.floor_s * (1 + RELATIVE_TOLERANCE)
    orders = islice(_orders(job, least_s), looks)
    best = next(orders)
    for filled in orders:
        if best.time_s <= least_s:
            break
        best = min(best, filled, key=_rank)
    return _schedule(job, best, name)


def _rank(filled: Filled) -> tuple[float, float]:
    return filled.time_s, sum(filled.peak_held)


def _orders(job: OrderJob, first_s: float) -> Iterator[Filled]:
    """Yield orders of a job, the promising ones first; `first_s` is the first target."""
    found: dict[tuple[int, _Way, float], Filled] = {}
    turns: list[Turns] = []

    def tried(target: float, rule: int, way: _Way) -> Iterator[Filled]:
        if rule < len(turns) and (rule, way, target) not in found:
            filled = fill(job, turns[rule], first_s + target * way_s, *way)
            found[rule, way, target] = filled
            yield filled

    way_s = 0.0
    for rule, taken in enumerate(_turns(job)):
        turns.append(taken)
        for way in _WAYS if job.kinds is SPLIT else _WAYS[:1]:
            yield from tried(0.0, rule, way)
    if job.kinds is SPLIT:
        for rule in range(len(turns)):
            yield from tried(0.0, rule, _RISING)
    for rule, whole in enumerate(squeezed_blocks(job), len(turns)):
        yield found.setdefault((rule, _RISING, 0.0), fill(job, whole, first_s))
    way_s = min(filled.time_s for filled in found.values()) - first_s
    if job.kinds is SPLIT:
        for target in _TARGETS:
            for rule, way, _ in list(found):
                yield from tried(target, rule, way)
        for step in _STEPS:
            for rule, way, target in sorted(found, key=lambda key: _rank(found[key]))[:_BEST]:
                yield from tried(round(target - step, 3), rule, way)
                yield from tried(round(target + step, 3), rule, way)
    distinct = {_rank(filled): filled for filled in found.values()}
    for rank in sorted(distinct)[:_BEST]:
        yield from polished(job, distinct[rank])


def _turns(job: OrderJob) -> Iterator[Turns]:
    for changed, rule in _RULES:
        yield take_turns(changed(job), rule)
    yield from block_turns(job)


def _schedule(job: OrderJob, filled: Filled, name: str) -> Schedule:
    """Return the orders as a schedule, which checks that they can run."""
    _, chunks, microbatches = job.shape
    stages = tuple(
        tuple(unit(job.kinds[kind], microbatch, part % chunks) for kind, part, microbatch in order)
        for order in filled.orders
    )
    return Schedule(name, microbatches, chunks, stages, job.placement)


#: How many places later a unit may be moved at once.
_REACH = 9


def polished(job: OrderJob, filled: Filled) -> Iterator[Filled]:
    """Yield orders beside one, then beside the first that is better, and so on.

    To shorten an order, some unit must leave its longest path.
    """
    moved = True
    while moved:
        moved = False
        for orders in _beside(job, filled):
            other = fill(job, orders, 0.0)
            yield other
            if _rank_by_ends(job, other) < _rank_by_ends(job, filled):
                filled, moved = other, True
                break


def _rank_by_ends(job: OrderJob, filled: Filled) -> tuple[float, float]:
    """Return the time, and how late stages end together: a smaller sum is a move nearer."""
    squares = sum((end_s / job.floor_s) ** 2 for end_s in filled.stage_end_s)
    return round(filled.time_s / job.floor_s, 9), round(squares, 9)


def _beside(job: OrderJob, filled: Filled) -> Iterator[Turns]:
    """Yield orders in which one unit of the longest path runs some places later on its stage."""
    for stage, at in _longest_path(job, filled):
        order = filled.orders[stage]
        kind, part, microbatch = order[at]
        for later in range(at + 1, min(len(order), at + 1 + _REACH)):
            other = order[later]
            if other[1] == part and (other[0] == kind or other[2] == microbatch):
                break
            moved = [*order[:at], *order[at + 1 : later + 1], order[at], *order[later + 1 :]]
            if not _fits(job, stage, moved):
                break
            yield [*filled.orders[:stage], moved, *filled.orders[stage + 1 :]]


def _fits(job: OrderJob, stage: int, order: list[tuple[int, int, int]]) -> bool:
    most = job.stage_limits[stage] + HELD_TOLERANCE
    return all(held <= most for held in accumulate(job.holds[stage][kind] for kind, _, _ in order))


def _longest_path(job: OrderJob, filled: Filled) -> list[tuple[int, int]]:
    """Return stage and position of the units on the longest path, first to last."""
    schedule = _schedule(job, filled, "polished")
    duration_s = [[job.durations_s[k][part][m] for k, part, m in own] for own in filled.orders]
    path = Timeline(schedule, duration_s, job.latency_s, job.tail_s).critical_path()
    return [divmod(node, schedule.units_per_stage) for node in reversed(path)]
