"""What other processes take: a command, or a function in a Python of its own."""

from __future__ import annotations

import multiprocessing
import resource
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Generic, TypeVar

import click

Result = TypeVar("Result")


@dataclass
class Spent:
    """What a process and its children took."""

    wall_s: float = 0.0
    cpu_s: float = 0.0


@dataclass(frozen=True)
class Ran(Generic[Result]):
    """What a function returned in a process of its own, whose start counts, and what that took."""

    found: Result
    spent: Spent
    memory_mib: float


@contextmanager
def spending() -> Iterator[Spent]:
    """Measure what processes take that begin and end in the block; known when it is left."""
    spent, begin_s = Spent(), time.monotonic()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    yield spent
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent.wall_s = time.monotonic() - begin_s
    spent.cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def run_command(command: Sequence[str], folder: Path) -> tuple[str, Spent]:
    """Run a command in a folder, and return what it printed."""
    with spending() as spent:
        done = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout, spent


def run_alone(
    function: Callable[..., Result], *arguments: Any, limit_s: float | None = None
) -> Ran[Result] | None:
    """Call a function of a module in a new process; return None if it takes longer than a limit.

    Raises click.ClickException if the process fails; its own message is printed above.
    """
    context = multiprocessing.get_context("spawn")  # a forked child starts with this one's memory
    receiver, sender = context.Pipe(duplex=False)
    with spending() as spent:
        process = context.Process(target=_call, args=(sender, function, arguments))
        process.start()
        sender.close()
        try:
            answer = receiver.recv() if receiver.poll(limit_s) else None
        except EOFError:
            raise click.ClickException(f"{function.__name__} failed on {arguments}") from None
        finally:
            process.terminate()
            process.join()
    return None if answer is None else Ran(answer[0], spent, answer[1])


def _call(sender: Connection, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    sender.send((function(*arguments), memory_mib("VmHWM")))


def memory_mib(field: str) -> float:
    """Return this process's memory by a field of Linux: VmRSS now, VmHWM the most so far."""
    # Not ru_maxrss: Linux passes that on through fork and exec, so it is the parent's.
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{field}:")[2].split()[0]) / 1024
