"""What in a job of megatron-core stands against which level, by Megatron-LM's names of arguments.

It is free of Megatron. Level `units` needs that each iteration calls Megatron's `forward_step` and
`backward_step` in one order that is known beforehand. Level `order` needs proof that another order
gives the same result.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping

from envpipe_megatron.integrations.levels import (
    Asks,
    Level,
    Limit,
    above_one,
    any_of,
    on,
)
from envpipe_megatron.integrations.refusals import (
    FREES_WHILE_TRAINING,
    RefusedError,
    frees_while_training,
)

#: What stands against EnvPipe's order if nothing else does.
NOT_PROVEN = "not proven in another order than Megatron's"


def _against_order(feature: str, asks: Asks, reason: str = NOT_PROVEN) -> Limit:
    return Limit(feature, asks, Level.UNITS, reason)


def _against_units(feature: str, asks: Asks, reason: str) -> Limit:
    return Limit(feature, asks, Level.UNIFORM, reason)


def _against_uniform(feature: str, asks: Asks, reason: str) -> Limit:
    return Limit(feature, asks, Level.OBSERVE, reason)


def _full_iteration_graph(args: argparse.Namespace) -> bool:
    """Whether one CUDA graph holds an iteration, as versions spell it.

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
    """Whether FP8 has another recipe than delayed scaling, holds weights, or computes again."""
    more = on("fp8_param_gather", "recompute_granularity")
    return on("fp8")(args) and any_of(_other_than("delayed", "fp8_recipe"), more)(args)


def _other_than(default: str, name: str) -> Asks:
    """Whether the argument is there and has another value; empty is the default."""
    return lambda args: (getattr(args, name, None) or default) != default


_ONE_NUMBER = "messages and memory are made ready for one number of microbatches"
_POSTED = "waits for the device, and so for a receive that is posted"

#: Feature by feature; a job's arguments may ask for several.
LIMITS: tuple[Limit, ...] = (
    _against_order(
        "virtual pipeline stages (interleaved schedule)",
        above_one("virtual_pipeline_model_parallel_size"),
    ),
    _against_order("mixture of experts", on("num_experts")),
    _against_order("expert parallelism", above_one("expert_model_parallel_size")),
    _against_order("context parallelism", above_one("context_parallel_size")),
    _against_order("multi-token prediction", on("mtp_num_layers")),
    _against_order("multi-latent attention", on("multi_latent_attention")),
    _against_order(
        "experimental kinds of attention",
        on("experimental_attention_variant", "linear_attention_freq"),
    ),
    _against_order(
        "FP4, and FP8 but for plain delayed scaling",
        any_of(
            _fp8_unproven,
            on(
                "fp4",
                "te_precision_config_file",
                "kitchen_config_file",
                "kitchen_recipe_number",
            ),
        ),
    ),
    _against_order(
        "hybrid (Mamba) models",
        on("is_hybrid_model", "hybrid_override_pattern", "hybrid_layer_pattern"),
    ),
    _against_order(
        "heterogeneous layers",
        on("heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json"),
    ),
    _against_order(
        "T5 and other models of encoder and decoder",
        on("decoder_num_layers", "decoder_seq_length"),
    ),
    _against_order("vision pretraining", on("vision_pretraining")),
    _against_order("legacy models", on("use_legacy_models")),
    _against_order("fine-tuning on packed sequences (--sft)", on("sft")),
    _against_order(
        "documents packed by the data loader (--dataloader-inter-document-masking)",
        on("dataloader_inter_document_masking"),
    ),
    _against_order(
        "distillation and ModelOpt",
        on("export_kd_teacher_load", "modelopt_enabled", "logits_load_dir", "logits_save_dir"),
    ),
    _against_order(
        "CUDA graphs",
        any_of(
            on("enable_cuda_graph", "external_cuda_graph", "optimizer_cuda_graph"),
            _other_than("none", "cuda_graph_impl"),
        ),
        "captured in Megatron's order",
    ),
    _against_order(
        "overlapped tensor-parallel communication (--tp-comm-overlap)", on("tp_comm_overlap")
    ),
    _against_order(
        "delayed weight gradients", on("delay_wgrad_compute", "defer_embedding_wgrad_compute")
    ),
    _against_order(
        "offloading of activations or of the optimizer",
        on(
            "cpu_offloading",
            "fine_grained_activation_offloading",
            "optimizer_cpu_offload",
            "offload_optimizer_states",
        ),
    ),
    _against_order(
        "several instances of the distributed optimizer",
        above_one("num_distributed_optimizer_instances"),
    ),
    _against_order(
        "rematerialised weights (--gtp-weight-remat-size)", above_one("gtp_weight_remat_size")
    ),
    # With a constant batch size, one number of microbatches for all iterations.
    _against_order("--decrease-batch-size-if-needed", on("decrease_batch_size_if_needed")),
    # Nothing of Megatron's step runs in such an iteration.
    _against_order("--iterations-to-skip", on("iterations_to_skip")),
    _against_order("the fault tolerance package (--enable-ft-package)", on("enable_ft_package")),
    _against_order(
        "--rerun-mode report_stats",
        lambda args: getattr(args, "rerun_mode", None) == "report_stats",
        "runs each iteration twice",
    ),
    _against_order(
        "timers inside of forwards and backwards (--timing-log-level 2)",
        above_one("timing_log_level"),
        f"each {_POSTED}",
    ),
    _against_order(
        "memory given back in each iteration (--empty-unused-memory-level)",
        on("empty_unused_memory_level"),
        f"allocating it again {_POSTED}",
    ),
    _against_order(
        FREES_WHILE_TRAINING, lambda _: frees_while_training(), f"giving memory back {_POSTED}"
    ),
    _against_order(
        "--num-microbatches-with-partial-activation-checkpoints",
        lambda args: (
            getattr(args, "num_microbatches_with_partial_activation_checkpoints", None) is not None
        ),
        "what a unit costs depends on the order",
    ),
    _against_order(
        "saving activations and gradients while training (--save-dgrads-interval and the like)",
        on("save_activations_interval", "save_dgrads_interval", "save_wgrads_interval"),
        "its kernels are first used in mid-training, beside a receive that is posted",
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
    _against_units(
        "CUDA_LAUNCH_BLOCKING",
        lambda args: os.environ.get("CUDA_LAUNCH_BLOCKING", "0") != "0",
        "a message that is measured would stop its host for ever",
    ),
    _against_order("--yaml-cfg", on("yaml_cfg")),
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
    _against_order(
        "batch-size ramp-up (--rampup-batch-size)",
        on("rampup_batch_size"),
        _ONE_NUMBER,
    ),
    _against_order("--step-batch-size-schedule", on("step_batch_size_schedule"), _ONE_NUMBER),
    _against_units(
        "hybrid or dynamic context parallelism",
        on("hybrid_context_parallel", "dynamic_context_parallel"),
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
#: connections, or one process stands for all ranks.
REFUSED: Mapping[str, Asks] = {
    "in-process restart": on("inprocess_restart"),
    "--fake-process-group": on("fake_process_group"),
}


def check_metered(args: argparse.Namespace, refused: Mapping[str, Asks] = REFUSED) -> None:
    """Raise a RefusedError that names what EnvPipe has not even a bill for."""
    if found := [feature for feature, asks in refused.items() if asks(args)]:
        raise RefusedError("EnvPipe cannot meter such a job", value=found, remedy="Leave it out.")
