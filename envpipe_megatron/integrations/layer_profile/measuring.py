"""Runs microbatches by Megatron's own function, and marks the edges of the model's pieces.

They run as in training, with the script's own `forward_step`, on samples of zeros. Marks are set
where data have been loaded, where each layer and the last norm get their input, where the loss is
there, and, on the way back, where the gradient of each such input is. So the whole time of a
microbatch belongs to pieces: data and mask, the script's work on losses, and the host's looks at
them.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from envpipe_megatron.core.arrays import FloatArray
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.integrations.device import current_device
from envpipe_megatron.integrations.hooking import replaced

_LAYERS_IN_A_ROW = 4
#: Weight, gradient and optimizer of mixed precision, none of it shared.
_BYTES_PER_PARAMETER = 18
#: Of the free memory, for all kinds together.
_SHARE = 0.25


class Window(NamedTuple):
    """Begin and end of some microbatches, by `time.monotonic`, and how many they were."""

    begin_s: float
    end_s: float
    runs: int


class Marks:
    """Notes instants on the device's stream, without a wait for it; on a CPU, the host's."""

    def __init__(self) -> None:
        self._on_gpu = torch.cuda.is_available()
        self._marks: list[Any] = []

    def add(self) -> None:
        """Mark what has been handed to the device until here."""
        if not self._on_gpu:
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._marks.append(event)

    def gaps(self) -> FloatArray:
        """Return [edges - 1, 1] time from each mark to the next, s."""
        now_s()
        pairs = pairwise(self._marks)
        return np.array([[a.elapsed_time(b) / 1e3 if self._on_gpu else b - a] for a, b in pairs])


class Looks:
    """Notes instants of the host, and the memory, at edges where the device has done all its work.

    On a CPU no memory is counted.
    """

    def __init__(self) -> None:
        self._looks: list[tuple[float, float, int, int]] = []

    def add(self) -> None:
        """Look at the clock, wait for the device, and look at the memory."""
        ended_s, allocated, peak = time.perf_counter(), 0, 0
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            allocated, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        self._looks.append((ended_s, time.perf_counter(), allocated, peak))

    def gaps(self) -> FloatArray:
        """Return [edges - 1, 4] host's time, s; bytes held more; peak above begin and end."""
        return np.array(
            [
                (ended_s - begun_s, held - before, peak - before, peak - held)
                for (_, begun_s, before, _), (ended_s, _, held, peak) in pairwise(self._looks)
            ]
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
        #: Of what a stage sends that ends with a layer.
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
        beside = np.full((1, gaps.shape[1]), np.nan)  # behind the last
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


def now_s() -> float:
    """Return the host's time when the device has done all that it was handed, s."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def lowest(value: int) -> int:
    """Return the lowest of all ranks' values; every rank calls it."""
    tensor = torch.tensor([value], device=current_device())
    dist.all_reduce(tensor, op=dist.ReduceOp.MIN)
    return int(tensor.item())


def free_bytes() -> float:
    """Return the memory that torch can still have, bytes; infinite on a CPU."""
    if not torch.cuda.is_available():
        return math.inf
    free, _ = torch.cuda.mem_get_info()
    return free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()


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
        lowest(max(1, int(min(count, each // size))))
        for count, size in zip(wanted, parameters, strict=True)
    ]
