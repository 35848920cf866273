"""Makes one rank's part of a training job, of any framework: its device, channel and session."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from envpipe_megatron import __version__
from envpipe_megatron.core.channel_model import QUEUES_VARIABLE
from envpipe_megatron.core.orders.builders import framework_order
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.core.sidecar import Sidecar
from envpipe_megatron.errors import EnvPipeError, first_line
from envpipe_megatron.gpu.control import Control
from envpipe_megatron.integrations.device import DeviceError, open_device
from envpipe_megatron.integrations.levels import Decision, JobError, Limit, version_of, why_whole_at
from envpipe_megatron.policies.objective import Goal
from envpipe_megatron.policies.problem import check_own_within
from envpipe_megatron.policies.schedules import SCHEDULES
from envpipe_megatron.runtime.channel.collectives import (
    CollectivesError,
    all_pipelines,
    make_collectives,
    of_all_ranks,
)
from envpipe_megatron.runtime.channel.links import make_channel, timeout_of
from envpipe_megatron.runtime.channel.p2p import P2PChannel
from envpipe_megatron.runtime.job.options import OPTIONS, OWN_ORDERS, JobOptions, Level
from envpipe_megatron.runtime.job.session import Session

T = TypeVar("T")

#: Packages whose kernels units may run, beside torch's.
_KERNELS = ("transformer-engine", "flash-attn", "apex", "triton")


class WithoutEnvPipeError(EnvPipeError):
    """A job that can only train without EnvPipe; every rank raises it, and the first says why."""


@dataclass(frozen=True)
class FrameworkJob:
    """A rank's part of a job, as its framework has it.

    Args:
        pipeline_group: its ranks, in the order of their stages. Its time-out, or the default
            group's if that is longer, is the time after which a silent rank is an error.
        num_microbatches: M, of each pipeline.
        messages_vary: stages may send another shape each time.
        runs_units: the framework runs units and sends messages itself at every level, in any order
            at level `order`; else it does so only below that level.
        why_whole: why no unit at level `order` is a part of a backward, the same on all ranks;
            empty if units may be, None if the framework runs no such parts.
        framework_order: by default Megatron's of one chunk.
        group_size: of chunks, as for `PlanRequest`.
        sidecar: facts for the online profile's sidecar.
        bill: see `Session.describe_job`.
        same_job: what decides the time and energy of units (see `JobOptions`), without the GPU.
    """

    pipeline_group: dist.ProcessGroup | None
    num_microbatches: int
    messages_vary: bool = False
    runs_units: bool = False
    why_whole: str | None = None
    framework_order: Schedule | None = None
    group_size: int | None = None
    sidecar: Sidecar = field(default_factory=Sidecar)
    bill: Mapping[str, Any] = field(default_factory=dict)
    same_job: Mapping[str, object] = field(default_factory=dict)

    @property
    def stage(self) -> int:
        """Return the stage of this rank."""
        return dist.get_rank(self.pipeline_group)

    @property
    def num_stages(self) -> int:
        """Return the number of stages of the pipeline, p."""
        return dist.get_world_size(self.pipeline_group)


def open_job(
    options: JobOptions,
    framework: FrameworkJob,
    say: Callable[[str], None],
    decision: Decision,
    notes: Sequence[str],
    *,
    busy: bool,
) -> Session:
    """Open this rank's GPU, channel and session, and print what the job does.

    Every rank calls it, at one point of the program.

    Args:
        say: prints a line, only on the planning rank.
        decision: the job's level. At `uniform` it gets one clock, within the slowdown that options
            allow, in place of what else they ask for; at `observe` nothing is changed.
        notes: for the bill, why it has this level.
        busy: whether another job of this process meters its GPU and sets its clock.

    Raises:
        JobError: ranks that were started differently, too few microbatches in flight, or a profile
            or plan where units have no clocks of their own.
        WithoutEnvPipeError: a GPU cannot even be read or is busy, or ranks cannot reach each other
            or send messages, and neither control nor a profile is required.
        EnvPipeError: no control though it is required, or another rank raised one.
    """
    level = decision.level
    if level < Level.UNITS and (options.profile or options.plan or options.profile_only):
        raise JobError(
            "A profile is of units, and this job's level is below that",
            value=str(level),
            remedy="Leave out --envpipe-profile, -profile-only and -plan.",
        )
    count, num_stages = framework.num_microbatches, framework.num_stages
    own = framework.framework_order or framework_order(num_stages, count)
    if options.scheduling == "1f1b":  # means the framework's own order
        if framework.runs_units:
            level = min(level, Level.UNITS)
        else:
            options = replace(options, scheduling=own.name)
    orders = level is Level.ORDER
    chunks = own.num_chunks if orders else 1
    why_whole = options.why_whole
    if framework.why_whole is not None:
        why_whole = why_whole_at(options, level, framework.why_whole)
    keeps_order = framework.runs_units or not orders
    for_time = options.objective == Goal.TIME and level is not Level.OBSERVE
    options = replace(
        options.at(level),
        num_microbatches=count,
        num_chunks=chunks,
        group_size=framework.group_size if chunks > 1 else None,
        runs_units=framework.runs_units,
        why_whole=why_whole,
        sidecar=framework.sidecar,
    )
    if level is Level.OBSERVE and torch.cuda.is_available():  # without, a GPU is emulated
        options = replace(options, gpu_control="none")
    if for_time and options.scheduling in OWN_ORDERS:
        notes = (*notes, "Objective time needs another order, and this job keeps its own")
        options = options.measuring()
    require = options.require_control or (options.profile_only and options.gpu_control != "dry_run")
    options = replace(options, require_control=require)
    made = partial(_made, say, require)
    made(_check_free, busy)
    pipeline = dist.get_process_group_ranks(framework.pipeline_group)
    timeout = timeout_of(framework.pipeline_group)
    collectives = made(make_collectives, all_pipelines(pipeline), timeout)
    check_same_everywhere(_of_all_ranks(options))
    order_name = options.scheduling if orders else own.name
    check_in_flight(options.max_in_flight, own)
    _check_split_order(options, why_whole)
    device = made(open_device, collectives, num_stages, options)
    if keeps_order:  # and sends its messages itself
        channel = P2PChannel(pipeline, framework.stage, {})
    else:
        make = partial(
            make_channel,
            timeout=timeout,
            carrier=options.channel,
            num_chunks=chunks,
            vary=framework.messages_vary,
        )
        channel = made(make, framework.pipeline_group, collectives)
    # A profile that is asked for is measured, even if an earlier start left one.
    if not options.profile_only:
        units = _fingerprint(framework.same_job, options, device.gpu.name)
        # Other messages disturb units in another way.
        options = replace(options, fingerprint={**units, "keeps_order": keeps_order})
    session = Session(options, device.gpu, device.make_executor, channel, collectives, say=say)
    session.state.notes += tuple(notes)
    if orders and framework.why_whole and why_whole == framework.why_whole:
        session.state.notes += (f"Backwards stay whole: {why_whole}",)
    session.describe_job(
        {
            **framework.bill,
            "level": str(Level.OBSERVE if session.options.only_measures() else level),
            "type": options.type,
            "scheduling": order_name,
            "reconfigure": options.reconfigure,
            "objective": session.options.goal.goal,
            "notes": session.summary()["notes"],
        }
    )
    session.parts.say(f"{decision}; {_about(session, options, order_name, device.control)}")
    return session


def _about(session: Session, options: JobOptions, order_name: str, control: Control) -> str:
    """Return what a job does that was asked for these options, in a line."""
    gpu, channel = session.parts.gpu, session.parts.channel
    if session.refused:
        control = Control(options.gpu_control, None, session.refused)
    locked = control.backend is not None and gpu.changes_clock
    clocks = "the highest clock" if locked else "the clocks as they are"
    runs = session.options if session.options.changes_only_order else options
    asked = runs.in_words(order_name, clocks)
    if session.options.only_measures():
        instead = "" if options.type == "baseline" else f", not {asked}"
        asked = f"only measuring, in the framework's order and at {clocks}{instead}"
    lines = [
        f"EnvPipe {__version__} is active: {asked}",
        f"clocks of {gpu.name}: {control.backend or 'left as they are'} ({control.why})",
        f"in flight: {options.max_in_flight or 'no limit'}; "
        f"output: {session.parts.folder.path or 'none'}",
        *session.state.notes,
    ]
    if channel.about:
        lines.append(f"messages: {channel.about}")
    if channel.capacity is not None:  # over one hardware queue
        lines.append(
            f"{QUEUES_VARIABLE} is below 8: {channel.capacity} message(s) may wait "
            "between neighbours, so their extra forwards are kept close"
        )
    return "; ".join(lines)


def _made(say: Callable[[str], None], required: bool, make: Callable[..., T], *arguments: Any) -> T:
    """Make a part of the job on all ranks.

    Raises on all ranks if one of them cannot: its own error where the part is `required` or the
    device is wrong, else a WithoutEnvPipeError.
    """
    failure: Exception | None = None
    try:
        made = make(*arguments)
    except Exception as error:
        failure = error
    own = "" if failure is None else str(failure) or repr(failure)
    wrong, why = max(of_all_ranks((isinstance(failure, DeviceError), own)))
    if not why:
        return made
    if wrong or required:
        raise failure or CollectivesError(why)
    if dist.get_rank() == 0:
        say(f"This job trains without EnvPipe: {why}")
    raise WithoutEnvPipeError(why) from failure


def _check_free(busy: bool) -> None:
    """Refuse by a JobError a second job of this process: both would set one clock, and bill it."""
    if busy:
        raise JobError(
            "Another job of this process has not ended",
            remedy="Call end_training, or close, of what runs that one, before this one is made.",
        )


def say_line(text: str) -> None:
    """Print a line of the log; only the planning rank calls it.

    A log that takes none, as on a full disk or by a stand-in of the script's, ends no training.
    """
    try:
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        line = f"[envpipe] {text}".encode(encoding, "backslashreplace").decode(encoding)
        print(line, flush=True)
    except Exception:
        from envpipe_megatron.console import drop_output  # for such a log only

        with suppress(Exception):  # else what is left fails again as the process ends
            kept = os.dup(sys.stdout.fileno())
            drop_output(sys.stdout)
            sys.stdout.flush()
            os.dup2(kept, sys.stdout.fileno())
            os.close(kept)


def same_by_facts(facts: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return what decides the time and energy of units by what a user says of the job.

    Without facts, no job can be recognised as a restart. EnvPipeError: no values by name.
    """
    if facts is None:
        return {"start": time.time_ns()}
    if not isinstance(facts, Mapping):
        raise EnvPipeError(
            "The facts of a job are values by name",
            value=facts,
            remedy='Give a mapping, such as {"model": "GPT, 24 layers"}.',
        )
    return facts


