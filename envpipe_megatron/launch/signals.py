"""Signals that end a launcher in order: SIGTERM, SIGINT, SIGHUP, or the end of standard input.

And those that torchrun handles besides, such as a batch system's signal before a time limit.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Collection, Iterator
from itertools import chain, repeat
from typing import Any

#: How often to look up from a wait: a signal that another thread gets, or that comes just before,
#: does not end it.
LOOK_S = 0.2
_NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Signals:
    """Takes signals as long as it is entered, in the main thread; one that is ignored stays so.

    They end the process as usual, by SystemExit, until `call` says what else they do. With
    `until_stdin_ends`, the end of standard input counts as a SIGTERM from then on.

    Attributes:
        arrived: the last one; None if there was none.
        to_pass_on: the last signal if it is of `also`; SIGTERM for those that every launcher takes,
            since ranks that wait in a library do not end by a SIGINT.
    """

    def __init__(
        self, also: Collection[signal.Signals] = (), *, until_stdin_ends: bool = False
    ) -> None:
        self.until_stdin_ends = until_stdin_ends
        self.arrived: signal.Signals | None = None
        self.to_pass_on = signal.SIGTERM
        self._actions: Iterator[Callable[[], object] | None] = repeat(None)
        self._watch: threading.Thread | None = None
        self._numbers = {*_NUMBERS, *also}
        self._before: dict[signal.Signals, Any] = {}

    def call(self, first: Callable[[], object], again: Callable[[], object]) -> None:
        """Have the next signal call `first`, and all others `again`.

        The end of standard input calls them in a thread.
        """
        self._actions = chain([first], repeat(again))
        if self.until_stdin_ends and self._watch is None:
            self._watch = threading.Thread(target=self._watch_stdin, daemon=True)
            self._watch.start()

    def __enter__(self) -> Signals:
        for number in self._numbers:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._take)
        return self

    def __exit__(self, *error: object) -> None:
        self._actions = repeat(bool)  # nothing, for standard input that ends later
        for number, before in self._before.items():
            signal.signal(number, before)

    def _take(self, number: int, frame: object = None) -> None:
        self.arrived = signal.Signals(number)
        self.to_pass_on = signal.SIGTERM if number in _NUMBERS else self.arrived
        action = next(self._actions)
        if action is None:
            raise SystemExit(128 + number)
        action()

    def _watch_stdin(self) -> None:
        while os.read(0, 4096):
            pass
        self._take(signal.SIGTERM)
