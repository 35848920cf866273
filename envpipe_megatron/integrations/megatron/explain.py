"""Says what a job of Megatron-LM gets and why, before it is started: `envpipe explain`.

The job's own functions decide here as in training: `read_options`, `decide` and what `limits` has.
Variables of its ranks are looked for in this process's environment. No torch, GPU or Megatron is
needed. What shows only in a job that runs is named as such.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass

from envpipe_megatron.core.channel_model import QUEUES_VARIABLE, hardware_capacity
from envpipe_megatron.core.kinds import ScheduleError
from envpipe_megatron.core.orders.builders import framework_order
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.integrations.levels import (
    Decision,
    Level,
    Limit,
    decide,
    limits_of_arguments,
)
from envpipe_megatron.integrations.megatron.evidence import never_tried, seen_like
from envpipe_megatron.integrations.megatron.limits import (
    LIMITS,
    against_order,
    check_metered,
    keep_sequence,
    keeps_whole,
)
from envpipe_megatron.runtime.job.given import LEVELS
from envpipe_megatron.runtime.job.options import JobOptions

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


@dataclass(frozen=True)
class PlannedJob:
    """A job that was not started.

    Args:
        args: its arguments, by Megatron-LM's names.
        options: EnvPipe's.
        ranks: its world size.
        ranks_per_node: GPUs of a node.
    """

    args: argparse.Namespace
    options: JobOptions
    ranks: int
    ranks_per_node: int

    @property
    def stages(self) -> int:
        """Number of stages of the pipeline, p."""
        stages: int = self.args.pipeline_model_parallel_size
        return stages

    @property
    def chunks(self) -> int:
        """Chunks of a stage, V."""
        return self.args.virtual_pipeline_model_parallel_size or 1

    @property
    def own_order(self) -> str:
        """The name of Megatron's order."""
        return "interleaved" if self.chunks > 1 else "1f1b"

    def replicas(self) -> int:
        """Return the number of pipelines; an EnvPipeError if ranks do not divide into them."""
        args = self.args
        of_one: int = self.stages * args.tensor_model_parallel_size * args.context_parallel_size
        if self.ranks % of_one:
            raise EnvPipeError(
                f"{self.ranks} ranks cannot be divided into pipelines of {of_one}",
                value=f"{self.stages} stages, tensor parallelism "
                f"{args.tensor_model_parallel_size}, context parallelism "
                f"{args.context_parallel_size}",
                remedy="Give another number of ranks or nodes.",
            )
        return self.ranks // of_one

    def microbatches(self) -> int | None:
        """Return M of a batch of full size; None where arguments do not say it."""
        batch, size = (getattr(self.args, f"{of}_batch_size", None) for of in ("global", "micro"))
        if not isinstance(batch, int) or not isinstance(size, int):
            return None
        return batch // (size * self.replicas())

    def crossing(self) -> int:
        """Return how many of the boundaries between stages lie between nodes, in some pipeline."""
        between = 1 if getattr(self.args, "use_tp_pp_dp_mapping", False) else self.replicas()
        stride = between * self.ranks // (self.stages * self.replicas())

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
    if why and _over_nccl(job, options):
        features = ", ".join(limit.feature for limit in decision.to_check) or "this job"
        limits.append(Limit(features, Level.UNITS, why))
        decision = decide(limits, options.level, checks=checks)
    at = options.at(decision.level)
    whole = at.why_whole_at(decision.level, ", ".join(keeps_whole(job.args)))
    clocks = at.gpu_control != "none"
    seen = seen_like(decision.level, job.args, splits=not whole, clocks=clocks)
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
        "Never tried": never_tried(decision.level, job.args, job.ranks),
        "Known only when it starts": list(_AT_START),
    }


def _gets(job: PlannedJob, decision: Decision, at: JobOptions) -> Iterator[str]:
    level = decision.level
    checks = ", if its first iterations show that results are the same" if decision.to_check else ""
    yield f"level {level}: {LEVELS[level]}{checks}"
    order = at.scheduling if level is Level.ORDER else job.own_order
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
        f"microbatches: {job.microbatches() or 'not known'}"
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


def _over_nccl(job: PlannedJob, options: JobOptions) -> int:
    """Return over how many boundaries between stages NCCL carries messages for certain."""
    return job.stages - 1 if options.channel == "receives" else job.crossing()


def _against_order_over_nccl(
    job: PlannedJob, decision: Decision, capacity: int | None
) -> str | None:
    """Return what a channel over NCCL of a capacity has against level `order`, None if nothing."""
    if decision.level is not Level.ORDER:
        return None
    count = job.microbatches() or job.stages
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
    boundaries, over_nccl = job.stages - 1, _over_nccl(job, at)
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


def planned_job(
    args: argparse.Namespace,
    options: JobOptions,
    *,
    nodes: int | None = None,
    ranks_per_node: int | None = None,
) -> PlannedJob:
    """Return a job with this number of nodes, and of ranks on each.

    Where neither is given it has one pipeline, on nodes of eight; else as few nodes as it takes.
    Raises EnvPipeError if ranks do not divide into pipelines.
    """
    least = (
        args.pipeline_model_parallel_size
        * args.tensor_model_parallel_size
        * args.context_parallel_size
    )
    per_node = ranks_per_node or _USUAL_NODE
    ranks = least
    if nodes is not None or ranks_per_node is not None:
        ranks = nodes * per_node if nodes else math.lcm(least, per_node)
    made = PlannedJob(args, options, ranks, per_node)
    made.replicas()
    return made
