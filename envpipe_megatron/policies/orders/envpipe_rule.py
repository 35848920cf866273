"""EnvPipe's own order: the framework's, with extra forwards by EnvPipe's rule."""

from __future__ import annotations

import math
from collections.abc import Iterator
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
from envpipe_megatron.policies.orders.judged import within
from envpipe_megatron.policies.request import (
    PlanRequest,
    framework_order,
    request_conditions,
    request_in_flight,
    request_limits,
)


def envpipe_order(profile: Profile, request: PlanRequest) -> tuple[Schedule, tuple[str, ...]]:
    """EnvPipe's order for a request's job, and notes on what limited it.

    The profile is that of the request's chunks.
    """
    if request.num_chunks > 1:
        return _in_chunks(profile, request), ()
    stages, microbatches = profile.num_stages, request.num_microbatches
    limits = request_limits(profile, request)
    unbounded = request_limits(profile, replace(request, channel_capacity=None))
    wanted = unbounded.fit(envpipe_counts(profile, microbatches, limits.most))
    extra = limits.fit(wanted)
    lowered = ", ".join(
        f"stage {stage} from {before} to {after}"
        for stage, (before, after) in enumerate(zip(wanted, extra, strict=True))
        if after < before
    )
    note = (
        f"Extra forwards lowered on {lowered}: on a channel of capacity {request.channel_capacity} "
        f"they may fall by at most {limits.max_fall} from a stage to the next. {CHANNEL_REMEDY}"
    )
    return builders.envpipe(stages, microbatches, extra), (note,) if lowered else ()


def _in_chunks(profile: Profile, request: PlanRequest) -> Schedule:
    """Megatron's interleaved order with as many more forwards in the warm-up as the rule has.

    Fewer on all stages where memory is short, where stages would wait in circles, or where that
    order would take longer at the highest clocks.
    """
    own = framework_order(profile.num_stages, request)
    conditions = request_conditions(profile, request)
    longest_s = order_at_maximum_s(own, profile, conditions) * (1 + RELATIVE_TOLERANCE)
    most = request_in_flight(profile, request)
    rule = list(_counts_in_chunks(profile))
    if request.max_extra_forwards is not None:
        rule = [min(count, request.num_chunks * request.max_extra_forwards) for count in rule]
    for at_most in range(max(rule), 0, -1):
        extra = [min(count, at_most) for count in rule]
        try:
            order = builders.interleaved(
                profile.num_stages,
                request.num_microbatches,
                request.num_chunks,
                request.group_size,
                extra_warmup=extra,
            )
        except ScheduleError:
            continue
        if within(order, most) and order_at_maximum_s(order, profile, conditions) <= longest_s:
            return replace(order, name="envpipe-interleaved")
    return own


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
