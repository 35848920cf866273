"""The job of a framework on megatron-core, from Megatron-LM's names of arguments, and groups."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist
from megatron.core import num_microbatches_calculator
from megatron.core.models.gpt import GPTModel
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.utils import get_model_config, unwrap_model

from envpipe_megatron.core.channel_model import find_stall
from envpipe_megatron.core.kinds import ScheduleError
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.core.sidecar import Sidecar
from envpipe_megatron.integrations.hooking import same_job
from envpipe_megatron.integrations.job import (
    Job,
    JobFacts,
    Placement,
    say_line,
)
from envpipe_megatron.integrations.levels import Decision, Level, Limit, stands_against
from envpipe_megatron.integrations.megatron.core import ForwardBackward, unsupported
from envpipe_megatron.integrations.megatron.kept import KeptOrder, WholeSteps
from envpipe_megatron.integrations.megatron.limits import NOT_PROVEN
from envpipe_megatron.integrations.megatron.self_check import SelfCheck
from envpipe_megatron.integrations.options import Options
from envpipe_megatron.policies.orders.families import group_sizes
from envpipe_megatron.runtime.channel.links import timeout_of

#: Whose layers come to the same result in any order, as far as jobs were proven with them.
_KNOWN_PACKAGES = ("megatron", "transformer_engine", "torch", "apex")


def limits_of(model: Sequence[Any]) -> list[Limit]:
    """What the model that was built has about EnvPipe's order, whatever the flags say."""
    config = get_model_config(model[0])
    found = [
        stands_against(feature, Level.UNITS, "the interpreter does not run it")
        for feature in unsupported(config)
    ]
    own = type(unwrap_model(model[0]))
    others = {type(m) for chunk in model for m in chunk.modules() if not _is_known(type(m))}
    if not issubclass(own, GPTModel):
        feature = f"models other than GPTModel: {own.__name__}"
        found.append(stands_against(feature, Level.ORDER, NOT_PROVEN))
    elif others:
        names = ", ".join(sorted(f"{each.__module__}.{each.__name__}" for each in others))
        found.append(stands_against(f"layers of one's own: {names}", Level.ORDER, NOT_PROVEN))
    if config.variable_seq_lengths:
        feature = "sequences of varying length"
        found.append(stands_against(feature, Level.ORDER, NOT_PROVEN))
    return found


def make_job(
    args: argparse.Namespace,
    options: Options,
    level: Level,
    model: Sequence[Any],
    pipeline_group: dist.ProcessGroup,
) -> Job:
    """Make the job of this rank, as `Job` says, from Megatron's arguments and the rank's model."""
    config, orders = get_model_config(model[0]), level is Level.ORDER
    if not orders:
        options = replace(options, scheduling=_own_order(args), max_in_flight=None)
    elif options.scheduling == "1f1b" or (
        options.scheduling == "auto" and len(model) > 1 and _sequence_counts(config)
    ):
        options = replace(options, scheduling=_own_order(args))  # Megatron's, whatever it is
    placement = Placement(
        pipeline_group,
        num_microbatches_of(args),
        timeout_of(pipeline_group),
        messages_vary=orders and config.variable_seq_lengths,
        keeps_order=not orders,
        num_chunks=len(model) if orders else 1,
        group_size=config.microbatch_group_size_per_vp_stage if orders and len(model) > 1 else None,
    )
    facts = JobFacts(
        Sidecar(
            tensor_parallel=args.tensor_model_parallel_size,
            microbatch_size=args.micro_batch_size,
            sequence_length=args.seq_length,
        ),
        {
            "model": f"GPT, {args.num_layers} layers, width {args.hidden_size}",
            "tokens_per_iteration": _full_batch(args) * args.seq_length,
            "samples_per_iteration": _full_batch(args),
            "microbatch_size": args.micro_batch_size,
        },
        same_job(args),
    )
    return Job(options, placement, facts, say_line, level)


