"""Which layers the models of each family have. A new family is an entry of `FAMILIES`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
)

from envpipe_megatron.integrations.huggingface import layers
from envpipe_megatron.integrations.huggingface.layers import Entry
from envpipe_megatron.integrations.losses import image_class_loss, language_model_loss


@dataclass(frozen=True)
class Family:
    """Models that are split alike.

    Args:
        auto: transformers' class that makes the unsplit model of a configuration.
        entries: the layers of a configuration's model, first to last.
        loss: of the last layer's outputs and labels.
        refused: settings that change what a block takes, by name; they must be off.
        ignored: beginnings or ends of names of files' tensors that the model has no use for.
        renamed: parts of old names of tensors, and what they are called now.
    """

    auto: Any
    entries: Callable[[Any], list[Entry]]
    loss: Callable[[Tensor, Tensor], Tensor] = language_model_loss
    refused: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()


def _decoder(config: Any) -> list[Entry]:
    tied = config.tie_word_embeddings
    return [
        Entry(layers.TokenEmbedding, {"embedding": "model.embed_tokens"}),
        *(
            Entry(layers.DecoderBlock, {"block": f"model.layers.{index}"})
            for index in range(config.num_hidden_layers)
        ),
        Entry(layers.FinalNorm, {"module": "model.norm"}),
        Entry(layers.TiedHead, {"embedding": "model.embed_tokens"}, tied=True)
        if tied
        else Entry(layers.Head, {"module": "lm_head"}),
    ]


def _gpt2(config: Any) -> list[Entry]:
    positions = {"positions": "transformer.wpe", "dropout": "transformer.drop"}
    return [
        Entry(layers.TokenEmbedding, {"embedding": "transformer.wte"}),
        Entry(layers.GPT2Positions, positions),
        *(
            Entry(layers.GPT2Block, {"block": f"transformer.h.{index}"})
            for index in range(config.num_hidden_layers)
        ),
        Entry(layers.FinalNorm, {"module": "transformer.ln_f"}),
        Entry(layers.TiedHead, {"embedding": "transformer.wte"}, tied=True)
        if config.tie_word_embeddings
        else Entry(layers.Head, {"module": "lm_head"}),
    ]


def _bert(config: Any) -> list[Entry]:
    words = {"embedding": "bert.embeddings.word_embeddings"}
    if config.tie_word_embeddings:
        head = [
            Entry(layers.TiedHead, words, tied=True),
            Entry(layers.BertBias, {"predictions": "cls.predictions"}),
        ]
    else:
        head = [Entry(layers.Head, {"module": "cls.predictions.decoder"})]
    return [
        Entry(layers.TokenEmbedding, words),
        Entry(layers.BertPositions, {"embeddings": "bert.embeddings"}),
        *(
            Entry(layers.BertBlock, {"block": f"bert.encoder.layer.{index}"})
            for index in range(config.num_hidden_layers)
        ),
        Entry(layers.BertTransform, {"module": "cls.predictions.transform"}),
        *head,
    ]


def _resnet(config: Any) -> list[Entry]:
    return [
        Entry(layers.ResNetStem, {"module": "resnet.embedder"}),
        *(
            Entry(layers.ResNetBlock, {"module": f"resnet.encoder.stages.{stage}.layers.{index}"})
            for stage, depth in enumerate(config.depths)
            for index in range(depth)
        ),
        Entry(layers.ResNetHead, {"pooler": "resnet.pooler", "classifier": "classifier"}),
    ]


_DECODER = Family(AutoModelForCausalLM, _decoder, ignored=(".rotary_emb.inv_freq",))
#: By the `model_type` of a configuration.
FAMILIES = {
    "llama": _DECODER,
    "mistral": _DECODER,
    "qwen2": _DECODER,
    "qwen3": _DECODER,
    "gpt2": Family(
        AutoModelForCausalLM,
        _gpt2,
        refused=("add_cross_attention", "reorder_and_upcast_attn"),
        ignored=(".attn.bias", ".attn.masked_bias"),
    ),
    "bert": Family(
        AutoModelForMaskedLM,
        _bert,
        refused=("add_cross_attention", "is_decoder"),
        ignored=("bert.pooler.", "cls.seq_relationship.", ".position_ids"),
        renamed=((".gamma", ".weight"), (".beta", ".bias")),
    ),
    "resnet": Family(AutoModelForImageClassification, _resnet, loss=image_class_loss),
}
