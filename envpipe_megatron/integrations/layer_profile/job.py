"""A job's measurement: all pieces at each microbatch size, each size a file.

Beside the pieces: what the optimizer holds and its step takes, and how long a microbatch of the
whole model takes in Megatron's own function. That is more than its pieces: the data, its mask, what
the training script makes of the losses, and the host's looks at them.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from envpipe_megatron.core.arrays import FloatArray
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.files import replace_files
from envpipe_megatron.integrations.hooking import refuse
from envpipe_megatron.integrations.layer_profile.gpt import GptPieces
from envpipe_megatron.integrations.layer_profile.measuring import (
    Held,
    Marks,
    now_s,
    repeats_that_fit,
)
from envpipe_megatron.integrations.layer_profile.passes import (
    RankGpu,
    Way,
    measure_pieces,
    undisturbed_s,
)
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
_ROUNDS = 5
_FEW, _MANY = 1, 5


class StepTime(NamedTuple):
    """Of a training step for each parameter, as `LayerProfile` has it."""

    gradients_s: float
    optimizer_s: float


def measure_step(model: Any, optimizer: Any) -> StepTime:
    """Seconds for each parameter of what follows, and comes before, a step's microbatches.

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
        # A rank alone scales nothing by itself.
        model.scale_gradients(1.0)
        ready_s = now_s()
        optimizer.step()
        gradients_s.append(ready_s - begin_s)
        optimizer_s.append(now_s() - ready_s)
    return StepTime(
        *(statistics.median(times_s[1:]) / parameters for times_s in (gradients_s, optimizer_s))
    )


def bytes_held(model: torch.nn.Module, optimizer: Any) -> BytesPerParameter:
    """Means over the parameters of a model whose optimizer has made a step, alone in its group."""
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
    """All tensors of the optimizers that a job's optimizer consists of."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = part.optimizer
        for group in inner.param_groups:
            yield from group["params"]
        for values in inner.state.values():
            yield from (value for value in values.values() if isinstance(value, torch.Tensor))


class Times(NamedTuple):
    """Of a microbatch through all layers that were built: the whole, and until the model begins."""

    whole_s: float
    data_s: float


def measure_microbatches(
    wrapped: Any, args: argparse.Namespace, forward_step: Callable[..., Any], sizes: Sequence[int]
) -> list[Times]:
    """What each microbatch more takes, by size; every rank calls it.

    Repeats of a size lie between those of the others, so that a host that is slow for a second
    meets few of them.

    Args:
        wrapped: the model in Megatron's data parallel wrapper.
        args: Megatron's; their microbatch size is the one that is measured, meanwhile.
        forward_step: the training script's.
        sizes: microbatch sizes.
    """
    data = {size: _batches(args, size) for size in sizes}
    with closing(_Loading(wrapped, forward_step)) as loading:
        rounds = [
            [_measure_round(wrapped, args, loading, size, data[size]) for size in sizes]
            for _ in range(1 + _ROUNDS)
        ]
    times_s = np.array(rounds[1:])  # the first loads, and allocates
    # Each apart: a difference is too small as well where the shorter run was held up.
    few_s, many_s, data_s = np.apply_along_axis(undisturbed_s, 0, times_s).T
    whole_s = np.maximum(many_s - few_s, 0.0) / (_MANY - _FEW)
    return [Times(*each) for each in zip(whole_s.tolist(), data_s.tolist(), strict=True)]


class _Loading:
    """A script's `forward_step`, and how long it takes on the device until the model begins."""

    def __init__(self, wrapped: Any, forward_step: Callable[..., Any]) -> None:
        self._forward_step = forward_step
        #: Of each call where it began, and where the model did, if the script calls it as it is.
        self._calls = [Marks()]
        self.close = wrapped.register_forward_pre_hook(lambda *_: self._calls[-1].add()).remove

    def __call__(self, *args: Any) -> Any:
        self._calls.append(Marks())
        self._calls[-1].add()
        return self._forward_step(*args)

    def last_s(self) -> float:
        """The median since the last call of this."""
        times_s = [gap_s for marks in self._calls for gap_s in marks.gaps_s()[:1]]
        self._calls = [Marks()]
        return statistics.median(times_s or [0.0])


def _measure_round(
    wrapped: Any,
    args: argparse.Namespace,
    loading: _Loading,
    size: int,
    data: Iterator[Mapping[str, torch.Tensor]],
) -> tuple[float, float, float]:
    """How long a few, and many, microbatches of a size take, and the data of one of many."""
    from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining

    def time_s(num_microbatches: int) -> float:
        begin_s = now_s()
        forward_backward_no_pipelining(
            forward_step_func=loading,
            data_iterator=data,
            model=wrapped,
            num_microbatches=num_microbatches,
            seq_length=args.seq_length,
            micro_batch_size=size,
        )
        return now_s() - begin_s

    before, args.micro_batch_size = args.micro_batch_size, size
    try:
        few_s = time_s(_FEW)
        loading.last_s()
        return few_s, time_s(_MANY), loading.last_s()
    finally:
        args.micro_batch_size = before


