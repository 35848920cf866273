"""A job's measurement: all pieces at each microbatch size, each size a file."""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import numpy as np
import torch.distributed as dist

from envpipe_megatron.core.arrays import FloatArray
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.files import replace_files
from envpipe_megatron.integrations.hooking import refuse
from envpipe_megatron.integrations.layer_profile.gpt import GptPieces
from envpipe_megatron.integrations.layer_profile.measuring import (
    Held,
    Timing,
    measure_memory,
    measure_time,
    repeats_that_fit,
)
from envpipe_megatron.integrations.layer_profile.optimizer import bytes_held, measure_step
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

#: Equal layers that run in a row while time is taken, as in training.
_LAYERS_IN_A_ROW = 4


def measure_model(
    wrapped: Any, model: Any, optimizer: Any, args: argparse.Namespace, job: LayerJob
) -> None:
    """Measure a model that one rank, or the job's group, holds whole; every rank calls it.

    Args:
        wrapped: the model in Megatron's data parallel wrapper.
        model: the same without, with one layer of each kind.
        optimizer, args: Megatron's.
    """
    try:
        pieces, gpu = GptPieces(model, args), RankGpu(job.clocks_mhz)
    except EnvPipeError as error:
        refuse(error)
    with closing(gpu):
        optimizer_s = measure_step(wrapped, optimizer)
        held = bytes_held(model, optimizer)
        for size in job.microbatch_sizes:
            names = dict.fromkeys(name for block in pieces.blocks for name in block.pieces)
            measures = {name: _measure(pieces, name, size, gpu) for name in names}
            profile = LayerProfile(
                blocks=pieces.blocks,
                frequency_mhz=np.array(gpu.frequency_mhz),
                measures={job.sizes(size): measures},
                bytes_per_parameter=held,
                links=Links(),
                optimizer_s=optimizer_s,
                gpu=gpu.name,
                source=shlex.join(sys.argv),
            )
            if dist.get_rank() == 0:
                replace_files({job.file(size): [layers_text(profile)]})


def _measure(pieces: GptPieces, name: str, size: int, gpu: RankGpu) -> Measure:
    held, timings = _way(pieces, name, size, gpu, None)
    both_s, both_j = _sums(timings)
    ways = []
    for way in pieces.ways(name):
        way_held, way_timings = _way(pieces, name, size, gpu, way)
        way_s, way_j = _sums(way_timings)
        working = way_held.backward_workspace_bytes - held.backward_workspace_bytes
        ways.append(
            Recomputation(
                way,
                np.maximum(way_s - both_s, 0.0),
                _known(np.maximum(way_j - both_j, 0.0)),
                way_held.activation_bytes,
                max(working, 0),
            )
        )
    with pieces.running(name, size) as (piece, hidden):
        return Measure(
            forward_s=np.array([timing.forward_s for timing in timings]),
            backward_s=np.array([timing.backward_s for timing in timings]),
            forward_j=_known(np.array([timing.forward_j for timing in timings])),
            backward_j=_known(np.array([timing.backward_j for timing in timings])),
            parameters=piece.parameters,
            input_bytes=0 if name == EMBEDDING else hidden.nbytes,
            output_bytes=0 if name == LOSS else hidden.nbytes,
            **held._asdict(),
            recomputation=tuple(ways),
        )


def _way(
    pieces: GptPieces, name: str, size: int, gpu: RankGpu, way: str | None
) -> tuple[Held, list[Timing]]:
    """A piece's memory in one way to recompute it, or without, and its times at each clock."""
    with pieces.running(name, size, way) as (piece, hidden):
        held = measure_memory(piece, hidden)
    layers = 1 if name in (EMBEDDING, LOSS) else repeats_that_fit(held, _LAYERS_IN_A_ROW)
    timings = []
    with pieces.running(name, size, way, layers) as (piece, hidden):
        for frequency_mhz in gpu.frequency_mhz:
            gpu.set(frequency_mhz)
            of_all = measure_time(piece, hidden, gpu)
            timings.append(Timing(*(value / layers for value in of_all)))
    return held, timings


def _sums(timings: Sequence[Timing]) -> tuple[FloatArray, FloatArray]:
    """Time and energy of forward and backward together, by clock."""
    return (
        np.array([timing.forward_s + timing.backward_s for timing in timings]),
        np.array([timing.forward_j + timing.backward_j for timing in timings]),
    )


def _known(values: FloatArray) -> FloatArray | None:
    return None if any(map(math.isnan, values)) else values
