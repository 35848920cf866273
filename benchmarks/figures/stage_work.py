"""One iteration of plain PyTorch stages, unit by unit, as the runtime's interpreter asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from benchmarks.figures.experiments import Model, Precision
from benchmarks.figures.layers import Stage, loss_of
from envpipe_megatron.core.kinds import Unit


class TrainingWork:
    """Forwards and backwards of one stage in one iteration.

    Args:
        samples: of each microbatch, on the first stage; a later one takes activations.
        targets: of each microbatch, on the last stage, which ends in their loss; an earlier one
            hands over activations.
    """

    def __init__(
        self,
        model: Model,
        stage: Stage,
        samples: Sequence[torch.Tensor] | None,
        targets: Sequence[torch.Tensor] | None,
        num_microbatches: int,
    ) -> None:
        self._model, self._stage = model, stage
        self._samples, self._targets = samples, targets
        self._num_microbatches = num_microbatches
        self._device = next(stage.parameters()).device
        #: Input and output of the microbatches in flight.
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        #: Of each microbatch, on the last stage.
        self.losses: dict[int, torch.Tensor] = {}

    def forward(self, unit: Unit, inputs: list[torch.Tensor] | None) -> list[torch.Tensor]:
        """Run a forward; the last stage's gives nothing to send."""
        if inputs is None:
            assert self._samples is not None
            x = self._samples[unit.microbatch]
        else:
            x = inputs[0]
        with half_precision(self._model, self._device):
            outputs = self._stage(x)
            if self._targets is not None:
                outputs = loss_of(outputs, self._targets[unit.microbatch])
                self.losses[unit.microbatch] = outputs.detach()
                outputs = outputs / self._num_microbatches
        self._kept[unit.microbatch] = x, outputs
        return [outputs.detach()] if self._targets is None else []

    def backward(self, unit: Unit, gradients: list[torch.Tensor] | None) -> list[torch.Tensor]:
        """Run a backward; the first stage's gives nothing to send."""
        x, outputs = self._kept.pop(unit.microbatch)
        torch.autograd.backward(outputs, None if gradients is None else gradients[0])
        if self._samples is not None:
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
