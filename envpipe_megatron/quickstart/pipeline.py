"""A rank's part in the one pipeline that all ranks of a machine are."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel


@contextlib.contextmanager
def joined_pipeline(num_stages: int, timeout: timedelta) -> Iterator[None]:
    """Join the other ranks that torchrun has started, one a stage: over NCCL where there are GPUs.

    The group is left at the end alone: after a failure peers may be gone, and leaving waits.
    """
    torch.set_num_threads(1)
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        backend = "nccl"
    dist.init_process_group(backend, timeout=timeout)
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=num_stages)
    tensor_parallel.random.initialize_rng_tracker(inference_rng_tracker=True)
    yield
    dist.destroy_process_group()
