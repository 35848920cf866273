"""What an attached pipeline of torch's costs the host, on CPUs.

    torchrun --nproc-per-node 2 benchmarks/torch_pipelining/host_cost.py

Stages of tiny layers train over gloo by torch's 1F1B, under EnvPipe at level `units` with another
clock at each unit. There is no GPU: units end milliseconds after they were handed over, one after
another, so that the host gets a lead; it waits for the last one, and has none at the next step's
begin. The energy counter is like NVML's. `exposed` is what a step takes beyond its units, as the
lower quartile: cores may be shared. The rest is the training thread's time in EnvPipe's functions,
without torch's in them, as medians.
"""

from __future__ import annotations

import cProfile
import pstats
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import Any
from unittest.mock import patch

import click
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from benchmarks.gpu.null_gpu import NullGpu
from benchmarks.unmeasured import PRESET, another_each_unit, write_unmeasured_plan
from envpipe_megatron.core.orders import builders
from envpipe_megatron.gpu.backends.energy_counter import EXPECTED_PERIOD_S, EnergyCounter
from envpipe_megatron.gpu.base import EnergyReading
from envpipe_megatron.gpu.control import ChosenControl
from envpipe_megatron.gpu.emulated.presets import load_preset
from envpipe_megatron.integrations import job
from envpipe_megatron.integrations.device import Device
from envpipe_megatron.integrations.torch_pipelining import AttachedPipeline, attach
from envpipe_megatron.runtime.execution.executor import CudaExecutor

WIDTH, MICROBATCH = 16, 2
FORWARD_S, BACKWARD_S = 2e-3, 4e-3
#: Until the plan runs, and the first lines of the logs are written.
WARM_UP = 16
#: What a read of NVML's counter takes on an H200.
_READ_S = 3.4e-3
_POWER_W = 500.0
_UNITS = "forward_one_chunk", "backward_one_chunk"


class Stream:
    """Work of a device, one piece after another."""

    def __init__(self) -> None:
        self.ends_s = 0.0

    def add(self, duration_s: float) -> None:
        """Hand over work."""
        self.ends_s = max(self.ends_s, time.monotonic()) + duration_s


STREAM = Stream()


class Event:
    """In place of a CUDA event."""

    def __init__(self, **how: bool) -> None:
        self._time_s = 0.0

    def record(self, stream: object = None) -> None:
        """Note when what was handed over ends."""
        self._time_s = max(STREAM.ends_s, time.monotonic())

    def query(self) -> bool:
        """Whether it has ended."""
        return time.monotonic() >= self._time_s

    def synchronize(self) -> None:
        """Sleep until then."""
        time.sleep(max(0.0, self._time_s - time.monotonic()))

    def elapsed_time(self, later: Event) -> float:
        """Ms to another one."""
        return 1e3 * (later._time_s - self._time_s)