def _batches(args: argparse.Namespace, size: int) -> Iterator[Mapping[str, torch.Tensor]]:
    """Samples of zeros as Megatron's dataset of a GPT gives them, in memory that is pinned."""
    length = args.seq_length
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
        pieces, gpu = GptPieces(model, args), RankGpu(job.clocks_mhz)
    except EnvPipeError as error:
        refuse(error)
    with closing(gpu):
        step = measure_step(wrapped, optimizer)
        held = bytes_held(model, optimizer)
        names = dict.fromkeys(name for block in pieces.blocks for name in block.pieces)
        profiles, measures = {}, {}
        for size in job.microbatch_sizes:
            ways = measure_pieces(pieces, names, size, gpu)
            measures[size] = {name: _measure(pieces, name, size, ways) for name in names}
            profiles[size] = LayerProfile(
                blocks=pieces.blocks,
                frequency_mhz=np.array(gpu.frequency_mhz),
                measures={job.sizes(size): measures[size]},
                bytes_per_parameter=held,
                links=Links(),
                **step._asdict(),
                frees_outputs=True,
                gpu=gpu.name,
                source=job.source,
            )
            # Kept, should the script's own function want more than what it is given here.
            _write(profiles[size], job.file(size))
            pieces.forget_microbatch()
        sizes = [size for size in measures if _fits(pieces, measures[size])]
        times_s = []
        for frequency_mhz in gpu.frequency_mhz if sizes else ():
            gpu.set(frequency_mhz)
            times_s.append(measure_microbatches(wrapped, args, forward_step, sizes))
        row = {name: pieces.row_length(name) for name in names}
        for at, size in enumerate(sizes):
            whole_s, data_s = np.array(times_s)[:, at].T
            measures[size].update(_with_rest(measures[size], row, whole_s, data_s))
            _write(profiles[size], job.file(size))


def _write(profile: LayerProfile, file: Path) -> None:
    if dist.get_rank() == 0:
        replace_files({file: [layers_text(profile)]})


def _fits(pieces: GptPieces, measures: Mapping[str, Measure]) -> bool:
    """Whether a microbatch of all layers that were built has room, on all ranks."""
    held = sum(pieces.row_length(name) * each.activation_bytes for name, each in measures.items())
    beside = [
        (each.forward_workspace_bytes, each.backward_workspace_bytes) for each in measures.values()
    ]
    return repeats_that_fit(Held(int(held), *map(int, np.max(beside, axis=0))), 1) == 1


def _with_rest(
    measures: Mapping[str, Measure], row: Mapping[str, int], whole_s: FloatArray, data_s: FloatArray
) -> dict[str, Measure]:
    """Embedding and loss with what a microbatch takes beside its pieces, as its data do.

    Where both are in one part of the model, data are loaded once. No clock changes what they take.

    Args:
        row: how many of each piece were in the microbatch.
        whole_s: [num_frequencies] of the microbatch.
        data_s: [num_frequencies] of it, until the model is entered.
    """
    pieces_s = sum(row[name] * each.both_s for name, each in measures.items())
    loading_s = float(data_s.min())
    beside_s = np.maximum(whole_s - pieces_s - loading_s, 0.0)
    return {
        EMBEDDING: measures[EMBEDDING].longer(loading_s),
        LOSS: replace(measures[LOSS].longer(beside_s), apart_s=loading_s),
    }


def _measure(
    pieces: GptPieces, name: str, size: int, ways: Mapping[tuple[str, str | None], Way]
) -> Measure:
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
                max(working, 0),
            )
        )
    with pieces.running(name, size) as (piece, hidden):
        measure = Measure(
            forward_s=plain.forward_s,
            backward_s=plain.backward_s,
            forward_j=_known(plain.forward_j),
            backward_j=_known(np.maximum(plain.both_j - plain.forward_j, 0.0)),
            parameters=piece.parameters,
            expert_parameters=piece.expert_parameters,
            input_bytes=0 if name == EMBEDDING else hidden.nbytes,
            output_bytes=0 if name == LOSS else hidden.nbytes,
            **plain.held._asdict(),
            recomputation=tuple(recomputation),
            host_s=plain.host_s,
        )
    # Where the host is the slower one, a rest lets it get ahead: that is no clock's doing.
    rested_s = None if measure.is_host_bound else _known(plain.rested_s)
    return replace(measure, rested_s=rested_s)


def _known(values: FloatArray) -> FloatArray | None:
    return None if np.isnan(values).any() else values
