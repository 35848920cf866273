"""A list scheduler: a good order for any durations, placement and limit of memory.

Forwards and gradients take turns in a simulation, by a handful of rules (`turns`). Weight gradients
go between them, for a few targets (`fill`), and the best orders are polished. `shortest` is the
entry; builders call it with equal units, policies with planned durations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice

from envpipe_megatron.core.kinds import SPLIT, unit
from envpipe_megatron.core.orders.blocks import block_turns, squeezed_blocks
from envpipe_megatron.core.orders.fill import TIME_TOLERANCE, Filled, fill
from envpipe_megatron.core.orders.job import OrderJob, Turns
from envpipe_megatron.core.orders.polish import polished
from envpipe_megatron.core.orders.turns import Rule, take_turns
from envpipe_megatron.core.schedule import Placement, Schedule

#: What turns are taken with, and by which rule; the first is the best where only one is tried.
#: With level units or free messages turns stay regular where an input comes a little late.
_RULES: tuple[tuple[Callable[[OrderJob], OrderJob], Rule], ...] = (
    (lambda job: job.level(weight_s=0.5), Rule(patience=0.75, hurried=True)),
    (lambda job: job, Rule(patience=0.75, hurried=True)),
    (lambda job: job, Rule(patience=0.5)),
    (lambda job: job.level(weight_s=0.3), Rule(pace=0.9)),
    (lambda job: job, Rule(strict=False, pace=1.0)),
    (lambda job: job, Rule(patience=1.0)),
    (lambda job: replace(job, latency_s=0.0), Rule(patience=0.25)),
    (lambda job: job.level(weight_s=0.3), Rule(patience=0.5)),
    (lambda job: job.level(weight_s=0.3), Rule(pace=0.75)),
    (lambda job: job.level(weight_s=0.3), Rule(strict=False, pace=0.8)),
    (lambda job: job.level(weight_s=0.3), Rule(strict=False, pace=1.1)),
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
    """The shortest order that is found within the job's limits, and of those of least memory.

    `looks` limits how many orders are looked at; two take 40 ms for 8 stages x 96 microbatches x
    2 chunks with split backwards, and without it that job takes about a second.
    """
    if looks is None:
        units = len(job.kinds) * job.num_per_kind * job.shape[0]
        looks = max(_FEWEST_LOOKS, _LOOK_BUDGET // units)
    least_s = job.floor_s * (1 + TIME_TOLERANCE)
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
    """Orders of a job, those first that are likely to be short; `first_s` is the first target."""
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
    if _has_blocks(job):
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
    if _has_blocks(job):
        yield from block_turns(job)


def _has_blocks(job: OrderJob) -> bool:
    return job.placement is Placement.V and job.shape[1] == 2 and job.kinds is SPLIT


def _schedule(job: OrderJob, filled: Filled, name: str) -> Schedule:
    """The orders as a schedule, which checks that they can run."""
    _, chunks, microbatches = job.shape
    stages = tuple(
        tuple(unit(job.kinds[kind], microbatch, part % chunks) for kind, part, microbatch in order)
        for order in filled.orders
    )
    return Schedule(name, microbatches, chunks, stages, job.placement)
