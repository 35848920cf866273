"""The unsplit model on the device `meta`: all of its modules, none of its memory.

A new family of models is an entry of `FAMILIES`. Attention masks are those that transformers makes,
without its looks at a mask's content: on a GPU these wait for the device within a unit.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # as all of torch's documentation has it
import transformers
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
)

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.integrations import versions
from envpipe_megatron.integrations.huggingface import layers
from envpipe_megatron.integrations.huggingface.layers import Entry

#: A label that is not predicted.
IGNORED_LABEL = -100


def language_model_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy of the labels that are not `IGNORED_LABEL`; 0 if all are.

    Logits are [samples, length, vocabulary], labels [samples, length]: the next tokens, or for BERT
    those that were masked. The loss is in fp32, whatever the logits' data type.
    """
    total = F.cross_entropy(
        logits.flatten(0, 1).float(),
        labels.flatten(),
        ignore_index=IGNORED_LABEL,
        reduction="sum",
    )
    return total / (labels != IGNORED_LABEL).sum().clamp(min=1)


def image_class_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy of logits [samples, classes] and labels [samples], in fp32."""
    return F.cross_entropy(logits.float(), labels)


#: The implementations of attention whose masks are made here.
IMPLEMENTATIONS = ("sdpa", "eager")
#: Lengths whose masks and angles are kept.
_KEPT = 8


class Attention:
    """Makes masks and angles, once for each length, data type and device.

    Args:
        implementation: of attention, one of `IMPLEMENTATIONS`.
        rotary: transformers' module with frequencies on the CPU, None for models without. It is no
            part of a layer: an engine that puts layers into half precision would round them.
    """

    def __init__(self, implementation: str, rotary: nn.Module | None = None) -> None:
        self._as_bias = implementation == "eager"
        self._rotary = rotary
        self._copies: dict[torch.device, nn.Module] = {}
        self._causal = functools.lru_cache(_KEPT)(self._make_causal)
        self._angles = functools.lru_cache(_KEPT)(self._make_angles)

    def causal(self, hidden: Tensor, window: int | None = None) -> Tensor | None:
        """What each position of [samples, length, hidden] sees: those before it, and itself.

        With a window, that many at most. None where attention does so without a mask; else
        [1, 1, length, length].
        """
        length = hidden.shape[1]
        if window is not None and length <= window:
            window = None
        if not self._as_bias and window is None:
            return None
        return self._causal(length, window, hidden.dtype, hidden.device)

    def padding(self, hidden: Tensor, is_token: Tensor | None) -> Tensor | None:
        """The mask for padding, [samples, 1, 1, length]; `is_token` is true or 1 for tokens."""
        if is_token is None:
            return None
        return self._finished(is_token.bool()[:, None, None, :], hidden.dtype)

    def angles(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines, [1, length, width of a head]."""
        found: tuple[Tensor, Tensor] = self._angles(hidden.shape[1], hidden.dtype, hidden.device)
        return found

    def _make_causal(
        self, length: int, window: int | None, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        with torch.inference_mode(False):  # it may be kept for training
            position = torch.arange(length, device=device)
            back = position[:, None] - position[None, :]
            seen = (back >= 0) if window is None else (back >= 0) & (back < window)
            return self._finished(seen[None, None], dtype)

    def _make_angles(
        self, length: int, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        assert self._rotary is not None
        with torch.inference_mode(False), torch.no_grad():
            # Older versions switch autocast off, which no `meta` has.
            where = torch.device("cpu") if device.type == "meta" else device
            if where not in self._copies:  # a copy to a GPU waits for it: once, and never again
                self._copies[where] = copy.deepcopy(self._rotary).to(where)
            rotary = self._copies[where]
            positions = torch.arange(length, device=where)[None]
            cosines, sines = rotary(torch.empty(0, dtype=dtype, device=where), positions)
        return cosines.to(device), sines.to(device)

    def _finished(self, seen: Tensor, dtype: torch.dtype) -> Tensor:
        if not self._as_bias:
            return seen
        zero = torch.zeros((), dtype=dtype, device=seen.device)
        return torch.where(seen, zero, torch.finfo(dtype).min)


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
    config: Any, words: str, block: type[layers.Layer], blocks: str, norm: str, *more: Entry
) -> list[Entry]:
    """A model of next words: `more` comes behind its embedding."""
    embedding = {"embedding": words}
    return [
        Entry(layers.TokenEmbedding, embedding),
        *more,
        *(
            Entry(block, {"block": f"{blocks}.{index}"})
            for index in range(config.num_hidden_layers)
        ),
        Entry(layers.Plain, {"module": norm}),
        Entry(layers.TiedHead, embedding, tied=True)
        if config.tie_word_embeddings
        else Entry(layers.Plain, {"module": "lm_head"}),
    ]


def _decoder(config: Any) -> list[Entry]:
    names = "model.embed_tokens", layers.DecoderBlock, "model.layers", "model.norm"
    return _text_model(config, *names)


def _gpt2(config: Any) -> list[Entry]:
    names = "transformer.wte", layers.GPT2Block, "transformer.h", "transformer.ln_f"
    positions = {"positions": "transformer.wpe", "dropout": "transformer.drop"}
    return _text_model(config, *names, Entry(layers.GPT2Positions, positions))


def _bert(config: Any) -> list[Entry]:
    words = {"embedding": "bert.embeddings.word_embeddings"}
    if config.tie_word_embeddings:
        head = [
            Entry(layers.TiedHead, words, tied=True),
            Entry(layers.BertBias, {"predictions": "cls.predictions"}),
        ]
    else:
        head = [Entry(layers.Plain, {"module": "cls.predictions.decoder"})]
    return [
        Entry(layers.TokenEmbedding, words),
        Entry(layers.BertPositions, {"embeddings": "bert.embeddings"}),
        *(
            Entry(layers.BertBlock, {"block": f"bert.encoder.layer.{index}"})
            for index in range(config.num_hidden_layers)
        ),
        Entry(layers.Plain, {"module": "cls.predictions.transform"}),
        *head,
    ]


def _resnet(config: Any) -> list[Entry]:
    return [
        Entry(layers.Plain, {"module": "resnet.embedder"}),
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


class ModelError(EnvPipeError):
    """A model or a version of transformers that is not split here."""


class Skeleton:
    """A configuration's model without memory, its layers, and what they share.

    Parameters have torch's default data type. Raises ModelError.
    """

    def __init__(self, config: Any) -> None:
        of = versions.TRANSFORMERS
        versions.check("transformers", transformers.__version__, of, ModelError)
        self.family = _family(config)
        config = copy.deepcopy(config)  # making a model writes to it
        with torch.device("meta"):
            self.model = self.family.auto.from_config(config, dtype=torch.get_default_dtype())
        self.entries: list[Entry] = self.family.entries(config)
        self.loss = self.family.loss
        self.attention = Attention(*_attention(self.model, config))

    def module(self, name: str) -> nn.Module:
        """A module of the unsplit model by its name, on the device `meta`."""
        found: nn.Module = self.model.get_submodule(name)
        return found

    def initialize(self, module: nn.Module) -> None:
        """Draw a module's weights as transformers does, from torch's generator."""
        with torch.no_grad():
            module.apply(self.model._init_weights)


def _family(config: Any) -> Family:
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


def _attention(model: Any, config: Any) -> tuple[str, nn.Module | None]:
    """The implementation of attention, and the module of rotary frequencies on the CPU."""
    if not hasattr(config, "num_attention_heads"):  # no Transformer
        return IMPLEMENTATIONS[0], None
    implementation = model.config._attn_implementation
    if implementation not in IMPLEMENTATIONS:
        allowed = " or ".join(IMPLEMENTATIONS)
        raise ModelError(
            "Models with this implementation of attention are not split into stages",
            value=implementation,
            remedy=f"Set attn_implementation of the configuration to {allowed}.",
        )
    rotary = getattr(model.base_model, "rotary_emb", None)
    if rotary is None:
        return implementation, None
    with torch.device("cpu"):
        return implementation, type(rotary)(config)
