"""Time and energy of each layer of a pipeline, measured on one GPU."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec

from envpipe_megatron.files import replace_files
from envpipe_megatron.gpu.base import Gpu
from envpipe_megatron.runtime.energy.meter import EnergyMeter
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
WINDOW_S = 1.5
_MARGIN_S = 0.3


class Meter(Protocol):
    """Measures work that is repeated."""

    def measure(self, run: Callable[[], object]) -> tuple[float, float]:
        """Time in s and energy in J of one run."""


class CudaMeter:
    """Repeats work for a while and reads the GPU's energy counter; clocks stay as they are.

    The GPU may be opened for reading alone.
    """

    def __init__(self, gpu: Gpu, window_s: float = WINDOW_S) -> None:
        self._meter = EnergyMeter(gpu)
        self._window_s = window_s

    def measure(self, run: Callable[[], object]) -> tuple[float, float]:
        """Time in s and energy in J of one run, after one that warms up; or a MeterError."""
        run()
        torch.cuda.synchronize()
        begin_s, count = time.monotonic(), 0
        while time.monotonic() < begin_s + self._window_s:
            run()
            torch.cuda.synchronize()
            count += 1
        end_s = time.monotonic()
        time.sleep(_MARGIN_S)  # the counter refreshes after the window, without an event
        self._meter.catch_up()
        return (end_s - begin_s) / count, self._meter.energy_j(begin_s, end_s) / count

    def close(self) -> None:
        """Stop reading."""
        self._meter.close()


def profile_layers(
    layers: Sequence[Any],
    batch: tuple[Any, Any],
    loss_fn: Callable[..., torch.Tensor] | None,
    frequency_mhz: int,
    meter: Meter,
    device: torch.device,
    path: Path,
) -> None:
    """Run each layer alone, forward and backward, and write a layer profile for `time:FILE`.

    The loss counts as a part of the last layer. One layer is on the device at a time, a copy if
    the pipeline has a module in place of a spec. Specs are built in torch's default type: set that
    to the one that is trained in.

    Args:
        layers: a PipelineModule's: specs, modules or functions.
        batch: inputs and labels of one microbatch, on the device.
        loss_fn: takes the last layer's outputs and the labels; None if that layer gives a loss.
        frequency_mhz: the clock that the GPU runs at, for the file: only times at one clock are
            compared.
        meter: raises a MeterError if the energy counter fails.
        device: where layers run.
        path: the JSON to write.
    """
    inputs, labels = batch
    measures = {}
    for index, layer in enumerate(layers):
        function = _on_device(layer, device)
        if index == len(layers) - 1 and loss_fn is not None:
            function = _with_loss(function, loss_fn, labels)
        forward = partial(function, inputs)
        forward_s, forward_j = meter.measure(forward)
        both_s, both_j = meter.measure(partial(_forward_and_backward, forward))
        # A layer without weights may have no backward that can be told from none.
        measures[str(index)] = Measure(
            np.array([max(forward_s, _LEAST)]),
            np.array([max(both_s - forward_s, _LEAST)]),
            np.array([max(forward_j, _LEAST)]),
            np.array([max(both_j - forward_j, _LEAST)]),
        )
        inputs = _detached(forward())
    profile = LayerProfile(
        blocks=tuple(Block((name,)) for name in measures),
        frequency_mhz=np.array([frequency_mhz]),
        measures={Sizes(): measures},
        bytes_per_parameter=BytesPerParameter(),
        links=Links(),
        source="layers of a pipeline module",
    )
    replace_files({path: [layers_text(profile)]})


#: Files have times and energies above 0: a microsecond, a microjoule.
_LEAST = 1e-6


def _on_device(layer: Any, device: torch.device) -> Callable[..., Any]:
    if isinstance(layer, LayerSpec):
        built = layer.build().to(device)
        if isinstance(layer, TiedLayerSpec) and layer.forward_fn is not None:
            forward_fn = layer.forward_fn
            return lambda inputs: forward_fn(built, inputs)
        layer = built
    elif isinstance(layer, torch.nn.Module):
        layer = copy.deepcopy(layer)
    function: Callable[..., Any] = layer.to(device) if isinstance(layer, torch.nn.Module) else layer
    return function


def _with_loss(
    function: Callable[..., Any], loss_fn: Callable[..., torch.Tensor], labels: Any
) -> Callable[..., Any]:
    return lambda inputs: loss_fn(function(inputs), labels)


def _forward_and_backward(forward: Callable[[], Any]) -> None:
    outputs = forward()
    tensors = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    learned = [tensor for tensor in tensors if tensor.requires_grad]
    if learned:
        torch.autograd.backward(learned, [torch.ones_like(tensor) for tensor in learned])


def _detached(outputs: Any) -> Any:
    """Outputs as the next layer's inputs, which get gradients if they can."""
    if isinstance(outputs, torch.Tensor):
        return outputs.detach().requires_grad_(outputs.is_floating_point())
    return tuple(_detached(tensor) for tensor in outputs)
