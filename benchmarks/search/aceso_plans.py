"""Stages of Aceso's plans, which recompute each piece in its way; and their simulation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import numpy as np

from benchmarks.search.aceso_files import OPERATOR, block_edges
from envpipe_megatron.core.arrays import FloatArray
from envpipe_megatron.search.candidates import Candidate
from envpipe_megatron.search.configuration import Configuration, Job, StageLayout
from envpipe_megatron.search.layer_profile import FULL, Block, LayerProfile, Recomputation, Sizes


@dataclass(frozen=True)
class PieceStage(StageLayout):
    """A stage with the recomputation of each of its pieces in turn, by name, or None."""

    ways: tuple[str | None, ...] = ()


def column(profile: LayerProfile, sizes: Sizes, name: str) -> FloatArray:
    """[num_pieces] a measure of each piece; with a second axis of clocks where it has."""
    measures = profile.at(sizes)
    return np.array([getattr(measures[piece], name) for piece in profile.pieces], dtype=float)


def read_plan(path: Path) -> Configuration | None:
    """Return a plan that Aceso's search wrote; None if sizes differ inside a stage."""
    plan = json.loads(path.read_text())
    stages, first = [], 0
    for number, count in enumerate(plan["num_ops_in_each_stage"]):
        tensor, data = (
            set(plan[f"{kind}_parallel_size_of_each_op"][number]) for kind in ("model", "data")
        )
        if len(tensor) > 1 or len(data) > 1:
            return None
        data_parallel = data.pop()
        sizes = Sizes(tensor.pop(), plan["micro_batch_size"] // data_parallel)
        ways = tuple(OPERATOR if flag else None for flag in plan["recompute_ops"][number])
        stages.append(PieceStage(((first, first + count),), sizes, data_parallel, ways=ways))
        first += count
    return Configuration(tuple(stages), plan["global_batch_size"] // plan["micro_batch_size"])


def simulated(configuration: Configuration, profile: LayerProfile, job: Job) -> Candidate:
    """A plan as the search has candidates.

    There, each piece goes by its number, and knows the way in which the plan recomputes it as
    `full`; of stages of Megatron's space nothing changes.
    """
    stages = [stage for stage in configuration.stages if isinstance(stage, PieceStage)]
    if not stages:
        return Candidate(configuration, profile, job)
    numbered = {
        sizes: {
            str(piece): replace(profile.at(sizes)[name], recomputation=())
            for piece, name in enumerate(profile.pieces)
        }
        for sizes in {stage.sizes for stage in stages}
    }
    for stage in stages:
        of_sizes = numbered[stage.sizes]
        for piece, way in _ways(profile, stage):
            known = (replace(way, name=FULL),)
            of_sizes[str(piece)] = replace(of_sizes[str(piece)], recomputation=known)
    blocks = tuple(Block((str(piece),)) for piece in range(len(profile.pieces)))
    layouts = tuple(
        StageLayout(
            stage.chunks,
            stage.sizes,
            stage.data_parallel,
            (FULL, len(blocks)) if any(stage.ways) else (None, 0),
        )
        for stage in stages
    )
    named = replace(profile, blocks=blocks, measures=numbered)
    return Candidate(replace(configuration, stages=layouts), named, job)


def _ways(profile: LayerProfile, stage: PieceStage) -> Iterator[tuple[int, Recomputation]]:
    """The pieces that are recomputed, each with its way; operators go in runs, as in `choices`."""
    measures, edges = profile.at(stage.sizes), block_edges(profile)
    asked = list(zip(stage.pieces, stage.ways, strict=True))
    blocks = np.searchsorted(edges, stage.pieces, side="right").tolist()
    keys = zip(blocks, stage.ways, strict=True)
    for (block, name), group in groupby(enumerate(keys), key=lambda each: each[1]):
        run = [asked[index][0] for index, _ in group]
        if name is None:
            continue
        kept_bytes = [measures[profile.pieces[piece]].activation_bytes for piece in run]
        # The last output is kept, and held twice where the next block may begin with a run.
        held = kept_bytes if run[-1] + 1 == edges[block] else kept_bytes[:-1]
        for piece in run:
            way = measures[profile.pieces[piece]].way(name)
            if way is None:
                continue
            if name == OPERATOR:
                kept = kept_bytes[-1] if piece == run[-1] else 0.0
                way = replace(way, activation_bytes=kept, working_bytes=sum(held))
            yield piece, way
