"""The bytes of live tensors on the CPU, counted as a GPU's allocator would count them."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from jobs import Job, Ours
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.runtime.execution.stage_run import execute
from envpipe_megatron.runtime.job.session import Session
from envpipe_megatron.runtime.memory.stage import Reading, StageMemory

#: Sequence x microbatch x hidden size, as in `training`, of four bytes each.
MESSAGE_BYTES = 16 * 2 * 32 * 4


class LiveStorages(TorchDispatchMode):
    """Counts every storage that an operator makes, until it is freed; a memory source."""

    def __init__(self) -> None:
        super().__init__()
        self._live: set[int] = set()
        self._allocated = self._peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tree_map_only(torch.Tensor, self._see, result)
        return result

    def _see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._live:
            self._live.add(key)
            self._allocated += size
            self._peak = max(self._peak, self._allocated)
            weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._live.discard(key)
        self._allocated -= size

    def read(self) -> Reading:
        return Reading(self._allocated, self._peak)

    def reset_peak(self) -> None:
        self._peak = self._allocated

    def capacity_bytes(self) -> int:
        return 10**9

    def reserve(self, count: int) -> bool:
        return count <= self.capacity_bytes()


@contextmanager
def _watched_sessions() -> Iterator[list[Any]]:
    """Sessions that training makes count live tensors."""
    import training

    sessions: list[Any] = []
    make_session = training._session

    def session(*args: Any) -> Any:
        sessions.append(make_session(*args))
        return sessions[-1]

    live = LiveStorages()
    with (
        patch("envpipe_megatron.runtime.job.session.device_memory", lambda: live),
        patch.object(training, "_session", session),
        live,
    ):
        yield sessions


def train_and_watch(rank: int, job: Job, ours: Ours, root: Path) -> tuple[StageMemory, ...] | None:
    """Train as `training.train`; what the session came to know of memory."""
    import training

    with _watched_sessions() as sessions:
        training.train(rank, job, ours, root)
    found: tuple[StageMemory, ...] | None = sessions[0].parts.memory.stages if sessions else None
    return found


def peaks_of_orders(
    rank: int, job: Job, ran: Schedule, orders: list[Schedule], root: Path
) -> tuple[tuple[StageMemory, ...], list[int]] | None:
    """Learn from an iteration of `ran`, then run others; this rank's peak in each of them."""
    import training

    order_of, peaks = iter([job.own_order, job.own_order, ran, *orders]), []

    def run_iteration(session: Any, count: int, specs: Any, make_work: Any, **_: Any) -> None:
        order, memory = next(order_of), session.parts.memory
        watched = partial(execute, unit_ended=memory.watch())
        with patch("envpipe_megatron.runtime.job.session.execute", watched):
            session.rehearse(order, specs, make_work)
        if order is ran:
            memory.learn(job.own_order, specs, ran)
        elif memory.stages is not None:
            peaks.append(memory.peak_bytes)

    with _watched_sessions() as sessions, patch.object(Session, "run_iteration", run_iteration):
        training.train(rank, replace(job, steps=3 + len(orders)), Ours(), root)
    return (sessions[0].parts.memory.stages, peaks) if sessions else None
