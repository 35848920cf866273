"""Layers of a pipeline: each holds modules of transformers, and calls them as the model does.

`families` says which layers a model has. A layer is made on the device `meta` and takes no memory
until `split` gives it weights.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812  # as all of torch's documentation has it
from torch import Tensor, nn

if TYPE_CHECKING:
    from envpipe_megatron.integrations.huggingface.split import SplitModel

#: Hidden states, or a tuple of them and what later layers need.
Message = Tensor | tuple[Tensor, ...]
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


class Layer(nn.Module):
    """A layer of a split model; DeepSpeed's specs call the class.

    Args:
        model: has the unsplit model's modules, and weights.
        index: the layer's place in the model.
        finished: whether it gets weights, or stays on the device `meta`.
    """

    def __init__(self, model: SplitModel, index: int, finished: bool = True) -> None:
        super().__init__()
        self.index, self.entry, self.rotary = index, model.entries[index], model.rotary
        self._takes, self._gives = model.extras(index), model.extras(index + 1)
        for attribute, name in self.entry.modules.items():
            self.add_module(attribute, copy.deepcopy(model.module(name)))
        for name in self.entry.elsewhere:
            parent, _, child = name.rpartition(".")
            delattr(self.get_submodule(parent), child)
        if finished:
            model.finish(self)

    def forward(self, message: Message, **extras: Tensor | None) -> Message:
        """Take what the layer before gave, or the model's inputs: a tensor, or a tuple.

        A tuple has the other inputs behind the hidden states, if this layer or a later one needs
        them, and so has what is returned. Beside a tensor the `EXTRAS` come by name.
        """
        hidden, *others = (message,) if isinstance(message, Tensor) else message
        taken = dict(zip(self._takes, others, strict=True)) if others else {}
        known = taken or extras
        hidden = self.entry.run(self, hidden, *(known.get(name) for name in self.entry.needs))
        given = [taken[name] for name in self._gives if taken]
        return (hidden, *given) if given else hidden

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield parameters and lasting buffers by their name in the unsplit model."""
        for name, tensor in self.state_dict(keep_vars=True).items():
            attribute, _, rest = name.partition(".")
            yield f"{self.entry.modules[attribute]}.{rest}", tensor


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
        found: tuple[Tensor, Tensor] = self._angles(hidden.shape[1], hidden.dtype, hidden.device)
        return found

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
