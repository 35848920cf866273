"""Lists what limits the level of a job of megatron-core, by Megatron-LM's names of arguments.

It is free of Megatron. Level `units` needs that each iteration calls Megatron's `forward_step` and
`backward_step` in one order that is known beforehand. Level `order` needs proof that another order
gives the same result: by tests of each part that such jobs are made of (dense GPTs, virtual stages,
Transformer Engine, FP8 by delayed scaling), or by a check of the job's own first iteration.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from dataclasses import replace

from envpipe_megatron.core.channel_model import find_stall
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.integrations.levels import (
    FREES_WHILE_TRAINING,
    ArgumentLimit,
    Decision,
    JobError,
    Level,
    Predicate,
    above_one,
    any_of,
    frees_while_training,
    on,
)
from envpipe_megatron.runtime.job.options import JobOptions

#: Why a job's own first iteration is to show that EnvPipe's order gives the same result.
NOT_PROVEN = "not proven in every combination in another order than Megatron's"
#: Why such features cannot have level `order` over some channels.
POSTED_AHEAD = (
    "may wait for the device within a unit, and with one hardware queue receives of NCCL are "
    "posted ahead: both would wait for ever"
)
#: As `NOT_PROVEN`, where a host waits for the device within a unit.
WAITS = "waits for the device, where no receive may have been posted ahead"


def _at_most(highest: Level) -> Callable[[str, Predicate, str], ArgumentLimit]:
    return lambda feature, asks, reason: ArgumentLimit(feature, highest, reason, asks)


def _not_proven(features: Mapping[str, Predicate]) -> list[ArgumentLimit]:
    return [_to_check(feature, asks, NOT_PROVEN) for feature, asks in features.items()]


_to_check, _against_order = _at_most(Level.ORDER), _at_most(Level.UNITS)
_against_units, _against_uniform = _at_most(Level.UNIFORM), _at_most(Level.OBSERVE)


def _full_iteration_graph(args: argparse.Namespace) -> bool:
    """Return whether one CUDA graph holds an iteration, as versions spell it.

    Until 0.17 it is a scope (an enum, or its name where arguments were not validated), since 0.18
    an implementation.
    """
    given = (getattr(args, name, None) for name in ("cuda_graph_scope", "cuda_graph_modules"))
    scopes = [
        getattr(scope, "name", scope)
        for value in given
        for scope in (value.split(",") if isinstance(value, str) else value or ())
    ]
    return "full_iteration" in (getattr(args, "cuda_graph_impl", None), *scopes)


def _fp8_unproven(args: argparse.Namespace) -> bool:
    """Return whether FP8 is used for more than plain delayed scaling.

    That is another recipe, weights in FP8, or recomputation.
    """
    more = on("fp8_param_gather", "recompute_granularity", "envpipe_recompute")
    return on("fp8")(args) and any_of(_other_than("delayed", "fp8_recipe"), more)(args)


def _other_than(default: str, name: str) -> Predicate:
    """Return whether the argument exists and has another value; empty is the default."""
    return lambda args: (getattr(args, name, None) or default) != default


_REPORTS_STATS = ("report_stats", "report_determinism_stats")

#: Feature by feature; a job's arguments may ask for several.
LIMITS: tuple[ArgumentLimit, ...] = (
    *_not_proven(
        {
            "mixture of experts": on("num_experts"),
            "expert parallelism": above_one("expert_model_parallel_size"),
            "context parallelism": above_one("context_parallel_size"),
            "multi-token prediction": on("mtp_num_layers"),
            "multi-latent attention": on("multi_latent_attention"),
            "experimental kinds of attention": on(
                "experimental_attention_variant", "linear_attention_freq"
            ),
            "FP4, and FP8 other than plain delayed scaling": any_of(
                _fp8_unproven,
                on("fp4", "te_precision_config_file", "kitchen_config_file"),
                on("kitchen_recipe_number"),
            ),
            "hybrid (Mamba) models": on(
                "is_hybrid_model", "hybrid_override_pattern", "hybrid_layer_pattern"
            ),
            "heterogeneous layers": on(
                "heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json"
            ),
            "vision pretraining": on("vision_pretraining"),
            "fine-tuning on packed sequences (--sft)": on("sft"),
            "documents packed by the data loader (--dataloader-inter-document-masking)": on(
                "dataloader_inter_document_masking"
            ),
            "distillation and ModelOpt": on(
                "export_kd_teacher_load", "modelopt_enabled", "logits_save_dir"
            ),
            "overlapped tensor-parallel communication (--tp-comm-overlap)": on("tp_comm_overlap"),
            "the embedding's weight gradients put off (--defer-embedding-wgrad-compute)": on(
                "defer_embedding_wgrad_compute"
            ),
            "offloading of the optimizer": on("optimizer_cpu_offload", "offload_optimizer_states"),
            "several instances of the distributed optimizer": above_one(
                "num_distributed_optimizer_instances"
            ),
            "weights that ranks share out (--tensor-parallel-num-weight-shards)": above_one(
                "gtp_weight_remat_size"
            ),
        }
    ),
    _to_check(
        "timers inside of forwards and backwards (--timing-log-level 2)",
        above_one("timing_log_level"),
        f"each {WAITS}",
    ),
    _to_check(
        "memory given back in each iteration (--empty-unused-memory-level)",
        on("empty_unused_memory_level"),
        f"allocating it again {WAITS}",
    ),
    _to_check(
        FREES_WHILE_TRAINING, lambda _: frees_while_training(), f"giving memory back {WAITS}"
    ),
    _against_order(
        "T5, LLaVA and other models of encoder and decoder",
        on("decoder_num_layers", "decoder_seq_length"),
        "never tried in a pipeline",
    ),
    _against_order("legacy models", on("use_legacy_models"), "Megatron has given them up"),
    _against_order(
        "CUDA graphs",
        any_of(
            on("enable_cuda_graph", "external_cuda_graph", "optimizer_cuda_graph"),
            _other_than("none", "cuda_graph_impl"),
        ),
        "captured in Megatron's order, in memory that is used again in that order",
    ),
    _against_order(
        "delayed weight gradients (--delay-wgrad-compute)",
        on("delay_wgrad_compute"),
        "Megatron has them only with overlapped expert communication",
    ),
    _against_order(
        "logits by file (--logits-load-dir)",
        on("logits_load_dir"),
        "they are counted, so an iteration cannot be checked by running it again",
    ),
    _against_order(
        "gradients in the memory of gathered parameters (--reuse-grad-buf-for-mxfp8-param-ag)",
        on("reuse_grad_buf_for_mxfp8_param_ag"),
        "an iteration cannot be checked by running it again, for its parameters are gone",
    ),
    _against_order(
        "hyper-connections (--enable-hyper-connections)",
        on("enable_hyper_connections", "enable_mhc_connections"),
        "stages send several streams of hidden states at once",
    ),
    _against_order(
        "offloading of activations",
        on("cpu_offloading", "fine_grained_activation_offloading"),
        "what is brought back next depends on Megatron's order",
    ),
    _against_order(
        "--iterations-to-skip",
        on("iterations_to_skip"),
        "nothing of Megatron's step runs in such an iteration",
    ),
    _against_order(
        "the fault tolerance package (--enable-ft-package)",
        on("enable_ft_package"),
        "it times sections of Megatron's own loop",
    ),
    _against_order(
        "--rerun-mode report_stats",
        # Its argument's name, and that of the mode itself.
        lambda args: getattr(args, "rerun_mode", None) in _REPORTS_STATS,
        "runs each iteration twice",
    ),
    _against_order(
        "saving activations and gradients while training (--save-dgrads-interval and the like)",
        on(
            "save_activations_interval",
            "save_dgrads_interval",
            "save_wgrads_interval",
            "save_tokens_per_expert_interval",
            "moe_routing_trace_path",
        ),
        "they are saved in Megatron's order",
    ),
    _against_units(
        "other transfers in the pipeline (--pipeline-model-parallel-comm-backend ucc, "
        "--use-ring-exchange-p2p)",
        any_of(
            on("use_ring_exchange_p2p"),
            _other_than("nccl", "pipeline_model_parallel_comm_backend"),
        ),
        "what their waits take is not measured",
    ),
    _against_order(
        "CUDA_LAUNCH_BLOCKING",
        lambda args: os.environ.get("CUDA_LAUNCH_BLOCKING", "0") != "0",
        "a receive that waits would stop its host for ever",
    ),
    _against_units(
        "--log-straggler, unless it is off on startup (--disable-straggler-on-startup)",
        lambda args: on("log_straggler")(args) and not on("disable_straggler_on_startup")(args),
        "it compares how long forwards take, and each GPU would have clocks of its own",
    ),
    _against_units(
        "no pipeline",
        lambda args: not above_one("pipeline_model_parallel_size")(args),
        "there is nothing to schedule",
    ),
    _against_units(
        "CUDA graphs over the full iteration",
        _full_iteration_graph,
        "the host does nothing between units",
    ),
    _against_order(
        "overlapped expert communication (--overlap-moe-expert-parallel-comm)",
        on("overlap_moe_expert_parallel_comm"),
        "one call runs a forward and a backward",
    ),
    _against_units(
        "FSDP",
        on("use_megatron_fsdp", "use_torch_fsdp2", "use_custom_fsdp"),
        "weights are gathered ahead, across units",
    ),
    _against_units(
        "hybrid or dynamic context parallelism, and sequences that a scheduler packs",
        on("hybrid_context_parallel", "dynamic_context_parallel", "sequence_packing_scheduler"),
        "the data decide how many forwards there are",
    ),
    _against_units(
        "--freeze-all-layers", on("freeze_all_layers"), "there may be no backwards at all"
    ),
    _against_uniform(
        "reinforcement learning",
        on("perform_rl_step"),
        "GPUs also generate, which no clock was tried for",
    ),
    _against_uniform("--skip-train", on("skip_train"), "nothing is trained"),
)

#: With these there is no bill either: ranks start again within processes that hold clocks and
#: connections, one process acts for all ranks, or there are no groups of one pipeline.
REFUSED: Mapping[str, Predicate] = {
    "in-process restart": on("inprocess_restart"),
    "--fake-process-group": on("fake_process_group"),
    "modules on grids of ranks of their own (examples/mimo)": on("llm_pp"),
}


#: What keeps backwards whole: switches, and sizes above 1. Some are Megatron's since 0.18 or 0.19.
_WHOLE_IF_ON = (
    "tp_comm_overlap",
    "delay_wgrad_compute",
    "overlap_dispatch_backward_with_experts_wgrad",
    "enable_autocast",
)
_WHOLE_IF_SHARED = ("gtp_weight_remat_size", "expert_gtp_weight_remat_size")


#: What makes forwards draw random numbers.
_DRAWS = (
    "hidden_dropout",
    "attention_dropout",
    "moe_input_jitter_eps",
    "moe_router_force_load_balancing",
    "moe_router_force_biased",
    "fp4",  # rounds by chance
)


def keeps_whole(settings: object) -> list[str]:
    """Name what keeps backwards whole in a job's arguments, or its model's configuration."""
    found = [name for name in _WHOLE_IF_ON if getattr(settings, name, False)]
    shared = (name for name in _WHOLE_IF_SHARED if (getattr(settings, name, None) or 1) > 1)
    return [*found, *shared]


def check_metered(args: argparse.Namespace, refused: Mapping[str, Predicate] = REFUSED) -> None:
    """Raise a JobError that names what EnvPipe has not even a bill for."""
    if found := [feature for feature, asks in refused.items() if asks(args)]:
        raise JobError("EnvPipe cannot meter such a job", value=found, remedy="Leave it out.")


def keep_sequence(options: JobOptions, num_chunks: int, settings: object) -> JobOptions:
    """Return the options of a job, which keeps Megatron's order where a search might harm it.

    With chunks, a search finds orders in which a stage's forwards come in another sequence: random
    numbers would be others, and so would scales that FP8 takes from several forwards before.
    `settings` are its arguments, or its model's configuration.
    """
    remembers = getattr(settings, "fp8", None) and getattr(settings, "fp8_amax_history_len", 1) > 1
    counts = remembers or any(getattr(settings, name, None) for name in _DRAWS)
    if options.scheduling == "auto" and num_chunks > 1 and counts:
        return replace(options, scheduling="1f1b", max_in_flight=None)
    return options


def against_order(decision: Decision, own: Schedule, capacity: int | None) -> str | None:
    """Return what a channel has against level `order`, None if nothing.

    Args:
        decision: what the job's arguments leave it.
        own: Megatron's order.
        capacity: of the channel, in the words of `channel_model`.
    """
    if decision.to_check and capacity is not None:
        return POSTED_AHEAD
    stuck = find_stall(own, capacity)
    if not stuck:
        return None
    return f"Megatron's order needs a deeper channel than one hardware queue has: {stuck[0]}"
