r"""Random orders of units by torch's own runtime: does anything hang, and are all bits the same?

    torchrun --nproc-per-node 4 benchmarks/torch_pipelining/random_orders.py --iterations 300

Over NCCL where each rank has a GPU, else over gloo. Units last a random time more; every iteration
has an order of its own, and its losses and gradients are held against those of torch's 1F1B, or of
its interleaved order with --chunks 2. PyTorch issue 172668 is about messages of NCCL that wait for
others which were sent before: an order in which two stages do so ends by the time-out.
"""

from __future__ import annotations

import os
import random
import time
from datetime import timedelta
from typing import Any

import click
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from benchmarks.megatron_lm.stress import random_extra_forwards, random_interleaved
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.integrations.torch_pipelining.orders import Runner, torch_order

LAYERS_A_STAGE, WIDTH, SEQUENCE, MICROBATCH = 2, 512, 64, 2


class DelayedLayer(torch.nn.Module):
    """A layer whose forward and backward each last a random time more on the device."""

    def __init__(self, source: random.Random, longest_s: float) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH)
        self._source, self._longest_s = source, longest_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The same shape."""
        self._wait()
        made: torch.Tensor = torch.tanh(self.linear(x))
        if made.requires_grad:
            made.register_hook(lambda gradient: self._wait())  # type: ignore[no-untyped-call]
        return made

    def _wait(self) -> None:
        longest_s = self._source.random() * self._longest_s
        if torch.cuda.is_available():
            torch.cuda._sleep(int(longest_s * 1.9e9))  # type: ignore[no-untyped-call]  # torch's
        else:
            time.sleep(longest_s)


@click.command(help=(__doc__ or "").replace("\n\n    torchrun", "\n\n\b\n    torchrun"))
@click.option("--iterations", default=300, show_default=True)
@click.option("--microbatches", default=12, show_default=True)
@click.option("--chunks", type=click.IntRange(1, 2), default=1, show_default=True)
@click.option("--delay-ms", default=1.0, show_default=True, help="Of a layer, at most.")
def main(iterations: int, microbatches: int, chunks: int, delay_ms: float) -> None:
    """Run random orders, and say how many there were."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(seconds=60))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine = [rank + chunk * ranks for chunk in range(chunks)]
    delays = random.Random(rank)
    modules = [_module(at, delays, delay_ms / 1e3).to(device) for at in mine]
    stages: list[Any] = [
        PipelineStage(module, at, ranks * chunks, device)
        for module, at in zip(modules, mine, strict=True)
    ]
    loss = torch.nn.functional.mse_loss
    schedule: Any = (
        ScheduleInterleaved1F1B(stages, microbatches, loss_fn=loss)
        if chunks > 1
        else Schedule1F1B(stages[0], microbatches, loss_fn=loss)
    )
    torch.manual_seed(1)
    data = torch.randn(2, microbatches * MICROBATCH, SEQUENCE, WIDTH).to(device)
    inputs, target = (
        ([data[0]] if 0 in mine else []),
        data[1] if mine[-1] + 1 == ranks * chunks else None,
    )
    own = torch_order(schedule)
    runner, orders = Runner(schedule, own), random.Random(7)

    def step(order: Schedule) -> list[torch.Tensor]:
        losses: list[torch.Tensor] = []
        for module in modules:
            module.zero_grad()
        runner.turn_to(order).step(*inputs, target=target, losses=losses)
        gradients = [w.grad.clone() for m in modules for w in m.parameters() if w.grad is not None]
        return [each.detach().clone() for each in losses] + gradients

    expected, seen, begin_s = step(own), set(), time.monotonic()
    for number in range(iterations):
        order = _random_order(orders, ranks, microbatches, chunks)
        seen.add(order.stages)
        found = step(order)
        if not all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)):
            raise SystemExit(f"rank {rank}: other bits in iteration {number}")
        if rank == 0 and number % 50 == 49:  # where a run that is ended had come to
            print(f"{number + 1} of {iterations}", flush=True)
    dist.barrier()
    if rank == 0:
        print(
            f"{iterations} iterations of {len(seen)} orders on {ranks} ranks over "
            f"{dist.get_backend()}, {chunks} stage(s) a rank, in {time.monotonic() - begin_s:.0f} s"
            ": no hang, all bits the same",
            flush=True,
        )
    dist.destroy_process_group()


def _module(at: int, delays: random.Random, longest_s: float) -> torch.nn.Module:
    torch.manual_seed(at)
    return torch.nn.Sequential(*(DelayedLayer(delays, longest_s) for _ in range(LAYERS_A_STAGE)))


def _random_order(source: random.Random, ranks: int, count: int, chunks: int) -> Schedule:
    if chunks > 1:
        return random_interleaved(source, ranks, count, chunks)[0]
    return builders.envpipe(ranks, count, random_extra_forwards(source, ranks, count, None))


if __name__ == "__main__":
    main()
