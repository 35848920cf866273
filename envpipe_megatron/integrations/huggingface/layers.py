"""Layers of a pipeline: each holds modules of transformers, and calls them as the model does.

`families` says which layers a model has. A layer is made on the device `meta` and takes no memory
until `split` gives it weights.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812  # as all of torch's documentation has it
from torch import Tensor, nn

if TYPE_CHECKING:
    from envpipe_megatron.integrations.huggingface.split import SplitModel

#: Hidden states, alone or with what later layers need.
Message = Tensor | tuple[Tensor, ...]
MASK = "attention_mask"
#: Inputs of a model beside the first, in the order in which messages have them.
EXTRAS = ("token_type_ids", MASK)


@dataclass(frozen=True)
class Entry:
    """A layer of a model: its class, and by attribute the module's name in the unsplit model.

    `tied` layers have the weights of the first layer.
    """

    layer: type[Layer]
    modules: Mapping[str, str]
    tied: bool = False


class Layer(nn.Module):
    """A layer of a split model; DeepSpeed's specs call the class.

    Args:
        model: has the unsplit model's modules, and weights.
        index: the layer's place in the model.
        finished: whether it gets weights, or stays on the device `meta`.
    """

    #: Those of `EXTRAS` that `run` takes.
    needs: ClassVar[tuple[str, ...]] = ()

    def __init__(self, model: SplitModel, index: int, finished: bool = True) -> None:
        super().__init__()
        self.index = index
        self.attention = model.attention
        self.takes, self.gives = model.extras(index), model.extras(index + 1)
        self.names = dict(model.entries[index].modules)
        for attribute, name in self.names.items():
            self.add_module(attribute, copy.deepcopy(model.module(name)))
        self.arrange()
        if finished:
            model.finish(self)

    def arrange(self) -> None:
        """Leave out what other layers hold."""

    def run(self, hidden: Tensor, **extras: Tensor | None) -> Tensor:
        """The layer's work; hidden states are [samples, length, hidden], of images [n, c, h, w]."""
        raise NotImplementedError

    def forward(self, message: Message, **extras: Tensor | None) -> Message:
        """Take what the layer before gave, or the model's inputs: a tensor, or a tuple.

        A tuple has the `takes` behind the hidden states, and so has what is returned the `gives`.
        Beside a tensor the `EXTRAS` come by name.
        """
        if isinstance(message, Tensor):
            return self.run(message, **{name: extras.get(name) for name in self.needs})
        hidden, *others = message
        taken = dict(zip(self.takes, others, strict=True))
        hidden = self.run(hidden, **{name: taken[name] for name in self.needs})
        return (hidden, *(taken[name] for name in self.gives)) if self.gives else hidden

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters and lasting buffers by their name in the unsplit model."""
        for name, tensor in self.state_dict(keep_vars=True).items():
            attribute, _, rest = name.partition(".")
            yield f"{self.names[attribute]}.{rest}", tensor


class TokenEmbedding(Layer):
    """From token numbers, [samples, length], to hidden states."""

    embedding: Any

    def run(self, hidden: Tensor, **extras: Tensor | None) -> Tensor:
        """Take token numbers."""
        embedded: Tensor = self.embedding(hidden)
        return embedded


class TiedHead(TokenEmbedding):
    """From hidden states to logits, by the first layer's weights."""

    def run(self, hidden: Tensor, **extras: Tensor | None) -> Tensor:
        """Take hidden states."""
        return tied_logits(self, hidden)


def tied_logits(layer: TokenEmbedding, hidden: Tensor) -> Tensor:
    """Logits by the weights of an embedding."""
    return F.linear(hidden, layer.embedding.weight)


class Plain(Layer):
    """A module that takes hidden states, or images, and nothing else: a norm, a head, a stem."""

    module: Any

    def run(self, hidden: Tensor, **extras: Tensor | None) -> Tensor:
        """Take hidden states."""
        found: Tensor = self.module(hidden)
        return found


class DecoderBlock(Layer):
    """A block of Llama, Qwen or Mistral: rotary positions, perhaps a sliding window."""

    block: Any

    def arrange(self) -> None:
        """Find this block's window."""
        config = self.block.self_attn.config
        kinds = getattr(config, "layer_types", None)
        sliding = kinds is None or kinds[self.block.self_attn.layer_idx] == "sliding_attention"
        self.window = getattr(config, "sliding_window", None) if sliding else None

    def run(self, hidden: Tensor, **extras: Tensor | None) -> Tensor:
        """Take hidden states."""
        found: Tensor = self.block(
            hidden,
            attention_mask=self.attention.causal(hidden, self.window),
            position_embeddings=self.attention.angles(hidden),
        )
        return found


class GPT2Positions(Layer):
    """Adds what each position has learned."""

    positions: Any
    dropout: Any

    def run(self, hidden: Tensor, **extras: Tensor | None) -> Tensor:
        """Take hidden states."""
        positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
        found: Tensor = self.dropout(hidden + self.positions(positions))
        return found


class GPT2Block(Layer):
    """Attention to what came before, and a feed-forward network."""

    block: Any

    def run(self, hidden: Tensor, **extras: Tensor | None) -> Tensor:
        """Take hidden states."""
        found = self.block(hidden, attention_mask=self.attention.causal(hidden))
        states: Tensor = found[0] if isinstance(found, tuple) else found  # transformers 5.0: tuple
        return states


class BertPositions(Layer):
    """Adds what positions and segments have learned."""

    embeddings: Any

    needs = ("token_type_ids",)

    def arrange(self) -> None:
        """The first layer holds the words, which are tied."""
        del self.embeddings.word_embeddings

    def run(self, hidden: Tensor, **extras: Tensor | None) -> Tensor:
        """Take hidden states, and segment numbers [samples, length]; none are all 0."""
        found: Tensor = self.embeddings(
            inputs_embeds=hidden, token_type_ids=extras.get("token_type_ids")
        )
        return found


class BertBlock(Layer):
    """Attention to all tokens, and a feed-forward network."""

    block: Any

    needs = ("attention_mask",)

    def run(self, hidden: Tensor, **extras: Tensor | None) -> Tensor:
        """Take hidden states, and whether each position holds a token, [samples, length]."""
        mask = self.attention.padding(hidden, extras.get("attention_mask"))
        found: Tensor = self.block(hidden, attention_mask=mask)
        return found


class BertBias(Layer):
    """What BERT adds to its logits, for each word."""

    predictions: Any

    def arrange(self) -> None:
        """Only the bias is new: the tied head has the matrix."""
        del self.predictions.transform, self.predictions.decoder

    def run(self, hidden: Tensor, **extras: Tensor | None) -> Tensor:
        """Take logits."""
        found: Tensor = hidden + self.predictions.bias
        return found


class ResNetBlock(Plain):
    """One block of convolutions and its shortcut."""


class ResNetHead(Layer):
    """The mean over each image, and its classes' logits [samples, classes]."""

    pooler: Any
    classifier: Any

    def run(self, hidden: Tensor, **extras: Tensor | None) -> Tensor:
        """Take [samples, channels, height, width]."""
        logits: Tensor = self.classifier(self.pooler(hidden))
        return logits
