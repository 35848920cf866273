"""EnvPipe's models as configurations of Hugging Face's transformers, and batches of noise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import BertConfig, GPT2Config, ResNetConfig

from benchmarks.figures.experiments import MODELS as SIZES
from benchmarks.figures.experiments import Family, Model
from envpipe_megatron.integrations.huggingface.layers import IGNORED_LABEL

_BERT_WORDS, _GPT_WORDS = 30522, 50257
#: BERT predicts this share of its tokens.
_MASKED = 0.15

#: By the name that the command takes.
_SIZED = {name.lower().replace("_", "-"): size for name, size in SIZES.items()}
NAMES = tuple(_SIZED)


def config_of(name: str, tiny: bool) -> Any:
    """A model's configuration; with `tiny`, of a size that a CPU trains."""
    size = _SIZED[name]
    if size.family is Family.RESNET:
        group = 8 if tiny else 4 * size.width
        return ResNetConfig(
            embedding_size=8 if tiny else size.width,
            hidden_sizes=[group * 2**stage for stage in range(4)],
            depths=[1, 2, 2, 1] if tiny else list(size.layers),
            num_labels=size.outputs,
        )
    if tiny:
        size = replace(size, layers=(4,), width=32, heads=4)
    return _bert(size, tiny) if size.family is Family.BERT else _gpt(size, tiny)


def _bert(size: Model, tiny: bool) -> Any:
    return BertConfig(
        vocab_size=512 if tiny else _BERT_WORDS,
        hidden_size=size.width,
        num_hidden_layers=size.layers[0],
        num_attention_heads=size.heads,
        intermediate_size=4 * size.width,
        max_position_embeddings=size.length,
    )


def _gpt(size: Model, tiny: bool) -> Any:
    return GPT2Config(
        vocab_size=512 if tiny else size.outputs or _GPT_WORDS,
        n_embd=size.width,
        n_layer=size.layers[0],
        n_head=size.heads,
        n_positions=size.length,
        bos_token_id=None,
        eos_token_id=None,
    )


def length_of(name: str, tiny: bool) -> int:
    """Tokens of a sequence, or pixels of an image's side."""
    return 32 if tiny else _SIZED[name].length


def batches(config: Any, samples: int, length: int, seed: int = 1) -> Iterator[tuple[Any, Tensor]]:
    """Random inputs and labels as DeepSpeed's engine takes them, without an end."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        if config.model_type == "resnet":
            images = torch.randn(samples, 3, length, length, generator=generator)
            yield images, torch.randint(config.num_labels, (samples,), generator=generator)
            continue
        words = torch.randint(config.vocab_size, (samples, length + 1), generator=generator)
        tokens = words[:, :-1]
        if config.model_type == "bert":
            is_hidden = torch.rand(samples, length, generator=generator) < _MASKED
            segments = (torch.arange(length) >= length // 2).long().expand(samples, length)
            is_token = torch.ones_like(is_hidden)
            labels = tokens.masked_fill(~is_hidden, IGNORED_LABEL)
            yield (tokens.masked_fill(is_hidden, 0), segments.contiguous(), is_token), labels
        else:
            yield tokens, words[:, 1:]
