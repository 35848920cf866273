"""Messages between two stages: what they hold, between whom, and how a loss shows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from envpipe_megatron.core.kinds import WHOLE, Kind
from envpipe_megatron.errors import EnvPipeError


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
        """Make the spec of a message whose tensors have one type."""
        return cls(shapes, (dtype,) * len(shapes), device)

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> TensorSpec:
        """Return the spec of a message of these tensors."""
        shapes, dtypes = tuple(tuple(t.shape) for t in tensors), tuple(t.dtype for t in tensors)
        return cls(shapes, dtypes, tensors[0].device)

    def make(self, how: Callable[..., torch.Tensor] = torch.empty) -> list[torch.Tensor]:
        """Make tensors for a message; `how` takes a shape, a type and a device."""
        parts = zip(self.shapes, self.dtypes, strict=True)
        return [how(shape, dtype=dtype, device=self.device) for shape, dtype in parts]

    @property
    def tensor_bytes(self) -> list[int]:
        """Return the size of each tensor."""
        parts = zip(self.shapes, self.dtypes, strict=True)
        return [math.prod(shape) * dtype.itemsize for shape, dtype in parts]

    @property
    def num_bytes(self) -> int:
        """Return the size of a message."""
        return sum(self.tensor_bytes)


@dataclass(frozen=True)
class StageSpecs:
    """The specs of a stage's messages; kinds that it never receives or sends may be missing.

    Args:
        receives: by kind, as its neighbours send it.
        sends: by kind, as they receive it.
        vary: whether that is an example, and each message of an iteration says what it carries.
    """

    receives: Mapping[Kind, TensorSpec]
    sends: Mapping[Kind, TensorSpec]
    vary: bool = False

    @classmethod
    def alike(cls, spec: TensorSpec) -> StageSpecs:
        """Make the specs of a pipeline whose messages are all alike."""
        both = dict.fromkeys(WHOLE, spec)
        return cls(both, both)


class ChannelError(EnvPipeError):
    """A neighbour that is gone or silent, messages left over, or transfers that cannot work."""


@dataclass(frozen=True)
class Peers:
    """This stage, its neighbour, the neighbour's global rank, and the kind that comes from it."""

    stage: int
    neighbour: int
    rank: int
    receives: Kind

    @property
    def sends(self) -> Kind:
        """Return the kind of messages that goes to the neighbour."""
        return opposite(self.receives)

    def lost(self, doing: str, error: RuntimeError | str) -> ChannelError:
        """Make the error of a neighbour that is gone or silent."""
        return ChannelError(
            f"Stage {self.stage} lost its neighbour, stage {self.neighbour} (rank {self.rank}), "
            f"while {doing}: {first_line(error)}",
            remedy="Look at that rank's log for the first error; clocks are reset on the way out.",
        )


def first_line(error: Exception | str) -> str:
    """Return the first line of an error's text, or its class name."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def opposite(kind: Kind) -> Kind:
    """Return the kind of messages that crosses a boundary the other way."""
    return Kind.BACKWARD if kind is Kind.FORWARD else Kind.FORWARD
