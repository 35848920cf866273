"""Records or follows the units that a framework runs, as its hooks report them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

from envpipe_megatron.core.kinds import Kind, Unit
from envpipe_megatron.core.orders import builders
from envpipe_megatron.runtime.execution.stage_run import StageRun
from envpipe_megatron.runtime.job.session import Session

logger = logging.getLogger(__name__)


class SeenUnit(NamedTuple):
    """A unit that begins, as a framework's hook reports it; None for what the hook cannot know."""

    kind: Kind
    microbatch: int | None = None
    chunk: int | None = None
    combined: bool = False

    def __str__(self) -> str:
        microbatch = "" if self.microbatch is None else self.microbatch
        chunk = f".{self.chunk}" if self.chunk else ""
        return f"{self.kind.letter}{microbatch}{chunk}{'+' * self.combined}"

    def may_be(self, unit: Unit) -> bool:
        """True if this is the unit, by what is known."""
        return (
            self.kind is unit.kind
            and self.combined == unit.combined
            and self.microbatch in (None, unit.microbatch)
            and self.chunk in (None, unit.chunk)
        )


class UnitRecorder:
    """Records the units of a call."""

    def __init__(self) -> None:
        self.units: list[SeenUnit] = []
        self.running = self._overlapped = False

    def begin(self, seen: SeenUnit) -> None:
        """Note that a unit begins."""
        self._overlapped |= self.running
        self.running = True
        self.units.append(seen)

    def end(self) -> None:
        """Note that the unit's work has been handed to the device."""
        self.running = False

    def shows(self, units: tuple[Unit, ...]) -> bool:
        """Return whether these units may have run, one after another."""
        return (
            not self._overlapped
            and len(units) == len(self.units)
            and all(map(SeenUnit.may_be, self.units, units))
        )


def once() -> Callable[[str], None]:
    """Return a function that warns only once: an order may have changed for good, for weeks."""
    left = [logger.warning]
    return lambda text: left.pop()(text) if left else None


class UnitFollower:
    """Reports units to their iteration, as long as they come in its order, one after another."""

    def __init__(
        self,
        run: StageRun,
        highest_clock: Callable[[], None],
        warn: Callable[[str], None] = logger.warning,
    ) -> None:
        self.run = run
        self._warn = warn
        self._highest_clock = highest_clock
        self._units = iter(run.units)
        #: Why no more units are reported; None as long as they come in order.
        self.against: str | None = None
        self._running = False

    @classmethod
    def whole_step(cls, session: Session) -> UnitFollower:
        """Begin a step that is one unit: no code on the host may run within it, as in a graph."""
        order = builders.whole_iteration(session.parts.num_stages)
        followed = cls(session.open_iteration(order), session.highest_clock)
        followed.begin(SeenUnit(Kind.FORWARD))
        return followed

    def begin(self, seen: SeenUnit) -> None:
        """Note that a unit begins."""
        if self.against is not None:
            return
        unit = None if self._running else next(self._units, None)
        if unit is not None and seen.may_be(unit):
            self._running = True
            self.run.begin_unit()
            return
        instead = "within another" if self._running else f"in place of {unit or 'no unit'}"
        self._leave(f"In this iteration, {seen} came {instead}")
        self._highest_clock()

    def end(self) -> None:
        """Note that the unit's work has been handed to the device."""
        if self.against is None and self._running:
            self._running = False
            self.run.end_unit()

    def fail(self) -> None:
        """Report nothing more of this step, which has failed."""
        self.against = "It failed"
        self.run.whole = self.run.same_work = False
        self._highest_clock()

    def complete(self) -> None:
        """End the step. Units that have not come end as if they took no time."""
        if self._running:
            self._running = False
            self.run.end_unit()
        left = self.run.next_unit
        if left is not None and self.against is None:
            self._leave(f"This iteration ended before {left}")
        while self.run.next_unit is not None:
            self.run.unit_ended = None  # memory is not what it was after each unit
            self.run.begin_unit()
            self.run.end_unit()

    def _leave(self, why: str) -> None:
        self.against = why
        self.run.whole = self.run.same_work = False
        self._warn(why)


#: Gets `begin` and `end` of each unit.
Reporter = UnitRecorder | UnitFollower
