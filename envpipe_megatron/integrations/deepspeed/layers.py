"""The layers of Transformers, in pure torch and in any data type; `models` makes lists of them.

Each draws its weights from its own seed, so they do not depend on what was built before.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812  # as all of torch's documentation has it
from torch import Tensor, nn

from envpipe_megatron.errors import EnvPipeError

_STANDARD_DEVIATION = 0.02
_SEGMENTS = 2
#: A message between BERT's stages: hidden states, and which positions hold a token.
Masked = tuple[Tensor, Tensor]


class ShapeError(EnvPipeError):
    """Sizes of a Transformer that do not go together."""


@dataclass(frozen=True)
class TransformerShape:
    """The sizes of a Transformer; a ShapeError if they do not go together.

    Fewer `num_kv_heads` than `num_heads` is grouped-query attention.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    ffn_hidden_size: int
    vocabulary_size: int
    max_length: int
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_heads or self.num_heads % self.num_kv_heads:
            raise ShapeError(
                "Heads share the hidden size evenly, and groups of heads share keys and values",
                value=(self.hidden_size, self.num_heads, self.num_kv_heads),
                remedy="Make hidden_size a multiple of num_heads, and that one of num_kv_heads.",
            )

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return self.hidden_size // self.num_heads


class TokenEmbedding(nn.Embedding):
    """The first layer, and in GPT-2 and BERT the last one: its weights are tied."""

    def __init__(self, shape: TransformerShape, seed: int) -> None:
        super().__init__(shape.vocabulary_size, shape.hidden_size, device="meta")
        self.weight = _normal(_generator(seed), *self.weight.shape)


class GPT2Positions(nn.Module):
    """Adds what each position has learned."""

    def __init__(self, shape: TransformerShape, seed: int) -> None:
        super().__init__()
        self.weight = _normal(_generator(seed), shape.max_length, shape.hidden_size)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """Take hidden states [samples, length, hidden]."""
        added: Tensor = self.dropout(hidden + self.weight[: hidden.shape[1]])
        return added


class GPT2Block(nn.Module):
    """Attention to what came before, and a feed-forward network."""

    def __init__(self, shape: TransformerShape, seed: int) -> None:
        super().__init__()
        generator = _generator(seed)
        self.attention_norm = nn.LayerNorm(shape.hidden_size)
        self.attention = Attention(shape, generator, bias=True)
        self.ffn_norm = nn.LayerNorm(shape.hidden_size)
        self.ffn = _gelu_ffn(shape, generator)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """Take hidden states [samples, length, hidden]."""
        attended = self.attention(self.attention_norm(hidden), causal=True)
        hidden = hidden + self.dropout(attended)
        output: Tensor = hidden + self.dropout(self.ffn(self.ffn_norm(hidden)))
        return output


class LlamaBlock(nn.Module):
    """Attention to what came before with rotary positions, and a gated feed-forward network."""

    def __init__(self, shape: TransformerShape, seed: int) -> None:
        super().__init__()
        generator = _generator(seed)
        width, inner = shape.hidden_size, shape.ffn_hidden_size
        self.attention_norm = nn.RMSNorm(width, eps=1e-5)
        self.attention = Attention(shape, generator, bias=False, rotary=True)
        self.ffn_norm = nn.RMSNorm(width, eps=1e-5)
        self.gate_and_up = _linear(generator, width, 2 * inner, bias=False)
        self.down = _linear(generator, inner, width, bias=False, scale=_residual_scale(shape))
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """Take hidden states [samples, length, hidden]."""
        attended = self.attention(self.attention_norm(hidden), causal=True)
        hidden = hidden + self.dropout(attended)
        gate, up = self.gate_and_up(self.ffn_norm(hidden)).chunk(2, dim=-1)
        output: Tensor = hidden + self.dropout(self.down(F.silu(gate) * up))
        return output


class LlamaHead(nn.Linear):
    """From hidden states to logits, with its own weights."""

    def __init__(self, shape: TransformerShape, seed: int) -> None:
        super().__init__(shape.hidden_size, shape.vocabulary_size, bias=False, device="meta")
        self.weight = _normal(_generator(seed), *self.weight.shape)


class BertPositions(nn.Module):
    """Adds what positions and segments have learned; the tuple of segments ends here."""

    def __init__(self, shape: TransformerShape, seed: int) -> None:
        super().__init__()
        generator = _generator(seed)
        self.positions = _normal(generator, shape.max_length, shape.hidden_size)
        self.segments = _normal(generator, _SEGMENTS, shape.hidden_size)
        self.norm = nn.LayerNorm(shape.hidden_size)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, inputs: tuple[Tensor, Tensor, Tensor]) -> Masked:
        """Take hidden states, segment numbers, and whether each position holds a token."""
        hidden, segments, is_token = inputs
        hidden = hidden + self.positions[: hidden.shape[1]] + F.embedding(segments, self.segments)
        return self.dropout(self.norm(hidden)), is_token


