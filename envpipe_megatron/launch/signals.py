"""Signals that end a launcher in order: SIGTERM, SIGINT, SIGHUP, or the end of standard input.

And what torchrun is told to handle besides, such as a batch system's signal before a time limit.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain, repeat
from types import TracebackType

_NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
#: Python's handler of a signal that comes just before the main thread begins to wait in a system
#: call runs after that call: the next signal interrupts it.
_AGAIN_S = 1.0


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
    `until_stdin_ends`, the end of standard input counts as a SIGTERM.

    Attributes:
        to_pass_on: the last signal if it is of `also`; SIGTERM for those that every launcher takes,
            since ranks that wait in a library do not end by a SIGINT.
    """

    def __init__(
        self, also: Collection[signal.Signals] = (), *, until_stdin_ends: bool = False
    ) -> None:
        self.until_stdin_ends = until_stdin_ends
        self.to_pass_on = signal.SIGTERM
        self._also = also
        self._actions: Iterator[Callable[[], None] | None] = repeat(None)
        self._over = threading.Lock()
        self._is_over = self._is_taken = False
        self._handled = ExitStack()

    def call(self, first: Callable[[], None], again: Callable[[], None]) -> None:
        """From here on, the next signal calls `first`, and all others call `again`."""
        self._actions = chain([first], repeat(again))

    def __enter__(self) -> Signals:
        self._handled.enter_context(handled(self._take, self._also))
        if self.until_stdin_ends:
            threading.Thread(target=self._watch_stdin, daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._over:
            self._is_over = True
        self._handled.close()

    def _take(self, number: signal.Signals) -> None:
        self._is_taken = True
        self.to_pass_on = signal.SIGTERM if number in _NUMBERS else number
        action = next(self._actions)
        if action is None:
            raise SystemExit(128 + number)
        action()

    def _watch_stdin(self) -> None:
        while os.read(0, 4096):
            pass
        while not self._is_taken:
            with self._over:
                if self._is_over:
                    return
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(_AGAIN_S)
