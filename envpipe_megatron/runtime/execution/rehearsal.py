"""An order that is tried once: an error in a stage's work ends the try, and no training."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import torch

from envpipe_megatron.core.kinds import Kind, Unit
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.runtime.channel.carrier import StageSpecs
from envpipe_megatron.runtime.execution.stage_run import SplitWork

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Rehearsal:
    """A stage's work in an order, until it raises an error: then its messages carry zeros.

    So no neighbour waits for what never comes.

    Args:
        order: to be tried.
        specs: what its messages carry.
    """

    def __init__(self, order: Schedule, specs: StageSpecs) -> None:
        self.order = order
        #: What ended the work, in a line; None if nothing did.
        self.error: str | None = None
        self._specs = specs
        self._work: SplitWork | None = None

    def of(self, work: SplitWork) -> Rehearsal:
        """Return the work as it is to be executed."""
        self._work = work
        return self

    def forward(self, unit: Unit, inputs: list[torch.Tensor] | None) -> list[torch.Tensor]:
        """Run a forward."""
        outputs = self._run(lambda work: work.forward(unit, inputs))
        return self._zeros(Kind.FORWARD) if outputs is None else outputs

    def backward(self, unit: Unit, gradients: list[torch.Tensor] | None) -> list[torch.Tensor]:
        """Run a backward, or its first part."""
        outputs = self._run(lambda work: work.backward(unit, gradients))
        return self._zeros(Kind.BACKWARD) if outputs is None else outputs

    def weight_gradient(self, unit: Unit) -> None:
        """Run the second part of a backward."""
        self._run(lambda work: work.weight_gradient(unit))

    def sent(self, unit: Unit) -> None:
        """The unit's output is in the channel."""
        self._run(lambda work: work.sent(unit))

    def _run(self, run: Callable[[SplitWork], T]) -> T | None:
        if self._work is not None:
            try:
                return run(self._work)
            except Exception as error:
                logger.warning("Order %s is not tried to its end", self.order.name, exc_info=True)
                self.error = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
                self._work = None  # it holds activations, and the framework's runs need the memory
        return None

    def _zeros(self, kind: Kind) -> list[torch.Tensor]:
        return self._specs.sends[kind].make(torch.zeros)
