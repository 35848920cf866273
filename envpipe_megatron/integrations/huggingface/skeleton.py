"""Lists the models that are split, with layers and losses. A new family is a row of `FAMILIES`.

Attention masks are those that transformers makes, without its looks at a mask's content: on a GPU
these wait for the device within a unit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # as all of torch's documentation has it
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
)

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.integrations.huggingface import layers
from envpipe_megatron.integrations.huggingface.layers import Entry, Rotary

#: Of attention: it needs no mask to look back.
_IMPLEMENTATION = "sdpa"
#: A label that is not predicted.
IGNORED_LABEL = -100


def language_model_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross entropy of labels that are not `IGNORED_LABEL`; 0 if all are.

    Logits are [samples, length, vocabulary], labels [samples, length]: the next tokens, or for BERT
    those that were masked. The loss is in fp32, for logits of any data type.
    """
    total = F.cross_entropy(
        logits.flatten(0, 1).float(),
        labels.flatten(),
        ignore_index=IGNORED_LABEL,
        reduction="sum",
    )
    return total / (labels != IGNORED_LABEL).sum().clamp(min=1)


def image_class_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross entropy of logits [samples, classes], labels [samples]; in fp32."""
    return F.cross_entropy(logits.float(), labels)


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


def _text_model(
    config: Any, words: str, blocks: list[Entry], norm: str, *more: Entry
) -> list[Entry]:
    """Return the layers of a model of next words; `more` comes behind its embedding."""
    embedding = {"embedding": words}
    tied = Entry(layers.tied_logits, embedding, tied=True)
    head = tied if config.tie_word_embeddings else Entry(layers.call, {"module": "lm_head"})
    return [
        Entry(layers.embed, embedding),
        *more,
        *blocks,
        Entry(layers.call, {"module": norm}),
        head,
    ]


def _decoder(config: Any) -> list[Entry]:
    places = range(config.num_hidden_layers)
    blocks = [Entry(layers.run_decoder, {"block": f"model.layers.{place}"}) for place in places]
    return _text_model(config, "model.embed_tokens", blocks, "model.norm")


def _gpt2(config: Any) -> list[Entry]:
    places = range(config.num_hidden_layers)
    blocks = [Entry(layers.call, {"module": f"transformer.h.{place}"}) for place in places]
    positions = {"positions": "transformer.wpe", "dropout": "transformer.drop"}
    more = Entry(layers.add_positions, positions)
    return _text_model(config, "transformer.wte", blocks, "transformer.ln_f", more)


def _bert(config: Any) -> list[Entry]:
    words = {"embedding": "bert.embeddings.word_embeddings"}
    predictions = {"predictions": "cls.predictions"}
    # Only its bias is new there: the tied head has the matrix.
    known = ("predictions.transform", "predictions.decoder")
    if config.tie_word_embeddings:
        head = [
            Entry(layers.tied_logits, words, tied=True),
            Entry(layers.add_bert_bias, predictions, elsewhere=known),
        ]
    else:
        head = [Entry(layers.call, {"module": "cls.predictions.decoder"})]
    return [
        Entry(layers.embed, words),
        Entry(
            layers.add_bert_positions,
            {"embeddings": "bert.embeddings"},
            needs=("token_type_ids",),
            elsewhere=("embeddings.word_embeddings",),
        ),
        *(
            Entry(layers.run_bert, {"block": f"bert.encoder.layer.{index}"}, needs=(layers.MASK,))
            for index in range(config.num_hidden_layers)
        ),
        Entry(layers.call, {"module": "cls.predictions.transform"}),
        *head,
    ]


def _resnet(config: Any) -> list[Entry]:
    return [
        Entry(layers.call, {"module": "resnet.embedder"}),
        *(
            Entry(layers.call, {"module": f"resnet.encoder.stages.{stage}.layers.{index}"})
            for stage, depth in enumerate(config.depths)
            for index in range(depth)
        ),
        Entry(layers.classify, {"pooler": "resnet.pooler", "classifier": "classifier"}),
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


class ModelError(EnvPipeError):
    """A model or a version of transformers that is not split here."""


def family_of(config: Any) -> Family:
    """Return a configuration's family; ModelError if there is none, or a setting is refused."""
    model_type = getattr(config, "model_type", None)
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise ModelError(
            "Models of this type are not split into stages",
            value=model_type or type(config).__name__,
            remedy=f"Those are: {', '.join(FAMILIES)}, by a configuration of transformers.",
        )
    for name in family.refused:
        if getattr(config, name, False):
            raise ModelError(
                f"A {model_type} with {name} is not split into stages",
                value=getattr(config, name),
                remedy=f"Set {name} to false in the configuration.",
            )
    return family


def rotary_of(model: Any, config: Any) -> Rotary | None:
    """Return what makes a model's rotary angles; ModelError for attention that is not split."""
    if not hasattr(config, "num_attention_heads"):  # no Transformer
        return None
    if model.config._attn_implementation != _IMPLEMENTATION:
        raise ModelError(
            "Models with this implementation of attention are not split into stages",
            value=model.config._attn_implementation,
            remedy=f"Set attn_implementation of the configuration to {_IMPLEMENTATION}.",
        )
    rotary = getattr(model.base_model, "rotary_emb", None)
    if rotary is None:
        return None
    with torch.device("cpu"):
        return Rotary(type(rotary)(config))