class BertBlock(nn.Module):
    """Attention to all tokens, and a feed-forward network."""

    def __init__(self, shape: TransformerShape, seed: int) -> None:
        super().__init__()
        generator = _generator(seed)
        self.attention = Attention(shape, generator, bias=True)
        self.attention_norm = nn.LayerNorm(shape.hidden_size)
        self.ffn = _gelu_ffn(shape, generator)
        self.ffn_norm = nn.LayerNorm(shape.hidden_size)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, inputs: Masked) -> Masked:
        """Take hidden states, and whether each position holds a token."""
        hidden, is_token = inputs
        attended = self.attention(hidden, causal=False, is_token=is_token)
        hidden = self.attention_norm(hidden + self.dropout(attended))
        return self.ffn_norm(hidden + self.dropout(self.ffn(hidden))), is_token


class BertTransform(nn.Module):
    """What comes before BERT's tied head; the truth values end here."""

    def __init__(self, shape: TransformerShape, seed: int) -> None:
        super().__init__()
        width = shape.hidden_size
        self.linear = _linear(_generator(seed), width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, inputs: Masked) -> Tensor:
        """Take hidden states, and whether each position holds a token."""
        normed: Tensor = self.norm(F.gelu(self.linear(inputs[0])))
        return normed


class Attention(nn.Module):
    """Attention of many heads, groups of which may share keys and values."""

    def __init__(
        self,
        shape: TransformerShape,
        generator: torch.Generator,
        *,
        bias: bool,
        rotary: bool = False,
    ) -> None:
        super().__init__()
        self._heads = [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads]
        self._dropout = shape.dropout
        self._rotary = rotary
        outputs = sum(self._heads) * shape.head_width
        self.qkv = _linear(generator, shape.hidden_size, outputs, bias=bias)
        width, scale = shape.hidden_size, _residual_scale(shape)
        self.output = _linear(generator, width, width, bias=bias, scale=scale)

    def forward(self, hidden: Tensor, *, causal: bool, is_token: Tensor | None = None) -> Tensor:
        """Take [samples, length, hidden]; keys whose `is_token` is false are left out."""
        heads = self.qkv(hidden).unflatten(-1, (sum(self._heads), -1)).transpose(1, 2)
        query, key, value = heads.split(self._heads, dim=1)
        if self._rotary:
            query, key = _rotated(query), _rotated(key)
        attended = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=None if is_token is None else is_token[:, None, None, :],
            dropout_p=self._dropout if self.training else 0.0,
            is_causal=causal,
            enable_gqa=self._heads[0] != self._heads[1],
        )
        projected: Tensor = self.output(attended.transpose(1, 2).flatten(2))
        return projected


def _rotated(heads: Tensor) -> Tensor:
    """Turn the pairs (i, i + width / 2) of each head by angles that grow with the position."""
    cosine, sine = _rotation(heads.shape[-2], heads.shape[-1], heads.dtype, heads.device)
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


@functools.lru_cache(maxsize=8)
def _rotation(
    length: int, head_width: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosines and sines, made in fp32: a buffer of the module would be in half precision."""
    exponents = torch.arange(0, head_width, 2, dtype=torch.float32, device=device) / head_width
    positions = torch.arange(length, dtype=torch.float32, device=device)
    angles = torch.outer(positions, 10_000.0**-exponents)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _gelu_ffn(shape: TransformerShape, generator: torch.Generator) -> nn.Sequential:
    width, inner = shape.hidden_size, shape.ffn_hidden_size
    down = _linear(generator, inner, width, scale=_residual_scale(shape))
    return nn.Sequential(_linear(generator, width, inner), nn.GELU(), down)


def _residual_scale(shape: TransformerShape) -> float:
    """Keeps the sum of all residual branches as wide as one, as GPT-2 does."""
    return float((2 * shape.num_layers) ** -0.5)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _normal(generator: torch.Generator, *size: int, scale: float = 1.0) -> nn.Parameter:
    values = torch.empty(size).normal_(std=scale * _STANDARD_DEVIATION, generator=generator)
    return nn.Parameter(values)


def _linear(
    generator: torch.Generator, inputs: int, outputs: int, *, bias: bool = True, scale: float = 1.0
) -> nn.Linear:
    linear = nn.Linear(inputs, outputs, bias=bias, device="meta")  # torch would draw weights, too
    linear.weight = _normal(generator, outputs, inputs, scale=scale)
    if bias:
        linear.bias = nn.Parameter(torch.zeros(outputs))
    return linear
