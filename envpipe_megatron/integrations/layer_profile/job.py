"""Measures a model: all pieces at each microbatch size, each size a file.

Beside the pieces it measures the optimizer's memory, and the time of its step.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from envpipe_megatron.core.arrays import FloatArray
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.files import replace_files
from envpipe_megatron.integrations.hooking import refuse
from envpipe_megatron.integrations.layer_profile.gpt import GptPieces
from envpipe_megatron.integrations.layer_profile.measuring import Microbatches, now_s
from envpipe_megatron.integrations.layer_profile.passes import MeasuredPiece, measure_pieces
from envpipe_megatron.integrations.layer_profile.rank_gpu import RankGpu
from envpipe_megatron.search.layer_file import layers_text
from envpipe_megatron.search.layer_jobs import LayerJob
from envpipe_megatron.search.layer_profile import (
    EMBEDDING,
    LOSS,
    BytesPerParameter,
    LayerProfile,
    Links,
    Measure,
    Recomputation,
)

_STEPS = 4


class StepTime(NamedTuple):
    """Times of a training step for each parameter, as `LayerProfile` has them."""

    gradients_s: float
    optimizer_s: float


def measure_step(model: Any, optimizer: Any) -> StepTime:
    """Return seconds for each parameter of what surrounds a step's microbatches.

    Gradients are set to zero, checked and scaled, as each of several data parallel ranks does for
    all its parameters; a sum over ranks is in it only where this job has several. The first step,
    which makes the optimizer's state, does not count. `model` is the data parallel wrapper, whose
    gradients are zeros from here on.
    """
    parameters: int = sum(weight.numel() for weight in model.parameters())
    gradients_s, optimizer_s = [], []
    for _ in range(_STEPS):
        begin_s = now_s()
        model.zero_grad_buffer()
        optimizer.zero_grad()
        model.finish_grad_sync()
        # One rank by itself scales nothing.
        model.scale_gradients(1.0)
        ready_s = now_s()
        optimizer.step()
        gradients_s.append(ready_s - begin_s)
        optimizer_s.append(now_s() - ready_s)
    return StepTime(
        *(statistics.median(times_s[1:]) / parameters for times_s in (gradients_s, optimizer_s))
    )


def bytes_held(model: torch.nn.Module, optimizer: Any) -> BytesPerParameter:
    """Return means over a model's parameters; the optimizer of its only replica has stepped."""
    weights: list[Any] = list(model.parameters())
    count = sum(weight.numel() for weight in weights)
    own = {weight.data_ptr() for weight in weights}
    state = {tensor.data_ptr(): tensor.nbytes for tensor in _state(optimizer)}
    return BytesPerParameter(
        sum(weight.nbytes for weight in weights) / count,
        sum(weight.main_grad.nbytes for weight in weights) / count,
        sum(size for place, size in state.items() if place not in own) / count,
    )


def _state(optimizer: Any) -> Iterator[torch.Tensor]:
    """Yield all tensors of the optimizers that a job's optimizer consists of."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = part.optimizer
        for group in inner.param_groups:
            yield from group["params"]
        for values in inner.state.values():
            yield from (value for value in values.values() if isinstance(value, torch.Tensor))


def measure_model(
    wrapped: Any,
    model: Any,
    optimizer: Any,
    args: argparse.Namespace,
    forward_step: Callable[..., Any],
    job: LayerJob,
) -> None:
    """Measure a model that one rank, or the job's group, holds whole; every rank calls it.

    Args:
        wrapped: the model in Megatron's data parallel wrapper.
        model: the same without, with a row of each kind of layers.
        optimizer, args: Megatron's.
        forward_step: the training script's.
    """
    try:
        pieces, gpu = GptPieces(model), RankGpu(job.clocks_mhz)
    except EnvPipeError as error:
        refuse(error)
    with closing(gpu), closing(Microbatches(wrapped, model, args, forward_step)) as microbatches:
        step = measure_step(wrapped, optimizer)
        held = bytes_held(model, optimizer)
        for size in job.microbatch_sizes:
            ways = measure_pieces(pieces, microbatches, size, gpu)
            sent = microbatches.message_bytes
            profile = LayerProfile(
                blocks=pieces.blocks,
                frequency_mhz=np.array(gpu.frequency_mhz),
                measures={
                    job.sizes(size): {
                        name: _measure(pieces, name, sent, ways, counted=gpu.name is not None)
                        for name in pieces.names
                    }
                },
                bytes_per_parameter=held,
                links=Links(),
                **step._asdict(),
                frees_outputs=True,
                gpu=gpu.name,
                source=job.source,
            )
            if dist.get_rank() == 0:
                replace_files({job.file(size): [layers_text(profile)]})


def _measure(
    pieces: GptPieces,
    name: str,
    sent_bytes: int,
    ways: Mapping[tuple[str, str | None], MeasuredPiece],
    *,
    counted: bool,
) -> Measure:
    """Return a piece's measure; its forward and its backward take the same power.

    Args:
        sent_bytes: of a message between stages.
        counted: the host hands over to a GPU.
    """
    plain = ways[name, None]
    recomputation = []
    for way in pieces.ways(name):
        again = ways[name, way]
        working = again.held.backward_workspace_bytes - plain.held.backward_workspace_bytes
        recomputation.append(
            Recomputation(
                way,
                np.maximum(again.both_s - plain.both_s, 0.0),
                _known(np.maximum(again.both_j - plain.both_j, 0.0)),
                again.held.activation_bytes,
                max(working, 0.0),
            )
        )
    measure = Measure(
        forward_s=plain.forward_s,
        backward_s=plain.backward_s,
        forward_j=_known(plain.both_j * plain.forward_s / plain.both_s),
        backward_j=_known(plain.both_j * plain.backward_s / plain.both_s),
        parameters=pieces.parameters(name),
        expert_parameters=pieces.parameters(name, of_experts=True),
        input_bytes=0 if name == EMBEDDING else sent_bytes,
        output_bytes=0 if name == LOSS else sent_bytes,
        **plain.held._asdict(),
        recomputation=tuple(recomputation),
        host_s=plain.host_s if counted else None,
    )
    # Where the host is the slower one, a rest lets it get ahead: that is no clock's doing.
    rested_s = None if measure.is_host_bound else _known(np.minimum(plain.rested_s, plain.both_s))
    return replace(measure, rested_s=rested_s)


def _known(values: FloatArray) -> FloatArray | None:
    return None if np.isnan(values).any() else values
