"""A small GPT, its data and its training steps, on megatron-core: on the CPU, or on GPUs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig

from envpipe_megatron.integrations.device import current_device
from envpipe_megatron.trials.settings import Settings


def build_model(settings: Settings) -> GPTModel:
    """Build this stage's part of the model, with the same weights in every run."""
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
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        settings.vocabulary,
        settings.sequence_length,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )
    # Megatron makes norms and embeddings of positions in float32, not in `params_dtype`.
    return model.to(current_device(), dtype)


def _working_type() -> torch.dtype:
    return torch.bfloat16 if torch.cuda.is_available() else torch.float32


def digest_of_weights(model: torch.nn.Module) -> str:
    """Return the SHA-256 of all weights of this stage, to the last bit."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        content = parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest.update(content.numpy().tobytes())
    return digest.hexdigest()


def microbatches(settings: Settings, text: bytes, iteration: int) -> Iterator[torch.Tensor]:
    """Yield an iteration's microbatches, [microbatch_size, sequence_length + 1] tokens each.

    Drawn by the iteration's number only: every rank and every run sees the same.
    """
    tokens = np.frombuffer(text, dtype=np.uint8)
    length = settings.sequence_length + 1
    random = np.random.default_rng(iteration)
    for _ in range(settings.num_microbatches):
        starts = random.integers(0, len(tokens) - length, size=settings.microbatch_size)
        windows = np.stack([tokens[start : start + length] for start in starts])
        yield torch.from_numpy(windows.astype(np.int64))


def forward_step(data: Iterator[torch.Tensor], model: GPTModel) -> tuple[torch.Tensor, Any]:
    """Run a forward, in the shape that megatron-core's `forward_step` asks for."""
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
