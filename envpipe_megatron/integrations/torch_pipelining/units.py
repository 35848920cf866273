"""Units as torch.distributed.pipelining runs them, told to whoever wants to know."""

from __future__ import annotations

import enum
import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.integrations.hooks.framework_units import Reporter

_ORDINARY = "forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"


class SideEffect(enum.Enum):
    """What units change beside their outputs and gradients, so that their order may tell."""

    DRAWN_BY_FORWARDS = enum.auto()
    DRAWN_BY_BACKWARDS = enum.auto()
    BUFFERS_BY_BACKWARDS = enum.auto()


class Units:
    """Tells `reporter` of the units of this rank's stages; of none while there is no reporter.

    On the last stage a forward ends behind its loss, which the schedule computes.

    Args:
        stages: of this rank, in the order of their chunks.
        split: whether the order lists whole backwards as two parts that run as one.
    """

    def __init__(self, stages: Iterable[Any], *, split: bool) -> None:
        self.reporter: Reporter | None = None
        #: What units were seen to change; None where nobody wants to know.
        self.seen: set[SideEffect] | None = None
        self._split = split
        self._awaits_loss = False
        #: Whose functions are replaced, by which names, and the object's own, if it had one.
        self._replaced: list[tuple[Any, str, Callable[..., Any] | None]] = []
        for chunk, stage in enumerate(stages):
            for name in _ORDINARY:
                self.replace(stage, name, self._around(stage, chunk, name))

    def release(self) -> None:
        """Give stages and schedules their own functions back."""
        self.reporter = None
        while self._replaced:
            of, name, own = self._replaced.pop()
            if own is None:
                delattr(of, name)
            else:
                setattr(of, name, own)

    def forget(self) -> None:
        """A step has failed: nothing is to be said of the rest of it."""
        self.reporter, self._awaits_loss = None, False

    def hear_losses_of(self, schedule: Any) -> None:
        """Have a schedule of these stages say when it has computed a loss."""
        name = "_maybe_compute_loss"
        if any(of is schedule and name == each for of, each, _ in self._replaced):
            return
        compute = schedule._maybe_compute_loss

        def maybe_compute_loss(*args: Any, **kwargs: Any) -> Any:
            result = compute(*args, **kwargs)
            if self._awaits_loss:
                self._awaits_loss = False
                self._end()
            return result

        self.replace(schedule, name, maybe_compute_loss)

    def replace(self, of: Any, name: str, function: Callable[..., Any]) -> None:
        """Give an object another function, until `release`."""
        self._replaced.append((of, name, vars(of).get(name)))
        setattr(of, name, function)

    def _around(self, stage: Any, chunk: int, name: str) -> Callable[..., Any]:
        own = getattr(stage, name)

        def run(kind: Kind, *args: Any, **kwargs: Any) -> Any:
            if self.seen is None:
                return own(*args, **kwargs)
            before, versions = _random_states(stage.device), _versions(stage)
            result = own(*args, **kwargs)
            forward = kind is Kind.FORWARD
            if before != _random_states(stage.device):
                self.seen.add(
                    SideEffect.DRAWN_BY_FORWARDS if forward else SideEffect.DRAWN_BY_BACKWARDS
                )
            if not forward and versions != _versions(stage):
                self.seen.add(SideEffect.BUFFERS_BY_BACKWARDS)
            return result

        def forward(microbatch: int, *args: Any, **kwargs: Any) -> Any:
            if self.reporter is None:
                return own(microbatch, *args, **kwargs)
            self.reporter.begin(Kind.FORWARD, microbatch, chunk)
            result = run(Kind.FORWARD, microbatch, *args, **kwargs)
            self._awaits_loss = stage.is_last
            if not self._awaits_loss:
                self._end()
            return result

        def backward(microbatch: int, *args: Any, **kwargs: Any) -> Any:
            if self.reporter is None:
                return own(microbatch, *args, **kwargs)
            whole = args[1] if len(args) > 1 else kwargs.get("full_backward", True)
            if not whole:
                self.reporter.begin(Kind.INPUT_GRADIENT, microbatch, chunk)
            elif self._split:
                self.reporter.begin(Kind.INPUT_GRADIENT, microbatch, chunk, combined=True)
                self.reporter.end()
                self.reporter.begin(Kind.WEIGHT_GRADIENT, microbatch, chunk)
            else:
                self.reporter.begin(Kind.BACKWARD, microbatch, chunk)
            result = run(Kind.BACKWARD, microbatch, *args, **kwargs)
            self._end()
            return result

        def weight_gradient(microbatch: int, *args: Any, **kwargs: Any) -> Any:
            if self.reporter is None:
                return own(microbatch, *args, **kwargs)
            self.reporter.begin(Kind.WEIGHT_GRADIENT, microbatch, chunk)
            result = run(Kind.BACKWARD, microbatch, *args, **kwargs)
            self._end()
            return result

        return dict(zip(_ORDINARY, (forward, backward, weight_gradient), strict=True))[name]

    def _end(self) -> None:
        if self.reporter is not None:
            self.reporter.end()


def _random_states(device: torch.device) -> tuple[object, ...]:
    """Of all numbers that a unit may draw; on a GPU, known without a wait for it."""
    tensors = [torch.get_rng_state()]
    if torch.device(device).type == "cuda":
        tensors.append(torch.cuda.get_rng_state(device))
    numpys: Any = np.random.get_state()
    _, key, *rest = numpys
    arrays = [key, *(state.numpy() for state in tensors)]
    return (random.getstate(), *rest, *(array.tobytes() for array in arrays))


def _versions(stage: Any) -> list[int]:
    """They count writes in place, as a recomputed forward of a BatchNorm makes them."""
    return [each._version for each in stage.submod.buffers() if not each.is_inference()]