def make_stand_in(
    args: argparse.Namespace,
    model: Sequence[Any],
    decision: Decision,
    job: Job,
    framework_function: Callable[..., Any],
    *,
    checked: bool,
) -> ForwardBackward | KeptOrder | WholeSteps:
    """What runs in place of Megatron's forward-backward function; level `order` may be checked."""
    stages, microbatches = args.pipeline_model_parallel_size, num_microbatches_of(args)
    if decision.level is Level.UNIFORM or decision.against.get(Level.UNITS):
        return WholeSteps(
            job.session,
            framework_function,
            builders.whole_iteration(stages),
            lambda: get_num_microbatches() == microbatches,
        )
    order_of = partial(megatron_order, args, model)
    if decision.level is Level.ORDER:
        orders_of = partial(orders_to_try, args, model, regroups=job.options.scheduling == "auto")
        check = (
            SelfCheck(orders_of, microbatches, job.channel, job.collectives, job.say)
            if checked
            else None
        )
        return ForwardBackward(
            job.session,
            framework_function=framework_function,
            check=check,
            full_microbatches=microbatches,
            first=job.collectives.first,
        )
    return KeptOrder(
        job.session,
        framework_function,
        order_of,
        microbatches,
        job.collectives.stage,
        job.collectives.on_all,
    )


def what_stalls(args: argparse.Namespace, model: Sequence[Any], job: Job) -> str | None:
    """Why not even Megatron's own order finishes over a job's channel; None if it does."""
    stuck = find_stall(megatron_order(args, model, num_microbatches_of(args)), job.channel.capacity)
    if not stuck:
        return None
    return f"Megatron's order needs a deeper channel than one hardware queue has: {stuck[0]}"


def orders_to_try(
    args: argparse.Namespace, model: Sequence[Any], count: int, *, regroups: bool
) -> list[Schedule]:
    """Megatron's order, and those unlike it that a self-check may try, the most unlike first.

    With `regroups`, a plan's order may take chunks in another turn, so that forwards come in
    another sequence; else it may have more of them in flight.
    """
    stages = args.pipeline_model_parallel_size
    orders = [megatron_order(args, model, count)]
    if regroups and len(model) > 1:
        for size in group_sizes(count, stages):
            with suppress(ScheduleError):
                orders.append(builders.interleaved(stages, count, len(model), size))
    with suppress(ScheduleError):
        orders.append(megatron_order(args, model, count, [1] * (stages - 1) + [0]))
    return list({order.stages: order for order in orders}.values())


def megatron_order(
    args: argparse.Namespace, model: Sequence[Any], count: int, more: Sequence[int] = ()
) -> Schedule:
    """Megatron's order of a number of microbatches, or with more forwards in stages' warm-ups."""
    stages, config = args.pipeline_model_parallel_size, get_model_config(model[0])
    if len(model) == 1:
        own = builders.one_f_one_b(stages, count)
        return builders.envpipe(stages, count, more) if more else own
    return builders.interleaved(
        stages,
        count,
        len(model),
        config.microbatch_group_size_per_vp_stage,
        combined=config.overlap_moe_expert_parallel_comm,
        extra_warmup=more,
    )


def _is_known(module: type) -> bool:
    """Whether a module is of a package that jobs were proven with; adapters of Bridge's are not."""
    package = module.__module__
    return package.split(".")[0] in _KNOWN_PACKAGES and not package.startswith("megatron.bridge")


def _sequence_counts(config: Any) -> bool:
    """Whether it counts in which sequence a stage's forwards come, one chunk's behind another's.

    With chunks, a search finds orders in which they come otherwise: random numbers would be others,
    and so would scales that FP8 takes from several forwards before.
    """
    draws = (
        "hidden_dropout",
        "attention_dropout",
        "moe_input_jitter_eps",
        "moe_router_force_load_balancing",
        "moe_router_force_biased",
        "fp4",  # rounds by chance
    )
    remembers = getattr(config, "fp8", None) and getattr(config, "fp8_amax_history_len", 1) > 1
    return bool(remembers) or any(getattr(config, name, None) for name in draws)


def _own_order(args: argparse.Namespace) -> str:
    if args.virtual_pipeline_model_parallel_size is None:
        return "1f1b"
    combined = getattr(args, "overlap_moe_expert_parallel_comm", False)
    return "interleaved-combined" if combined else "interleaved"


def num_microbatches_of(args: argparse.Namespace) -> int:
    """M of a batch of full size."""
    # From 0.19 on, ranks that share out weights have data of their own, too.
    replicas = args.data_parallel_size * (getattr(args, "gtp_weight_remat_size", None) or 1)
    num_microbatches: int = _full_batch(args) // (args.micro_batch_size * replicas)
    return num_microbatches


def _full_batch(args: argparse.Namespace) -> int:
    """Samples of a batch of full size, to which ramp-up and step schedules lead.

    With a step schedule, `global_batch_size` is a default that nothing uses.
    """
    calculator = num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR
    full: int = getattr(calculator, "global_batch_size", args.global_batch_size)
    return full
