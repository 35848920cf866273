"""Splitting the backwards of an order where they stand."""

from __future__ import annotations

from collections.abc import Iterator

from envpipe_megatron.core.kinds import Kind, Unit, unit
from envpipe_megatron.core.schedule import Schedule


def split_in_place(schedule: Schedule, last: int) -> Schedule:
    """An order whose `last` backwards of each stage are in two parts, one behind the other.

    The stage before gets their gradients earlier; no more activations are held. For the last ones,
    on the way out of the pipeline, that is nearly all that splitting gains, and it is paid for on a
    few units only.
    """
    most = schedule.num_microbatches * schedule.num_chunks
    orders = (_split(order, most - last) for order in schedule.stages)
    name = f"{schedule.name}-split"
    return Schedule(
        name,
        schedule.num_microbatches,
        schedule.num_chunks,
        tuple(map(tuple, orders)),
        schedule.placement,
    )


def _split(order: tuple[Unit, ...], whole: int) -> Iterator[Unit]:
    """The order with each backward in two parts, the first `whole` of which run as one."""
    seen = 0
    for own in order:
        if own.kind is Kind.FORWARD:
            yield own
            continue
        seen += 1
        yield unit(Kind.INPUT_GRADIENT, own.microbatch, own.chunk, seen <= whole)
        yield unit(Kind.WEIGHT_GRADIENT, own.microbatch, own.chunk)
