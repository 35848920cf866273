"""What becomes of a job's wishes before it holds a GPU."""

from __future__ import annotations

from dataclasses import replace

from envpipe_megatron.gpu.base import Gpu
from envpipe_megatron.policies.planner import PlanRequest
from envpipe_megatron.runtime.job.context import SessionConfig
from envpipe_megatron.runtime.memory.device import MemorySource
from envpipe_megatron.runtime.memory.limit import check_memory_is_known


def prepare(
    config: SessionConfig, gpu: Gpu, memory: MemorySource | None, *, reads_files: bool
) -> bool:
    """Whether this rank's clock may be asked for, once there is a folder for what it measures.

    Raises:
        MemoryUnknownError: a limit by memory that nobody knows.
        OSError: there can be no output folder.
    """
    if config.plan_file is None and (reads_files or config.profile_file is None):
        check_memory_is_known(config.request, config.profile_file, memory)
    if config.output_dir:
        config.output_dir.mkdir(parents=True, exist_ok=True)
    return not gpu.read_only


def without_control(config: SessionConfig) -> SessionConfig:
    """The same job by the framework's own order, at whatever clocks there are."""
    chunks = config.request.num_chunks
    request = PlanRequest(
        config.request.num_microbatches,
        schedule="interleaved" if chunks > 1 else "1f1b",
        num_chunks=chunks,
    )
    return replace(config, request=request, profile_file=None, plan_file=None)
