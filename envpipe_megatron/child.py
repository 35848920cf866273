"""Processes that end in order: those beside a rank, commands with a parent, launchers by signals.

Run as a program, this becomes a command that gets SIGTERM when its parent dies, however it dies:

    python -P child.py PARENT COMMAND ...
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import site
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import chain, repeat
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
TORCHRUN_MARK = "ENVPIPE_TORCHRUN"
"""Set for every process that torchrun starts, except these; the launcher finds survivors by it."""
#: How often to look up from a wait: a signal that another thread gets, or that comes just before,
#: does not end it.
LOOK_S = 0.2
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def open_memory() -> int:
    """Return the descriptor of a file in memory, without a name; OSError if there can be none.

    Where `os.memfd_create` is missing, as from Pythons that were built for old C libraries (uv's
    and conda's), `/dev/shm` needs room for it.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create("envpipe")
    return os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR, 0o600)


def start_child(
    module: Sequence[str], order: object, pass_fds: Sequence[int] = (), **streams: Any
) -> subprocess.Popen[bytes]:
    """Start a module, with an order as JSON; OSError if that cannot be.

    Args:
        module: as arguments of Python's.
        pass_fds: descriptors that it gets.
        streams: `stdin`, `stdout` and `stderr` of Popen.
    """
    # It finds this package where this process found it. A folder of installed packages has no place
    # in PYTHONPATH: what lies there (the `dataclasses` of old Pythons) would hide Python's own.
    package = str(Path(__file__).resolve().parents[1])
    installed = map(os.path.realpath, (*site.getsitepackages(), site.getusersitepackages()))
    paths = [package] if package not in installed else []
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    environment.pop(TORCHRUN_MARK, None)
    return subprocess.Popen(
        [sys.executable, *module, json.dumps(order)],
        pass_fds=pass_fds,
        env=environment,
        start_new_session=True,  # Ctrl-C and the end of a process group do not reach it
        **streams,
    )


def ignore_signals_of_ranks() -> None:
    """Ignore what batch systems send to all of a job's processes, and mean its ranks."""
    for number in (*_ENDING, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def end_with_parent(parent: int, number: signal.Signals) -> None:
    """Get a signal when the parent ends, or end now if it is gone; only Linux has the signal."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(128 + number)


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
        self._numbers = {*_ENDING, *also}
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
        self.to_pass_on = signal.SIGTERM if number in _ENDING else self.arrived
        action = next(self._actions)
        if action is None:
            raise SystemExit(128 + number)
        action()

    def _watch_stdin(self) -> None:
        while os.read(0, 4096):
            pass
        self._take(signal.SIGTERM)


if __name__ == "__main__":
    end_with_parent(int(sys.argv[1]), signal.SIGTERM)
    os.execvp(sys.argv[2], sys.argv[2:])
