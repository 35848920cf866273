"""A job's phases, for each size that its batches have. Called by `session`.

What units cost does not depend on how many there are, so one profile serves all; but what a step
takes and which clocks are best does. So each number of microbatches has a warm-up, which is its
baseline, a plan, and the loop that corrects that by waits of its own iterations. Its phases wait
while iterations of another number run, but for a profile, whose iterations must follow each other:
that is begun anew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from envpipe_megatron.formats.energy import Phase
from envpipe_megatron.runtime.execution.orders import IterationOrder, PhaseRun
from envpipe_megatron.runtime.job.parts import SessionState


@dataclass
class Batch:
    """Where iterations of one number of microbatches stand.

    Args:
        name: empty for the batch of full size, see `phase_in_batch`.
        order: what the next one runs.
    """

    name: str
    num_microbatches: int
    phases: PhaseRun[None]
    order: IterationOrder


class Batches:
    """Those that have come so far; all ranks turn to the same ones."""

    def __init__(self, state: SessionState) -> None:
        self._state = state
        #: The one whose iterations run now; None before the first.
        self.now: Batch | None = None
        self._waiting: dict[int, Batch] = {}

    def turn_to(
        self, name: str, num_microbatches: int, begin: Callable[[], PhaseRun[None]]
    ) -> Batch:
        """The batch whose iteration is next: where it was left, or from its beginning."""
        left = self.now
        if left is not None and left.num_microbatches == num_microbatches:
            return left
        if left is not None:
            self._state.several_sizes = True
            if left.order.phase is not Phase.PROFILE:
                self._waiting[left.num_microbatches] = left
        self.now = self._waiting.pop(num_microbatches, None)
        if self.now is None:
            phases = begin()
            self.now = Batch(name, num_microbatches, phases, next(phases))
        return self.now
