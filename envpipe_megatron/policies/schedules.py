"""The table of schedules: the orders that commands and jobs know by name.

A new one of this project is a module in `core.orders` and a row here. Another package adds one by
an entry point of the group `envpipe_megatron.schedules` (see `frequencies.added_functions`): a
function of a `Profile` and a `Problem` that returns a `Schedule`. EnvPipe's own order is here too:
the framework's, with extra forwards by EnvPipe's rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from envpipe_megatron.core.channel_model import CHANNEL_REMEDY
from envpipe_megatron.core.kinds import Kind, ScheduleError
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.orders.builders import zero_bubble, zero_bubble_v
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.errors import EnvPipeError, plain
from envpipe_megatron.policies.frequencies import added_functions
from envpipe_megatron.policies.problem import Problem, check_own_within, envpipe_counts

#: Measured on GPT-3 175B in two chunks (A100s, A40s; 16 to 96 microbatches): 0.1 to 0.4 points.
_IN_CHUNKS = (
    "Stages have chunks, so the order is Megatron's own: there EnvPipe's extra forwards lose. Plan "
    "with --schedule auto for a better one."
)


def envpipe_order(problem: Problem) -> tuple[Schedule, tuple[str, ...]]:
    """Return EnvPipe's order for a problem's job, and notes on what limited it.

    With chunks it is Megatron's own, which saves more than with extra forwards by EnvPipe's rule.
    ScheduleError: that holds more than the limit.
    """
    if problem.num_chunks > 1:
        check_own_within(problem.own_order, problem.max_in_flight)
        return problem.own_order, (_IN_CHUNKS,)
    limits = problem.order_limits()
    wanted = envpipe_counts(problem.profile, limits.most)
    extra = limits.fit(wanted)
    lowered = ", ".join(
        f"stage {stage} from {before} to {after}"
        for stage, (before, after) in enumerate(zip(wanted, extra, strict=True))
        if after < before
    )
    note = (
        f"Extra forwards lowered on {lowered}: on a channel of capacity {problem.channel_capacity} "
        f"they may fall by at most {limits.max_fall} from a stage to the next. {CHANNEL_REMEDY}"
    )
    order = builders.envpipe(problem.num_stages, problem.num_microbatches, extra)
    return order, (note,) if lowered else ()


#: An order, and notes on what limited it.
Built = tuple[Schedule, tuple[str, ...]]

_GROUPS = ("group_size",)
_LIMITS = ("max_extra_forwards", "max_in_flight", "channel_capacity")


@dataclass(frozen=True)
class ScheduleRow:
    """A row of the table.

    Args:
        name: what the order is called.
        build: makes it for a checked problem; None: it is planned together with the clocks.
        chunks: the chunks of each stage; None for any number.
        takes: the fields of a `PlanRequest` that it may be given.
        splits: whether it splits backwards; None if only the order itself shows it.
        in_jobs: whether the options of a job name it. Not so if its framework's options decide
            about it, or if no job runs it yet.
        alias: another name.
    """

    name: str
    build: Callable[[Problem], Schedule | Built] | None
    chunks: int | None = 1
    takes: tuple[str, ...] = ()
    splits: bool | None = False
    in_jobs: bool = True
    alias: str | None = None


def _interleaved(problem: Problem, *, combined: bool = False) -> Schedule:
    job = problem.num_stages, problem.num_microbatches, problem.num_chunks, problem.group_size
    return builders.interleaved(*job, combined=combined)


def _zero_bubble(
    problem: Problem, build: Callable[[int, int, int], Schedule], most: Callable[[int], int]
) -> Schedule:
    """Return ZB-H1, ZB-H2 or ZB-V for equal units, within the problem's limit of memory.

    `most` says how many microbatches x chunks each of p stages holds at most.
    """
    if Kind.INPUT_GRADIENT not in problem.profile.kinds:
        raise EnvPipeError(
            f"Schedule {problem.schedule} splits backwards, and {problem.profile.source} does not "
            "say what the parts take",
            remedy="Add --split-overhead 0.01 to assume halves that take 1 % more together, or "
            "give rows of input-gradient and weight-gradient.",
        )
    stages = problem.num_stages
    in_flight, shares = problem.max_in_flight, problem.profile.weight_shares
    limit = min(most(stages), *(in_flight or (most(stages),)))
    order = build(stages, problem.num_microbatches, limit)
    while not problem.allows(order):  # one that waits takes more than one in flight
        limit -= 1
        try:
            order = build(stages, problem.num_microbatches, limit)
        except ScheduleError:
            held = plain(order.peak_held(shares).round(1).tolist())
            raise EnvPipeError(
                f"Schedule {problem.schedule} needs memory of {held} microbatches (x chunks) in "
                "flight by stage, since a pending weight gradient takes more than one",
                value=in_flight,
                remedy="Allow more in flight, or use --schedule auto.",
            ) from None
    return order


def _zero_bubble_row(
    name: str, build: Any, most: Callable[[int], int], chunks: int = 1
) -> ScheduleRow:
    make = partial(_zero_bubble, build=build, most=most)
    # No framework lays out a model in a V.
    return ScheduleRow(name, make, chunks, ("max_in_flight",), splits=True, in_jobs=chunks == 1)


_ROWS = (
    ScheduleRow("1f1b", lambda job: builders.one_f_one_b(job.num_stages, job.num_microbatches)),
    ScheduleRow(
        "gpipe",
        lambda job: builders.gpipe(job.num_stages, job.num_microbatches),
        in_jobs=False,
    ),
    ScheduleRow("interleaved", _interleaved, None, _GROUPS, in_jobs=False),
    ScheduleRow("envpipe", envpipe_order, None, (*_GROUPS, *_LIMITS), alias="ours"),
    ScheduleRow("auto", None, None, (*_GROUPS, *_LIMITS), splits=None),
    ScheduleRow(
        "interleaved-combined",
        partial(_interleaved, combined=True),
        None,
        _GROUPS,
        in_jobs=False,
    ),
    ScheduleRow(
        "breadth-first",
        lambda job: builders.breadth_first(job.num_stages, job.num_microbatches, job.num_chunks),
        None,
        in_jobs=False,
    ),
    _zero_bubble_row("zb-h1", zero_bubble, lambda p: p),
    _zero_bubble_row("zb-h2", zero_bubble, lambda p: 2 * p - 1),
    _zero_bubble_row("zb-v", zero_bubble_v, lambda p: 2 * p, chunks=2),
)


def _table(rows: Iterable[ScheduleRow]) -> dict[str, ScheduleRow]:
    """Return rows by name, then those of other packages, then rows by their other names."""
    by_name = {row.name: row for row in rows}
    aliases = {row.alias: row for row in rows if row.alias is not None}
    added = added_functions("envpipe_megatron.schedules", known=(*by_name, *aliases))
    for name, make in added.items():
        by_name[name] = ScheduleRow(name, partial(_of_package, make), None, _GROUPS, splits=None)
    return by_name | aliases


def _of_package(make: Callable[..., Schedule], problem: Problem) -> Schedule:
    return make(problem.profile, problem)


#: By name, and by alias.
SCHEDULES = _table(_ROWS)


def that_take(field: str) -> str:
    """Name the schedules that may be given a field, for messages."""
    *others, last = (row.name for row in _ROWS if field in row.takes)
    return f"{', '.join(others)} or {last}"


def build_order(problem: Problem) -> Built:
    """Return the order of a problem, not planned with the clocks, and notes on what limited it.

    EnvPipeError: a function of another package made an order of another job.
    """
    built: Schedule | Built
    if problem.order is not None:
        built, name = problem.order, f"'{problem.order.name}'"
    else:
        build, name = SCHEDULES[problem.schedule].build, problem.schedule
        assert build is not None
        built = build(problem)
    schedule, notes = (built, ()) if isinstance(built, Schedule) else built
    job = (problem.num_stages, problem.num_microbatches, problem.num_chunks)
    made = (schedule.num_stages, schedule.num_microbatches, schedule.num_chunks)
    if made != job:
        raise EnvPipeError(
            f"Schedule {name} has {_counts(*made)}, and the job has {_counts(*job)}",
            remedy="Give an order of the job, or fix the function that builds it.",
        )
    if problem.profile.assumed is not None and not schedule.split:
        raise EnvPipeError(
            f"Schedule {name} splits no backward, and the cost of splitting is given",
            remedy="Leave --split-overhead out, or use --schedule auto.",
        )
    return schedule, notes


def _counts(stages: int, microbatches: int, chunks: int) -> str:
    return f"{stages} stages, {microbatches} microbatches and {chunks} chunks a stage"
