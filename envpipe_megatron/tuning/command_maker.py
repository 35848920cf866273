"""Makes a run's commands: ranks hear of orders, clocks and words only where these are new."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from envpipe_megatron.core.arrays import FloatArray
from envpipe_megatron.core.plan import Plan
from envpipe_megatron.formats.energy import Phase
from envpipe_megatron.tuning.budget import Budget
from envpipe_megatron.tuning.commands import Clocked, Command, Run, Window
from envpipe_megatron.tuning.measured.store import Store


class CommandMaker:
    """Keeps what ranks run, and what they and the bill have not heard yet.

    Args:
        store: learns what is measured of units; None where nobody measures them.
        budget: counts the power of all windows, if there is or was one.

    Attributes:
        bill: what it says: why no plan runs, what was too slow, and what runs.
    """

    def __init__(self, store: Store | None, budget: Budget | None = None) -> None:
        self._store, self._budget = store, budget or Budget()
        self._running: tuple[tuple[Clocked, ...], tuple[int, ...]] = ((), ())
        #: Whether the order of the last command began with it.
        self._fresh = False
        self.bill = dict.fromkeys(("none", "late", "won"), "")
        #: What the next command says.
        self._notes = list[str]()

    def note(self, *texts: str) -> None:
        """Have the next command say something; an empty text is nothing."""
        self._notes += filter(None, texts)

    def metered(self, phase: Phase, clocked: Clocked, iterations: int, settle: int = 0) -> Command:
        """Return a command of one order on all replicas, behind which the counter is waited for."""
        return replace(self.make(phase, iterations, settle, (clocked,), ()), metered=True)

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
        self._fresh = not same and not settle
        notes, self._notes = self._notes, []
        late_s, tail_s = 0.0, tuple[float, ...]()
        if self._store is not None:
            late_s, tail_s = self._store.lateness.late_s, tuple(self._store.tail_s.tolist())
        return Command(
            phase,
            iterations,
            settle,
            late_s,
            tail_s,
            () if same else running[0],
            which,
            note="\n".join(notes),
            billed="\n".join(filter(None, [*self.bill.values(), self._budget.billed])),
            power=self._budget.facts,
        )

    def run(
        self, phase: Phase, clocked: Clocked, iterations: int, settle: int = 0
    ) -> Run[tuple[Window, FloatArray]]:
        """Run one order on all replicas; its window, and what drifted, as `learn`."""
        window = yield self.make(phase, iterations, settle, (clocked,), ())
        return window, self.learn(clocked, window)

    def adopt(self, plan: Plan) -> Run[str]:
        """Have ranks turn to a plan; why they have no memory for it, else empty."""
        return (yield Command(Phase.STEADY, 0, plan=plan)).refused

    def learn(
        self, clocked: Clocked, window: Window, replicas: Sequence[int] = (), fades: float = 1.0
    ) -> FloatArray:
        """Have the store learn what some replicas ran last, by default all; as `Store.learn`."""
        assert self._store is not None
        self.note(self._budget.count(window))
        return self._store.learn(clocked, window, replicas, fresh=self._fresh, fades=fades)
