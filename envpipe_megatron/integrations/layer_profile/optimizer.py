"""What Megatron's optimizer holds for each parameter, and how long its step takes."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from envpipe_megatron.integrations.layer_profile.measuring import now_s
from envpipe_megatron.search.layer_profile import BytesPerParameter

_STEPS = 4


class StepTime(NamedTuple):
    """Of a training step for each parameter, as `LayerProfile` has it."""

    gradients_s: float
    optimizer_s: float


def measure_step(model: Any, optimizer: Any) -> StepTime:
    """Seconds for each parameter of what follows, and comes before, a step's microbatches.

    Gradients are set to zero, checked and scaled, as each of several data parallel ranks does for
    all its parameters; a sum over ranks is in it only where this job has several. The first step,
    which makes the optimizer's state, does not count. `model` is the data parallel wrapper, whose
    gradients are zeros from here on.
    """
    parameters: int = sum(weight.numel() for weight in model.parameters())
    gradients_s, optimizer_s = [], []
    for _ in range(_STEPS):
        begin_s = now_s()
        model.zero_grad_buffer()
        optimizer.zero_grad()
        model.finish_grad_sync()
        # A rank alone scales nothing by itself.
        model.scale_gradients(1.0)
        ready_s = now_s()
        optimizer.step()
        gradients_s.append(ready_s - begin_s)
        optimizer_s.append(now_s() - ready_s)
    return StepTime(
        *(statistics.median(times_s[1:]) / parameters for times_s in (gradients_s, optimizer_s))
    )


def bytes_held(model: torch.nn.Module, optimizer: Any) -> BytesPerParameter:
    """Means over the parameters of a model whose optimizer has made a step, alone in its group."""
    weights: list[Any] = list(model.parameters())
    count = sum(weight.numel() for weight in weights)
    own = {weight.data_ptr() for weight in weights}
    state = {tensor.data_ptr(): tensor.nbytes for tensor in _state(optimizer)}
    return BytesPerParameter(
        sum(weight.nbytes for weight in weights) / count,
        sum(weight.main_grad.nbytes for weight in weights) / count,
        sum(size for place, size in state.items() if place not in own) / count,
    )


def _state(optimizer: Any) -> Iterator[torch.Tensor]:
    """All tensors of the optimizers that a job's optimizer consists of."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = part.optimizer
        for group in inner.param_groups:
            yield from group["params"]
        for values in inner.state.values():
            yield from (value for value in values.values() if isinstance(value, torch.Tensor))
