"""A parallel configuration: the pieces of each stage, its GPUs, and what it recomputes."""

from __future__ import annotations

from dataclasses import dataclass

from envpipe_megatron.search.layer_profile import Sizes


@dataclass(frozen=True)
class StageLayout:
    """One stage of a pipeline.

    Args:
        chunks: for each virtual stage, the first piece and the one behind the last.
        sizes: at which its pieces run.
        data_parallel: GPUs with the same part of the model and other samples, in groups of
            `sizes.gpus` that share a sample.
        recomputed: for each piece of all chunks in turn, the name of its recomputation, or None.
    """

    chunks: tuple[tuple[int, int], ...]
    sizes: Sizes
    data_parallel: int
    recomputed: tuple[str | None, ...]

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
    """How a job is cut. Stages may differ in sizes (Aceso's runtime can), in Megatron they do not.

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
    """What is searched for: the GPUs that are there, the batch, and the memory of one GPU.

    Args:
        memory_bytes: that one GPU may hold at its peak; None for no limit.
    """

    num_gpus: int
    gpus_per_node: int
    global_batch: int
    memory_bytes: float | None = None
