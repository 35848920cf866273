"""Who may use the GPUs: jobs that were started together take turns.

Each rank of each job talks to the referee over a Unix socket (`entry.Turns`), a JSON object a line.
"""

from __future__ import annotations

import json
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any


@dataclass(frozen=True)
class Block:
    """One turn of one job; its time is from the first rank's begin to the last one's end.

    `median_s` is the median of its iterations, each from begin to begin on the first rank, without
    the first of several: neither what now and then holds up a host counts, nor another's turn that
    has just ended.
    """

    turn: int
    time_s: float
    memory: tuple[dict[str, int], ...]
    median_s: float


@dataclass
class Rank:
    """What is known of one rank of a running job."""

    pid: int
    connection: socket.socket
    at: int = -1
    unit: str = ""
    finished: bool = False
    waits: bool = False
    ended: dict[str, Any] = field(default_factory=dict)


@dataclass
class _Run:
    num_ranks: int
    ranks: dict[int, Rank] = field(default_factory=dict)
    turn: int = 0
    ended: bool = False
    started: bool = False
    over: bool = False
    last_heard_s: float = field(default_factory=time.monotonic)
    blocks: list[Block] = field(default_factory=list)

    def ready(self) -> bool:
        live = [rank for rank in self.ranks.values() if not rank.finished]
        return len(self.ranks) == self.num_ranks and bool(live) and all(rank.waits for rank in live)


class Referee:
    """Grants turns, one job after the other.

    Args:
        order: which job has each turn; turns begin when all these jobs are ready. Without, who is
            ready first is first, and one turn lasts until its job's last iteration.
        slots: jobs that may have a turn at the same time, without an order.
        goes_on: asked before each turn of an order, with the turns that are left; if it denies
            once, no job gets another.
    """

    def __init__(
        self,
        path: Path,
        order: Sequence[str] = (),
        *,
        slots: int = 1,
        goes_on: Callable[[int], bool] = lambda left: True,
        on_block: Callable[[str, Block], None] = lambda run, block: None,
    ) -> None:
        self.path = path
        self._ordered = bool(order)
        self._order = deque(order)
        self._expected = set(order)
        self._slots = slots
        self._goes_on = goes_on
        self._on_block = on_block
        self._runs: dict[str, _Run] = {}
        self._holders: list[str] = []
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(1024)
        self._selector.register(self._listener, selectors.EVENT_READ, None)

    def expect(self, run: str, num_ranks: int) -> None:
        """A job was started."""
        self._runs[run] = _Run(num_ranks)

    def drop(self, run: str) -> None:
        """A job is over, whether it finished or not."""
        self._runs[run].over = True
        if run in self._holders:
            self._holders.remove(run)
        self._grant()

    def blocks(self, run: str) -> list[Block]:
        """The turns that a job has ended."""
        return self._runs[run].blocks

    def ranks(self, run: str) -> dict[int, Rank]:
        """The ranks of a job that have come so far."""
        return self._runs[run].ranks

    def silent_s(self, run: str) -> float:
        """How long a job that has a turn, or none yet, has said nothing; s."""
        state = self._runs[run]
        waits = state.ready() and not state.ended and run not in self._holders
        return 0.0 if waits else time.monotonic() - state.last_heard_s

    def started(self, run: str) -> bool:
        """Whether a job has begun its first turn."""
        return self._runs[run].started

    def poll(self, timeout_s: float) -> None:
        """Read what ranks say, for at most this time."""
        for key, _ in self._selector.select(timeout_s):
            if key.data is None:
                connection, _ = self._listener.accept()
                self._selector.register(connection, selectors.EVENT_READ, _Peer())
            else:
                self._hear(key.fileobj, key.data)  # type: ignore[arg-type]  # a socket
        self._grant()

    def close(self) -> None:
        """Close all connections; ranks that still wait end."""
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]  # sockets
        self._selector.close()
        self.path.unlink(missing_ok=True)

    def _hear(self, connection: socket.socket, peer: _Peer) -> None:
        data = b""
        with suppress(OSError):
            data = connection.recv(1 << 16)
        if not data:
            self._selector.unregister(connection)
            connection.close()
            return
        *lines, peer.rest = (peer.rest + data).split(b"\n")
        for line in lines:
            self._take(connection, peer, json.loads(line))

    def _take(self, connection: socket.socket, peer: _Peer, message: dict[str, Any]) -> None:
        if "hello" in message:
            peer.run, peer.rank = message["hello"], message["rank"]
            rank = Rank(message["pid"], connection)
            self._runs[peer.run].ranks[peer.rank] = rank
            return
        run = self._runs[peer.run]
        run.last_heard_s = time.monotonic()
        rank = run.ranks[peer.rank]
        if "at" in message:
            rank.at, rank.unit = message["at"], message["unit"]
            return
        rank.ended = message
        rank.finished = "finished" in message
        rank.waits = not rank.finished
        if len(run.ranks) == run.num_ranks and all(
            other.waits or other.finished for other in run.ranks.values()
        ):
            self._end_turn(peer.run, run)

    def _end_turn(self, name: str, run: _Run) -> None:
        ends = [rank.ended for _, rank in sorted(run.ranks.items())]
        if run.turn and not run.ended:
            time_s = max(end["end_s"] for end in ends) - min(end["begins_s"][0] for end in ends)
            memory = tuple(end["memory"] for end in ends)
            instants_s = *ends[0]["begins_s"], ends[0]["end_s"]
            times_s = [after - at for at, after in pairwise(instants_s)]
            median_s = median(times_s[1:] or times_s)
            run.blocks.append(Block(run.turn - 1, time_s, memory, median_s))
            self._on_block(name, run.blocks[-1])
        run.started = True
        if name in self._holders:
            self._holders.remove(name)

    def _grant(self) -> None:
        if self._ordered:
            self._grant_in_order()
        else:
            for name, run in self._runs.items():
                if len(self._holders) >= self._slots:
                    break
                if run.ready() and not run.over and name not in self._holders:
                    self._go(name, run)

    def _grant_in_order(self) -> None:
        """The next turn, once all jobs have come; after the last turn all jobs end."""
        runs = [self._runs.get(name) for name in self._expected]
        if not all(run and (run.started or run.over) for run in runs):
            return
        while self._order and self._runs[self._order[0]].over:
            self._order.popleft()
        if self._holders:
            return
        if self._order and not self._goes_on(len(self._order)):
            self._order.clear()
        if not self._order:
            for run in self._runs.values():
                if run.ready() and not run.over:
                    self._say(run, "end")
                    run.ended = True
        elif self._runs[self._order[0]].ready():
            name = self._order.popleft()
            self._go(name, self._runs[name])

    def _go(self, name: str, run: _Run) -> None:
        self._holders.append(name)
        run.turn += 1
        self._say(run, "go")

    @staticmethod
    def _say(run: _Run, word: str) -> None:
        run.last_heard_s = time.monotonic()
        for rank in run.ranks.values():
            rank.waits = False
        for rank in run.ranks.values():
            with suppress(OSError):  # it died; its job's end is seen elsewhere
                rank.connection.sendall(json.dumps({word: True}).encode() + b"\n")


@dataclass
class _Peer:
    rest: bytes = b""
    run: str = ""
    rank: int = -1
