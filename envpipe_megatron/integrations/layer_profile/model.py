"""Divides megatron-core's GPTModel in pieces, and runs its microbatches by Megatron's own function.

A few layers of each kind are built. Microbatches run as in training, with the script's own
`forward_step`, on samples of zeros. Marks are set where data have been loaded, where each layer and
the last norm get their input, where the loss is there, and, on the way back, where the gradient of
each such input is. So the whole time of a microbatch belongs to pieces: data and mask, the script's
work on losses, and the host's looks at them.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from envpipe_megatron.core.arrays import FloatArray
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.integrations.device import current_device
from envpipe_megatron.integrations.hooking import recompute, replaced
from envpipe_megatron.integrations.layer_profile.rank_gpu import (
    Looks,
    Marks,
    Window,
    free_bytes,
    now_s,
)
from envpipe_megatron.runtime.channel.collectives import of_all_ranks
from envpipe_megatron.search.layer_profile import EMBEDDING, FULL, LAYER, LOSS, SELECTIVE, Block

_LAYERS_IN_A_ROW = 4
#: For weight, gradient and optimizer in mixed precision, none of it shared.
_BYTES_PER_PARAMETER = 18
#: The share of the free memory that all kinds together may take.
_SHARE = 0.25


def build_rows(module: Any) -> None:
    """Let transformer blocks build a row of each kind of layers, in place of all layers.

    The kind of each layer of the model is kept in `envpipe_kinds`, of those built in
    `envpipe_built`.
    """
    block = module.TransformerBlock
    build = block._build_layers

    def build_rows(self: Any) -> None:
        specs = list(self.submodules.layer_specs)
        kinds = [spec for at, spec in enumerate(specs) if spec not in specs[:at]]
        self.envpipe_kinds = [kinds.index(spec) for spec in specs]
        submodules = self.submodules
        self.submodules = dataclasses.replace(submodules, layer_specs=kinds)
        build(self)
        counts = [self.envpipe_kinds.count(kind) for kind in range(len(kinds))]
        sizes = [sum(weight.numel() for weight in layer.parameters()) for layer in self.layers]
        rows = row_lengths(counts, sizes)
        self.envpipe_built = [kind for kind, length in enumerate(rows) for _ in range(length)]
        self.layers = None  # frees the first ones before more are built
        built = [kinds[kind] for kind in self.envpipe_built]
        self.submodules = dataclasses.replace(submodules, layer_specs=built)
        build(self)

    block._build_layers = build_rows


def row_lengths(of_kind: Sequence[int], parameters: Sequence[int]) -> list[int]:
    """Return how many layers of each kind are built, the same on all ranks; every rank calls it.

    One layer that ran several times would have its gradients summed by autograd, and added to the
    model's once.

    Args:
        of_kind: layers that the model has of each kind.
        parameters: of one layer of each kind.
    """
    each = _SHARE * free_bytes() / len(of_kind) / _BYTES_PER_PARAMETER
    wanted = (min(count, _LAYERS_IN_A_ROW) for count in of_kind)
    return [
        min(of_all_ranks(max(1, int(min(count, each // size)))))
        for count, size in zip(wanted, parameters, strict=True)
    ]


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
        recompute([self._decoder], way, len(self._decoder.layers))
        try:
            yield
        finally:
            recompute([self._decoder], None, 0)

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


class Microbatches:
    """Runs microbatches of the model that was built; every rank calls what runs some.

    Args:
        wrapped: the model in Megatron's data parallel wrapper.
        model: the same without.
        args: Megatron's; their microbatch size is the one that runs, meanwhile.
        forward_step: the training script's.
    """

    def __init__(
        self,
        wrapped: Any,
        model: Any,
        args: argparse.Namespace,
        forward_step: Callable[..., Any],
    ) -> None:
        self._wrapped, self._model, self._args = wrapped, model, args
        self._forward_step = forward_step
        edges = [*model.decoder.layers, model.decoder.final_layernorm]
        self._handles = [
            model.register_forward_pre_hook(lambda *_: self._marks.add()),
            *(each.register_forward_pre_hook(self._edge, with_kwargs=True) for each in edges),
        ]
        self._marks: Marks | Looks = Looks()
        self._rest_cycles = self._started = 0
        self._goes_back = False
        #: Bytes that a stage sends which ends with a layer.
        self.message_bytes = 0

    def close(self) -> None:
        """Take the marks out of the model."""
        for handle in self._handles:
            handle.remove()

    def run(
        self,
        size: int,
        count: int,
        marks: Marks | Looks,
        *,
        rest_cycles: int = 0,
    ) -> Window:
        """Run microbatches of a size, before each of which a GPU rests for cycles of its clock."""
        from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining

        self._marks, self._rest_cycles, self._started = marks, rest_cycles, 0
        with replaced(self._args, micro_batch_size=size):
            data = _batches(self._args)
            now_s()
            begin_s = time.monotonic()
            forward_backward_no_pipelining(
                forward_step_func=self._step,
                data_iterator=data,
                model=self._wrapped,
                num_microbatches=count,
                seq_length=self._args.seq_length,
                micro_batch_size=size,
                forward_only=False,
            )
            marks.add()
            now_s()
        return Window(begin_s, time.monotonic(), count)

    def measure(
        self, size: int, count: int, marks: Marks | Looks, rest_cycles: int = 0
    ) -> tuple[FloatArray, Window]:
        """Run microbatches, the first and one more apart.

        Returns [1 + 2 (layers + 2), values] the median of what lies between edges, in this order:
        data, forwards from embedding to loss, backwards from embedding to loss; and the window.
        EnvPipeError if the edges are not those of such a model.
        """
        window = self.run(size, count + 1, marks, rest_cycles=rest_cycles)
        slots = len(self._model.decoder.layers) + 2
        edges = 2 * slots + 2
        gaps = marks.gaps()
        if len(gaps) + 1 != edges * (count + 1):
            raise EnvPipeError(
                "The model's layers do not follow one another from the embedding to the last norm",
                value=(len(gaps) + 1) / (count + 1),
                remedy="Search by a profile of another origin.",
            )
        beside = np.full((1, gaps.shape[1]), np.nan)  # after the last
        each = np.concatenate([gaps, beside]).reshape(count + 1, edges, -1)[1:, :-1]
        medians: FloatArray = np.median(each, axis=0)
        return np.concatenate([medians[: slots + 1], medians[:slots:-1]]), window

    def _step(self, *arguments: Any) -> tuple[Any, Callable[..., Any]]:
        """Run the script's forward step, whose loss function marks its end."""
        if self._started:
            self._marks.add()
        self._started += 1
        if self._rest_cycles:
            torch.cuda._sleep(self._rest_cycles)  # type: ignore[no-untyped-call]  # one thread
            # Ranks whose rests end apart would wait for each other in the pieces' collectives.
            dist.all_reduce(torch.zeros(1, device=current_device()))
        self._goes_back = False
        self._marks.add()
        output, loss_of = self._forward_step(*arguments)

        def loss_and_mark(*of: Any, **named: Any) -> Any:
            loss = loss_of(*of, **named)
            self._goes_back = True
            self._marks.add()
            return loss

        return output, loss_and_mark

    def _edge(self, _module: Any, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        if self._goes_back:  # a layer is computed again
            return
        hidden = named["hidden_states"] if "hidden_states" in named else arguments[0]
        self.message_bytes = hidden.nbytes
        self._marks.add()
        if hidden.requires_grad:
            hidden.register_hook(lambda _: self._marks.add())


def _batches(args: argparse.Namespace) -> Iterator[Mapping[str, torch.Tensor]]:
    """Yield samples of zeros as Megatron's dataset of a GPT does, in pinned memory."""
    size, length = args.micro_batch_size, args.seq_length
    tokens = torch.zeros(size, length, dtype=torch.int64)
    batch = {
        "tokens": tokens,
        "labels": tokens.clone(),
        "loss_mask": torch.ones(size, length),
        "position_ids": torch.arange(length).repeat(size, 1),
    }
    if args.create_attention_mask_in_dataloader:
        batch["attention_mask"] = torch.ones(size, 1, length, length, dtype=torch.bool).triu(1)
    if torch.cuda.is_available():
        batch = {name: values.pin_memory() for name, values in batch.items()}
    while True:
        yield dict(batch)  # the script changes it
