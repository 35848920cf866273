"""A parallel configuration: the pieces of each stage, its GPUs, and what it recomputes.

What its stages take and hold, by the measures of their pieces (`stage_work`, `parameter_bytes`);
and the configuration as Megatron-LM's flags (`megatron_flags`).
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from envpipe_megatron.core.arrays import FloatArray, IntArray
from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.search.layer_profile import (
    EMBEDDING,
    FULL,
    LOSS,
    SELECTIVE,
    LayerProfile,
    Pieces,
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
        chunks: for each virtual stage, the first piece and the one after the last.
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
class Shape:
    """A configuration except for its cut and recomputation: all stages have the same sizes."""

    sizes: Sizes
    num_stages: int
    data_parallel: int
    num_chunks: int
    num_microbatches: int


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

    @property
    def shape(self) -> Shape:
        """The shape that this is a cut of."""
        one, chunks = self.stages[0], self.num_chunks
        return Shape(one.sizes, len(self.stages), one.data_parallel, chunks, self.num_microbatches)


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

    @property
    def limit_bytes(self) -> float:
        """The same; infinite for no limit."""
        return math.inf if self.memory_bytes is None else self.memory_bytes


@dataclass(frozen=True)
class StageLoad:
    """One stage, on one of its GPUs; arrays by chunk have one row for each virtual stage.

    Args:
        forward_s, backward_s: [num_chunks, num_frequencies]; what is computed again counts as
            backward.
        forward_j, backward_j: the same shape; zeros where no joule was measured.
        recomputed_s: [num_chunks] of it at the highest clock.
        held_bytes: [num_chunks] for each microbatch of a chunk in flight.
        beside_bytes: held at the peak besides: workspace, and one layer that is computed again.
        parameters, expert_parameters: that the GPU holds, and the experts' among them.
        message_bytes: [num_chunks] the output of each chunk.
        rested: [num_frequencies] times where the GPU rests half of the time, of those without.
    """

    forward_s: FloatArray
    backward_s: FloatArray
    forward_j: FloatArray
    backward_j: FloatArray
    recomputed_s: FloatArray
    held_bytes: FloatArray
    beside_bytes: float
    parameters: float
    expert_parameters: float
    message_bytes: FloatArray
    rested: FloatArray

    @property
    def time_s(self) -> float:
        """One microbatch through all chunks, forward and backward, at the highest clock."""
        return float(self.forward_s[:, 0].sum() + self.backward_s[:, 0].sum())

    def busy_for(self, share: float) -> StageLoad:
        """Return the same where the GPU computes for this share of the time.

        Layers that each rest gain twice as much at that share; a pipeline's rests are few and long.
        """
        factor = 1.0 - (1.0 - share) * (1.0 - self.rested)
        return replace(
            self,
            forward_s=self.forward_s * factor,
            backward_s=self.backward_s * factor,
            recomputed_s=self.recomputed_s * factor[0],
        )


def stage_work(profile: LayerProfile, stage: StageLayout) -> StageLoad:
    """Return the work of a stage; EnvPipeError for sizes that were not measured."""
    pieces = profile.sums(stage.sizes)
    first, end = np.array(stage.chunks).T

    def largest(values: FloatArray, ends: IntArray) -> float:
        runs = zip(first.tolist(), ends.tolist(), strict=True)
        return max(float(values[a:b].max(initial=0.0)) for a, b in runs)

    forward_j, forward_s = (sums[end] - sums[first] for sums in pieces.by_clock[Kind.FORWARD])
    backward_j, backward_s = (sums[end] - sums[first] for sums in pieces.by_clock[Kind.BACKWARD])
    plain_s = (forward_s + backward_s).sum(axis=0)
    held_bytes = pieces.kept_bytes[end] - pieces.kept_bytes[first]
    held_bytes += pieces.input_bytes[first] - pieces.freed_bytes[end]
    name, count = stage.recomputed
    way = pieces.ways[name]
    until = way.until(first, end, count)
    again_j, again_s = (sums[until] - sums[first] for sums in pieces.by_clock[name])
    held_bytes -= way.saved_bytes[until] - way.saved_bytes[first]
    parameters = float((pieces.parameters[end] - pieces.parameters[first]).sum())
    workspaces = largest(pieces.forward_bytes, end), largest(pieces.backward_bytes, end)
    working_bytes = largest(way.working_bytes, until)
    return StageLoad(
        forward_s,
        backward_s + again_s,
        forward_j,
        backward_j + again_j,
        again_s[:, 0],
        held_bytes,
        float(workspace_bytes(profile, *workspaces, working_bytes, parameters)),
        parameters,
        float((pieces.expert_parameters[end] - pieces.expert_parameters[first]).sum()),
        pieces.sent_bytes[end],
        1.0 - (pieces.saved_s[end] - pieces.saved_s[first]).sum(axis=0) / plain_s,
    )


def workspace_bytes(
    profile: LayerProfile,
    forward_bytes: FloatArray | float,
    backward_bytes: FloatArray | float,
    working_bytes: FloatArray | float,
    parameters: FloatArray | float,
) -> FloatArray:
    """Return the bytes held at the peak beside weights and activations, of one stage or many.

    The workspaces are the largest of a stage's pieces, and `working_bytes` the largest of a way's
    `working_bytes` of those that are recomputed.
    """
    least = profile.bytes_per_parameter.least_workspace * np.asarray(parameters)
    if profile.workspaces_add:
        return np.maximum(np.add(forward_bytes, backward_bytes), least) + working_bytes
    largest = np.maximum(np.maximum(forward_bytes, backward_bytes), working_bytes)
    return np.maximum(largest, least)


def replica_groups(stage: StageLayout | Shape) -> tuple[int, int]:
    """Return how many GPUs hold the same parameters: of experts', and of others.

    Context parallel ranks are among them (Megatron's process groups).
    """
    replicas = stage.data_parallel * stage.sizes.context_parallel
    return max(1, replicas // stage.sizes.expert_parallel), replicas


def parameter_bytes(
    profile: LayerProfile,
    stage: StageLayout | Shape,
    held: StageLoad | Pieces,
    *,
    distributed_optimizer: bool,
) -> FloatArray:
    """Return the bytes that a GPU holds for weights, gradients and its share of optimizer state.

    Of the parameters of a stage, or [n + 1] of running sums over pieces.
    """
    each = profile.bytes_per_parameter
    of_experts, of_others = (
        each.weight + each.gradient + each.optimizer / (group if distributed_optimizer else 1)
        for group in replica_groups(stage)
    )
    experts = np.asarray(held.expert_parameters)
    return of_experts * experts + of_others * (held.parameters - experts)


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
    stages = configuration.stages
    pieces, by_stage = profile.sums(stages[0].sizes), [stage.recomputed for stage in stages]
    most = max(count for _, count in by_stage)
    for name, count in ((FULL, most), (SELECTIVE, pieces.num_pieces)):
        if not most or name not in pieces.ways:
            continue
        alike = [recomputed_at_most(pieces, stage.chunks, (name, count)) for stage in stages]
        if alike == by_stage:
            yield f"--recompute-granularity {name}" + " --recompute-method block" * (name == FULL)
            if name == FULL:
                yield f"--recompute-num-layers {count}"
            return
    if most:
        texts = ("none" if name is None else f"{name}:{count}" for name, count in by_stage)
        yield f"--envpipe --envpipe-recompute {','.join(texts)}"


def recomputed_at_most(
    pieces: Pieces, chunks: Sequence[tuple[int, int]], recomputed: Recomputed
) -> Recomputed:
    """Return what a stage recomputes: no more than the pieces of a chunk that know the way."""
    name, count = recomputed
    known = pieces.ways[name].known
    count = int(min(count, max(known[end] - known[first] for first, end in chunks)))
    return (name, count) if count else (None, 0)
