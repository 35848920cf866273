r"""A pipeline of plain PyTorch with EnvPipe attached to its schedule.

Four stages on a machine without GPUs; emulated GPUs take their time, here 10 ms for a forward:

    ENVPIPE_EMULATED_GPU=a100-sxm ENVPIPE_EMULATED_FORWARD_S=0.01 \
        torchrun --nproc-per-node 4 launch/examples/attached_schedule.py
"""

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch_pipelining import device_of_rank

from envpipe_megatron.integrations.torch_pipelining import attach

MICROBATCHES, MICROBATCH, WIDTH, STEPS = 8, 4, 64, 150


def main() -> None:
    """Train, and print a line every 10 steps and the bill."""
    device = device_of_rank()
    rank, stages = dist.get_rank(), dist.get_world_size()
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()).to(device)
    stage = PipelineStage(model, rank, stages, device)
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=torch.nn.functional.mse_loss)
    pipeline = attach(schedule)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    data = torch.randn(MICROBATCHES * MICROBATCH, WIDTH, device=device)
    losses: list[torch.Tensor] = []
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        schedule.step(*([data] if rank == 0 else []), target=data.roll(1, 1), losses=losses)
        optimizer.step()
        if step % 10 == 0:
            report = pipeline.report().line()  # on every rank
            if rank == stages - 1:
                loss = torch.stack(losses).mean().item()
                print(f"step {step} | loss {loss:.4f} |{report}", flush=True)
    pipeline.end_training()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