def check_same_everywhere(facts: Mapping[str, object]) -> None:
    """Refuse ranks that would wait for each other forever: a JobError on all, naming options."""
    everyone = of_all_ranks({name: str(value) for name, value in facts.items()})
    values = {name: sorted({own.get(name, "") for own in everyone}) for name in facts}
    different = {name: each for name, each in values.items() if len(each) > 1}
    if different:
        raise JobError(
            "The ranks of this job were started differently",
            value=different,
            remedy="Give all nodes the same options, the same ENVPIPE_TYPE, ENVPIPE_SCHEDULING, "
            f"ENVPIPE_RECONFIGURE and {QUEUES_VARIABLE}, and one version of the package.",
        )


def limits_of_replicas(num_microbatches: int) -> list[Limit]:
    """Return the limit of replicas with other numbers of microbatches; every rank calls it."""
    feature = "replicas with other numbers of microbatches"
    limit = Limit(feature, Level.OBSERVE, "they cannot follow one plan")
    return [limit] if len(set(of_all_ranks(num_microbatches))) > 1 else []


def limits_of_ranks(own: Iterable[Limit]) -> list[Limit]:
    """Return the limits of all ranks, the same on each; every rank calls it.

    Stages may have models of different classes, and layers of different kinds.
    """
    return list(dict.fromkeys(chain.from_iterable(of_all_ranks(list(own)))))


