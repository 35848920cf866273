"""A profile of operators as one of whole blocks, between which Megatron cuts a model."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from benchmarks.search.aceso_space.aceso_files import block_name
from benchmarks.search.aceso_space.choices import Run
from envpipe_megatron.core.arrays import FloatArray
from envpipe_megatron.search.layer_profile import (
    FULL,
    OPERATOR,
    SELECTIVE,
    Block,
    LayerProfile,
    Measure,
    Recomputation,
)

#: From the scores of an attention to its context: what Megatron recomputes if it is selective.
_SCORE, _CONTEXT = re.compile(r".*-attention-score.*"), re.compile(r".*-attention-context.*")


def fold_blocks(profile: LayerProfile) -> LayerProfile:
    """One piece for each block, of the block's name, with Megatron's recomputations.

    `selective` computes the inside of attentions again, `full` every operator of the block that can
    be; what is kept and held besides is counted as in a run of operators.
    """
    names = [block_name(block.pieces[0]) for block in profile.blocks]
    return replace(
        profile,
        blocks=tuple(
            Block((name,), block.repeat) for name, block in zip(names, profile.blocks, strict=True)
        ),
        measures={
            sizes: {
                name: _fold(block.pieces, by_piece)
                for name, block in zip(names, profile.blocks, strict=True)
            }
            for sizes, by_piece in profile.measures.items()
        },
    )


def _fold(pieces: Sequence[str], measures: Mapping[str, Measure]) -> Measure:
    parts = [measures[piece] for piece in pieces]
    activation_bytes = np.array([part.activation_bytes for part in parts])
    ways = ((SELECTIVE, _attention_runs(pieces)), (FULL, _longest_runs(parts)))
    return Measure(
        forward_s=_sum([part.forward_s for part in parts]),
        backward_s=_sum([part.backward_s for part in parts]),
        parameters=sum(part.parameters for part in parts),
        input_bytes=parts[0].input_bytes,
        output_bytes=parts[-1].output_bytes,
        activation_bytes=float(activation_bytes.sum()),
        forward_workspace_bytes=max(part.forward_workspace_bytes for part in parts),
        backward_workspace_bytes=max(part.backward_workspace_bytes for part in parts),
        recomputation=tuple(
            _recomputation(name, runs, parts, activation_bytes) for name, runs in ways if runs
        ),
    )


def _recomputation(
    name: str, runs: Sequence[Run], parts: Sequence[Measure], activation_bytes: FloatArray
) -> Recomputation:
    again = [part for run in runs for part in parts[run.first : run.end]]
    return Recomputation(
        name,
        time_s=_sum([part.forward_s for part in again]),
        energy_j=None,
        activation_bytes=float(
            activation_bytes.sum() - sum(run.saved(activation_bytes) for run in runs)
        ),
        working_bytes=max(run.working(activation_bytes) for run in runs),
    )


def _attention_runs(pieces: Sequence[str]) -> list[Run]:
    begins = [index for index, piece in enumerate(pieces) if _SCORE.fullmatch(piece)]
    ends = [index + 1 for index, piece in enumerate(pieces) if _CONTEXT.fullmatch(piece)]
    return [Run(first, end) for first, end in zip(begins, ends, strict=True)]


def _longest_runs(parts: Sequence[Measure]) -> list[Run]:
    """Runs between operators that are always kept."""
    kept = [index for index, part in enumerate(parts) if part.way(OPERATOR) is None]
    return [
        Run(before + 1, after)
        for before, after in pairwise([-1, *kept, len(parts)])
        if after - before > 2
    ]


def _sum(arrays: Sequence[FloatArray]) -> FloatArray:
    total: FloatArray = np.sum(arrays, axis=0)
    return total
