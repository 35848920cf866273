"""What of Megatron-LM is refused under --envpipe, by name, until it is proven; free of Megatron."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping

from envpipe_megatron.errors import EnvPipeError


class RefusedError(EnvPipeError):
    """A feature of Megatron-LM that does not run under EnvPipe."""


def _on(*names: str) -> Callable[[argparse.Namespace], bool]:
    """Whether one of the arguments is there and set; the tags do not have the same ones."""
    return lambda args: any(getattr(args, name, None) for name in names)


def _above_one(*names: str) -> Callable[[argparse.Namespace], bool]:
    return lambda args: any((getattr(args, name, None) or 1) > 1 for name in names)


#: Feature, and whether the arguments ask for it.
REFUSED: Mapping[str, Callable[[argparse.Namespace], bool]] = {
    "virtual pipeline stages (interleaved schedule)": _above_one(
        "virtual_pipeline_model_parallel_size"
    ),
    "mixture of experts": _on("num_experts"),
    "expert parallelism": _above_one("expert_model_parallel_size"),
    "context parallelism": _above_one("context_parallel_size"),
    "hybrid or dynamic context parallelism": _on(
        "hybrid_context_parallel", "dynamic_context_parallel"
    ),
    "FSDP": _on("use_megatron_fsdp", "use_torch_fsdp2", "use_custom_fsdp"),
    "multi-token prediction": _on("mtp_num_layers"),
    "batch-size ramp-up (--rampup-batch-size, --step-batch-size-schedule)": _on(
        "rampup_batch_size", "step_batch_size_schedule"
    ),
    "--decrease-batch-size-if-needed": _on("decrease_batch_size_if_needed"),
    "T5 and other models of encoder and decoder": _on("decoder_num_layers"),
    "hybrid (Mamba) models": _on(
        "is_hybrid_model", "hybrid_override_pattern", "hybrid_layer_pattern"
    ),
    "multi-latent attention": _on("multi_latent_attention"),
    "heterogeneous layers": _on(
        "heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json"
    ),
    "vision pretraining": _on("vision_pretraining"),
    "legacy models": _on("use_legacy_models"),
    "reinforcement learning": _on("perform_rl_step"),
    "fine-tuning on packed sequences (--sft)": _on("sft"),
    "distillation and ModelOpt": _on("export_kd_teacher_load", "modelopt_enabled"),
    "FP8 and FP4": _on("fp8", "fp4"),
    "CUDA graphs": lambda args: (
        _on("enable_cuda_graph", "external_cuda_graph", "optimizer_cuda_graph")(args)
        or (getattr(args, "cuda_graph_impl", None) or "none") != "none"
    ),
    "overlapped tensor-parallel communication (--tp-comm-overlap)": _on("tp_comm_overlap"),
    "delayed weight gradients": _on("delay_wgrad_compute", "defer_embedding_wgrad_compute"),
    "offloading of activations or of the optimizer": _on(
        "cpu_offloading",
        "fine_grained_activation_offloading",
        "optimizer_cpu_offload",
        "offload_optimizer_states",
    ),
    "several instances of the distributed optimizer": _above_one(
        "num_distributed_optimizer_instances"
    ),
    "rematerialised weights (--gtp-weight-remat-size)": _above_one("gtp_weight_remat_size"),
    "in-process restart": _on("inprocess_restart"),
    "--yaml-cfg": _on("yaml_cfg"),
}


def check_supported(args: argparse.Namespace) -> None:
    """Refuse what is not proven to give the same result under EnvPipe.

    Raises:
        RefusedError: naming each feature.
    """
    if args.pipeline_model_parallel_size < 2:
        raise RefusedError(
            "--envpipe needs a pipeline",
            value=args.pipeline_model_parallel_size,
            remedy="Give --pipeline-model-parallel-size of at least 2, or leave --envpipe out.",
        )
    refused = [feature for feature, asked in REFUSED.items() if asked(args)]
    if refused:
        raise RefusedError(
            f"Under --envpipe, these are refused until they are proven: {'; '.join(refused)}",
            remedy="Leave them out, or train without --envpipe.",
        )
