"""megatron-core in a job of one rank, on the CPU, in the test's own process."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from free_port import free_port
from megatron.core import parallel_state
from megatron.core.tensor_parallel import random


@contextmanager
def one_rank_job() -> Iterator[pytest.MonkeyPatch]:
    """A job while the context lasts; what is patched meanwhile is put back."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "current_device", lambda: "cpu")
        patch.setattr(torch.cuda, "Stream", SimpleNamespace)  # experts' own
        zeros = torch.zeros
        patch.setattr(torch, "zeros", lambda *size, device=None, **more: zeros(*size, **more))
        state = torch.zeros(1, dtype=torch.uint8)
        patch.setattr(torch.cuda.random, "get_rng_state", lambda *_, **__: state)
        patch.setattr(random, "_set_cuda_rng_state", lambda *_, **__: None)
        for name in ("_CUDA_RNG_STATE_TRACKER", "_CUDA_RNG_STATE_TRACKER_INITIALIZED"):
            patch.setattr(random, name, getattr(random, name))
        random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
        address = f"tcp://127.0.0.1:{free_port()}"
        torch.distributed.init_process_group("gloo", init_method=address, rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        yield patch
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()
