"""Ranks of a job in one process, of which one runs at a time, by chance: the same for a seed.

Each rank's host is a thread. Whoever has the turn passes it on wherever it may wait or others may
go on, and meanwhile runs what other actors have to do, as the streams of `fake_device`. Nobody ever
waits for time: when nothing can go on, the clock jumps. So a hang is seen at once.
"""

import math
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

#: In a look of the watchers over neighbours.
_STEP_S = 0.25


class HangError(AssertionError):
    """Everybody waits, and no time-out is to come."""


class KilledError(BaseException):
    """A rank's process ends here."""


class Actor(Protocol):
    """Does what others have asked for, whoever has the turn."""

    def ready(self) -> bool:
        """Return True if it can do something."""

    def step(self) -> None:
        """Do it."""


def always() -> bool:
    """Of a host that may go on."""
    return True


@dataclass
class _Host:
    rank: int
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    until: Callable[[], bool] = always
    ended: bool = False
    raises: BaseException | None = None
    outcome: Any = None

    def ready(self) -> bool:
        return not self.ended and self.until()


class Turns:
    """The ranks of one machine.

    Args:
        seed: of who goes on when.
    """

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.actors: list[Actor] = []
        #: Look after something now and then, as threads do, until the rank has ended.
        self.watchers: dict[int, list[Callable[[], object]]] = {}
        #: Ranks whose process has ended early.
        self.dead: set[int] = set()
        #: Of a rank, after how many pauses its process ends, or its host stands still for ever.
        self.dies_after: dict[int, int] = {}
        self.stops_after: dict[int, int] = {}
        #: When the process of a rank that has not ended is ended.
        self.ends_at: dict[int, float] = {}
        #: The clock stops here: nothing that waits for longer is to come.
        self.patience_s = 100.0
        self.now_s = 0.0
        #: What ranks share, by pipeline and boundary.
        self.shared: dict[tuple[int, int], Any] = {}
        self._hosts: list[_Host] = []
        self._over = threading.Semaphore(0)
        self._exchanges: dict[Any, list[dict[int, Any]]] = {}

    @property
    def rank(self) -> int:
        """Whose turn it is."""
        return self._current.rank

    def run(self, *hosts: Callable[[], T]) -> list[T | BaseException]:
        """Run the host of each rank; what each returns or raises.

        Raises:
            HangError: all that have not ended wait for each other.
        """
        self._hosts = [_Host(rank) for rank in range(len(hosts))]
        #: Those that go on only where no other can.
        everyone = [*self._hosts, *self.actors]
        self._lazy = {id(actor) for actor in everyone if self.random.random() < 0.3}
        threads = [
            threading.Thread(target=self._run, args=pair, daemon=True)
            for pair in zip(self._hosts, hosts, strict=True)
        ]
        for thread in threads:
            thread.start()
        self._hand_over()
        self._over.acquire()
        for thread in threads:
            thread.join()
        hung = [h.outcome for h in self._hosts if isinstance(h.outcome, HangError)]
        if hung:
            raise hung[0]
        return [host.outcome for host in self._hosts]

    def pause(self, until: Callable[[], bool] = always) -> None:
        """Let others go on, and wait until something holds."""
        me = self._current
        if me.raises is not None:
            raise me.raises
        me.until = until
        for left, what in ((self.dies_after, self._die), (self.stops_after, self._stop)):
            if me.rank in left:
                left[me.rank] -= 1
                if left[me.rank] < 0:
                    what(me)
        self._hand_over()
        if me.raises is not None:
            raise me.raises

    def gather(self, ranks: Sequence[int], value: T, name: str) -> list[T]:
        """The values of some ranks, in the order in which these are named; all of them call it."""
        rounds = self._exchanges.setdefault((tuple(ranks), name), [])
        mine = next((each for each in rounds if self.rank not in each), None)
        if mine is None:
            rounds.append(mine := {})
        mine[self.rank] = value
        self.pause(lambda: len(mine) == len(ranks))
        return [mine[rank] for rank in ranks]

    def monotonic(self) -> float:
        """As `time`'s."""
        return self.now_s

    def sleep(self, duration_s: float) -> None:
        """As `time`'s."""
        end_s = self.now_s + duration_s
        self.pause(lambda: self.now_s >= end_s)

    def _run(self, host: _Host, function: Callable[[], Any]) -> None:
        host.turn.acquire()
        try:
            host.outcome = function()
        except BaseException as error:
            host.outcome = error
            self.dead.add(host.rank)
        host.ended = True
        self._hand_over()

    def _die(self, host: _Host) -> None:
        self.dead.add(host.rank)
        raise KilledError

    def _stop(self, host: _Host) -> None:
        host.until = lambda: False

    def _hand_over(self) -> None:
        """Give the turn to the next host, and return when this thread has it again."""
        me = getattr(self, "_current", None)
        following = self._next_host()
        if following is None:
            self._over.release()
        elif following is not me or me.ended:
            self._current = following
            following.turn.release()
            if me is not None and not me.ended:
                me.turn.acquire()

    def _next_host(self) -> _Host | None:
        """Let actors go on until it is a host's turn; None if all have ended."""
        while not all(host.ended for host in self._hosts):
            if self.random.random() < 0.05:
                self._look()
            for actor in self._by_chance():
                if actor.ready():
                    if isinstance(actor, _Host):
                        return actor
                    actor.step()
                    break
            else:
                self._let_time_pass()
        return None

    def _by_chance(self) -> Iterator[Any]:
        everyone: list[Any] = [*self._hosts, *self.actors]
        first = self.random.randrange(len(everyone))
        turned = everyone[first:] + everyone[:first]
        yield from (actor for actor in turned if id(actor) not in self._lazy)
        yield from (actor for actor in turned if id(actor) in self._lazy)

    def _look(self) -> None:
        for rank, watchers in self.watchers.items():
            if rank not in self.dead and not self._hosts[rank].ended:
                for watcher in watchers:
                    watcher()

    def _let_time_pass(self) -> None:
        self.now_s += _STEP_S
        self._look()
        waiting = [host for host in self._hosts if not host.ended]
        for host in waiting:
            if self.now_s > self.ends_at.get(host.rank, math.inf):
                self.dead.add(host.rank)
                host.until, host.raises = always, KilledError()
        stopped = [host for host in waiting if self.stops_after.get(host.rank, 0) < 0]
        if len(stopped) == len(waiting):
            for host in stopped:
                host.until, host.raises = always, KilledError()
        elif self.now_s > self.patience_s:
            for host in waiting:
                host.until, host.raises = always, HangError(f"ranks {[h.rank for h in waiting]}")
