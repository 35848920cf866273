"""A GPT on real GPUs under the interpreter, against megatron-core's own 1F1B, in the same process.

One rank a GPU, no clock is changed (dry run). Prints, for each order, whether losses and weights
are equal to megatron-core's to the last bit, and its iteration time over megatron-core's, from
alternating blocks of iterations: the median ratio and a 95 % interval by bootstrap over blocks.

    torchrun --nproc-per-node 4 benchmarks/gpu/schedules.py
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from scipy.stats import bootstrap

from benchmarks.outputs import leave, make_console, make_table, output_option
from envpipe_megatron.core.channel_model import CARRIERS
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.orders.builders import split_in_place, zero_bubble
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.gpu.base import FORBID_VARIABLE, ClockState, EnergyReading, Gpu, GpuAddress
from envpipe_megatron.gpu.presets import load_preset
from envpipe_megatron.integrations.megatron.core import ForwardBackward
from envpipe_megatron.runtime.channel.collectives import all_pipelines, make_collectives
from envpipe_megatron.runtime.channel.links import make_channel
from envpipe_megatron.runtime.execution.executor import CudaExecutor, Executor
from envpipe_megatron.runtime.job.options import JobOptions
from envpipe_megatron.runtime.job.session import Session
from envpipe_megatron.trials.model import build_model, forward_step
from envpipe_megatron.trials.settings import Settings
from unmeasured import PRESET, stepped_order, write_unmeasured_plan

VOCABULARY = 32000


@click.command()
@click.option("--layers", default=24, show_default=True)
@click.option("--hidden", default=2048, show_default=True)
@click.option("--sequence", default=2048, show_default=True)
@click.option("--microbatch-size", default=2, show_default=True)
@click.option("--num-microbatches", default=16, show_default=True)
@click.option("--blocks", default=12, show_default=True, help="Alternating blocks of each order.")
@click.option("--block-iterations", default=3, show_default=True)
@click.option("--steps", default=4, show_default=True, help="Steps of the comparison to the bit.")
@click.option("--carrier", type=click.Choice(CARRIERS), default="auto", show_default=True)
@output_option("gpu_schedules")
def main(output: Path, **options: Any) -> None:
    """Compare orders on the GPUs of this machine."""
    os.environ.setdefault(FORBID_VARIABLE, "1")  # measured with the clocks as they are
    join_pipeline()
    bench = Bench({**options, "vocabulary": VOCABULARY})
    bench.add_orders()
    orders = bench.compare()
    # The first number with a fraction ends what a row was set to.
    rows = [{"order": name, "time_ratio": row["time_ratio"], **row} for name, row in orders.items()]
    if dist.get_rank() == 0:
        make_console().print(make_table("Orders", rows))
        gpus = f"{dist.get_world_size()} {torch.cuda.get_device_name()}"
        leave(output, "GPUs", {"schedules": rows}, gpus=gpus)
    bench.close()
    dist.barrier()
    dist.destroy_process_group()


def join_pipeline() -> None:
    """Make this rank of torchrun a stage of one pipeline, on its own GPU."""
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl", timeout=timedelta(seconds=60), device_id=local_rank)
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=dist.get_world_size())
    tensor_parallel.model_parallel_cuda_manual_seed(123)


class NullGpu(Gpu):
    """Power and energy are 0, time is the monotonic clock; a rank sets its clock at once."""

    drives_hardware = changes_clock = False
    name = "no GPU"
    power_w: float = 0.0

    def __init__(self, frequencies_mhz: Sequence[int]) -> None:
        self.address = GpuAddress("null", f"none#{id(self)}")
        self.supported_frequencies_mhz = tuple(frequencies_mhz)

    def _lock(self, frequency_mhz: int) -> None:
        """Do nothing."""

    def _reset(self) -> None:
        """Do nothing."""

    def clock_state(self) -> ClockState:
        """Return the highest clock."""
        return ClockState(None, self.supported_frequencies_mhz[0])

    def read_energy(self) -> EnergyReading:
        """Return 0 J at the present instant."""
        return EnergyReading(0.0, self.time_s())


class Bench:
    """The model, megatron-core's own function, and the sessions that are added.

    Args:
        options: of the command, and `vocabulary`.
        device: "cuda", where the model has 16 bits; or "cpu".
        make_executor: makes what measures time.
    """

    def __init__(
        self,
        options: dict[str, Any],
        device: str = "cuda",
        make_executor: Callable[[], Executor] = CudaExecutor,
    ) -> None:
        self.options, self.device, self._make_executor = options, device, make_executor
        self.num_stages = parallel_state.get_pipeline_model_parallel_world_size()
        settings = Settings(
            output_dir="",
            text="",
            num_stages=self.num_stages,
            num_layers=options["layers"],
            hidden_size=options["hidden"],
            num_attention_heads=options["hidden"] // 128,
            sequence_length=options["sequence"],
            vocabulary=options["vocabulary"],
        )
        self.model = build_model(settings)
        self.initial = [p.detach().clone() for p in self.model.parameters()]
        pipeline = parallel_state.get_pipeline_model_parallel_group()
        self.collectives = make_collectives(
            all_pipelines(dist.get_process_group_ranks(pipeline)), timedelta(seconds=60)
        )
        self.channel = make_channel(
            pipeline, self.collectives, timeout=timedelta(seconds=60), carrier=options["carrier"]
        )
        self.sessions: dict[str, Session] = {}
        self.functions: dict[str, Callable[..., Any]] = {
            "megatron-core 1f1b": get_forward_backward_func()
        }
        # Megatron's own order first: compute kernels are loaded before any receive spins.
        self.run_steps("megatron-core 1f1b", 2)

    def add_orders(self) -> None:
        """Make a session for each order that is compared."""
        for name, schedule in self._schedules().items():
            session = self._session(schedule)
            self.sessions[name] = session
            self.functions[name] = ForwardBackward(session, framework_iterations=0)

    def _schedules(self) -> dict[str, Schedule]:
        p, m = self.num_stages, self.options["num_microbatches"]
        schedules = {"interpreter 1f1b": builders.one_f_one_b(p, m)}
        schedules["split in place"] = split_in_place(schedules["interpreter 1f1b"], m)
        schedules["zb-h1"] = zero_bubble(p, m)
        for step in (1, 3):
            schedule = stepped_order(p, m, self.channel.capacity, step=step)
            schedules[f"interpreter envpipe {list(schedule.extra_forwards)}"] = schedule
        return schedules

    def _session(self, schedule: Schedule) -> Session:
        with tempfile.TemporaryDirectory() as folder:
            profile_file, plan_file = write_unmeasured_plan(schedule, Path(folder))
            session = Session(
                JobOptions(
                    num_microbatches=self.options["num_microbatches"],
                    type="envelope",
                    scheduling="1f1b",
                    reconfigure="default",
                    baseline_steps=1,
                    profile=profile_file,
                    why_whole="",
                    plan=plan_file,
                ),
                NullGpu(load_preset(PRESET).supported_frequencies_mhz),
                lambda settle: self._make_executor(),
                self.channel,
                self.collectives,
            )
            # The warm-up iteration; the files are read when the next begins.
            self.functions["warm-up"] = ForwardBackward(session, framework_iterations=0)
            self.run_steps("warm-up", 2)
        return session

    def compare(self) -> dict[str, Any]:
        """Bits first, then times, in blocks whose order is reversed each time."""
        stock, *names = [name for name in self.functions if name != "warm-up"]
        reference = self.train(stock)
        report: dict[str, Any] = {
            name: {"bit_equal": self.collectives.on_all(equal(reference, self.train(name)))}
            for name in (stock, *names)
        }
        times: dict[str, list[float]] = {name: [] for name in report}
        for block in range(self.options["blocks"]):
            for name in sorted(times, reverse=bool(block % 2)):
                times[name].append(self.time_s(name))
        for name, blocks in times.items():
            ratios = [ours / theirs for ours, theirs in zip(blocks, times[stock], strict=True)]
            report[name] |= {
                "iteration_time_s": statistics.median(blocks),
                "time_ratio": statistics.median(ratios),
                "time_ratio_95_percent": interval(ratios),
            }
            if self.device == "cuda":
                report[name]["peak_memory_gib"] = self._peak_memory(name)
        for name in names:
            clock = self.sessions[name].clock.summary()
            report[name] |= {"clock_requests": clock["changes"], "coalesced": clock["coalesced"]}
        return report

    def close(self) -> None:
        """End the sessions' threads."""
        for session in self.sessions.values():
            session.close()

    def train(self, name: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Losses of some steps by one of the functions, and the weights after them."""
        with torch.no_grad():
            for parameter, value in zip(self.model.parameters(), self.initial, strict=True):
                parameter.copy_(value)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        losses = []
        for step in range(self.options["steps"]):
            optimizer.zero_grad()
            losses += [entry["loss"] for entry in self._run(name, step)]
            optimizer.step()
        torch.cuda.synchronize()
        return losses, [p.detach().clone() for p in self.model.parameters()]

    def _peak_memory(self, name: str) -> list[float]:
        torch.cuda.reset_peak_memory_stats()
        self.run_steps(name, 1)
        mine = torch.cuda.max_memory_allocated() / 2**30
        return [round(peak, 2) for peak in self.collectives.in_pipeline(mine)]

    def time_s(self, name: str) -> float:
        """Time of an iteration on the slowest stage, from a block of them."""
        dist.barrier()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        self.run_steps(name, self.options["block_iterations"])
        torch.cuda.synchronize()
        own = (time.perf_counter() - begin) / self.options["block_iterations"]
        return self.collectives.latest(own)

    def run_steps(self, name: str, count: int) -> None:
        """Run iterations of one of the functions."""
        for step in range(count):
            self.model.zero_grad()
            self._run(name, step)
        torch.cuda.synchronize()

    def _run(self, name: str, step: int) -> list[Any]:
        result: list[Any] = self.functions[name](
            forward_step_func=forward_step,
            data_iterator=self._data(step),
            model=self.model,
            num_microbatches=self.options["num_microbatches"],
            seq_length=self.options["sequence"],
            micro_batch_size=self.options["microbatch_size"],
        )
        return result

    def _data(self, step: int) -> Iterator[torch.Tensor]:
        shape = (self.options["microbatch_size"], self.options["sequence"] + 1)
        generator = torch.Generator(self.device).manual_seed(step)
        for _ in range(self.options["num_microbatches"]):
            yield torch.randint(
                0, self.options["vocabulary"], shape, generator=generator, device=self.device
            )


def equal(
    one: tuple[list[torch.Tensor], list[torch.Tensor]],
    other: tuple[list[torch.Tensor], list[torch.Tensor]],
) -> bool:
    """Whether losses and weights of two trainings are the same to the last bit."""
    return all(
        len(mine) == len(theirs) and all(map(torch.equal, mine, theirs))
        for mine, theirs in zip(one, other, strict=True)
    )


def interval(ratios: Sequence[float]) -> list[float]:
    """Return the 95 % interval of the median over blocks."""
    found = bootstrap((ratios,), np.median, method="percentile", random_state=0)
    low, high = found.confidence_interval
    return [float(low), float(high)]


if __name__ == "__main__":
    main()
