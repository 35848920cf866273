"""The pieces of megatron-core's GPTModel, each to be run alone.

Layers run inside the model's own transformer block, which sets up what they need (8-bit types,
random states, recomputation), and with the arguments that the model itself gives the block.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.integrations.device import current_device
from envpipe_megatron.integrations.hooking import replaced
from envpipe_megatron.search.layer_profile import EMBEDDING, FULL, LAYER, LOSS, SELECTIVE, Block

_SEED = 1234


@dataclass(frozen=True)
class Piece:
    """A part of the model that can be run.

    Args:
        forward: from hidden states to hidden states, or the loss. The embedding's ignores them.
        parameters, expert_parameters: that this rank holds, and those of them of experts.
    """

    name: str
    forward: Callable[[torch.Tensor], torch.Tensor]
    parameters: int
    expert_parameters: int = 0


@dataclass(frozen=True)
class _Microbatch:
    """Random tokens, the same on all ranks that share them, and what the model makes of them."""

    inputs: tuple[Any, ...]
    labels: torch.Tensor
    hidden: torch.Tensor
    block_arguments: Mapping[str, Any]


class GptPieces:
    """A model with a row of each kind of layers; EnvPipeError if it is no GPTModel.

    Args:
        model: without wrappers.
        args: Megatron's.
    """

    def __init__(self, model: Any, args: argparse.Namespace) -> None:
        from megatron.core.models.gpt import GPTModel

        if type(model) is not GPTModel:
            raise EnvPipeError(
                "Layers are measured of megatron-core's GPTModel alone",
                value=type(model).__name__,
                remedy="Search by a profile of another origin.",
            )
        self._model, self._args = model, args
        self._decoder = model.decoder
        kinds = self._decoder.envpipe_kinds
        one = max(kinds) == 0
        names = [
            LAYER if one else f"{LAYER}{kinds.index(kind) + 1}" for kind in range(max(kinds) + 1)
        ]
        self._layers: dict[str, list[Any]] = {name: [] for name in names}
        for kind, layer in zip(self._decoder.envpipe_built, self._decoder.layers, strict=True):
            self._layers[names[kind]].append(layer)
        #: Of the last microbatch size: each costs a run of the whole model.
        self._microbatch = lru_cache(maxsize=1)(self._make_microbatch)
        self.blocks = _blocks([EMBEDDING, *(names[kind] for kind in kinds), LOSS])

    def forget_microbatch(self) -> None:
        """Free what the hidden states of the last microbatch hold."""
        self._microbatch.cache_clear()

    def row_length(self, piece: str) -> int:
        """How many of a piece can run in a row: the layers that were built, or one."""
        return len(self._layers.get(piece, [piece]))

    def ways(self, piece: str) -> tuple[str, ...]:
        """The recomputations that a piece has, from the mildest."""
        row = self._layers.get(piece)
        if row is None:
            return ()
        attention = getattr(row[0], "self_attention", None)
        return (SELECTIVE, FULL) if hasattr(attention, "checkpoint_core_attention") else (FULL,)

    @contextmanager
    def running(
        self, piece: str, microbatch_size: int, way: str | None = None, length: int = 1
    ) -> Iterator[tuple[Piece, torch.Tensor]]:
        """A piece that may be run, and hidden states for it.

        `length` layers of a kind run in a row; `parameters` are those of one.
        """
        batch = self._microbatch(microbatch_size)
        if piece == EMBEDDING:
            embedding, (tokens, positions, _) = self._model.embedding, batch.inputs
            yield (
                Piece(piece, lambda _: embedding(tokens, positions), _count([embedding])),
                batch.hidden,
            )
        elif piece == LOSS:
            norm = self._decoder.final_layernorm
            weights = [self._model.shared_embedding_or_output_weight(), *norm.parameters()]
            with self._only([], norm):
                yield (
                    Piece(
                        piece,
                        lambda hidden: self._loss(batch, hidden),
                        sum(weight.numel() for weight in weights),
                    ),
                    batch.hidden,
                )
        else:
            row, block = self._layers[piece][:length], self._decoder
            with self._only(row, None), _recomputing(row, block.config, way):
                yield (
                    Piece(
                        piece,
                        lambda hidden: block(hidden_states=hidden, **batch.block_arguments),
                        _count(row[:1]),
                        _count(row[:1], of_experts=True),
                    ),
                    batch.hidden,
                )

    def _loss(self, batch: _Microbatch, hidden: torch.Tensor) -> torch.Tensor:
        """The sum of the losses, looked at by the host if Megatron's training scripts do so."""
        losses = self._model(*batch.inputs, decoder_input=hidden, labels=batch.labels)
        loss: torch.Tensor = losses.float().sum()
        if self._args.check_for_nan_in_loss_and_grad:
            _ = bool(loss.isnan()), bool(loss.isinf())
        return loss

    def _only(self, layers: Iterable[torch.nn.Module], norm: Any) -> Any:
        """While these are the transformer block's layers, and this its norm behind them."""
        modules = torch.nn.ModuleList(layers)
        return replaced(
            self._decoder,
            layers=modules,
            num_layers_per_pipeline_rank=len(modules),
            final_layernorm=norm,
        )

    def _make_microbatch(self, size: int) -> _Microbatch:
        args, device = self._args, current_device()
        length = args.seq_length // args.context_parallel_size
        random = torch.Generator().manual_seed(_SEED)
        tokens = torch.randint(args.padded_vocab_size, (size, length), generator=random).to(device)
        positions = torch.arange(length, device=device).repeat(size, 1)
        mask = None
        if args.create_attention_mask_in_dataloader:
            ones = torch.ones(length, args.seq_length, dtype=torch.bool, device=device)
            mask = ones.triu(1).repeat(size, 1, 1, 1)
        given: dict[str, Any] = {}

        def keep(_module: Any, _args: Any, kwargs: Mapping[str, Any]) -> None:
            given.update(kwargs)

        handle = self._decoder.register_forward_pre_hook(keep, with_kwargs=True)
        with torch.no_grad():
            self._model(tokens, positions, mask, labels=tokens)
        handle.remove()
        hidden = given.pop("hidden_states")
        return _Microbatch((tokens, positions, mask), tokens, hidden, given)


def _blocks(pieces: list[str]) -> tuple[Block, ...]:
    """Each run of equal pieces as a block that is repeated."""
    blocks: list[Block] = []
    for piece in pieces:
        if blocks and blocks[-1].pieces == (piece,):
            blocks[-1] = Block((piece,), blocks[-1].repeat + 1)
        else:
            blocks.append(Block((piece,)))
    return tuple(blocks)


def _count(modules: list[torch.nn.Module], *, of_experts: bool = False) -> int:
    """Parameters, or those that Megatron marks as experts'."""
    weights = [weight for module in modules for weight in module.parameters()]
    return sum(w.numel() for w in weights if not of_experts or not getattr(w, "allreduce", True))


@contextmanager
def _recomputing(layers: Iterable[Any], config: Any, way: str | None) -> Iterator[None]:
    """While layers are recomputed in one of the ways, or not."""
    if way == SELECTIVE:
        with ExitStack() as stack:
            for layer in layers:
                change = replaced(layer.self_attention, checkpoint_core_attention=True)
                stack.enter_context(change)
            yield
    elif way == FULL:
        with replaced(
            config,
            recompute_granularity=FULL,
            recompute_method="uniform",
            recompute_num_layers=1,
        ):
            yield
    else:
        yield
