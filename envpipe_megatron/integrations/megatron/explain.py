"""Says what a job of Megatron-LM gets and why, before it is started: `envpipe explain`.

The job's own functions decide here as in training: `read_options`, `decide` and what `limits` has.
Variables of its ranks are looked for in this process's environment. No torch, GPU or Megatron is
needed. What only a job that runs can show is named as such.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from envpipe_megatron.core.channel_model import QUEUES_VARIABLE, hardware_capacity
from envpipe_megatron.core.kinds import ScheduleError
from envpipe_megatron.core.orders.builders import framework_order
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.integrations.levels import (
    Decision,
    Level,
    Limit,
    Predicate,
    above_one,
    decide,
    limits_of_arguments,
    on,
    why_whole_at,
)
from envpipe_megatron.integrations.megatron.limits import (
    LIMITS,
    against_order,
    check_metered,
    keep_sequence,
    keeps_whole,
)
from envpipe_megatron.runtime.job.options import LEVELS, JobOptions

#: GPUs of a node, where nobody says it.
_USUAL_NODE = 8
#: What no argument says, and a job finds out when it starts.
_AT_START = (
    "whether this process may set clocks: `envpipe doctor` says it for a machine",
    "the model's class and layers: other than GPTModel, Megatron's and Transformer Engine's are "
    "checked in the first iteration, as are sequences of varying length",
    "how much memory other orders may take: measured in the first steps",
)
#: Why level `order` keeps Megatron's order.
_KEPT = (
    "of another order than Megatron's (1f1b): virtual stages, and forwards that draw random "
    "numbers or scale FP8 by several earlier forwards. Megatron's dropout is 0.1 unless the job "
    "has --hidden-dropout 0 --attention-dropout 0"
)

#: Of which jobs figures are, and whether they were measured, emulated or computed.
_LOOP = "stages alike, 24 microbatches: emulated, by a model fitted to measurements"
_PUBLISHED = "GPT-3 175B, 24 microbatches: computed from measured profiles"
_ORDER_ONLY = "bf16, 8 microbatches, no clock changed: measured"
_EXPERTS = "four grouped experts, bf16, 8 microbatches, no clock changed: measured"
_COST = "clocks asked for at units of 9 ms, and not set: what that costs, measured"


@dataclass(frozen=True)
class Seen:
    """A result on one kind of GPU.

    Args:
        level: of the job.
        gpu: the product.
        stages: p.
        chunks: V; 1 without virtual stages.
        split: whether backwards were in two parts.
        result: against Megatron's own order at the highest clocks.
        how: of which job, and whether it was measured, emulated or computed.
    """

    level: Level
    gpu: str
    stages: int
    chunks: int
    split: bool
    result: str
    how: str

    def __str__(self) -> str:
        chunks = f" of {self.chunks} virtual ones" if self.chunks > 1 else ""
        split = "split backwards, " if self.split else ""
        return f"{self.gpu}, {self.stages} stages{chunks}: {self.result} ({split}{self.how})"


#: Each figure is on a page of the docs, which says how it was made. Nothing is decided by it.
SEEN = (
    Seen(Level.ORDER, "A100 SXM", 4, 1, True, "14.86 % less energy", _LOOP),
    Seen(Level.ORDER, "A100 SXM", 8, 1, True, "26.89 % less energy", _LOOP),
    Seen(Level.ORDER, "A40", 4, 1, True, "19.58 % less energy", _LOOP),
    Seen(Level.ORDER, "A40", 8, 1, True, "25.36 % less energy", _LOOP),
    Seen(Level.ORDER, "A100 SXM", 4, 1, False, "9.70 % less energy", _LOOP),
    Seen(Level.ORDER, "A100 SXM", 8, 1, False, "15.72 % less energy", _LOOP),
    Seen(Level.ORDER, "A40", 4, 1, False, "12.06 % less energy", _LOOP),
    Seen(Level.ORDER, "A40", 8, 1, False, "16.38 % less energy", _LOOP),
    Seen(Level.ORDER, "A100 SXM", 4, 2, False, "5.3 % less energy", _LOOP),
    Seen(Level.ORDER, "A100 SXM", 4, 4, False, "2.8 % less energy", _LOOP),
    Seen(Level.ORDER, "A40", 4, 2, False, "7.9 % less energy", _LOOP),
    Seen(Level.ORDER, "A40", 4, 4, False, "4.3 % less energy", _LOOP),
    Seen(Level.ORDER, "A100 SXM", 8, 1, False, "21.6 % less energy", _PUBLISHED),
    Seen(Level.ORDER, "A40", 8, 1, False, "20.2 % less energy", _PUBLISHED),
    Seen(Level.ORDER, "H200", 2, 1, True, "8.2 % less time, 4.7 % less energy", _ORDER_ONLY),
    Seen(Level.ORDER, "H200", 4, 1, True, "17.7 % less time, 7.1 % less energy", _ORDER_ONLY),
    Seen(Level.ORDER, "H200", 4, 2, True, "7.0 % less time, 3.2 % less energy", _ORDER_ONLY),
    Seen(Level.ORDER, "H200", 4, 1, False, "6.4 % less time, 3.0 % less energy", _ORDER_ONLY),
    Seen(Level.ORDER, "H200", 4, 2, False, "0.6 % less time, within noise", _ORDER_ONLY),
    Seen(Level.ORDER, "H200", 2, 1, False, "6.1 % less time, 2.7 % less energy", _EXPERTS),
    Seen(Level.UNITS, "A100 SXM", 4, 1, False, "1.7 % less energy", _LOOP),
    Seen(Level.UNITS, "A100 SXM", 4, 2, False, "4.1 % less energy", _LOOP),
    Seen(Level.UNITS, "A100 SXM", 4, 4, False, "2.0 % less energy", _LOOP),
    Seen(Level.UNITS, "A40", 4, 1, False, "1.6 % less energy", _LOOP),
    Seen(Level.UNITS, "A40", 4, 2, False, "5.9 % less energy", _LOOP),
    Seen(Level.UNITS, "A40", 4, 4, False, "3.0 % less energy", _LOOP),
    Seen(Level.UNITS, "H200", 2, 2, False, "0.23 % more time", _COST),
)

#: What nobody has tried.
_NO_CLOCK = (
    "changing the clock of a real GPU in training: savings by clocks are emulated or computed"
)
_MOST_GPUS = 4
_MORE_GPUS = f"more than {_MOST_GPUS} GPUs, or several machines"
_DAYS = "training for days: the longest real run had 1,000 iterations"
#: Accepted, and not compared with Megatron's own results.
_NOT_COMPARED: Mapping[str, Predicate] = {
    "selective recomputation": (
        lambda args: getattr(args, "recompute_granularity", None) == "selective"
    ),
    "optimizers other than Adam": (
        lambda args: (getattr(args, "optimizer", None) or "adam") != "adam"
    ),
    "--async-save": on("async_save"),
}


class PlannedJob:
    """A job that was not started.

    Where neither number is given it has one pipeline, on nodes of eight; else as few nodes as it
    takes. Raises EnvPipeError if its ranks do not divide into pipelines.

    Args:
        args: its arguments, by Megatron-LM's names.
        options: EnvPipe's.
        nodes: how many there are.
        ranks_per_node: GPUs of a node.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        options: JobOptions,
        *,
        nodes: int | None = None,
        ranks_per_node: int | None = None,
    ) -> None:
        self.args = args
        self.options = options
        #: Stages of the pipeline, p, and chunks of a stage, V.
        self.stages: int = args.pipeline_model_parallel_size
        self.chunks: int = args.virtual_pipeline_model_parallel_size or 1
        self.ranks_per_node = ranks_per_node or _USUAL_NODE
        tensor, context = args.tensor_model_parallel_size, args.context_parallel_size
        of_one: int = self.stages * tensor * context
        as_few = math.lcm(of_one, ranks_per_node or 1)
        self.ranks = nodes * self.ranks_per_node if nodes else as_few
        if self.ranks % of_one:
            raise EnvPipeError(
                f"{self.ranks} ranks cannot be divided into pipelines of {of_one}",
                value=f"{self.stages} stages, tensor parallelism {tensor}, context parallelism "
                f"{context}",
                remedy="Give another number of ranks or nodes.",
            )
        #: The number of pipelines.
        self.replicas = self.ranks // of_one
        batch, size = (getattr(args, f"{of}_batch_size", None) for of in ("global", "micro"))
        #: M of a batch of full size; None where arguments do not say it.
        self.microbatches: int | None = None
        if isinstance(batch, int) and isinstance(size, int):
            self.microbatches = batch // (size * self.replicas)

    def over_nccl(self) -> int:
        """Return over how many boundaries between stages NCCL carries messages for certain.

        Those are all, if that is asked for, or the ones that lie between nodes in some pipeline.
        """
        if self.options.channel == "receives":
            return self.stages - 1
        between = 1 if getattr(self.args, "use_tp_pp_dp_mapping", False) else self.replicas
        stride = between * self.ranks // (self.stages * self.replicas)

        def node_of(stage: int, pipeline: int) -> int:
            return (stage * stride + pipeline) // self.ranks_per_node

        return sum(
            any(node_of(stage, each) != node_of(stage + 1, each) for each in range(stride))
            for stage in range(self.stages - 1)
        )


