"""From a profile and a user's wishes to a plan: the one entry of commands and of training."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from envpipe_megatron import builders
from envpipe_megatron.channel_model import fit_to_channel
from envpipe_megatron.conditions import make_conditions
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.plan import Plan
from envpipe_megatron.policies.frequencies import POLICIES
from envpipe_megatron.policies.reconfigure import RECONFIGURE_POLICIES, Reconfigured, reconfigure
from envpipe_megatron.profile import Profile
from envpipe_megatron.schedule import Kind, Schedule

SCHEDULES = ("1f1b", "gpipe", "interleaved", "envpipe")
#: EnvPipe's own name for its order.
SCHEDULE_ALIASES = {"ours": "envpipe"}
RECONFIGURE_NAMES = ("default", *RECONFIGURE_POLICIES)


class PlannerError(EnvPipeError):
    """Wishes that contradict each other."""


@dataclass(frozen=True)
class PlanRequest:
    """What to plan.

    Args:
        num_microbatches: M.
        schedule: one of `SCHEDULES`, or an alias.
        policy: baseline, uniform or envelope.
        reconfigure: default (none), greedy or balanced; the latter two go with envelope.
        blocking_power_w: one number, or one for each stage.
        num_chunks: chunks of each stage, for the interleaved schedule.
        max_extra_forwards: no stage gets more.
        max_in_flight: the most microbatches in flight, one number or one for each stage.
        max_warmup_step: how far neighbouring stages' extra forwards may differ.
        channel_capacity: messages a bounded p2p channel holds; None for one that never blocks.
    """

    num_microbatches: int
    schedule: str = "1f1b"
    policy: str = "baseline"
    reconfigure: str = "default"
    blocking_power_w: float | tuple[float, ...] = 0.0
    num_chunks: int = 1
    max_extra_forwards: int | None = None
    max_in_flight: int | tuple[int, ...] | None = None
    max_warmup_step: int | None = None
    channel_capacity: int | None = None


@dataclass(frozen=True)
class Planned:
    """A plan, how its reconfiguring ended, and what the user should know about it."""

    plan: Plan
    reconfigured: Reconfigured | None
    notes: tuple[str, ...]


def make_plan(profile: Profile, request: PlanRequest) -> Planned:
    """Plan order and frequencies as requested.

    Raises:
        PlannerError: wishes that contradict each other.
        ScheduleError: a job that the schedule does not fit.
        ProfileError: a profile that the policy cannot work with.
    """
    check_request(request)
    schedule, notes = build_schedule(profile, request)
    profile = profile.for_chunks(schedule.num_chunks)
    plan = Plan(
        request.policy,
        schedule,
        POLICIES[request.policy](schedule, profile),
        profile,
        make_conditions(profile, blocking_power_w=request.blocking_power_w),
    )
    if request.reconfigure == "default":
        return Planned(plan, None, notes)
    result = reconfigure(plan, RECONFIGURE_POLICIES[request.reconfigure])
    plan = replace(
        plan,
        policy=f"{request.policy}-{request.reconfigure}",
        frequency_mhz=result.frequency_mhz,
    )
    return Planned(plan, result, notes)


def check_request(request: PlanRequest) -> None:
    """Refuse wishes that no job can have.

    Raises:
        PlannerError: an unknown name, or names that contradict each other.
    """
    _check_name("policy", request.policy, POLICIES)
    _check_name("reconfigure policy", request.reconfigure, RECONFIGURE_NAMES)
    _check_name("schedule", request.schedule, (*SCHEDULES, *SCHEDULE_ALIASES))
    if request.reconfigure != "default" and request.policy != "envelope":
        raise PlannerError(
            f"Reconfiguring goes with the envelope policy, not with {request.policy}",
            value=request.reconfigure,
            remedy="Use --policy envelope, or --reconfigure default.",
        )


def build_schedule(profile: Profile, request: PlanRequest) -> tuple[Schedule, tuple[str, ...]]:
    """The requested order for a profile's pipeline, and notes on what limited it."""
    name = SCHEDULE_ALIASES.get(request.schedule, request.schedule)
    stages, microbatches = profile.num_stages, request.num_microbatches
    if name != "interleaved" and request.num_chunks > 1:
        raise PlannerError(
            f"Schedule {name} has one chunk a stage",
            value=request.num_chunks,
            remedy="Use --schedule interleaved for chunks.",
        )
    if name == "1f1b":
        return builders.one_f_one_b(stages, microbatches), ()
    if name == "gpipe":
        return builders.gpipe(stages, microbatches), ()
    if name == "interleaved":
        return builders.interleaved(stages, microbatches, request.num_chunks), ()
    extra = builders.envpipe_extra_forwards(
        [kinds[Kind.BACKWARD][0].time_s for kinds in profile.rows],
        [
            profile.row(stage, Kind.FORWARD, frequency).time_s
            for stage, frequency in enumerate(profile.optimal_frequency_mhz)
        ],
        microbatches,
        max_extra_forwards=request.max_extra_forwards,
        max_in_flight=_per_stage(request.max_in_flight, stages),
        max_warmup_step=request.max_warmup_step,
    )
    fit = fit_to_channel(stages, microbatches, extra, request.channel_capacity)
    notes = (fit.reason,) if fit.lowered else ()
    return builders.envpipe(stages, microbatches, fit.extra_forwards), notes


def _check_name(what: str, name: str, known: Collection[str]) -> None:
    if name not in known:
        raise PlannerError(f"Unknown {what}", value=name, remedy=f"Known: {', '.join(known)}.")


def _per_stage(limit: int | tuple[int, ...] | None, num_stages: int) -> Sequence[int] | None:
    if limit is None:
        return None
    if isinstance(limit, int):
        return [limit] * num_stages
    if len(limit) == 1:
        return list(limit) * num_stages
    if len(limit) != num_stages:
        raise PlannerError(
            "The limit on microbatches in flight must be one number, or one for each stage",
            value=limit,
            remedy=f"The pipeline has {num_stages} stages.",
        )
    return limit
