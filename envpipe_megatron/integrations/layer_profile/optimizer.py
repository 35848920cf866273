"""What Megatron's optimizer holds for each parameter, and how long its step takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch

from envpipe_megatron.search.layer_profile import BytesPerParameter

_STEPS = 4


def measure_step(model: Any, optimizer: Any) -> float:
    """Seconds for each parameter, gradients set to zero before, as in each step of training.

    The first step, which makes the optimizer's state, does not count. `model` is the data parallel
    wrapper, whose gradients are zeros from here on.
    """
    parameters: int = sum(weight.numel() for weight in model.parameters())
    times_s = []
    for _ in range(_STEPS):
        _synchronize()
        begin_s = time.perf_counter()
        model.zero_grad_buffer()
        optimizer.zero_grad()
        optimizer.step()
        _synchronize()
        times_s.append(time.perf_counter() - begin_s)
    return statistics.median(times_s[1:]) / parameters


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


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