class Layer(torch.nn.Module):
    """One whose work the device does later."""

    def __init__(self) -> None:
        super().__init__()
        self._linear = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The same shape."""
        made: torch.Tensor = torch.tanh(self._linear(x))
        STREAM.add(FORWARD_S)
        if made.requires_grad:
            made.register_hook(lambda gradient: STREAM.add(BACKWARD_S))  # type: ignore[no-untyped-call]
        return made


class CountedGpu(NullGpu):
    """With an energy counter that refreshes ten times a second, and takes a while to be read."""

    def __init__(self) -> None:
        super().__init__(load_preset(PRESET).supported_frequencies_mhz)
        self._counter = EnergyCounter(self._read_j, self.name)

    def read_energy(self) -> EnergyReading:
        """As of a real GPU."""
        return self._counter.read()

    def _read_j(self) -> float:
        time.sleep(_READ_S)
        return time.monotonic() // EXPECTED_PERIOD_S * EXPECTED_PERIOD_S * _POWER_W


class Costs:
    """Times in EnvPipe's functions, and not in torch's that they call."""

    def __init__(self) -> None:
        self._begun_ns = self._inner_ns = 0
        self._of_step: dict[str, int] = defaultdict(int)
        #: Of each step, ns by place.
        self.steps: list[dict[str, int]] = []

    def inner(self, of: Any, name: str) -> None:
        """A function of torch's, whose time is none of EnvPipe's; before the attach."""
        own = getattr(of, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            begin_ns = time.perf_counter_ns()
            if name == "step":
                self._of_step["before the first unit"] = begin_ns - self._begun_ns
            try:
                return own(*args, **kwargs)
            finally:
                self._inner_ns = time.perf_counter_ns() - begin_ns

        setattr(of, name, call)

    def outer(self, of: Any, name: str) -> None:
        """What EnvPipe has put in the place of such a function."""
        attached = getattr(of, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            begin_ns = self._begun_ns = time.perf_counter_ns()
            try:
                return attached(*args, **kwargs)
            finally:
                self._of_step[name] += time.perf_counter_ns() - begin_ns - self._inner_ns

        setattr(of, name, call)

    def end_step(self) -> None:
        """Another step follows."""
        self.steps.append(self._of_step)
        self._of_step = defaultdict(int)

    def us(self) -> dict[str, float]:
        """Medians by place, us a step."""
        found = {name: median(s[name] for s in self.steps) / 1e3 for name in self.steps[-1]}
        found["after the last unit"] = found.pop("step") - found["before the first unit"]
        return found


@click.command(help=(__doc__ or "").replace("\n\n    torchrun", "\n\n\b\n    torchrun"))
@click.option("--steps", default=200, show_default=True)
@click.option("--microbatches", default=8, show_default=True)
@click.option("--functions", default=0, show_default=True, help="Say so many that take longest.")
def main(steps: int, microbatches: int, functions: int) -> None:
    """Train, and say what it cost."""
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    control = ChosenControl("dry_run", "dry_run", "a benchmark")
    for of, name, instead in (
        (torch.cuda, "Event", Event),
        (torch.cuda, "current_stream", lambda: None),
        (job, "open_device", lambda *_, **__: Device(CountedGpu(), control, _executor)),
    ):
        patch.object(of, name, instead).start()
    torch.manual_seed(rank)
    layer = Layer()
    stage = PipelineStage(layer, rank, ranks, torch.device("cpu"))
    schedule: Any = Schedule1F1B(stage, microbatches, loss_fn=torch.nn.functional.mse_loss)
    data = torch.randn(2, microbatches * MICROBATCH, WIDTH)
    inputs, target = ([data[0]] if rank == 0 else []), data[1] if rank + 1 == ranks else None
    last, units_s = Event(), microbatches * (FORWARD_S + BACKWARD_S)

    def step() -> float:
        """Train once; what it took beyond its units, s."""
        layer.zero_grad()
        dist.barrier()
        begin_s = time.perf_counter()
        schedule.step(*inputs, target=target, losses=[])
        last.record()
        last.synchronize()
        return time.perf_counter() - begin_s - units_s

    costs = Costs()
    places = [(schedule, "step"), (schedule, "_maybe_compute_loss")]
    places += [(stage, name) for name in _UNITS]
    own = [step() for _ in range(WARM_UP + steps)][WARM_UP:]  # and once more at the end
    for place in places:
        costs.inner(*place)
    with tempfile.TemporaryDirectory() as folder:
        pipeline = _attach(schedule, ranks, microbatches, Path(folder))
        attached = [step() for _ in range(WARM_UP + steps)][WARM_UP:]
        for place in places:
            costs.outer(*place)
        with _threads() as threads:
            for _ in range(steps):
                step()
                costs.end_step()
        if functions:
            _by_function(step, steps, functions if rank == 0 else 0)
        pipeline.end_training()
    own += [step() for _ in range(steps)]
    for turn in range(ranks):
        dist.barrier()
        if turn == rank:
            alone_us, attached_us = (1e6 * quantiles(each)[0] for each in (own, attached))
            click.echo(
                f"rank {rank}: exposed {alone_us:.0f} us a step, attached {attached_us:.0f} "
                f"({attached_us - alone_us:+.0f})"
            )
            click.echo(f"  {2 * microbatches} units, us a step: " + _joined(costs.us()))
            for name, (wakes, share) in threads.items():
                click.echo(f"  {name}: wakes {wakes:.0f} times a second, {share:.2%} of a core")
    dist.destroy_process_group()


def _executor(settle: Callable[[], None]) -> CudaExecutor:
    return CudaExecutor()


def _attach(schedule: Any, ranks: int, microbatches: int, folder: Path) -> AttachedPipeline:
    order = builders.one_f_one_b(ranks, microbatches)
    profile, plan = write_unmeasured_plan(order, folder, another_each_unit)
    pipeline = attach(
        schedule,
        facts={},
        level="units",
        type="envelope",
        reconfigure="default",
        scheduling="1f1b",
        baseline_steps=3,
        profile=profile,
        plan=plan,
        gpu_control="dry_run",
        output=folder / "envpipe",
        say=lambda text: None,
    )
    pipeline.report()  # as torchtitan does: there are none in between
    return pipeline


@contextmanager
def _threads() -> Iterator[dict[str, tuple[float, float]]]:
    """How often a second each other thread of Python's woke up meanwhile, and its share of a core.

    Empty until the context ends.
    """
    found: dict[str, tuple[float, float]] = {}
    natives = {t.name: t.native_id for t in threading.enumerate() if t.name != "MainThread"}
    before = {name: _of_thread(native) for name, native in natives.items()}
    begin_s = time.monotonic()
    yield found
    lasted_s = time.monotonic() - begin_s
    for name, native in natives.items():
        wakes, cpu_s = _of_thread(native)
        found[name] = (wakes - before[name][0]) / lasted_s, (cpu_s - before[name][1]) / lasted_s


def _of_thread(native: int | None) -> tuple[int, float]:
    """How often a thread has gone to sleep, and its CPU time in s."""
    task = Path("/proc/self/task") / str(native)
    status = dict(line.split(":") for line in (task / "status").read_text().splitlines())
    sleeps = int(status["voluntary_ctxt_switches"])
    return sleeps, int((task / "schedstat").read_text().split()[0]) / 1e9


def _by_function(step: Callable[[], float], steps: int, functions: int) -> None:
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(steps):
        step()
    profile.disable()
    if functions:
        stats = pstats.Stats(profile).sort_stats("cumulative")
        stats.print_stats("envpipe_megatron", functions)


def _joined(us: dict[str, float]) -> str:
    return f"{sum(us.values()):.0f}, " + ", ".join(f"{name} {at:.0f}" for name, at in us.items())


if __name__ == "__main__":
    main()
