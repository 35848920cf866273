"""Runs of operators that are computed again: what they take, what they save, what they hold.

A piece that is an operator can be recomputed with its neighbours: in a *run* of operators of one
block, all outputs but the last are dropped after the forward, and are there again, together, while
the run's backward runs. A run of one saves nothing. (Aceso, EuroSys'24, section 3.3.3, counts so.)
"""

from __future__ import annotations

from dataclasses import dataclass

from envpipe_megatron.core.arrays import FloatArray

#: Name of the `Recomputation` of pieces that are operators and can be part of a run.
OPERATOR = "operator"


@dataclass(frozen=True)
class Run:
    """Operators `first` to `end - 1` of a block, computed again."""

    first: int
    end: int

    def saved(self, activation_bytes: FloatArray) -> float:
        """Bytes that are not kept of a microbatch in flight."""
        return float(activation_bytes[self.first : self.end - 1].sum())

    def working(self, activation_bytes: FloatArray) -> float:
        """Bytes held besides during its backward.

        A run that ends with its block holds the block's output too, as it does where the next block
        begins with a run.
        """
        end = self.end if self.end == len(activation_bytes) else self.end - 1
        return float(activation_bytes[self.first : end].sum())
