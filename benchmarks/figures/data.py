"""What the experiments train on: the same random samples in every run, as EnvPipe has them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from benchmarks.figures.experiments import Family, Model


def inputs_of(model: Model, samples: int, seed: int, device: torch.device) -> torch.Tensor:
    """One microbatch for the first stage, drawn on a device; the seed is the microbatch's own."""
    generator = torch.Generator(device).manual_seed(seed)
    match model.family:
        case Family.MEGATRON:
            tokens = (samples, model.length)
            return torch.randint(model.outputs, tokens, generator=generator, device=device)
        case Family.RESNET:
            shape: tuple[int, ...] = (samples, 3, model.length, model.length)
        case _:
            shape = (samples, model.length, model.width)
    return torch.randn(shape, generator=generator, device=device)


def targets_of(
    model: Model, outputs: Sequence[int], seed: int, device: torch.device
) -> torch.Tensor:
    """What the last stage's outputs of one microbatch are compared with.

    Args:
        model: whose outputs.
        outputs: their shape.
        seed: the microbatch's own.
        device: where targets are drawn.
    """
    generator = torch.Generator(device).manual_seed(seed)
    if model.outputs:
        classes = tuple(outputs[:-1])
        return torch.randint(model.outputs, classes, generator=generator, device=device)
    return torch.randn(tuple(outputs), generator=generator, device=device)


def loss_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The loss of one microbatch: against classes, or against values of the same shape."""
    if targets.is_floating_point():
        return functional.mse_loss(outputs.float(), targets)
    return functional.cross_entropy(outputs.float().flatten(0, -2), targets.flatten())
