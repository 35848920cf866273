"""A few ranks that exchange small values between their hosts; one of them leads.

Over gloo, with its own connections: in `torch.distributed.new_group` every rank of the job must
take part in making every group, or ranks that have made equally many groups before; and each of
torch's exchanges of objects is two collectives.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

T = TypeVar("T")

#: Bytes of a message that says how long the pickle is, and carries it or its beginning.
FRAME_BYTES = 256
_LENGTH_BYTES = 8


class HostGroup:
    """Exchanges of a group; each is called by all of its ranks, in one order.

    Every method raises RuntimeError when a rank is gone, or silent for the time-out.

    Args:
        ranks: the global ranks, this one among them.
        name: the same on all of the ranks, and unique in the job.
        timeout: after which a silent rank is an error.
        leader: the global rank that leads.
    """

    def __init__(self, ranks: Sequence[int], name: str, timeout: timedelta, *, leader: int) -> None:
        self._index = list(ranks).index(dist.get_rank())
        self._leader = list(ranks).index(leader)
        self._size = len(ranks)
        #: Sends and receives by a rank's number in the group, as a process group of torch's.
        self.transport: Any = None
        if self._size > 1:
            store = PrefixStore(f"envpipe/{name}", _get_default_store())
            self.transport = dist.ProcessGroupGloo(store, self._index, self._size, timeout)

    @property
    def leads(self) -> bool:
        """Whether this rank does."""
        return self._index == self._leader

    def gather(self, value: T) -> list[T]:
        """The values of all ranks in their order, on the leader; elsewhere nothing."""
        if self._size == 1:
            return [value]
        frame, rest = _packed(value)
        if not self.leads:
            self.transport.gather([], frame, self._leader).wait()
            if rest is not None:
                self.transport.send([rest], self._leader, 0).wait()
            return []
        frames = [torch.empty_like(frame) for _ in range(self._size)]
        self.transport.gather(frames, frame, self._leader).wait()
        values = []
        for index, other in enumerate(frames):
            more = None if index == self._index else _rest_of(other)
            if more is not None:
                self.transport.recv([more], index, 0).wait()
            values.append(value if index == self._index else _unpacked(other, more))
        return values

    def broadcast(self, value: T) -> T:
        """The leader's value, on all ranks."""
        if self._size == 1:
            return value
        frame, rest = _packed(value)
        self.transport.broadcast(frame, self._leader).wait()
        if not self.leads:
            rest = _rest_of(frame)
        if rest is not None:
            self.transport.broadcast(rest, self._leader).wait()
        return value if self.leads else _unpacked(frame, rest)


def _packed(value: object) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The frame, and what does not fit into it."""
    text = pickle.dumps(value)
    whole = torch.frombuffer(bytearray(len(text).to_bytes(_LENGTH_BYTES) + text), dtype=torch.uint8)
    frame = torch.zeros(FRAME_BYTES, dtype=torch.uint8)
    frame[: len(whole)] = whole[:FRAME_BYTES]
    return frame, whole[FRAME_BYTES:] if len(whole) > FRAME_BYTES else None


def _rest_of(frame: torch.Tensor) -> torch.Tensor | None:
    """Room for what did not fit into a frame."""
    more = int.from_bytes(frame[:_LENGTH_BYTES].numpy().tobytes()) + _LENGTH_BYTES - FRAME_BYTES
    return torch.empty(more, dtype=torch.uint8) if more > 0 else None


def _unpacked(frame: torch.Tensor, rest: torch.Tensor | None) -> Any:
    parts = [frame[_LENGTH_BYTES:]] + ([] if rest is None else [rest])
    return pickle.loads(b"".join(part.numpy().tobytes() for part in parts))
