"""The job of a patched Megatron-LM, from Megatron's arguments and groups."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from datetime import timedelta

from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import get_num_microbatches

from envpipe_megatron.core.sidecar import Sidecar
from envpipe_megatron.integrations.job import Job, JobFacts, Placement
from envpipe_megatron.integrations.options import Options

#: What a stored profile and plan were made for; another value of one of these makes them useless.
_SAME_JOB = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "seq_length",
    "padded_vocab_size",
    "swiglu",
    "normalization",
    "untie_embeddings_and_output_weights",
    "micro_batch_size",
    "global_batch_size",
    "params_dtype",
    "world_size",
    "pipeline_model_parallel_size",
    "tensor_model_parallel_size",
    "sequence_parallel",
    "use_distributed_optimizer",
    "transformer_impl",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
    "kv_channels",
    "attention_backend",
    "use_flash_attn",
    "calculate_per_token_loss",
    "cross_entropy_loss_fusion",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "optimizer",
    "use_precision_aware_optimizer",
    "main_params_dtype",
    "main_grads_dtype",
    "exp_avg_dtype",
    "exp_avg_sq_dtype",
    "pipeline_model_parallel_layout",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)


def make_job(args: argparse.Namespace, options: Options, say: Callable[[str], None]) -> Job:
    """Make the job of this rank, as `Job` says, from Megatron's arguments."""
    placement = Placement(
        parallel_state.get_pipeline_model_parallel_group(),
        get_num_microbatches(),
        timedelta(minutes=args.distributed_timeout_minutes),
    )
    facts = JobFacts(
        Sidecar(
            tensor_parallel=args.tensor_model_parallel_size,
            microbatch_size=args.micro_batch_size,
            sequence_length=args.seq_length,
        ),
        {
            "model": f"GPT, {args.num_layers} layers, width {args.hidden_size}",
            "tokens_per_iteration": args.global_batch_size * args.seq_length,
            "samples_per_iteration": args.global_batch_size,
            "microbatch_size": args.micro_batch_size,
        },
        {name: getattr(args, name, None) for name in _SAME_JOB},
    )
    return Job(options, placement, facts, say)
