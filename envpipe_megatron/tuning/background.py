"""Work of the planning rank beside training, in a process of its own, which runs `main`.

A thread would take Python's interpreter lock from the training thread, and could not be ended.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any, Generic, TypeVar

from envpipe_megatron.child import (
    end_with_parent,
    ignore_signals_of_ranks,
    open_memory,
    start_child,
)
from envpipe_megatron.errors import EnvPipeError

T = TypeVar("T")

_PROCESS = ("-P", "-m", "envpipe_megatron.tuning.background")  # -P: not the working folder
#: It ends itself after so long, s.
_LIMIT_S = 900
#: How long to wait for the end of a process that was killed, s.
_END_S = 1.0
_NICE = 10
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class Background(Generic[T]):
    """One piece of work at a time in a child process, which training does not wait for.

    The child is killed when it lasts longer than `_LIMIT_S`, when other work begins, and when this
    process ends. It has this process' import path, no torch and no GPU.
    """

    def __init__(self) -> None:
        self._child: tuple[subprocess.Popen[bytes], IO[bytes]] | None = None

    @property
    def busy(self) -> bool:
        """True if a piece of work was begun whose result was not taken."""
        return self._child is not None

    def start(self, make: Callable[[], T]) -> None:
        """Begin; what was begun before and not taken is ended.

        Args:
            make: can be pickled, as its result can, without names of `__main__`.

        Raises an error of any kind if it cannot be pickled, or no process can be started.
        """
        self.close()
        nothing = subprocess.DEVNULL
        answer = os.fdopen(open_memory(), "w+b")
        order = {"answer": answer.fileno(), "parent": os.getpid(), "limit_s": _LIMIT_S}
        with os.fdopen(open_memory(), "w+b") as work:
            pickle.dump([*map(str, sys.path)], work)  # its working folder is this one's
            pickle.dump(make, work)
            work.seek(0)
            streams = {"stdin": work, "stdout": nothing, "stderr": nothing}
            self._child = start_child(_PROCESS, order, [answer.fileno()], **streams), answer

    def take(self) -> T | None:
        """Return the result, once; None as long as there is none.

        Raises what the work raised, EnvPipeError if it was given up or its process has died.
        """
        if self._child is None:
            return None
        process, answer = self._child
        status = process.poll()
        if status is None:
            return None
        self._child = None
        with answer:
            if status == -signal.SIGALRM:
                raise EnvPipeError(f"No end in {_LIMIT_S} s")
            size = answer.seek(0, os.SEEK_END)
            if status or not size:  # where SIGCHLD is ignored, no status is known
                raise EnvPipeError(
                    "The process that plans has died",
                    value=signal.Signals(-status).name if status < 0 else f"status {status}",
                    remedy="Look whether the host's memory is full.",
                )
            answer.seek(0)
            result, error = pickle.load(answer)
        if error is not None:
            raise error
        return result  # type: ignore[no-any-return]  # of a pickle

    def close(self) -> None:
        """End what runs: nobody takes its result any more."""
        if self._child is not None:
            (process, answer), self._child = self._child, None
            answer.close()
            process.kill()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)


def main() -> None:
    """Work for a rank, and leave (result, error) in a file, one of them None.

    At low priority, with one thread of linear algebra, without GPUs. It ends with the rank, which
    may also kill it.
    """
    order = json.loads(sys.argv[1])
    ignore_signals_of_ranks()
    end_with_parent(order["parent"], signal.SIGKILL)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # a rank may ignore it, or block it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    signal.alarm(order["limit_s"])
    os.nice(_NICE)
    os.environ.update(dict.fromkeys(_ONE_THREAD, "1"), CUDA_VISIBLE_DEVICES="")
    done: tuple[Any, Exception | None]
    try:
        sys.path[:] = pickle.load(sys.stdin.buffer)
        done = pickle.load(sys.stdin.buffer)(), None
    except EnvPipeError as error:
        done = None, error
    except Exception as error:  # whose class may not survive the way
        done = None, RuntimeError(f"{type(error).__name__}: {error}")
    with os.fdopen(order["answer"], "wb") as answer:
        pickle.dump(done, answer)


if __name__ == "__main__":
    main()
