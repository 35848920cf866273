"""A small GPT, its data and its training steps, on megatron-core: on the CPU, or on GPUs.

`envpipe quickstart` trains it on emulated GPUs, `envpipe prove` on those and on real ones.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig

from envpipe_megatron.integrations.device import current_device
from envpipe_megatron.quickstart.settings import VOCABULARY, Settings


def build_model(settings: Settings) -> GPTModel:
    """This stage's part of the model; the same weights in every run."""
    torch.manual_seed(1234 + parallel_state.get_pipeline_model_parallel_rank())
    dtype = _working_type()
    config = TransformerConfig(
        num_layers=settings.num_layers,
        hidden_size=settings.hidden_size,
        num_attention_heads=settings.num_attention_heads,
        pipeline_model_parallel_size=settings.num_stages,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        deterministic_mode=torch.are_deterministic_algorithms_enabled(),
        use_cpu_initialization=True,
        deallocate_pipeline_outputs=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        VOCABULARY,
        settings.sequence_length,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
    )
    # Megatron makes norms and embeddings of positions in float32, whatever `params_dtype` says.
    return model.to(current_device(), dtype)


def _working_type() -> torch.dtype:
    return torch.bfloat16 if torch.cuda.is_available() else torch.float32


def train_step(
    forward_backward: Callable[..., list[dict[str, torch.Tensor]]],
    model: GPTModel,
    optimizer: torch.optim.Optimizer,
    settings: Settings,
    text: bytes,
    iteration: int,
) -> list[torch.Tensor]:
    """Train one iteration; its losses, one of each microbatch, on the last stage."""
    optimizer.zero_grad()
    reduced = forward_backward(
        forward_step_func=forward_step,
        data_iterator=microbatches(settings, text, iteration),
        model=model,
        num_microbatches=settings.num_microbatches,
        seq_length=settings.sequence_length,
        micro_batch_size=settings.microbatch_size,
    )
    optimizer.step()
    return [entry["loss"] for entry in reduced]


def digest_of_weights(model: torch.nn.Module) -> str:
    """SHA-256 of all weights of this stage, to the last bit."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        content = parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest.update(content.numpy().tobytes())
    return digest.hexdigest()


def microbatches(settings: Settings, text: bytes, iteration: int) -> Iterator[torch.Tensor]:
    """An iteration's microbatches, [microbatch_size, sequence_length + 1] tokens each.

    Drawn by the iteration's number alone: every rank and every run sees the same.
    """
    tokens = np.frombuffer(text, dtype=np.uint8)
    length = settings.sequence_length + 1
    random = np.random.default_rng(iteration)
    for _ in range(settings.num_microbatches):
        starts = random.integers(0, len(tokens) - length, size=settings.microbatch_size)
        windows = np.stack([tokens[start : start + length] for start in starts])
        yield torch.from_numpy(windows.astype(np.int64))


def forward_step(data: Iterator[torch.Tensor], model: GPTModel) -> tuple[torch.Tensor, Any]:
    """One forward, in the shape that megatron-core's `forward_step` asks for."""
    tokens = next(data).to(current_device(), non_blocking=True)
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    length = inputs.shape[1]
    positions = torch.arange(length, device=tokens.device).expand_as(inputs)
    mask = torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(1)[None, None]
    output = model(inputs, positions, mask, labels=labels)
    return output, _mean_loss


def _mean_loss(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    mean = losses.mean()
    return mean, {"loss": mean.detach().clone()}  # Megatron divides the first in place


@contextlib.contextmanager
def joined_pipeline(num_stages: int, timeout: timedelta) -> Iterator[None]:
    """Join the other ranks that torchrun has started, one a stage: over NCCL where there are GPUs.

    The group is left at the end alone: after a failure peers may be gone, and leaving waits.
    """
    torch.set_num_threads(1)
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        backend = "nccl"
    dist.init_process_group(backend, timeout=timeout)
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=num_stages)
    tensor_parallel.random.initialize_rng_tracker(inference_rng_tracker=True)
    yield
    dist.destroy_process_group()
