"""Divides megatron-core's GPTModel, of which a few layers of each kind were built, in pieces."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import groupby
from typing import Any

import torch

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.integrations.hooking import replaced
from envpipe_megatron.search.layer_profile import EMBEDDING, FULL, LAYER, LOSS, SELECTIVE, Block


class GptPieces:
    """A model with a row of each kind of layers; EnvPipeError if it is no GPTModel.

    Args:
        model: without wrappers.
    """

    def __init__(self, model: Any) -> None:
        from megatron.core.models.gpt import GPTModel

        if type(model) is not GPTModel:
            raise EnvPipeError(
                "Layers are measured only of megatron-core's GPTModel",
                value=type(model).__name__,
                remedy="Search by a profile of another origin.",
            )
        self._model, self._decoder = model, model.decoder
        kinds = self._decoder.envpipe_kinds
        one = max(kinds) == 0
        names = [
            LAYER if one else f"{LAYER}{kinds.index(kind) + 1}" for kind in range(max(kinds) + 1)
        ]
        self._layers: dict[str, list[Any]] = {name: [] for name in names}
        for kind, layer in zip(self._decoder.envpipe_built, self._decoder.layers, strict=True):
            self._layers[names[kind]].append(layer)
        self.names = (EMBEDDING, *names, LOSS)
        in_order = [EMBEDDING, *(names[kind] for kind in kinds), LOSS]
        self.blocks = tuple(Block((name,), len(list(same))) for name, same in groupby(in_order))

    @property
    def longest_row(self) -> int:
        """Return the most layers of a kind that were built."""
        return max(map(len, self._layers.values()))

    @property
    def slots(self) -> list[str]:
        """Return the pieces that the model now runs, one after another."""
        kind = {id(layer): name for name, row in self._layers.items() for layer in row}
        return [EMBEDDING, *(kind[id(layer)] for layer in self._decoder.layers), LOSS]

    def ways(self, piece: str) -> tuple[str, ...]:
        """Return the recomputations that a piece has, from the mildest."""
        row = self._layers.get(piece)
        if row is None:
            return ()
        attention = getattr(row[0], "self_attention", None)
        return (SELECTIVE, FULL) if hasattr(attention, "checkpoint_core_attention") else (FULL,)

    def rows(self, most: int) -> Any:
        """Within, the model runs at most `most` layers of each kind."""
        layers = torch.nn.ModuleList(layer for row in self._layers.values() for layer in row[:most])
        return replaced(self._decoder, layers=layers, num_layers_per_pipeline_rank=len(layers))

    @contextmanager
    def recomputing(self, way: str | None) -> Iterator[None]:
        """Within, all layers that have this recomputation do it."""
        with ExitStack() as stack:
            if way == FULL:
                stack.enter_context(
                    replaced(
                        self._decoder.config,
                        recompute_granularity=FULL,
                        recompute_method="uniform",
                        recompute_num_layers=1,
                    )
                )
            for name, row in self._layers.items() if way == SELECTIVE else ():
                for layer in row if SELECTIVE in self.ways(name) else ():
                    change = replaced(layer.self_attention, checkpoint_core_attention=True)
                    stack.enter_context(change)
            yield

    def parameters(self, piece: str, *, of_experts: bool = False) -> int:
        """Return the number of parameters on this rank, or only of those that are experts'."""
        if piece == EMBEDDING:
            weights = list(self._model.embedding.parameters())
        elif piece == LOSS:
            norm = self._decoder.final_layernorm
            weights = [self._model.shared_embedding_or_output_weight(), *norm.parameters()]
        else:
            weights = list(self._layers[piece][0].parameters())
        return sum(
            weight.numel()
            for weight in weights
            if not of_experts or not getattr(weight, "allreduce", True)
        )
