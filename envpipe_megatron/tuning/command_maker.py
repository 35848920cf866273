"""Makes a run's commands: ranks hear of orders, clocks and words only where these are new."""

from __future__ import annotations

from collections.abc import Sequence

from envpipe_megatron.core.plan import Plan
from envpipe_megatron.formats.energy import Phase
from envpipe_megatron.tuning.commands import Clocked, Command
from envpipe_megatron.tuning.measured.store import Store


class CommandMaker:
    """Keeps what ranks run, and what they and the bill have not heard yet.

    Args:
        store: what is known of a job's units.

    Attributes:
        fresh: whether the order of the last command began with it.
        adopted: the plan that ranks have not heard of.
        billed: what the bill is to say from the next command on; empty if nothing new.
        won: likewise, what splitting backwards wins.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._running: tuple[tuple[Clocked, ...], tuple[int, ...]] = ((), ())
        self.fresh, self.billed, self.won = False, "", ""
        #: The last of both that was not empty.
        self._billed = "", ""
        self.adopted: Plan | None = None
        #: The plan before the last that ranks have heard of, and that one; with what was won.
        self._heard: tuple[tuple[Plan | None, str], ...] = ((None, ""), (None, ""))
        self._notes: list[str] = []

    def note(self, *texts: str) -> None:
        """Have the next command say something."""
        self._notes += texts

    def for_all(self, phase: Phase, clocked: Clocked, iterations: int, settle: int = 0) -> Command:
        """Return a command of one order and its clocks, the same on all replicas."""
        return self.make(phase, iterations, settle, (clocked,), ())

    def make(
        self,
        phase: Phase,
        iterations: int,
        settle: int,
        orders: Sequence[Clocked],
        which: tuple[int, ...],
    ) -> Command:
        """Return a command; `which` is each replica's place among the orders, empty: the first."""
        running = tuple(orders), which
        same, self._running = self._running == running, running
        self.fresh = not same and not settle
        note, self._notes = "; ".join(self._notes), []
        new, self.billed, self.won = (self.billed, self.won), "", ""
        self._billed = new[0] or self._billed[0], new[1] or self._billed[1]
        billed = "\n".join(filter(None, self._billed)) if any(new) else ""
        adopted, self.adopted = self.adopted, None
        if adopted is not None:
            self._heard = self._heard[1], (adopted, self._billed[1])
        return Command(
            phase,
            iterations,
            settle,
            self._store.lateness.late_s,
            tuple(self._store.tail_s.tolist()),
            () if same else running[0],
            which,
            adopted,
            note,
            billed,
        )

    def take_back(self, command: Command) -> Plan | None:
        """Ranks refuse a command's plan: the next one says its words; the plan that ran before."""
        before, won = self._heard[0]
        self._heard = self._heard[:1] * 2
        self._notes = [command.note] if command.note else []
        self._billed = self.billed, self.won = self._billed[0], won
        return before
