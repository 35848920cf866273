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

_GATHER_TAG = 0
#: For ranks that have been together just before.
_COME = timedelta(minutes=3)
#: gloo may wait five times as long for a rank that cannot be reached.
_CONNECT = timedelta(seconds=20)


class HostGroup:
    """Exchanges of a group; each is called by all of its ranks, in one order.

    Every method raises RuntimeError when a rank is gone, or silent for the time-out; so does making
    one whose ranks do not come or cannot reach each other, within five minutes.

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
        self._transport: Any = None
        if self._size > 1:
            store = PrefixStore(f"envpipe/{name}", _get_default_store())
            place = self._index, self._size
            # A rank that comes late (a debugger, a slow import) can be reached all the same.
            store.set(f"come/{self._index}", "")
            everyone = [f"come/{index}" for index in range(self._size)]
            store.wait(everyone, min(timeout, _COME))
            # The first shows soon whether all can be reached. It lives until the next is connected.
            first = dist.ProcessGroupGloo(PrefixStore("first", store), *place, _CONNECT)
            self._transport, _ = dist.ProcessGroupGloo(store, *place, timeout), first

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
            self._transport.gather([], frame, self._leader).wait()
            if rest is not None:
                self._transport.send([rest], self._leader, _GATHER_TAG).wait()
            return []
        frames = [torch.empty_like(frame) for _ in range(self._size)]
        self._transport.gather(frames, frame, self._leader).wait()
        return [
            value if index == self._index else self._value(other, index, _GATHER_TAG)
            for index, other in enumerate(frames)
        ]

    def broadcast(self, value: T) -> T:
        """The leader's value, on all ranks."""
        if self._size == 1:
            return value
        frame, rest = _packed(value)
        self._transport.broadcast(frame, self._leader).wait()
        if not self.leads:
            rest = _rest_of(frame)
        if rest is not None:
            self._transport.broadcast(rest, self._leader).wait()
        return value if self.leads else _unpacked(frame, rest)

    def send(self, value: object, to: int, tag: int) -> list[tuple[dist.Work, torch.Tensor]]:
        """Send a value to another rank, by its place in the group; returns at once.

        Values with the same tag arrive in order.

        Args:
            value: anything that pickles.
            to: the place of the rank that calls `receive`.
            tag: at least 1.

        Returns:
            what must be kept until it has left, and the works that say whether it has.
        """
        parts = [part for part in _packed(value) if part is not None]
        return [(self._transport.send([part], to, tag), part) for part in parts]

    def receive(self, source: int, tag: int) -> Any:
        """Wait for a value that another rank sends to this one."""
        frame = torch.empty(FRAME_BYTES, dtype=torch.uint8)
        self._transport.recv([frame], source, tag).wait()
        return self._value(frame, source, tag)

    def _value(self, frame: torch.Tensor, source: int, tag: int) -> Any:
        """The value that a frame begins, whose rest comes by the same way."""
        rest = _rest_of(frame)
        if rest is not None:
            self._transport.recv([rest], source, tag).wait()
        return _unpacked(frame, rest)


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
