"""A parallel configuration: the pieces of each stage, its GPUs, and what it recomputes.

Also as Megatron-LM's flags (`megatron_flags`).
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from envpipe_megatron.search.layer_profile import (
    EMBEDDING,
    FULL,
    LOSS,
    SELECTIVE,
    LayerProfile,
    Sizes,
)

#: The letters of pieces in a layout; all others are transformer layers.
_LETTERS = {EMBEDDING: "E", LOSS: "L"}

#: The name of a recomputation, and of how many of the first pieces that know it.
Recomputed = tuple[str | None, int]


@dataclass(frozen=True)
class StageLayout:
    """One stage of a pipeline.

    Args:
        chunks: for each virtual stage, the first piece and the one behind the last.
        sizes: at which its pieces run.
        data_parallel: GPUs with the same part of the model and other samples, in groups of
            `sizes.gpus` that share a sample.
        recomputed: in which way, and how many of the first layers of each chunk.
    """

    chunks: tuple[tuple[int, int], ...]
    sizes: Sizes
    data_parallel: int
    recomputed: Recomputed = (None, 0)

    @property
    def pieces(self) -> tuple[int, ...]:
        """The numbers of all its pieces, chunk by chunk."""
        return tuple(piece for first, end in self.chunks for piece in range(first, end))

    @property
    def num_gpus(self) -> int:
        """GPUs of the stage, over all its data parallel ranks."""
        return self.sizes.gpus * self.data_parallel


@dataclass(frozen=True)
class Configuration:
    """A job's cut. Stages may differ in sizes (Aceso's runtime can), in Megatron they do not.

    Args:
        num_microbatches: of an iteration, on each data parallel rank of a stage whose
            microbatches are `global_batch / num_microbatches` samples over all its ranks.
        distributed_optimizer: whether data parallel ranks share the optimizer's state.
    """

    stages: tuple[StageLayout, ...]
    num_microbatches: int
    distributed_optimizer: bool = False

    @property
    def num_chunks(self) -> int:
        """Virtual stages on each stage, V."""
        return len(self.stages[0].chunks)


@dataclass(frozen=True)
class Job:
    """A training job: its GPUs, the batch, and the memory of one GPU.

    Args:
        memory_bytes: that one GPU may hold at its peak; None for no limit.
    """

    num_gpus: int
    gpus_per_node: int
    global_batch: int
    memory_bytes: float | None = None


def megatron_flags(profile: LayerProfile, configuration: Configuration, job: Job) -> list[str]:
    """Return the flags that make Megatron-LM (core_v0.16.1 to core_v0.19.0) train a configuration.

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
        flags.append(layout_flag(profile, configuration))
    if configuration.distributed_optimizer:
        flags.append("--use-distributed-optimizer")
    return [*flags, *_recomputation(profile, configuration)]


def layout_flag(profile: LayerProfile, configuration: Configuration) -> str:
    """Return Megatron's flag for any cut, quoted for a shell: slots chunk by chunk, stage by stage.

    Embedding and loss are demanded exactly once, first and last, whether they were profiled or not.
    """
    slots = [
        "".join(_LETTERS.get(piece, "t") for piece in profile.pieces[first:end])
        for chunk in range(configuration.num_chunks)
        for first, end in (stage.chunks[chunk] for stage in configuration.stages)
    ]
    slots[0] = "E" + slots[0].removeprefix("E")
    slots[-1] = slots[-1].removesuffix("L") + "L"
    return f"--pipeline-model-parallel-layout {shlex.quote(_layout_text(slots))}"


def _layout_text(stages: Sequence[str]) -> str:
    """Write letters of stages as Megatron's layout: `Et*3|(tt|)*2tL`.

    The syntax of core_v0.16.1 to core_v0.19.0: stages between `|`; `E` embedding, `t` transformer
    layer, `m` layer that predicts a further token, `L` loss; `x*n` and `(...)*n` repeat.
    """

    def short(stage: str) -> str:
        runs = [(letter, len(list(same))) for letter, same in groupby(stage)]
        return "".join(x * n if n < 2 else f"{x}*{n}" for x, n in runs)

    middle = ""
    for stage, same in groupby(stages[1:-1]):
        repeats = len(list(same))
        text = f"{short(stage)}|"
        middle += text if repeats == 1 else f"({text})*{repeats}"
    return f"{short(stages[0])}|{middle}{short(stages[-1])}"


def _recomputation(profile: LayerProfile, configuration: Configuration) -> Iterator[str]:
    by_stage = [stage.recomputed for stage in configuration.stages]
    most = max(count for _, count in by_stage)
    for name, count in ((FULL, most), (SELECTIVE, len(profile.pieces))):
        if most and all(_alike(profile, stage, name, count) for stage in configuration.stages):
            yield f"--recompute-granularity {name}" + " --recompute-method block" * (name == FULL)
            if name == FULL:
                yield f"--recompute-num-layers {count}"
            return
    if most:
        stages = ",".join("none" if name is None else f"{name}:{count}" for name, count in by_stage)
        yield f"--envpipe --envpipe-recompute {stages}"


def _alike(profile: LayerProfile, stage: StageLayout, name: str, count: int) -> bool:
    """Check that a stage recomputes the first `count` layers of each chunk, or all it has."""
    measures, (own_name, own) = profile.at(stage.sizes), stage.recomputed
    names = (profile.pieces[first:end] for first, end in stage.chunks)
    able = [sum(measures[piece].way(name) is not None for piece in chunk) for chunk in names]
    own = own if own_name == name else 0
    return all(min(own, layers) == min(count, layers) for layers in able)
