"""What carries the messages between a stage and one neighbour, and how it tells of a loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from envpipe_megatron.core.kinds import Kind, Unit
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.runtime.channel.messages import TensorSpec


class ChannelError(EnvPipeError):
    """A neighbour that is gone or silent, messages left over, or transfers that cannot work."""


class Carrier(Protocol):
    """One stage's side of the boundary to a neighbour: it receives one kind and sends the other.

    Every method that waits or hands over raises ChannelError if the neighbour is gone or silent.
    """

    def expect(
        self, messages: int, receives: TensorSpec | None, sends: TensorSpec | None, *, vary: bool
    ) -> None:
        """Expect this many messages until `end_step`, of which each carries what is said.

        None is what never comes or goes; where messages vary, what is said is an example.
        """

    def receive(self, unit: Unit) -> list[torch.Tensor]:
        """The next message, a unit's input; on a GPU the stream waits for it, not the host."""

    def send(self, unit: Unit, payload: list[torch.Tensor]) -> None:
        """Hand over a unit's output; returns at once and keeps it until it has left."""

    def end_step(self) -> int:
        """All has been handed over; how many of the expected messages were not taken."""


@dataclass(frozen=True)
class Peers:
    """This stage, its neighbour, the neighbour's global rank, and the kind that comes from it."""

    stage: int
    neighbour: int
    rank: int
    receives: Kind

    @property
    def sends(self) -> Kind:
        """The kind that goes to it."""
        return opposite(self.receives)

    def lost(self, doing: str, error: RuntimeError | str) -> ChannelError:
        """The neighbour is gone or silent."""
        return ChannelError(
            f"Stage {self.stage} lost its neighbour, stage {self.neighbour} (rank {self.rank}), "
            f"while {doing}: {first_line(error)}",
            remedy="Look at that rank's log for the first error; clocks are reset on the way out.",
        )


def first_line(error: Exception | str) -> str:
    """What an error says, or its kind."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def opposite(kind: Kind) -> Kind:
    """The kind that crosses a boundary the other way."""
    return Kind.BACKWARD if kind is Kind.FORWARD else Kind.FORWARD
