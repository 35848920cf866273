"""What stages send each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from envpipe_megatron.schedule import Kind


@dataclass(frozen=True)
class Message:
    """What a stage receives for one unit.

    Args:
        tensors: one for each tensor shape.
        sent_s: the emulated instant at which the sender ended its unit; None where time is real.
    """

    tensors: list[torch.Tensor]
    sent_s: float | None


@dataclass(frozen=True)
class TensorSpec:
    """Shape and type of each tensor of a message, and their device."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    device: torch.device

    @classmethod
    def of_one_type(
        cls, shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype, device: torch.device
    ) -> TensorSpec:
        """A message whose tensors have all the same type."""
        return cls(shapes, (dtype,) * len(shapes), device)

    def make(self, how: Callable[..., torch.Tensor] = torch.empty) -> list[torch.Tensor]:
        """Tensors for a message; `how` takes a shape, a type and a device."""
        parts = zip(self.shapes, self.dtypes, strict=True)
        return [how(shape, dtype=dtype, device=self.device) for shape, dtype in parts]

    @property
    def num_bytes(self) -> int:
        """Of a message."""
        parts = zip(self.shapes, self.dtypes, strict=True)
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in parts)


@dataclass(frozen=True)
class StageSpecs:
    """What a stage's messages carry; kinds that it never receives or sends may be missing.

    Args:
        receives: by kind, as its neighbours send it.
        sends: by kind, as they receive it.
    """

    receives: Mapping[Kind, TensorSpec]
    sends: Mapping[Kind, TensorSpec]

    @classmethod
    def alike(cls, spec: TensorSpec) -> StageSpecs:
        """Where all messages of the pipeline carry the same."""
        both = dict.fromkeys(Kind, spec)
        return cls(both, both)
