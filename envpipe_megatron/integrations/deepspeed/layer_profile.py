"""Measures time and energy of each layer of a pipeline, on one GPU."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec

from envpipe_megatron.files import replace_files
from envpipe_megatron.integrations.layer_profile.rank_gpu import RankGpu, Window, now_s
from envpipe_megatron.search.layer_file import layers_text
from envpipe_megatron.search.layer_profile import (
    Block,
    BytesPerParameter,
    LayerProfile,
    Links,
    Measure,
    Sizes,
)

#: A counter that refreshes ten times a second is right to a few percent over this.
_WINDOW_S = 1.5


def profile_layers(
    layers: Sequence[Any],
    batch: tuple[Any, Any],
    loss_fn: Callable[..., torch.Tensor] | None,
    device: torch.device,
    path: Path,
) -> None:
    """Run each layer by itself, forward and backward, and write a layer profile for `time:FILE`.

    The loss counts as a part of the last layer. One layer is on the device at a time, a copy if
    the pipeline has a module in place of a spec. Specs are built in torch's default type: set that
    to the one that is trained in. The GPU is only read, and its clock stays as it is; a CPU has no
    joules.

    Args:
        layers: a PipelineModule's: specs, modules or functions.
        batch: inputs and labels of one microbatch, on the device.
        loss_fn: takes the last layer's outputs and the labels; None if that layer gives a loss.
        device: where layers run: the process's GPU, or the CPU.
        path: the JSON to write.
    """
    inputs, labels = batch
    measures = {}
    with closing(RankGpu(())) as gpu:
        for index, layer in enumerate(layers):
            function = _on_device(layer, device)
            if index == len(layers) - 1 and loss_fn is not None:
                function = _with_loss(function, loss_fn, labels)
            measures[str(index)] = measure(partial(function, inputs), gpu)
            inputs = _detached(function(inputs))
    profile = LayerProfile(
        blocks=tuple(Block((name,)) for name in measures),
        frequency_mhz=np.array(gpu.frequency_mhz),
        measures={Sizes(): measures},
        bytes_per_parameter=BytesPerParameter(),
        links=Links(),
        source="layers of a pipeline module",
    )
    replace_files({path: [layers_text(profile)]})


def measure(forward: Callable[[], Any], gpu: RankGpu) -> Measure:
    """Measure a layer by its forward, and backward, after one of both that warms up.

    Both take the same power; without joules where the meter knows none.
    """
    _backward(forward())
    times_s: list[tuple[float, float]] = []
    begin_s = time.monotonic()
    while not times_s or time.monotonic() < begin_s + _WINDOW_S:
        begun_s = now_s()
        outputs = forward()
        ready_s = now_s()
        _backward(outputs)
        times_s.append((ready_s - begun_s, now_s() - ready_s))
    window = Window(begin_s, time.monotonic(), len(times_s))
    (energy_j,) = gpu.energies_j([window])
    forward_s, backward_s = np.mean(times_s, axis=0)[:, None]
    power_w = energy_j / (forward_s + backward_s)
    if np.isnan(power_w):
        return Measure(forward_s, backward_s)
    return Measure(forward_s, backward_s, power_w * forward_s, power_w * backward_s)


def _on_device(layer: Any, device: torch.device) -> Callable[..., Any]:
    if isinstance(layer, LayerSpec):
        built = layer.build().to(device)
        if isinstance(layer, TiedLayerSpec) and layer.forward_fn is not None:
            forward_fn = layer.forward_fn
            return lambda inputs: forward_fn(built, inputs)
        layer = built
    elif isinstance(layer, torch.nn.Module):
        layer = copy.deepcopy(layer)
    return layer.to(device) if isinstance(layer, torch.nn.Module) else layer


def _with_loss(
    function: Callable[..., Any], loss_fn: Callable[..., torch.Tensor], labels: Any
) -> Callable[..., Any]:
    return lambda inputs: loss_fn(function(inputs), labels)


def _backward(outputs: Any) -> None:
    tensors = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    learned = [tensor for tensor in tensors if tensor.requires_grad]
    if learned:
        torch.autograd.backward(learned, [torch.ones_like(tensor) for tensor in learned])


def _detached(outputs: Any) -> Any:
    """Return outputs as the next layer's inputs, which get gradients if they can."""
    if isinstance(outputs, torch.Tensor):
        return outputs.detach().requires_grad_(outputs.is_floating_point())
    return tuple(_detached(tensor) for tensor in outputs)
