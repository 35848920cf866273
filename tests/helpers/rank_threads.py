"""Ranks of a job that are threads of one process, and what they exchange."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

#: More than any test needs: a rank that never comes breaks the exchange of the others.
_PATIENCE_S = 20.0


class RankThreads:
    """`size` ranks; those of an exchange must all come to it, in one order.

    Args:
        size: number of ranks.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._here = threading.local()
        self._exchanges: dict[Any, _Exchange] = {}
        self._lock = threading.Lock()

    @property
    def rank(self) -> int:
        """The calling thread's."""
        rank: int = self._here.rank
        return rank

    def run(self, function: Callable[[int], T]) -> list[T]:
        """Call `function(rank)` on all ranks; their values, or the first error."""

        def call(rank: int) -> T:
            self._here.rank = rank
            try:
                return function(rank)
            except BaseException:
                for exchange in list(self._exchanges.values()):
                    exchange.barrier.abort()
                raise

        with ThreadPoolExecutor(self.size) as pool:
            calls = [pool.submit(call, rank) for rank in range(self.size)]
        errors = [error for done in calls if (error := done.exception()) is not None]
        errors.sort(key=lambda error: isinstance(error, threading.BrokenBarrierError))
        if errors:
            raise errors[0]
        return [done.result() for done in calls]

    def gather(self, ranks: Sequence[int], value: T, name: Any = None) -> list[T]:
        """The values of some ranks in the order in which these are named.

        Args:
            name: exchanges with another name have nothing to do with this one.
        """
        with self._lock:
            key = (tuple(ranks), name)
            exchange = self._exchanges.setdefault(key, _Exchange(len(ranks)))
        return exchange.gather(list(ranks).index(self.rank), value)


class _Exchange:
    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=_PATIENCE_S)
        self._values: list[Any] = [None] * size

    def gather(self, place: int, value: Any) -> list[Any]:
        self._values[place] = value
        self.barrier.wait()
        values = list(self._values)
        self.barrier.wait()
        return values


class ThreadCollectives:
    """Of `Collectives`, what the channel's making calls."""

    def __init__(self, ranks: RankThreads, pipeline: Sequence[int]) -> None:
        self._ranks, self._members = ranks, list(pipeline)
        self.stage = self._members.index(ranks.rank)
        self.pipeline = f"hosts of {self._members}"

    def in_pipeline(self, value: T) -> list[T]:
        """As `Collectives`'."""
        return self._ranks.gather(self._members, value, "in_pipeline")

    def on_all(self, holds: bool) -> bool:
        """As `Collectives`'."""
        return all(self._ranks.gather(range(self._ranks.size), holds, "on_all"))
