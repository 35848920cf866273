"""What the experiments train on: the same random samples in every run, as EnvPipe has them."""

from __future__ import annotations

import torch
from torch.nn import functional

from figures.experiments import Family, Model


def inputs_of(model: Model, samples: int, seed: int, device: torch.device) -> torch.Tensor:
    """One microbatch for the first stage; the seed is the microbatch's own."""
    generator = torch.Generator().manual_seed(seed)
    match model.family:
        case Family.MEGATRON:
            made = torch.randint(model.outputs, (samples, model.length), generator=generator)
        case Family.RESNET:
            image = (3, model.length, model.length)
            made = torch.randn((samples, *image), generator=generator)
        case _:
            made = torch.randn((samples, model.length, model.width), generator=generator)
    return made.to(device)


def loss_of(model: Model, outputs: torch.Tensor, seed: int) -> torch.Tensor:
    """The loss of one microbatch's outputs against targets that follow from the same seed."""
    generator = torch.Generator().manual_seed(seed)
    if model.outputs:
        targets = torch.randint(model.outputs, outputs.shape[:-1], generator=generator)
        return functional.cross_entropy(
            outputs.float().flatten(0, -2), targets.to(outputs.device).flatten()
        )
    targets = torch.randn(outputs.shape, generator=generator).to(outputs.device)
    return functional.mse_loss(outputs.float(), targets)
