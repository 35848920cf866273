"""megatron-core's own 1F1B and EnvPipe's interpreter in turns, on CPU ranks that really compute.

The bench of `gpu/schedules.py` over gloo. `compare_schedules` is what each rank calls.
"""

from __future__ import annotations

import warnings
from typing import Any

#: Of `Bench`: the model, and how often both run it.
OPTIONS: dict[str, Any] = {
    "layers": 4, "hidden": 256, "sequence": 128, "microbatch_size": 1, "num_microbatches": 8,
    "blocks": 12, "block_iterations": 2, "steps": 2, "carrier": "auto",
}  # fmt: skip


def compare_schedules(rank: int) -> dict[str, Any]:
    """What `Bench.compare` reports of each order; every rank calls it."""
    from envpipe_megatron.integrations.device import use_cpu

    warnings.filterwarnings("ignore", module="megatron")  # of Apex, which no CPU has
    use_cpu()
    from training import cuda_on_cpu  # type: ignore[import-not-found]  # of tests/pipeline

    with cuda_on_cpu():
        return _compare()


def _compare() -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel

    from benchmarks.gpu.schedules import Bench
    from benchmarks.overhead.host import HostExecutor

    class CpuBench(Bench):
        device = "cpu"
        dtype = torch.float32
        vocabulary = 512

        def make_executor(self) -> HostExecutor:
            return HostExecutor()

    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=dist.get_world_size())
    tensor_parallel.random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    torch.manual_seed(1234)
    bench = CpuBench(OPTIONS)
    bench.add_orders()
    report = bench.compare()
    bench.close()
    return report
