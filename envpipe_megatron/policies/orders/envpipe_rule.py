"""EnvPipe's own order: the framework's, with extra forwards by EnvPipe's rule."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import fmean as mean

from envpipe_megatron.core.channel_model import CHANNEL_REMEDY
from envpipe_megatron.core.kinds import WHOLE, Kind, ScheduleError
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.profile import Profile
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.core.timeline import RELATIVE_TOLERANCE
from envpipe_megatron.policies.limits import envpipe_counts
from envpipe_megatron.policies.optimal.optimizer import order_at_maximum_s
from envpipe_megatron.policies.orders.judged import check_own_within, within
from envpipe_megatron.policies.problem import Problem


def envpipe_order(problem: Problem) -> tuple[Schedule, tuple[str, ...]]:
    """EnvPipe's order for a problem's job, and notes on what limited it."""
    if problem.num_chunks > 1:
        return _in_chunks(problem)
    microbatches, capacity = problem.num_microbatches, problem.limits.channel_capacity
    limits = problem.order_limits()
    unbounded = problem.order_limits(replace(problem.limits, channel_capacity=None))
    wanted = unbounded.fit(envpipe_counts(problem.profile, microbatches, limits.most))
    extra = limits.fit(wanted)
    lowered = _lowered(wanted, extra)
    note = (
        f"Extra forwards lowered on {lowered}: on a channel of capacity {capacity} "
        f"they may fall by at most {limits.max_fall} from a stage to the next. {CHANNEL_REMEDY}"
    )
    order = builders.envpipe(problem.num_stages, microbatches, extra)
    return order, (note,) if lowered else ()


def _lowered(wanted: Sequence[int], extra: Sequence[int]) -> str:
    """The stages that have fewer extra forwards than wanted, with both counts; or nothing."""
    return ", ".join(
        f"stage {stage} from {before} to {after}"
        for stage, (before, after) in enumerate(zip(wanted, extra, strict=True))
        if after < before
    )


def _in_chunks(problem: Problem) -> tuple[Schedule, tuple[str, ...]]:
    """Megatron's interleaved order with as many more forwards in the warm-up as the rule has.

    Fewer on all stages where memory is short, where stages would wait in circles, or where that
    order would take longer at the highest clocks; a note says so. ScheduleError: Megatron's own
    order holds more than the limit.
    """
    profile, conditions, own = problem.profile, problem.conditions, problem.own_order
    longest_s = order_at_maximum_s(own, profile, conditions) * (1 + RELATIVE_TOLERANCE)
    most = problem.limits.max_in_flight
    check_own_within(own, most)
    # More than the forwards that are left would change nothing, and be Megatron's own order.
    left = [own.units_per_stage // 2 - int(first) for first in own.is_backward.argmax(axis=1)]
    rule = list(map(min, _counts_in_chunks(profile), left))
    if (limit := problem.limits.max_extra_forwards) is not None:
        rule = [min(count, problem.num_chunks * limit) for count in rule]
    order, extra, why = own, [0] * len(rule), ""
    for at_most in range(max(rule), 0, -1):
        tried = [min(count, at_most) for count in rule]
        try:
            longer = builders.interleaved(
                problem.num_stages,
                problem.num_microbatches,
                problem.num_chunks,
                problem.group_size,
                extra_warmup=tried,
            )
        except ScheduleError:
            why = "make stages wait in circles"
            continue
        if not within(longer, most):
            why = "hold more microbatches than the limit"
        elif order_at_maximum_s(longer, profile, conditions) > longest_s:
            why = "take longer than Megatron's order at full clock"
        else:
            order, extra = replace(longer, name="envpipe-interleaved"), tried
            break
    lowered = _lowered(rule, extra)
    note = f"Extra forwards of a chunk lowered on {lowered}: more would {why}."
    return order, (note,) if lowered else ()


def _counts_in_chunks(profile: Profile) -> Iterator[int]:
    """For each stage the forwards that fill its wait for the first gradient (ATC'23, section 4.2).

    With chunks a stage warms up with two forwards for each stage behind it, and the gradient comes
    to it after one backward of each: it waits (p - s - 1) (B - F), of a chunk's times.
    """
    for stage, optimal_mhz in enumerate(profile.optimal_frequency_mhz):
        parts = profile.parts(stage)
        forward_s, backward_s = (mean(part[kind][0].time_s for part in parts) for kind in WHOLE)
        slower_s = mean(
            row.time_s
            for part in parts
            for row in part[Kind.FORWARD]
            if row.frequency_mhz == optimal_mhz
        )
        behind = profile.num_stages - stage - 1
        yield max(0, math.floor(behind * (backward_s - forward_s) / slower_s + 1e-9))
