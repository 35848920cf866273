"""Lists the models that are split, their layers and losses. A new family is a row of `FAMILIES`.

Each layer of a pipeline holds modules of transformers, and calls them as the model does. It is made
on the device `meta` and takes no memory until `split` gives it weights. Attention masks are those
that transformers makes, without its looks at a mask's content: on a GPU these wait for the device
within a unit.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # as all of torch's documentation has it
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
)

from envpipe_megatron.errors import EnvPipeError

MASK = "attention_mask"
#: Inputs of a model beside the first, in the order in which messages have them.
EXTRAS = ("token_type_ids", MASK)


@dataclass(frozen=True)
class Entry:
    """A layer of a model.

    Args:
        run: the layer's work: from the layer, hidden states [samples, length, hidden] (of images
            [n, c, h, w]; of the first layer the model's inputs) and what it `needs`, in order.
        modules: by attribute, the module's name in the unsplit model.
        needs: those of `EXTRAS` that `run` takes.
        elsewhere: parts of the modules that other layers hold.
        tied: whether it has the weights of the first layer.
    """

    run: Callable[..., Tensor]
    modules: Mapping[str, str]
    needs: tuple[str, ...] = ()
    elsewhere: tuple[str, ...] = ()
    tied: bool = False


#: Lengths whose angles and masks are kept.
_KEPT = 8


class Rotary:
    """Makes cosines and sines of positions, once for each length, data type and device.

    Args:
        module: transformers', with frequencies on the CPU. It is no part of a layer: an engine
            that puts layers into half precision would round them.
    """

    def __init__(self, module: nn.Module) -> None:
        self._copies: dict[torch.device, nn.Module] = {torch.device("cpu"): module}
        self._angles = functools.lru_cache(_KEPT)(self._make)

    def angles(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines, [1, length, width of a head]."""
        return self._angles(hidden.shape[1], hidden.dtype, hidden.device)

    def _make(self, length: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        with torch.inference_mode(False), torch.no_grad():  # they may be kept for training
            # Older versions switch autocast off, which no `meta` has.
            where = torch.device("cpu") if device.type == "meta" else device
            if where not in self._copies:  # a copy to a GPU waits for it: once, and never again
                self._copies[where] = copy.deepcopy(self._copies[torch.device("cpu")]).to(where)
            positions = torch.arange(length, device=where)[None]
            like = torch.empty(0, dtype=dtype, device=where)
            cosines, sines = self._copies[where](like, positions)
            return cosines.to(device), sines.to(device)


def embed(layer: Any, tokens: Tensor) -> Tensor:
    """Return hidden states of token numbers, [samples, length]."""
    embedded: Tensor = layer.embedding(tokens)
    return embedded


def tied_logits(layer: Any, hidden: Tensor) -> Tensor:
    """Return logits of hidden states, by the weights of an embedding."""
    return F.linear(hidden, layer.embedding.weight)


def call(layer: Any, hidden: Tensor) -> Tensor:
    """Call a module that takes hidden states, or images, and nothing else: a norm, a head, a stem.

    GPT-2's block, too, which sees what came before without a mask.
    """
    found = layer.module(hidden)
    states: Tensor = found[0] if isinstance(found, tuple) else found  # transformers 5.0: tuple
    return states


def run_decoder(layer: Any, hidden: Tensor) -> Tensor:
    """Run a block of Llama, Qwen or Mistral: rotary positions, perhaps a sliding window."""
    block, length = layer.block, hidden.shape[1]
    config = block.self_attn.config
    kinds = getattr(config, "layer_types", None)
    sliding = kinds is None or kinds[block.self_attn.layer_idx] == "sliding_attention"
    window = getattr(config, "sliding_window", None) if sliding else None
    mask = None  # attention looks back on its own
    if window is not None and length > window:
        mask = _within(window, length, hidden.device)
    angles = layer.rotary.angles(hidden)
    found: Tensor = block(hidden, attention_mask=mask, position_embeddings=angles)
    return found


@functools.lru_cache(_KEPT)
def _within(window: int, length: int, device: torch.device) -> Tensor:
    """Return the mask of a window, [1, 1, length, length]: one, which all blocks keep."""
    with torch.inference_mode(False):
        position = torch.arange(length, device=device)
        back = position[:, None] - position[None, :]
        return ((back >= 0) & (back < window))[None, None]


def add_positions(layer: Any, hidden: Tensor) -> Tensor:
    """Add what each of GPT-2's positions has learned."""
    positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
    found: Tensor = layer.dropout(hidden + layer.positions(positions))
    return found


def add_bert_positions(layer: Any, hidden: Tensor, segments: Tensor | None) -> Tensor:
    """Add what positions and segments have learned, by [samples, length]; no segments: all 0."""
    found: Tensor = layer.embeddings(inputs_embeds=hidden, token_type_ids=segments)
    return found


def run_bert(layer: Any, hidden: Tensor, is_token: Tensor | None) -> Tensor:
    """Run a block that sees all tokens; [samples, length] says whether each position holds one."""
    mask = None if is_token is None else is_token.bool()[:, None, None, :]
    found: Tensor = layer.block(hidden, attention_mask=mask)
    return found


def add_bert_bias(layer: Any, logits: Tensor) -> Tensor:
    """Add what BERT has learned for each word."""
    found: Tensor = logits + layer.predictions.bias
    return found


def classify(layer: Any, hidden: Tensor) -> Tensor:
    """Make logits [samples, classes] of the mean over images [samples, channels, height, width]."""
    logits: Tensor = layer.classifier(layer.pooler(hidden))
    return logits


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
    """Return the layers of a model of next words; `more` comes after its embedding."""
    embedding = {"embedding": words}
    tied = Entry(tied_logits, embedding, tied=True)
    head = tied if config.tie_word_embeddings else Entry(call, {"module": "lm_head"})
    return [
        Entry(embed, embedding),
        *more,
        *blocks,
        Entry(call, {"module": norm}),
        head,
    ]


def _decoder(config: Any) -> list[Entry]:
    places = range(config.num_hidden_layers)
    blocks = [Entry(run_decoder, {"block": f"model.layers.{place}"}) for place in places]
    return _text_model(config, "model.embed_tokens", blocks, "model.norm")


def _gpt2(config: Any) -> list[Entry]:
    places = range(config.num_hidden_layers)
    blocks = [Entry(call, {"module": f"transformer.h.{place}"}) for place in places]
    positions = {"positions": "transformer.wpe", "dropout": "transformer.drop"}
    more = Entry(add_positions, positions)
    return _text_model(config, "transformer.wte", blocks, "transformer.ln_f", more)


def _bert(config: Any) -> list[Entry]:
    words = {"embedding": "bert.embeddings.word_embeddings"}
    predictions = {"predictions": "cls.predictions"}
    # Only its bias is new there: the tied head has the matrix.
    known = ("predictions.transform", "predictions.decoder")
    if config.tie_word_embeddings:
        head = [
            Entry(tied_logits, words, tied=True),
            Entry(add_bert_bias, predictions, elsewhere=known),
        ]
    else:
        head = [Entry(call, {"module": "cls.predictions.decoder"})]
    return [
        Entry(embed, words),
        Entry(
            add_bert_positions,
            {"embeddings": "bert.embeddings"},
            needs=("token_type_ids",),
            elsewhere=("embeddings.word_embeddings",),
        ),
        *(
            Entry(run_bert, {"block": f"bert.encoder.layer.{index}"}, needs=(MASK,))
            for index in range(config.num_hidden_layers)
        ),
        Entry(call, {"module": "cls.predictions.transform"}),
        *head,
    ]


def _resnet(config: Any) -> list[Entry]:
    return [
        Entry(call, {"module": "resnet.embedder"}),
        *(
            Entry(call, {"module": f"resnet.encoder.stages.{stage}.layers.{index}"})
            for stage, depth in enumerate(config.depths)
            for index in range(depth)
        ),
        Entry(classify, {"pooler": "resnet.pooler", "classifier": "classifier"}),
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


def family_of(config: Any) -> Family:
    """Return a configuration's family; EnvPipeError if there is none, or a setting is refused."""
    model_type = getattr(config, "model_type", None)
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise EnvPipeError(
            "Models of this type are not split into stages",
            value=model_type or type(config).__name__,
            remedy=f"Those are: {', '.join(FAMILIES)}, by a configuration of transformers.",
        )
    for name in family.refused:
        if getattr(config, name, False):
            raise EnvPipeError(
                f"A {model_type} with {name} is not split into stages",
                value=getattr(config, name),
                remedy=f"Set {name} to false in the configuration.",
            )
    return family


def rotary_of(model: Any, config: Any) -> Rotary | None:
    """Return what makes a model's rotary angles; EnvPipeError for attention that is not split."""
    if not hasattr(config, "num_attention_heads"):  # no Transformer
        return None
    if model.config._attn_implementation != _IMPLEMENTATION:
        raise EnvPipeError(
            "Models with this implementation of attention are not split into stages",
            value=model.config._attn_implementation,
            remedy=f"Set attn_implementation of the configuration to {_IMPLEMENTATION}.",
        )
    rotary = getattr(model.base_model, "rotary_emb", None)
    if rotary is None:
        return None
    with torch.device("cpu"):
        return Rotary(type(rotary)(config))
