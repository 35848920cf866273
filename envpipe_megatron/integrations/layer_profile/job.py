"""A job's measurement: all pieces at each microbatch size, each size a file."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from envpipe_megatron.core.arrays import FloatArray
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.files import replace_files
from envpipe_megatron.integrations.hooks.hooking import refuse
from envpipe_megatron.integrations.layer_profile.gpt import GptPieces
from envpipe_megatron.integrations.layer_profile.measuring import Held, repeats_that_fit
from envpipe_megatron.integrations.layer_profile.microbatch import measure_microbatches
from envpipe_megatron.integrations.layer_profile.optimizer import bytes_held, measure_step
from envpipe_megatron.integrations.layer_profile.passes import Way, measure_pieces
from envpipe_megatron.integrations.layer_profile.rank_gpu import RankGpu
from envpipe_megatron.search.layer_file import layers_text
from envpipe_megatron.search.layer_jobs import LayerJob
from envpipe_megatron.search.layer_profile import (
    EMBEDDING,
    LOSS,
    LayerProfile,
    Links,
    Measure,
    Recomputation,
)


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
