"""megatron-core's own 1F1B and EnvPipe's interpreter in turns, on CPU ranks that really compute.

The bench of `gpu_schedules.py` on another device: the same model on CPU, over gloo, clocks asked of
a dry run. Runs inside ranks; `compare_schedules` is what each calls.
"""

from __future__ import annotations

import statistics
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


@dataclass(frozen=True)
class TimeRatio:
    """An order's time over that of megatron-core's 1F1B.

    Args:
        bit_equal: whether losses and weights of some steps are the same to the last bit.
        ratio: median over pairs of neighbouring blocks.
    """

    order: str
    bit_equal: bool
    iteration_time_s: float
    ratio: float
    low: float
    high: float
    pairs: int


def compare_schedules(rank: int, settings: RatioSettings) -> list[TimeRatio]:
    """Every rank calls it; all return the same."""
    from envpipe_megatron.integrations.megatron_cpu import use_cpu

    warnings.filterwarnings("ignore", module="megatron")  # of Apex, which no CPU has
    use_cpu()
    from training import cuda_on_cpu  # type: ignore[import-not-found]  # of tests/pipeline

    with cuda_on_cpu():
        return _compare(asdict(settings))


def _compare(options: dict[str, Any]) -> list[TimeRatio]:
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel

    from benchmarks.gpu.schedules import Bench, bootstrap, equal
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
    stock = "megatron-core 1f1b"
    names = [name for name in bench.functions if name.startswith("interpreter")]
    reference = bench.train(stock)
    same = {name: bench.collectives.on_all(equal(reference, bench.train(name))) for name in names}
    times: dict[str, list[float]] = {name: [] for name in (stock, *names)}
    for block in range(options["blocks"]):
        # Whoever comes first in a round comes last in the next.
        for name in sorted(times, reverse=bool(block % 2)):
            times[name].append(bench.time_s(name))
    found = []
    for name in names:
        ratios = [ours / theirs for ours, theirs in zip(times[name], times[stock], strict=True)]
        low, high = bootstrap(ratios)
        found.append(
            TimeRatio(
                name.removeprefix("interpreter "),
                same[name],
                statistics.median(times[name]),
                statistics.median(ratios),
                low,
                high,
                len(ratios),
            )
        )
    bench.close()
    return found