def explain(job: PlannedJob) -> dict[str, list[str]]:
    """Return what the job gets and why, in lines below titles.

    Raises EnvPipeError where the job would end before it trains.
    """
    check_metered(job.args)
    options = keep_sequence(job.options, job.chunks, job.args)
    limits = limits_of_arguments(job.args, LIMITS)
    checks = options.self_check != "off"
    decision = decide(limits, options.level, checks=checks)
    why = _against_order_over_nccl(job, decision, hardware_capacity(os.environ))
    if why and job.over_nccl():
        features = ", ".join(limit.feature for limit in decision.to_check) or "this job"
        limits.append(Limit(features, Level.UNITS, why))
        decision = decide(limits, options.level, checks=checks)
    at = options.at(decision.level)
    whole = why_whole_at(at, decision.level, ", ".join(keeps_whole(job.args)))
    clocks = at.gpu_control != "none"
    seen = _seen_like(job, decision.level, splits=not whole, clocks=clocks)
    return {
        "What it gets": list(_gets(job, decision, at)),
        "What is in the way of the next level": list(
            _in_the_way(decision, kept=options.scheduling != job.options.scheduling)
        ),
        "What is proven, and what is checked at start": list(_proven(decision, whole)),
        "What carries messages between stages": list(_carriers(job, decision, at)),
        "What was seen of such jobs, against Megatron's own order at the highest clocks": (
            list(map(str, seen)) or ["no figure is known"]
        ),
        "Never tried": _never_tried(job, decision.level),
        "Known only when it starts": list(_AT_START),
    }


