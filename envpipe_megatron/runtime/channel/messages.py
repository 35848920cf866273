"""What stages send each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from envpipe_megatron.core.schedule import Kind
from envpipe_megatron.errors import EnvPipeError

#: A header's numbers: of tensors; of each its type, its dimensions and their sizes.
_HEADER_LENGTH = 128
#: The place of a type here is its number in a header.
_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
)


class MessageError(EnvPipeError):
    """A message that stages cannot send each other."""


def empty_header() -> torch.Tensor:
    """Room for a header that is to be received."""
    return torch.empty(_HEADER_LENGTH, dtype=torch.int64)


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

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> TensorSpec:
        """What a message of these tensors carries."""
        shapes, dtypes = tuple(tuple(t.shape) for t in tensors), tuple(t.dtype for t in tensors)
        return cls(shapes, dtypes, tensors[0].device)

    def make(self, how: Callable[..., torch.Tensor] = torch.empty) -> list[torch.Tensor]:
        """Tensors for a message; `how` takes a shape, a type and a device."""
        parts = zip(self.shapes, self.dtypes, strict=True)
        return [how(shape, dtype=dtype, device=self.device) for shape, dtype in parts]

    def header(self) -> torch.Tensor:
        """What a message carries, for who is to receive it.

        Raises:
            MessageError: more than a header holds.
        """
        numbers = [len(self.shapes)]
        for shape, dtype in zip(self.shapes, self.dtypes, strict=True):
            numbers += [_DTYPES.index(dtype), len(shape), *shape]
        if len(numbers) > _HEADER_LENGTH:
            raise MessageError(
                "A message of varying shape has too many tensors or dimensions for its header",
                value=self.shapes,
                remedy="Hand fewer tensors from stage to stage.",
            )
        return torch.tensor(numbers + [0] * (_HEADER_LENGTH - len(numbers)))

    @classmethod
    def of_header(cls, header: torch.Tensor, device: torch.device) -> TensorSpec:
        """What a header says."""
        numbers = iter(header.tolist())
        parts = []
        for _ in range(next(numbers)):
            dtype, dimensions = _DTYPES[next(numbers)], next(numbers)
            parts.append((tuple(next(numbers) for _ in range(dimensions)), dtype))
        return cls(tuple(s for s, _ in parts), tuple(d for _, d in parts), device)

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
        vary: whether that is an example, and each message of an iteration says what it carries.
    """

    receives: Mapping[Kind, TensorSpec]
    sends: Mapping[Kind, TensorSpec]
    vary: bool = False

    @classmethod
    def alike(cls, spec: TensorSpec) -> StageSpecs:
        """Where all messages of the pipeline carry the same."""
        both = dict.fromkeys(Kind, spec)
        return cls(both, both)
