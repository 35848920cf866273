r"""EnvPipe around a pipeline of plain PyTorch, which keeps its own order of units.

Four stages on a machine without GPUs; emulated GPUs take their time, here 10 ms for a forward:

    ENVPIPE_EMULATED_GPU=a100-sxm ENVPIPE_EMULATED_FORWARD_S=0.01 \
        torchrun --nproc-per-node 4 launch/examples/torch_pipelining.py
"""

import os

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from envpipe_megatron.integrations.instructions import InstrumentedPipeline

MICROBATCHES, MICROBATCH, WIDTH = 8, 4, 64


class InstrumentedStage(PipelineStage):
    """A stage that says when its units begin and end."""

    pipeline: InstrumentedPipeline

    def forward_one_chunk(self, *args, **kwargs):
        """The forward of one microbatch."""
        with self.pipeline.instruction("forward"):
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args, **kwargs):
        """The backward of one microbatch."""
        with self.pipeline.instruction("backward"):
            return super().backward_one_chunk(*args, **kwargs)


def train(model: torch.nn.Module, data: torch.Tensor, steps: int, **settings) -> list[float]:
    """Train this rank's stage with EnvPipe's `settings`; return losses, on the last stage."""
    rank, stages = dist.get_rank(), dist.get_world_size()
    stage = InstrumentedStage(model, rank, stages, data.device)
    pipeline = InstrumentedPipeline(dist.group.WORLD, MICROBATCHES, **settings)
    stage.pipeline = pipeline
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=torch.nn.functional.mse_loss)
    if rank == stages - 1:
        print(f"{steps} steps on {stages} stages; a line every 10 steps", flush=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses: list[float] = []
    of_microbatches: list[torch.Tensor] = []
    for step in range(steps):
        with pipeline.step():
            optimizer.zero_grad()
            inputs = [data] if rank == 0 else []
            schedule.step(*inputs, target=data.roll(1, 1), losses=of_microbatches)
            optimizer.step()
        if rank == stages - 1:
            losses.append(torch.stack(of_microbatches).mean().item())
        if step % 10 == 9:
            report = pipeline.report()  # on every rank
            if rank == stages - 1:
                print(f"step {step + 1} | loss {losses[-1]:.4f} |{report}", flush=True)
    pipeline.end_training()
    return losses


def device_of_rank() -> torch.device:
    """This rank's device; its group is made, too."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return device


if __name__ == "__main__":
    device = device_of_rank()
    layers = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()
    data = torch.randn(MICROBATCHES * MICROBATCH, WIDTH)
    train(torch.nn.Sequential(*layers).to(device), data.to(device), steps=200)
    dist.destroy_process_group()
