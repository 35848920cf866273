"""Processes in one gloo group that stay up and call what a test hands them.

Ranks are forked from a server that has imported torch and EnvPipe's sessions once (and
megatron-core, where asked for): that takes seconds, which no rank and no later pool pays again.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing as mp
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any
from unittest.mock import patch


class RankFailedError(AssertionError):
    """A rank raised; its traceback is the message."""


class RankPool:
    """`size` processes in one gloo group; `run` calls a function on all of them at once.

    Args:
        size: number of ranks.
        timeout_s: of the group's collectives.
        preload: modules to import before ranks are forked; heeded by the first pool of a process.
    """

    def __init__(self, size: int, timeout_s: float = 30.0, preload: Sequence[str] = ()) -> None:
        self.size = size
        self.timeout_s = timeout_s
        self._context = mp.get_context("forkserver")
        self._context.set_forkserver_preload(
            ["torch.distributed", *preload, "plain_stages", "rank_heap"]
        )
        # The server does not know pytest's path, where what ranks run is found.
        path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        with patch.dict(os.environ, PYTHONPATH=path.rstrip(os.pathsep)):
            forkserver.ensure_running()
        self._fork()

    def _fork(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.pipes = []
        self.processes = []
        for rank in range(self.size):
            here, there = self._context.Pipe()
            process = self._context.Process(
                target=_serve,
                args=(rank, self.size, self._folder.name, self.timeout_s, there),
                daemon=True,
            )
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        """Call a module-level function as `function(rank, *args)` on every rank."""
        for pipe in self.pipes:
            pipe.send((function, args))

    def outcomes(
        self, timeout_s: float = 120.0, ranks: Collection[int] | None = None
    ) -> dict[int, tuple[bool, Any]]:
        """For each rank that answered in time, whether it returned, and its value or traceback.

        Args:
            timeout_s: for all answers together.
            ranks: whose answers to wait for; None for all.
        """
        deadline = time.monotonic() + timeout_s
        waited = range(self.size) if ranks is None else ranks
        open_pipes = {self.pipes[rank]: rank for rank in waited}
        outcomes: dict[int, tuple[bool, Any]] = {}
        while open_pipes and (ready := wait(list(open_pipes), deadline - time.monotonic())):
            for pipe in ready:
                rank = open_pipes.pop(pipe)
                with contextlib.suppress(EOFError, ConnectionError):  # the process is gone
                    outcomes[rank] = pipe.recv()
                    if not outcomes[rank][0]:  # its peers fail by the time-out at the latest
                        deadline = min(deadline, time.monotonic() + self.timeout_s + 5)
        return outcomes

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Values of all ranks; where one fails, all are replaced.

        Raises:
            RankFailedError: with the tracebacks of the ranks that raised, who did not answer, and
                how those ended that are gone.
        """
        self.start(function, *args)
        outcomes = self.outcomes()
        failures = [text for worked, text in outcomes.values() if not worked]
        silent = sorted(set(range(self.size)) - outcomes.keys())
        if failures or silent:
            ends = [self._end(rank) for rank in silent]
            self.close()  # what the ranks still wait for would spoil the next test
            self._fork()
            raise RankFailedError("\n".join([*failures, *ends]))
        return [outcomes[rank][1] for rank in range(self.size)]

    def _end(self, rank: int) -> str:
        """How a rank ended that did not answer, with the last it wrote to its stderr."""
        self.processes[rank].join(1)  # its pipe may close a moment before
        code = self.processes[rank].exitcode
        if code is None:
            return f"rank {rank}: without an answer"
        how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        written = _stderr_file(self._folder.name, rank).read_text(errors="replace")
        return f"rank {rank}: ended by {how}\n{written[-4000:]}"

    def close(self) -> None:
        """End every rank; one that does not listen is killed."""
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        deadline = time.monotonic() + 1
        for process in self.processes:
            process.join(max(0.1, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()  # also one that SIGSTOP holds
                process.join()
        self._folder.cleanup()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def share_one_device() -> None:
    """Let all gloo groups of this process have one device.

    Each device has a thread that wakes a hundred times a second. A rank that has seen many tests
    has dozens of groups: waiting for the next one, it would take a thirtieth of a core.
    """
    from torch.distributed import distributed_c10d as c10d

    gloo = c10d.ProcessGroupGloo
    device = gloo.create_default_device()

    class OfGloo(type):
        def __instancecheck__(cls, group: object) -> bool:
            return isinstance(group, gloo)

        def __call__(
            cls, store: Any, rank: int, size: int, timeout: timedelta, **_: Any
        ) -> Any:  # since torch 2.14 with more
            options = gloo._Options()
            options._devices, options._threads, options._timeout = [device], 2, timeout
            return gloo(store, rank, size, options)

    c10d.ProcessGroupGloo = OfGloo("ProcessGroupGloo", (), {})  # type: ignore[misc,assignment]


def _stderr_file(folder: str, rank: int) -> Path:
    return Path(folder) / f"stderr{rank}.txt"


def _serve(rank: int, size: int, folder: str, timeout_s: float, pipe: Any) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), OMP_NUM_THREADS="1")
    with _stderr_file(folder, rank).open("wb") as stderr:
        os.dup2(stderr.fileno(), 2)  # that of the server is what pytest captured for another test
    faulthandler.enable()
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    share_one_device()
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{folder}/store", size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout_s),
    )
    while (job := pipe.recv()) is not None:
        function, args = job
        try:
            pipe.send((True, function(rank, *args)))
        except BaseException:
            pipe.send((False, f"rank {rank}:\n{traceback.format_exc()}"))
    # Peers may be gone, and a rank that took its leave in order would wait for them.
    os._exit(0)
