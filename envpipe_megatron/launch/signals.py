"""Signals that end a launcher in order: SIGTERM, SIGINT, SIGHUP, or the end of standard input.

And what torchrun is told to handle besides, such as a batch system's signal before a time limit.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from itertools import chain, repeat

#: How often to look up from a wait: a signal that another thread gets, or that comes just before,
#: does not end it.
LOOK_S = 0.2
_NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@contextmanager
def handled(
    handler: Callable[[signal.Signals], None], also: Collection[signal.Signals] = ()
) -> Iterator[None]:
    """Call `handler` in the main thread for each signal; one that `nohup` ignores stays so."""
    before = {
        number: signal.signal(number, lambda number, _: handler(signal.Signals(number)))
        for number in {*_NUMBERS, *also}
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


class Signals:
    """Takes signals as long as it is entered, in the main thread.

    They end the process as usual, by SystemExit, until `call` says what else they do. With
    `until_stdin_ends`, the end of standard input counts as a SIGTERM from then on.

    Attributes:
        arrived: whether there was any.
        to_pass_on: the last signal if it is of `also`; SIGTERM for those that every launcher takes,
            since ranks that wait in a library do not end by a SIGINT.
    """

    def __init__(
        self, also: Collection[signal.Signals] = (), *, until_stdin_ends: bool = False
    ) -> None:
        self.until_stdin_ends = until_stdin_ends
        self.arrived = False
        self.to_pass_on = signal.SIGTERM
        self._actions: Iterator[Callable[[], object] | None] = repeat(None)
        self._watch: threading.Thread | None = None
        self._handled = handled(self._take, also)

    def call(self, first: Callable[[], object], again: Callable[[], object]) -> None:
        """From here on, the next signal calls `first`, and all others call `again`.

        The end of standard input calls them in a thread.
        """
        self._actions = chain([first], repeat(again))
        if self.until_stdin_ends and self._watch is None:
            self._watch = threading.Thread(target=self._watch_stdin, daemon=True)
            self._watch.start()

    def __enter__(self) -> Signals:
        self._handled.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._actions = repeat(bool)  # nothing, for standard input that ends later
        self._handled.__exit__(None, None, None)

    def _take(self, number: signal.Signals) -> None:
        self.arrived = True
        self.to_pass_on = signal.SIGTERM if number in _NUMBERS else number
        action = next(self._actions)
        if action is None:
            raise SystemExit(128 + number)
        action()

    def _watch_stdin(self) -> None:
        while os.read(0, 4096):
            pass
        self._take(signal.SIGTERM)
