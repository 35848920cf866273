"""A configuration as flags of Megatron-LM."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from itertools import islice

from envpipe_megatron.policies.partitions.layers import layout_text
from envpipe_megatron.search.configuration import Configuration, Job
from envpipe_megatron.search.layer_profile import EMBEDDING, FULL, LOSS, LayerProfile

#: The letters of pieces in a layout; all others are transformer layers.
_LETTERS = {EMBEDDING: "E", LOSS: "L"}


def megatron_flags(profile: LayerProfile, configuration: Configuration, job: Job) -> list[str]:
    """The flags that make Megatron-LM (core_v0.16.1 to core_v0.19.0) train a configuration.

    Where stages recompute different numbers of layers, which Megatron has no flag for, the flag is
    EnvPipe's own.
    """
    stages, sizes = configuration.stages, configuration.stages[0].sizes
    flags = [
        f"--tensor-model-parallel-size {sizes.tensor_parallel}",
        f"--pipeline-model-parallel-size {len(stages)}",
        f"--micro-batch-size {sizes.microbatch_size}",
        f"--global-batch-size {job.global_batch}",
    ]
    if sizes.context_parallel > 1:
        flags.append(f"--context-parallel-size {sizes.context_parallel}")
    if sizes.expert_parallel > 1:
        flags.append(f"--expert-model-parallel-size {sizes.expert_parallel}")
    if len(stages) > 1:
        layout = shlex.quote(megatron_layout(profile, configuration))
        flags.append(f"--pipeline-model-parallel-layout {layout}")
    if configuration.distributed_optimizer:
        flags.append("--use-distributed-optimizer")
    return [*flags, *_recomputation(profile, configuration)]


def megatron_layout(profile: LayerProfile, configuration: Configuration) -> str:
    """The value of `--pipeline-model-parallel-layout`: slots chunk by chunk, stage by stage."""
    return layout_text(
        [
            "".join(_LETTERS.get(piece, "t") for piece in profile.pieces[first:end])
            for chunk in range(configuration.num_chunks)
            for first, end in (stage.chunks[chunk] for stage in configuration.stages)
        ]
    )


def recomputed_layers(configuration: Configuration) -> list[tuple[str | None, int]]:
    """For each stage the name of its recomputation, and how many layers of a chunk it is of."""
    found: list[tuple[str | None, int]] = []
    for stage in configuration.stages:
        ways = iter(stage.recomputed)
        chunks = [[next(ways) for _ in range(first, end)] for first, end in stage.chunks]
        counts = [sum(way is not None for way in chunk) for chunk in chunks]
        name = next((way for way in stage.recomputed if way is not None), None)
        found.append((name, max(counts)))
    return found


def _recomputation(profile: LayerProfile, configuration: Configuration) -> Iterator[str]:
    by_stage = recomputed_layers(configuration)
    names = {name for name, _ in by_stage}
    if names == {None}:
        return
    count = max(count for _, count in by_stage)
    if names <= {None, FULL} and _first_everywhere(profile, configuration, FULL, count):
        yield "--recompute-granularity full --recompute-method block"
        yield f"--recompute-num-layers {count}"
        return
    for name in names - {None, FULL}:
        if _first_everywhere(profile, configuration, name, len(profile.pieces)):
            yield f"--recompute-granularity {name}"
            return
    stages = ",".join("none" if name is None else f"{name}:{n}" for name, n in by_stage)
    yield f"--envpipe --envpipe-recompute {stages}"


def _first_everywhere(
    profile: LayerProfile, configuration: Configuration, name: str | None, count: int
) -> bool:
    """Whether of each chunk's pieces that know a recomputation the first ones have it, alone."""
    for stage in configuration.stages:
        ways, measures = iter(stage.recomputed), profile.at(stage.sizes)
        for first, end in stage.chunks:
            own = list(islice(ways, end - first))
            able = [measures[piece].way(name) is not None for piece in profile.pieces[first:end]]
            known = [way for way, can_be in zip(own, able, strict=True) if can_be]
            given = min(count, len(known))
            if known != [name] * given + [None] * (len(known) - given):
                return False
    return True
