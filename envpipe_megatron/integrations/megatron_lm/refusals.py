"""What of Megatron-LM is refused under --envpipe, by name, until it is proven; free of Megatron."""

from __future__ import annotations

from collections.abc import Mapping

from envpipe_megatron.integrations.refusals import Asks, above_one, on

#: Feature, and whether the arguments ask for it.
REFUSED: Mapping[str, Asks] = {
    "virtual pipeline stages (interleaved schedule)": above_one(
        "virtual_pipeline_model_parallel_size"
    ),
    "mixture of experts": on("num_experts"),
    "expert parallelism": above_one("expert_model_parallel_size"),
    "context parallelism": above_one("context_parallel_size"),
    "hybrid or dynamic context parallelism": on(
        "hybrid_context_parallel", "dynamic_context_parallel"
    ),
    "FSDP": on("use_megatron_fsdp", "use_torch_fsdp2", "use_custom_fsdp"),
    "multi-token prediction": on("mtp_num_layers"),
    "batch-size ramp-up (--rampup-batch-size, --step-batch-size-schedule)": on(
        "rampup_batch_size", "step_batch_size_schedule"
    ),
    "--decrease-batch-size-if-needed": on("decrease_batch_size_if_needed"),
    "T5 and other models of encoder and decoder": on("decoder_num_layers", "decoder_seq_length"),
    "hybrid (Mamba) models": on(
        "is_hybrid_model", "hybrid_override_pattern", "hybrid_layer_pattern"
    ),
    "multi-latent attention": on("multi_latent_attention"),
    "heterogeneous layers": on(
        "heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json"
    ),
    "vision pretraining": on("vision_pretraining"),
    "legacy models": on("use_legacy_models"),
    "reinforcement learning": on("perform_rl_step"),
    "fine-tuning on packed sequences (--sft)": on("sft"),
    "documents packed by the data loader (--dataloader-inter-document-masking)": on(
        "dataloader_inter_document_masking"
    ),
    "distillation and ModelOpt": on(
        "export_kd_teacher_load", "modelopt_enabled", "logits_load_dir", "logits_save_dir"
    ),
    "FP8 and FP4": on(
        "fp8",
        "fp4",
        "te_precision_config_file",
        "kitchen_config_file",
        "kitchen_recipe_number",
    ),
    "experimental kinds of attention": on(
        "experimental_attention_variant", "linear_attention_freq"
    ),
    "--freeze-all-layers": on("freeze_all_layers"),
    "CUDA graphs": lambda args: (
        on("enable_cuda_graph", "external_cuda_graph", "optimizer_cuda_graph")(args)
        or (getattr(args, "cuda_graph_impl", None) or "none") != "none"
    ),
    "overlapped tensor-parallel communication (--tp-comm-overlap)": on("tp_comm_overlap"),
    "delayed weight gradients": on("delay_wgrad_compute", "defer_embedding_wgrad_compute"),
    "offloading of activations or of the optimizer": on(
        "cpu_offloading",
        "fine_grained_activation_offloading",
        "optimizer_cpu_offload",
        "offload_optimizer_states",
    ),
    "several instances of the distributed optimizer": above_one(
        "num_distributed_optimizer_instances"
    ),
    "rematerialised weights (--gtp-weight-remat-size)": above_one("gtp_weight_remat_size"),
    "in-process restart": on("inprocess_restart"),
    "the fault tolerance package (--enable-ft-package)": on("enable_ft_package"),
    "--iterations-to-skip": on("iterations_to_skip"),
    "--skip-train": on("skip_train"),
    "--rerun-mode report_stats": lambda args: getattr(args, "rerun_mode", "") == "report_stats",
    # A timer of this level waits for the device in each unit, and so for a posted receive.
    "timers inside of forwards and backwards (--timing-log-level 2)": lambda args: (
        (getattr(args, "timing_log_level", None) or 0) > 1
    ),
    # Freed memory must be allocated again, which may wait for a receive that is posted.
    "memory given back in each iteration (--empty-unused-memory-level)": on(
        "empty_unused_memory_level"
    ),
    # What a unit costs then depends on the order that plans choose.
    "--num-microbatches-with-partial-activation-checkpoints": lambda args: (
        getattr(args, "num_microbatches_with_partial_activation_checkpoints", None) is not None
    ),
    # Their kernels are used for the first time in mid-training, beside a posted receive.
    "saving activations and gradients while training (--save-dgrads-interval and the like)": on(
        "save_activations_interval", "save_dgrads_interval", "save_wgrads_interval"
    ),
    "other transfers in the pipeline (--pipeline-model-parallel-comm-backend ucc, "
    "--use-ring-exchange-p2p)": lambda args: (
        on("use_ring_exchange_p2p")(args)
        or (getattr(args, "pipeline_model_parallel_comm_backend", None) or "nccl") != "nccl"
    ),
    "--fake-process-group": on("fake_process_group"),
    "--yaml-cfg": on("yaml_cfg"),
}
