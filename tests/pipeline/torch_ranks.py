"""A rank of a small model under torch.distributed.pipelining, by its own schedule or a table."""

import torch
import torch.distributed as dist

LAYERS, WIDTH, MICROBATCH = 8, 16, 4


def train(
    rank: int, microbatches: int, table: str | None, stages_of: list[list[int]]
) -> tuple[list[bytes], dict[int, list[bytes]]]:
    """One iteration; losses, on the last virtual stage's rank, and gradients by layer.

    Args:
        table: the path of a table; None for the schedule of torch's own that fits.
        stages_of: the virtual stages of each rank.
    """
    # Takes seconds to import, which nobody pays who only collects tests.
    from torch.distributed.pipelining import (
        PipelineStage,
        Schedule1F1B,
        ScheduleInterleaved1F1B,
        schedules,
    )

    mine, num_virtual = stages_of[rank], sum(map(len, stages_of))
    each = LAYERS // num_virtual
    layers = {layer: _layer(layer) for at in mine for layer in range(at * each, (at + 1) * each)}
    stages = [
        PipelineStage(
            torch.nn.Sequential(*(layers[at * each + n] for n in range(each))),
            at, num_virtual, torch.device("cpu"), group=dist.group.WORLD,
        )
        for at in mine
    ]  # fmt: skip
    loss = torch.nn.functional.mse_loss
    if table is None:
        schedule = (
            ScheduleInterleaved1F1B(stages, microbatches, loss_fn=loss)
            if len(stages) > 1
            else Schedule1F1B(stages[0], microbatches, loss_fn=loss)
        )
    else:
        schedule = schedules._PipelineScheduleRuntime(stages, microbatches, loss_fn=loss)
        schedule._load_csv(table)
    generator = torch.Generator().manual_seed(99)
    inputs, target = torch.randn(2, microbatches * MICROBATCH, WIDTH, generator=generator)
    losses: list[torch.Tensor] = []
    schedule.step(
        *([inputs] if 0 in mine else []),
        target=target if num_virtual - 1 in mine else None,
        losses=losses,
    )
    gradients = {
        layer: [_bits(weight.grad) for weight in module.parameters()]
        for layer, module in layers.items()
    }
    return [_bits(each) for each in losses], gradients


def _layer(layer: int) -> torch.nn.Module:
    torch.manual_seed(layer)
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh())


def _bits(tensor: torch.Tensor | None) -> bytes:
    assert tensor is not None
    return tensor.detach().numpy().tobytes()
