"""One iteration of plain PyTorch stages, unit by unit, as the runtime's interpreter asks for it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from envpipe_megatron.schedule import Unit
from figures.data import inputs_of, loss_of
from figures.experiments import Model, Precision
from figures.layers import Stage


class TrainingWork:
    """Forwards and backwards of one stage in one iteration.

    Args:
        model: what the stage is a part of.
        stage: its layers.
        first: whether it takes samples, else activations.
        last: whether it ends in a loss, else hands over activations.
        samples: of a microbatch.
        num_microbatches: whose losses are averaged.
        seed: of the iteration's first microbatch; the next one's is one more.
    """

    def __init__(
        self,
        model: Model,
        stage: Stage,
        *,
        first: bool,
        last: bool,
        samples: int,
        num_microbatches: int,
        seed: int,
    ) -> None:
        self._model, self._stage = model, stage
        self._first, self._last = first, last
        self._samples, self._num_microbatches, self._seed = samples, num_microbatches, seed
        self._device = next(stage.parameters()).device
        #: Of the microbatches in flight: input and output, which the backward needs.
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        #: Of each microbatch, on the last stage.
        self.losses: dict[int, torch.Tensor] = {}

    def forward(self, unit: Unit, inputs: list[torch.Tensor] | None) -> list[torch.Tensor]:
        """Run a forward; the last stage's gives nothing to send."""
        seed = self._seed + unit.microbatch
        if inputs is None:
            x = inputs_of(self._model, self._samples, seed, self._device)
        else:
            x = inputs[0]
        with half_precision(self._model, self._device):
            outputs = self._stage(x)
            if self._last:
                outputs = loss_of(self._model, outputs, seed)
                self.losses[unit.microbatch] = outputs.detach()
                outputs = outputs / self._num_microbatches
        self._kept[unit.microbatch] = x, outputs
        return [] if self._last else [outputs.detach()]

    def backward(self, unit: Unit, gradients: list[torch.Tensor] | None) -> list[torch.Tensor]:
        """Run a backward; the first stage's gives nothing to send."""
        x, outputs = self._kept.pop(unit.microbatch)
        torch.autograd.backward(outputs, None if gradients is None else gradients[0])
        if self._first:
            return []
        assert x.grad is not None
        return [x.grad]

    def sent(self, unit: Unit) -> None:
        """Nothing is freed: what a backward needs lives until then."""


def half_precision(model: Model, device: torch.device) -> AbstractContextManager[object]:
    """Mixed precision where the model has it, on a GPU: a CPU computes in single precision."""
    if model.precision is Precision.FP16 and device.type == "cuda":
        return torch.autocast("cuda", torch.float16)
    return nullcontext()


def rehearse(model: Model, stage: Stage, inputs: torch.Tensor) -> None:
    """Run a stage once by itself, so that a GPU has loaded its kernels before a receive spins."""
    with half_precision(model, inputs.device):
        outputs = stage(inputs)
    torch.autograd.backward(outputs, torch.zeros_like(outputs))
