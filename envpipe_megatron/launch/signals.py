"""What ends a launcher in order: SIGTERM, SIGINT, SIGHUP, or the end of standard input."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain, repeat
from types import TracebackType

_NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
#: Python's handler of a signal that comes just before the main thread begins to wait in a system
#: call runs after that call: the next signal interrupts it.
_AGAIN_S = 1.0


@contextmanager
def handled(handler: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Call `handler` in the main thread for each signal; one that `nohup` ignores stays so."""
    before = {
        number: signal.signal(number, lambda number, _: handler(signal.Signals(number)))
        for number in _NUMBERS
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
    """

    def __init__(self, *, until_stdin_ends: bool = False) -> None:
        self.until_stdin_ends = until_stdin_ends
        self._actions: Iterator[Callable[[], None] | None] = repeat(None)
        self._over = threading.Lock()
        self._is_over = self._is_taken = False
        self._handled = ExitStack()

    def call(self, first: Callable[[], None], again: Callable[[], None]) -> None:
        """From here on, the next signal calls `first`, and all others call `again`."""
        self._actions = chain([first], repeat(again))

    def __enter__(self) -> Signals:
        self._handled.enter_context(handled(self._take))
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
