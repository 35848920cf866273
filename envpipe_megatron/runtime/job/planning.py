"""A job's request for a plan, and the plan that it has by file."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from envpipe_megatron.core.channel_model import find_stall
from envpipe_megatron.core.conditions import known_conditions
from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.core.plan import Plan, read_with_profile
from envpipe_megatron.core.profile import Profile
from envpipe_megatron.core.schedule import Placement, Schedule
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.policies.optimal.optimizer import order_at_maximum_s
from envpipe_megatron.policies.problem import Problem
from envpipe_megatron.policies.request import make_problem
from envpipe_megatron.policies.schedules import SCHEDULES
from envpipe_megatron.runtime.channel.collectives import DegradedError, by_planner
from envpipe_megatron.runtime.job.parts import PhaseParts
from envpipe_megatron.runtime.memory.peak import MemoryFullError
from envpipe_megatron.runtime.memory.stage import in_flight_limit, with_memory


def read_files(job: PhaseParts) -> None:
    """Take the user's files, and refuse what is not of this job: before its first iteration.

    A plan by file is for the full batch only, and no later size of batches ends training. Every
    rank calls it.

    Raises EnvPipeError on all ranks.
    """
    named, given = job.options.profile, job.options.plan
    if named is None or job.state.given is not None:
        return

    def look() -> tuple[Profile, Plan | None]:
        # Where options were read, so were the files, which may have gone since.
        profile, plan = job.options.files_read or read_with_profile(given, named, job.num_stages)
        if job.options.closed_loop:
            profiled_clocks(job, profile)
        # One that was found not to run in this job ends no training either.
        if given is None:
            plan = None
        elif plan is not None and not (job.batch or job.state.whole):
            check_plan(job, plan)
        return profile, plan

    job.state.given = job.collectives.agreed(look)


def splits(job: PhaseParts) -> bool:
    """True if the job runs orders that split backwards."""
    return not (job.options.why_whole or job.state.whole)


def given_plan(job: PhaseParts) -> Plan | None:
    """Return the user's plan, its memory ready; None: one is to be made. Every rank calls it.

    It is for the full batch only, and none where the job has trained batches of another size
    before and it does not run.

    Raises DegradedError if it cannot be run: training is under way.
    """
    _, plan = job.state.given or (None, None)
    if plan is None or job.batch:
        return None
    try:
        by_planner(job.collectives, partial(check_plan, job, plan))
        make_room(job, plan)
    except DegradedError as error:
        if not job.state.several_sizes:
            raise
        job.say(f"the plan {job.options.plan} is made again: {error}")
        return None
    return plan


def make_room(job: PhaseParts, plan: Plan) -> None:
    """Have the memory of a plan ready before it runs; errors as `JobMemory.predict` raises them."""
    make_room_for_messages(job, plan.schedule)  # first, for torch keeps what it reserves
    job.memory.predict(plan.schedule)


def make_room_for_messages(job: PhaseParts, order: Schedule) -> None:
    """Have memory for an order's messages, if EnvPipe sends them; every rank calls it.

    Raises MemoryFullError on all ranks alike; what they had they keep.
    """
    if not job.collectives.on_all(job.channel.make_room(order, job.specs)):
        raise MemoryFullError(
            f"A GPU has no memory for messages between stages in the order '{order.name}'",
            remedy="Let fewer microbatches be in flight, or take --envpipe-channel receives.",
        )


def profiled_clocks(job: PhaseParts, profile: Profile) -> list[int]:
    """Return clocks that all GPUs and rows have; EnvPipeError if the highest is not among them."""
    profiled = map(profile.clocks_mhz, range(job.num_stages))
    clocks = set.intersection(*profiled, *job.clocks_mhz)
    if job.top_mhz not in clocks:
        raise EnvPipeError(
            "The profile lacks the highest clock (MHz) of the job's GPUs",
            value=job.top_mhz,
            remedy="Use a profile of these GPUs, or let the job measure one.",
        )
    return sorted(clocks)


def plan_online(job: PhaseParts, profile: Profile, order: Schedule | None = None) -> Problem:
    """Say what to plan from all that is known of the job, on the planner: an order, or the best."""
    asked, kept = job.options.request(), job.kept_order
    schedule, order, most_waiting = asked.schedule, kept or order, job.channel.capacity
    if asked.num_chunks > 1 and most_waiting is not None:
        # Only of the framework's order is it known that one hardware queue can run it.
        schedule = "interleaved"
        if order is None:
            _check_finishes(job, job.megatron_order)
    may_split = splits(job) and Kind.INPUT_GRADIENT in profile.kinds
    if SCHEDULES[schedule].splits and not may_split:  # which showed in training
        schedule = "1f1b"
    # Memory is ready for an order that is there.
    takes = SCHEDULES[schedule].takes if order is None else ()
    conditions, own_s, own = known_conditions(profile), None, job.own_order
    in_v = own if own is not None and own.placement is Placement.V else None
    if own is not None:
        own_s = order_at_maximum_s(own, profile.for_chunks(own.num_chunks), conditions)
    if kept is None and not splits(job):
        profile = profile.whole()
    most, notes = None, tuple[str, ...]()
    if "max_in_flight" in takes:
        most = asked.max_in_flight
        limit = in_flight_limit(most, in_v or job.megatron_order, profile, job.memory.stages)
        profile = with_memory(profile.for_chunks(asked.num_chunks), job.memory.stages)
        if limit is not None:
            most = limit  # it may be more than there are, for weight gradients that wait
            held = ", ".join(f"{min(fits, job.num_microbatches):g}" for fits in limit)
            notes = (f"Memory is known to hold at most {held} microbatches in flight.",)
    request = replace(
        asked,
        schedule=schedule,
        order=order,
        reconfigure="default",  # the loop online replaces the offline one
        max_in_flight=most,
        channel_capacity=most_waiting if "channel_capacity" in takes else None,
        conditions=conditions,
        runnable=True,
    )
    return replace(make_problem(profile, request, own_s, in_v), notes=notes)


def predicted(plan: Plan | None) -> dict[str, float] | None:
    """Return what a plan is to save and how much slower it is to be, percent of its baseline."""
    if plan is None or not plan.baseline.cost.energy_j:  # no meter
        return None
    own = plan.baseline.cost
    return {
        "saving_percent": plan.cost.saving_percent(own),
        "slowdown_percent": plan.cost.slowdown_percent(own),
    }


def check_plan(job: PhaseParts, plan: Plan) -> None:
    """Refuse a plan of an order that the job cannot run, or of clocks that GPUs lack."""
    order, own, kept = plan.schedule, job.own_order, job.kept_order
    placement = Placement.LOOPED if own is None else own.placement
    turned = "" if own is not None and order.stages == own.stages else order.out_of_turn
    for wrong, what, remedy in (
        (
            order.num_microbatches != job.num_microbatches,
            f"is for {order.num_microbatches} microbatches, and this job has "
            f"{job.num_microbatches}",
            "Plan again with the job's number of microbatches, or let the job plan.",
        ),
        (
            kept is not None and order.stages != kept.stages,
            "has another order than the framework, which runs its units itself",
            "Plan with the framework's, or let the job plan.",
        ),
        (
            kept is None and order.placement is not placement,
            f"lays chunks out as {order.placement}, and this job's model is {placement}",
            "Plan with --runnable, or let the job plan.",
        ),
        (
            kept is None and order.num_chunks != job.options.num_chunks,
            f"is for {order.num_chunks} chunk(s) a stage, and this job's model has "
            f"{job.options.num_chunks}",
            "Plan for as many chunks as the model has, or let the job plan.",
        ),
        (
            kept is None and order.split and not splits(job),
            "splits backwards, and those of this job are whole: "
            f"{job.state.whole or job.options.why_whole}",
            "Plan from a profile without rows of input-gradient and weight-gradient, or let the "
            "job plan.",
        ),
        (
            kept is None and turned,
            f"adds gradients up in another sequence than the framework: {turned}",
            "List microbatches in their order, by kind and chunk, or let the job plan.",
        ),
    ):
        if wrong:
            raise EnvPipeError(f"The plan {what}", value=order.name, remedy=remedy)
    if kept is None:
        _check_finishes(job, order)
    # A job that changes only its order asks for no clock.
    sets = not (job.gpu.read_only or job.options.changes_only_order)
    for stage, supported in enumerate(job.clocks_mhz if sets else ()):
        unsupported = set(plan.frequency_mhz[stage].tolist()) - supported
        if unsupported:
            raise EnvPipeError(
                f"The plan asks for clocks (MHz) that the GPUs of stage {stage} do not have",
                value=sorted(unsupported),
                remedy="Use a profile of these GPUs.",
            )


def _check_finishes(job: PhaseParts, order: Schedule) -> None:
    """Refuse an order that does not reach its end on the job's channel."""
    if stuck := find_stall(order, job.channel.capacity):
        stall = "; ".join(map(str, stuck))
        remedy = "Set CUDA_DEVICE_MAX_CONNECTIONS=8"
        if order.num_chunks == 1:
            remedy += ", or plan with --channel-capacity 1"
        raise EnvPipeError(
            f"The order '{order.name}' needs a deeper channel than this job has: {stall}",
            remedy=f"{remedy}.\n{order.marked(*(each.node for each in stuck))}",
        )
