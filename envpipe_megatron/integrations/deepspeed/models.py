"""Transformers as lists of layers, of which `deepspeed.pipe.PipelineModule` makes a pipeline.

Three shapes: `gpt2_layers`, `llama_layers` and `bert_layers`; `language_model_loss` goes with all.
A model has the same weights however it is cut into stages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F  # noqa: N812  # as all of torch's documentation has it
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn

from envpipe_megatron.integrations.deepspeed.layers import (
    BertBlock,
    BertPositions,
    BertTransform,
    GPT2Block,
    GPT2Positions,
    LlamaBlock,
    LlamaHead,
    TokenEmbedding,
    TransformerShape,
)
from envpipe_megatron.integrations.losses import IGNORED_LABEL, language_model_loss

__all__ = [
    "IGNORED_LABEL",
    "PRESETS",
    "Preset",
    "bert_layers",
    "gpt2_layers",
    "language_model_loss",
    "llama_layers",
]


def gpt2_layers(shape: TransformerShape, seed: int = 1234) -> list[LayerSpec]:
    """GPT-2: learned positions, LayerNorm first, GELU, embedding and head tied.

    From token numbers, [samples, length], to logits of the next token at each position.
    """
    return [
        TiedLayerSpec("embedding", TokenEmbedding, shape, seed),
        LayerSpec(GPT2Positions, shape, seed + 1),
        *(LayerSpec(GPT2Block, shape, seed + 2 + index) for index in range(shape.num_layers)),
        LayerSpec(nn.LayerNorm, shape.hidden_size),
        TiedLayerSpec("embedding", TokenEmbedding, shape, seed, forward_fn=_tied_logits),
    ]


def llama_layers(shape: TransformerShape, seed: int = 1234) -> list[LayerSpec]:
    """Llama: rotary positions, RMSNorm, SwiGLU, grouped-query attention, an untied head.

    From token numbers, [samples, length], to logits of the next token at each position.
    """
    return [
        LayerSpec(TokenEmbedding, shape, seed),
        *(LayerSpec(LlamaBlock, shape, seed + 1 + index) for index in range(shape.num_layers)),
        LayerSpec(nn.RMSNorm, shape.hidden_size, eps=1e-5),
        LayerSpec(LlamaHead, shape, seed + 1 + shape.num_layers),
    ]


def bert_layers(shape: TransformerShape, seed: int = 1234) -> list[LayerSpec]:
    """BERT: segments, LayerNorm last, attention to both sides, embedding and head tied.

    From a tuple (token numbers, segment numbers, truth values of where a token stands), each
    [samples, length], to logits of the token at each position. The truth values travel with the
    hidden states, so an engine needs `set_has_attention_mask(True)`. Each sample has a token at
    least.
    """
    return [
        TiedLayerSpec("embedding", TokenEmbedding, shape, seed, forward_fn=_bert_tokens),
        LayerSpec(BertPositions, shape, seed + 1),
        *(LayerSpec(BertBlock, shape, seed + 2 + index) for index in range(shape.num_layers)),
        LayerSpec(BertTransform, shape, seed + 2 + shape.num_layers),
        TiedLayerSpec("embedding", TokenEmbedding, shape, seed, forward_fn=_tied_logits),
    ]


def _tied_logits(embedding: TokenEmbedding, hidden: Tensor) -> Tensor:
    return F.linear(hidden, embedding.weight)


def _bert_tokens(
    embedding: TokenEmbedding, inputs: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, segments, is_token = inputs
    return embedding(tokens), segments, is_token


@dataclass(frozen=True)
class Preset:
    """A model that people know: what makes its layers, and its sizes."""

    layers: Callable[..., list[LayerSpec]]
    shape: TransformerShape


#: By name. Parameters in millions: 124, 355, 335, 162 and 1,100.
PRESETS = {
    "gpt-125m": Preset(gpt2_layers, TransformerShape(12, 768, 12, 12, 3072, 50257, 1024, 0.1)),
    "gpt-350m": Preset(gpt2_layers, TransformerShape(24, 1024, 16, 16, 4096, 50257, 1024, 0.1)),
    "bert-336m": Preset(bert_layers, TransformerShape(24, 1024, 16, 16, 4096, 30522, 512, 0.1)),
    "llama-160m": Preset(llama_layers, TransformerShape(12, 768, 12, 12, 3072, 32000, 2048)),
    "llama-1b": Preset(llama_layers, TransformerShape(22, 2048, 32, 4, 5632, 32000, 2048)),
}