def _gets(job: PlannedJob, decision: Decision, at: JobOptions) -> Iterator[str]:
    level = decision.level
    checks = ", if its first iterations show that results are the same" if decision.to_check else ""
    yield f"level {level}: {LEVELS[level]}{checks}"
    own = "interleaved" if job.chunks > 1 else "1f1b"
    order = at.scheduling if level is Level.ORDER else own
    if at.only_measures():
        yield "nothing is changed, only measured"
    else:
        without = at.without_control()
        if at.gpu_control != "none":
            yield at.in_words(order, "the highest clock")
        yield f"where no clock may be set: {without.order_in_words(at)}"
    chunks = f" of {job.chunks} virtual ones" if job.chunks > 1 else ""
    yield (
        f"ranks: {job.ranks} on nodes of {job.ranks_per_node}; stages: {job.stages}{chunks}; "
        f"microbatches: {job.microbatches or 'not known'}"
    )


def _in_the_way(decision: Decision, *, kept: bool) -> Iterator[str]:
    """Yield each limit once, below the lowest level that it rules out.

    `kept`: the job keeps Megatron's order (`keep_sequence`).
    """
    if not decision.against:
        yield "nothing: there is no higher level"
    if kept and decision.level is Level.ORDER:
        yield _KEPT
    named = set()
    for level, limits in decision.against.items():
        for limit in limits:
            if limit.feature not in named:
                named.add(limit.feature)
                yield f"of level {level}: {limit}"
        if not limits:
            yield f"of level {level}: it was not asked for (--envpipe-level)"


