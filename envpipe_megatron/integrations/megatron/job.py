"""The job of a framework on megatron-core, from Megatron-LM's names of arguments, and groups."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from megatron.core import num_microbatches_calculator
from megatron.core.models.gpt import GPTModel
from megatron.core.utils import get_model_config, unwrap_model

from envpipe_megatron.core.kinds import ScheduleError
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.core.sidecar import Sidecar
from envpipe_megatron.integrations.hooking import same_job
from envpipe_megatron.integrations.job import JobFacts
from envpipe_megatron.integrations.levels import Level, Limit, limits_where
from envpipe_megatron.integrations.megatron.core import unsupported
from envpipe_megatron.integrations.megatron.limits import NOT_PROVEN

#: Whose layers come to the same result in any order, as far as jobs were proven with them.
_KNOWN_PACKAGES = ("megatron", "transformer_engine", "torch", "apex")


def limits_of(model: Sequence[Any]) -> list[Limit]:
    """What the model that was built has about EnvPipe's order, whatever the flags say."""
    config, own = get_model_config(model[0]), type(unwrap_model(model[0]))
    others = {type(m) for chunk in model for m in chunk.modules() if not _is_known(type(m))}
    names = ", ".join(sorted(f"{each.__module__}.{each.__name__}" for each in others))
    is_gpt = issubclass(own, GPTModel)
    runs_not = "the interpreter does not run it"
    return [
        *limits_where(Level.UNITS, *((True, each, runs_not) for each in unsupported(config))),
        *limits_where(
            Level.ORDER,
            (not is_gpt, f"models other than GPTModel: {own.__name__}", NOT_PROVEN),
            (is_gpt and names, f"layers of one's own: {names}", NOT_PROVEN),
            (config.variable_seq_lengths, "sequences of varying length", NOT_PROVEN),
        ),
    ]


def facts_of(args: argparse.Namespace) -> JobFacts:
    """Read the job from Megatron's arguments."""
    return JobFacts(
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
        for size in (stages, stages + stages // 2, 2 * stages):
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


def sequence_counts(config: Any) -> bool:
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
