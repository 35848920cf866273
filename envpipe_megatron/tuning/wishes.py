"""What an operator asks of a job while it runs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Wishes:
    """From the next window on, for the whole job.

    Attributes:
        power_budget_w: mean power of one GPU of the job over an iteration, at most, W; None for no
            budget in watts.
        power_budget_share: the same as a share of what a GPU takes in the framework's own order at
            the highest clocks; None for no such budget. At most one of both is set.
        off: whether the framework's own order runs, with the clocks given back.
    """

    power_budget_w: float | None = None
    power_budget_share: float | None = None
    off: bool = False


#: Save energy, with no budget.
NO_WISHES = Wishes()