def _proven(decision: Decision, whole: str) -> Iterator[str]:
    if decision.level is not Level.ORDER:
        yield "losses and gradients are Megatron's own: its functions run in its order"
        return
    yield (
        "another order gives Megatron's losses and gradients, equal to the last bit: by tests for "
        "GPTModel, virtual stages, Transformer Engine and FP8 with delayed scaling"
    )
    for limit in decision.to_check:
        yield f"checked in the first iterations, else level units: {limit}"
    if whole:
        yield f"backwards stay whole: {whole}"
    else:
        yield "checked in the first iterations, else whole: backwards in two parts"


def _against_order_over_nccl(
    job: PlannedJob, decision: Decision, capacity: int | None
) -> str | None:
    """Return what a channel over NCCL of a capacity has against level `order`, None if nothing."""
    if decision.level is not Level.ORDER:
        return None
    count = job.microbatches or job.stages
    group_size = getattr(job.args, "microbatch_group_size_per_virtual_pipeline_stage", None)
    try:
        own = framework_order(job.stages, count, job.chunks, group_size)
    except ScheduleError:  # Megatron says what is wrong with such a job
        return None
    return against_order(decision, own, capacity)


def _carriers(job: PlannedJob, decision: Decision, at: JobOptions) -> Iterator[str]:
    if job.stages == 1:
        yield "there are none: the job has no pipeline"
        return
    if decision.level is not Level.ORDER:
        yield "Megatron's own"
        return
    boundaries, over_nccl = job.stages - 1, job.over_nccl()
    if over_nccl:
        where = "between nodes" if at.channel == "auto" else "as asked for"
        yield f"{where} ({over_nccl} of {boundaries} boundaries): NCCL's receives"
    if inside := boundaries - over_nccl:
        yield (
            f"within nodes ({inside} of {boundaries} boundaries): one-sided copies where GPUs "
            "reach each other's memory and cuda-bindings is installed, else NCCL's receives"
        )
    queues, args = os.environ.get(QUEUES_VARIABLE), job.args
    demanded = ""
    if queues is None and max(args.tensor_model_parallel_size, args.context_parallel_size) > 1:
        demanded = ", which is not set here, and Megatron demands it before Blackwell"
        queues = "1"
    capacity = hardware_capacity({QUEUES_VARIABLE: queues or ""})
    if capacity is not None:
        why = _against_order_over_nccl(job, decision, capacity)
        then = f"level units: {why}" if why else "neighbours' extra forwards are kept close"
        yield f"over NCCL with {QUEUES_VARIABLE}={queues}{demanded}: {then}"


def _seen_like(job: PlannedJob, level: Level, *, splits: bool, clocks: bool) -> list[Seen]:
    """Return what was seen at a level: of each GPU and way what is nearest in stages and chunks.

    Split backwards are only of jobs that may split theirs, and there before whole ones; what was
    measured of the order is of jobs with experts where this one has any. Without `clocks`, no clock
    was changed.
    """
    measured, other = _ORDER_ONLY, _EXPERTS
    if above_one("num_experts")(job.args):
        measured, other = other, measured
    like = [
        row
        for row in SEEN
        if row.level is level
        and (row.chunks > 1) is (job.chunks > 1)
        and row.split <= splits
        and row.how != other
        and (clocks or row.how == measured)
    ]
    # The last of a key counts.
    like.sort(
        key=lambda row: (row.split, -abs(row.stages - job.stages), -abs(row.chunks - job.chunks))
    )
    return list({(row.gpu, row.how): row for row in like}.values())


def _never_tried(job: PlannedJob, level: Level) -> list[str]:
    """Return what nobody has tried of such jobs."""
    not_compared = [what for what, asks in _NOT_COMPARED.items() if asks(job.args)]
    return [
        *([] if level is Level.OBSERVE else [_NO_CLOCK]),
        *([_MORE_GPUS] if job.ranks > _MOST_GPUS else []),
        *(f"{what}: accepted, and not compared" for what in not_compared),
        _DAYS,
    ]
