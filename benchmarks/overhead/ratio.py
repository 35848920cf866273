"""megatron-core's own 1F1B and EnvPipe's interpreter in turns, on CPU ranks that really compute.

The bench of `gpu/schedules.py` over gloo. `compare_schedules` is what each rank calls.
"""

from __future__ import annotations

import warnings
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class RatioSettings:
    """The model, and how often both run it."""

    layers: int = 4
    hidden: int = 256
    sequence: int = 128
    microbatch_size: int = 1
    num_microbatches: int = 8
    blocks: int = 12
    block_iterations: int = 2
    steps: int = 2


def compare_schedules(rank: int, settings: RatioSettings) -> dict[str, Any]:
    """What `Bench.compare` reports of each order; every rank calls it."""
    from envpipe_megatron.integrations.megatron_cpu import use_cpu

    warnings.filterwarnings("ignore", module="megatron")  # of Apex, which no CPU has
    use_cpu()
    from training import cuda_on_cpu  # type: ignore[import-not-found]  # of tests/pipeline

    with cuda_on_cpu():
        return _compare(asdict(settings))


def _compare(options: dict[str, Any]) -> dict[str, Any]:
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
    bench = CpuBench({"max_ctas": 1, **options})
    bench.add_orders()
    report = bench.compare()
    bench.close()
    return report