def _of_all_ranks(options: JobOptions) -> dict[str, object]:
    # Paths may differ from node to node: only the planner reads, and says where.
    given = {name: getattr(options, name) for name in OPTIONS}
    own = {k: v is not None if isinstance(v, Path) else v for k, v in given.items()}
    return {
        **own,
        QUEUES_VARIABLE: os.environ.get(QUEUES_VARIABLE),
        "version": __version__,
    }


def _check_split_order(options: JobOptions, why_whole: str) -> None:
    """Refuse by a JobError an order that splits backwards by name where the job cannot run it."""
    row = SCHEDULES[options.scheduling]
    if not row.splits:
        return
    against = f"backwards of this job are whole: {why_whole}" if why_whole else ""
    if row.chunks not in (None, options.num_chunks):
        against = f"it is of {row.chunks} chunk a stage, and this job has {options.num_chunks}"
    if against:
        raise JobError(
            f"The order {row.name} cannot be had: {against}",
            remedy="Leave --envpipe-scheduling out: the best order that the job runs is planned.",
        )


def check_in_flight(limit: int | tuple[int, ...] | str | None, own: Schedule) -> None:
    """Refuse by a JobError a limit below what the framework's own order holds."""
    if limit is None or isinstance(limit, str):
        return
    limits = limit if isinstance(limit, tuple) else (limit,) * own.num_stages
    check_own_within(own, [most * own.num_chunks for most in limits], JobError)


def _fingerprint(
    same_job: Mapping[str, object], options: JobOptions, gpu: str
) -> dict[str, object]:
    """Return what decides the time and energy of units, for `JobOptions`."""
    # torch's types and enumerations become text: the facts are written as JSON.
    job: dict[str, object] = {
        name: value if isinstance(value, (str, int, float, list, type(None))) else str(value)
        for name, value in same_job.items()
    }
    return job | {
        **{name: version_of(name) for name in _KERNELS},
        "gpu": gpu,
        "gpu_preset": options.gpu,
        "torch": torch.__version__,
        "cudnn": _cudnn_version(),
    }


def _cudnn_version() -> object:
    """Return torch's version of cuDNN, or its error where another one is loaded."""
    try:
        return torch.backends.cudnn.version()  # type: ignore[no-untyped-call]  # torch's
    except RuntimeError as error:
        return first_line(error)
