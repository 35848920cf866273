"""What the clock controller waits for: that the device has ended a unit. Free of torch."""

from __future__ import annotations

from typing import Protocol


class Completion(Protocol):
    """Something that becomes true when the device has ended a unit; may be waited for anywhere.

    Both methods must let other Python threads run while they wait (a CUDA event's do).
    """

    def synchronize(self) -> None:
        """Return when it is true."""

    def query(self) -> bool:
        """Whether it is true; returns at once."""


class Done:
    """A completion that is true from the start."""

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        """Always true."""
        return True
