"""What EnvPipe's own machinery costs the training thread, with units that do nothing.

A unit has ended when its Python has, by the host's clock; the GPU is an emulated one, whose guard
sets its clock. Everything else is the training's own.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from envpipe_megatron.core.kinds import Kind, Unit
from envpipe_megatron.core.orders import builders
from envpipe_megatron.formats.energy import Phase
from envpipe_megatron.gpu.emulated.emulated_gpu import EmulatedGpu
from envpipe_megatron.gpu.presets import load_preset
from envpipe_megatron.runtime.channel.carrier import StageSpecs, TensorSpec
from envpipe_megatron.runtime.channel.collectives import make_collectives
from envpipe_megatron.runtime.channel.links import make_channel
from envpipe_megatron.runtime.channel.p2p import P2PChannel
from envpipe_megatron.runtime.clocks.rank_clock import RankClock
from envpipe_megatron.runtime.execution.stage_run import (
    IterationOrder,
    StageRun,
    StageWork,
    execute,
)
from envpipe_megatron.runtime.job.options import JobOptions
from host_executor import HostExecutor  # of tests/helpers

MICROBATCHES = 32
WARM_UP = 3
PRESET = "h100"
CLOCKS_MHZ = load_preset(PRESET).supported_frequencies_mhz
#: Of a message: small, so that its cost is the channel's and not its bytes'.
MESSAGE_SHAPE = (256,)


def _order(num_stages: int) -> IterationOrder:
    """1F1B that asks for another clock at every unit: none of the requests is skipped."""
    schedule = builders.one_f_one_b(num_stages, MICROBATCHES)
    shape = (num_stages, schedule.units_per_stage)
    clocks = np.resize(np.array(CLOCKS_MHZ), schedule.units_per_stage)
    return IterationOrder(Phase.STEADY, schedule, np.broadcast_to(clocks, shape).copy())


@contextlib.contextmanager
def guarded_clock() -> Iterator[RankClock]:
    """The clock of an emulated GPU, which a guard sets as that of a real one."""
    with tempfile.TemporaryDirectory() as folder:
        clock = RankClock(EmulatedGpu.create(PRESET, 0, folder), guarded=True)
        with contextlib.closing(clock):
            yield clock


def thread_costs_ns(seconds: float, *, clocks: bool) -> list[int]:
    """What the calls around one unit of a lone stage take the training thread, ns, of each unit."""
    with guarded_clock() if clocks else contextlib.nullcontext() as clock:
        request = clock.request if clock else lambda frequency_mhz, later: None
        return _thread_costs_ns(seconds, request)


def _thread_costs_ns(
    seconds: float, request: Callable[[int, float | None], Callable[[], None] | None]
) -> list[int]:
    order = _order(1)
    executor, costs_ns, iteration = HostExecutor(), [], 0
    now, end_s = time.perf_counter_ns, time.monotonic() + seconds
    while time.monotonic() < end_s:
        run = StageRun(order, 0, executor, request)
        run.begin()
        for _ in run.units:
            before_ns = now()
            run.begin_unit()
            run.end_unit()
            after_ns = now()
            if iteration >= WARM_UP:
                costs_ns.append(after_ns - before_ns)
        _ = run.end().end_s
        iteration += 1
    return costs_ns


def pipeline_unit_s(rank: int, seconds: float) -> list[float]:
    """Mean time of a unit that does nothing, s, of each iteration; messages go over gloo.

    Every rank of a pipeline calls it. A unit cannot be shorter than this.
    """
    stages = dist.get_world_size()
    order = _order(stages)
    world = dist.group.WORLD
    assert world is not None
    timeout = timedelta(seconds=30)
    channel = make_channel(world, make_collectives([range(stages)], timeout), timeout=timeout)
    with guarded_clock() as clock:
        return _null_iterations(rank, seconds, order, channel, clock)


class _NullWork(StageWork):
    """Units that do nothing, and send a message."""

    def __init__(self) -> None:
        self._message = torch.zeros(MESSAGE_SHAPE)

    def forward(self, unit: Unit, inputs: list[torch.Tensor] | None) -> list[torch.Tensor]:
        return [self._message]

    def backward(self, unit: Unit, gradients: list[torch.Tensor] | None) -> list[torch.Tensor]:
        return [self._message]


def _null_iterations(
    rank: int,
    seconds: float,
    order: IterationOrder,
    channel: P2PChannel,
    clock: RankClock,
) -> list[float]:
    specs = StageSpecs.alike(TensorSpec((MESSAGE_SHAPE,), (torch.float32,), torch.device("cpu")))
    executor, work = HostExecutor(), _NullWork()
    found: list[float] = []
    # The ranks must run equally many: the first says when it is over.
    going = torch.ones(1)
    end_s = time.monotonic() + seconds
    while True:
        going[0] = float(time.monotonic() < end_s or len(found) <= WARM_UP)
        dist.broadcast(going, 0)
        if not going[0]:
            return found[WARM_UP:]
        begin_s = time.perf_counter()
        run = StageRun(order, rank, executor, clock.request, channel.check)
        execute(work, run, channel, specs)
        _ = run.end().end_s
        found.append((time.perf_counter() - begin_s) / len(run.units))


LOGGED_MICROBATCHES = 8
#: Steady iterations after which files are looked at, and after which again.
SETTLED, MEASURED = 10, 100
#: A job that is not steady by then never will be.
_MAX_PHASES = 200


def leave_logs(rank: int, root: Path) -> tuple[dict[str, int], float]:
    """Train on every rank of a pipeline, with emulated GPUs in `root`; logs go to `root/run`.

    Returns the bytes by which all ranks' log files grow in `MEASURED` steady iterations, and the
    time of one, s.
    """
    import plain_stages  # of tests/helpers

    output = root / "run"
    session, _ = plain_stages.session(
        rank,
        JobOptions(
            num_microbatches=LOGGED_MICROBATCHES,
            type="envelope",
            reconfigure="default",
            baseline_steps=1,
            profile_steps=1,
            window_s=0.3,
            output=output,
        ),
        root,
        time_at_max_s={Kind.FORWARD: 0.05, Kind.BACKWARD: 0.1},
    )

    def train(iterations: int) -> None:
        for _ in range(iterations):
            session.begin_step()
            session.run_iteration(
                LOGGED_MICROBATCHES,
                plain_stages.SPECS,
                lambda schedule: plain_stages.PlainWork(schedule, rank),
            )
            session.end_step()

    try:
        for _ in range(_MAX_PHASES):
            if session.state.phase is Phase.STEADY:
                break
            train(1)
        train(SETTLED)
        dist.barrier()
        before = _sizes(output)
        train(MEASURED)
        dist.barrier()
        after = _sizes(output)
        _, iteration_time_s = session.iterations.latest[-1]
    finally:
        session.close()
    grown = {name: size - before.get(name, 0) for name, size in after.items()}
    return {name: size for name, size in grown.items() if size}, iteration_time_s


def _sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()}


#: Of `Bench`: the model, and how often both run it.
OPTIONS: dict[str, Any] = {
    "layers": 4, "hidden": 256, "sequence": 128, "microbatch_size": 1, "num_microbatches": 8,
    "blocks": 12, "block_iterations": 2, "steps": 2, "carrier": "auto",
    "vocabulary": 512,
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
    from megatron.core import parallel_state, tensor_parallel

    from benchmarks.gpu.schedules import Bench

    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=dist.get_world_size())
    tensor_parallel.random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    torch.manual_seed(1234)
    bench = Bench(OPTIONS, "cpu", HostExecutor)
    bench.add_orders()
    report = bench.compare()
    bench.close()
    return report
