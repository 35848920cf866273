"""Messages between two stages: what they hold, between whom, how a loss shows, and one carrier.

`TransferCarrier` sends and receives, over NCCL between nodes and over gloo on CPUs; `puts` has the
other. A receive is posted when its unit begins, after a header from the sender's host has said that
the send is enqueued: so no receive waits for a neighbour that has not got there. With one hardware
queue, where an unmatched send stops all behind it, exactly one receive is posted ahead instead (as
over gloo): the next when the stage takes the one before. On a GPU a posted receive is a kernel that
spins, and a unit beside it is slower. Four posted receives were measured 10 % slower on H200s.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property

import torch
import torch.distributed as dist

from envpipe_megatron.core.kinds import WHOLE, Kind, Unit
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.errors import EnvPipeError, first_line
from envpipe_megatron.runtime.channel.collectives import HostGroup

#: SUCCESS of torch's WorkResult, which has no name in Python.
_SUCCESS = 0
#: Tag of the tensors of a kind, which come in the order in which they were sent.
_TAGS = {kind: tag for tag, kind in enumerate(WHOLE)}


@dataclass(frozen=True)
class TensorSpec:
    """Shape and type of each tensor of a message, and their device."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    device: torch.device

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> TensorSpec:
        """Return the spec of a message of these tensors."""
        shapes, dtypes = tuple(tuple(t.shape) for t in tensors), tuple(t.dtype for t in tensors)
        return cls(shapes, dtypes, tensors[0].device)

    def make(self, how: Callable[..., torch.Tensor] = torch.empty) -> list[torch.Tensor]:
        """Make tensors for a message; `how` takes a shape, a type and a device."""
        parts = zip(self.shapes, self.dtypes, strict=True)
        return [how(shape, dtype=dtype, device=self.device) for shape, dtype in parts]

    @cached_property
    def tensor_bytes(self) -> list[int]:
        """Return the size of each tensor."""
        parts = zip(self.shapes, self.dtypes, strict=True)
        return [math.prod(shape) * dtype.itemsize for shape, dtype in parts]

    @property
    def num_bytes(self) -> int:
        """Return the size of a message."""
        return sum(self.tensor_bytes)


@dataclass(frozen=True)
class StageSpecs:
    """The specs of a stage's messages; kinds that it never receives or sends may be missing.

    Args:
        receives: by kind, as its neighbours send it.
        sends: by kind, as they receive it.
        vary: whether that is an example, and each message of an iteration says what it carries.
    """

    receives: Mapping[Kind, TensorSpec]
    sends: Mapping[Kind, TensorSpec]
    vary: bool = False

    @classmethod
    def alike(cls, spec: TensorSpec) -> StageSpecs:
        """Make the specs of a pipeline whose messages are all alike."""
        both = dict.fromkeys(WHOLE, spec)
        return cls(both, both)


class ChannelError(EnvPipeError):
    """A neighbour that is gone or silent, messages left over, or transfers that cannot work."""


@dataclass(frozen=True)
class Peers:
    """This stage, its neighbour, the neighbour's global rank, and the kind that comes from it."""

    stage: int
    neighbour: int
    rank: int
    receives: Kind

    @property
    def sends(self) -> Kind:
        """Return the kind of messages that goes to the neighbour."""
        return opposite(self.receives)

    def lost(self, doing: str, error: RuntimeError | str) -> ChannelError:
        """Make the error of a neighbour that is gone or silent."""
        return ChannelError(
            f"Stage {self.stage} lost its neighbour, stage {self.neighbour} (rank {self.rank}), "
            f"while {doing}: {first_line(error)}",
            remedy="Look at that rank's log for the first error; clocks are reset on the way out.",
        )


class TransferCarrier:
    """Sends and receives.

    Args:
        peers: whom they are between.
        groups: the process group of what comes and of what goes.
        timeout: time until a silent neighbour is an error; None if the group watches over that
            itself (NCCL, whose `wait` would block the host if it were given a time).
        hosts: host group of the pipeline's stages in order, for headers.
        ahead: whether receives are posted ahead, where messages do not vary.
    """

    def __init__(
        self,
        peers: Peers,
        groups: tuple[dist.ProcessGroup, dist.ProcessGroup],
        hosts: HostGroup,
        *,
        timeout: timedelta | None,
        ahead: bool,
    ) -> None:
        self._peers = peers
        self._receives_over, self._sends_over = groups
        self._hosts = hosts
        self._timeout = timeout
        self._ahead = ahead
        #: The receive that is posted, and what it fills.
        self._posted: tuple[list[dist.Work], list[torch.Tensor]] | None = None
        #: Sends under way, whose tensors stay alive until they have left.
        self._sent: deque[tuple[Unit, list[dist.Work], list[torch.Tensor]]] = deque()
        #: How each transfer of the step ends; kept in place of the transfers, which would keep
        #: their tensors.
        self._outcomes: list[torch.futures.Future[int]] = []

    def expect(self, count: int, specs: StageSpecs, schedule: Schedule) -> None:
        """Expect messages until `end_step`; the first is posted, if receives are posted ahead."""
        self._spec = specs.receives.get(self._peers.receives)
        self._headers = specs.vary or not self._ahead
        self._outcomes.clear()
        self._expected = count
        if not self._headers:
            self._post_next(self._spec)

    def receive(self, unit: Unit) -> list[torch.Tensor]:
        """Return the next message; on a GPU the stream waits for it, the host for a header."""
        if self._headers:
            self._post_next(self._receive_header(unit))
        assert self._posted is not None
        (works, tensors), self._posted = self._posted, None
        try:
            self._wait(works)
        except RuntimeError as error:
            raise self._peers.lost(f"waiting for the input of {unit}", error) from error
        if not self._headers:
            self._post_next(self._spec)
        return tensors

    def send(self, unit: Unit, payload: list[torch.Tensor]) -> None:
        """Hand over a unit's output; return at once and keep it until it has left."""
        try:
            works = self._start(dist.isend, self._sends_over, self._peers.sends, payload)
            kept = [*payload]
            if self._headers:
                tag = 1 + _TAGS[self._peers.sends]
                header = self._hosts.send(TensorSpec.of(payload), self._peers.neighbour, tag)
                works += [work for work, _ in header]
                kept += [part for _, part in header]
        except RuntimeError as error:
            raise self._peers.lost(f"sending the output of {unit}", error) from error
        self._sent.append((unit, works, kept))
        while self._sent and all(work.is_completed() for work in self._sent[0][1]):
            self._sent.popleft()

    def end_step(self) -> None:
        """Wait until all has left; on a GPU, the stream has got the last message.

        Go no further with messages that never came: NCCL's watchdog ends a transfer whose neighbour
        is silent for too long, and the stream goes on with what memory held. The host, which
        had queued the whole step, would go on into the framework's collectives; these would wait
        for the lost rank, too, and hold up the watchdog that is about to end the process.
        """
        if any(outcome.done() and outcome.value() != _SUCCESS for outcome in self._outcomes):
            gave_up = "NCCL gave a transfer up; its watchdog says why"
            raise self._peers.lost("waiting for the end of the step", gave_up)
        while self._sent:
            unit, works, _ = self._sent.popleft()
            try:
                self._wait(works)
            except RuntimeError as error:
                raise self._peers.lost(f"sending the output of {unit}", error) from error

    def _wait(self, works: Sequence[dist.Work]) -> None:
        for work in works:
            if self._timeout is None:
                work.wait()  # the stream waits, not the host
            else:
                work.wait(self._timeout)

    def _receive_header(self, unit: Unit) -> TensorSpec:
        """Return the spec of the next message, whose sender sends it after the message."""
        assert self._spec is not None
        try:
            tag = 1 + _TAGS[self._peers.receives]
            spec: TensorSpec = self._hosts.receive(self._peers.neighbour, tag)
        except RuntimeError as error:
            raise self._peers.lost(f"waiting for the header of {unit}", error) from error
        return replace(spec, device=self._spec.device)

    def _post_next(self, spec: TensorSpec | None) -> None:
        if not self._expected:
            return
        assert spec is not None
        self._expected -= 1
        tensors = spec.make()
        try:
            works = self._start(dist.irecv, self._receives_over, self._peers.receives, tensors)
        except RuntimeError as error:
            raise self._peers.lost("posting a receive", error) from error
        self._posted = works, tensors

    def _start(
        self,
        transfer: Callable[..., dist.Work | None],
        group: dist.ProcessGroup,
        kind: Kind,
        tensors: Sequence[torch.Tensor],
    ) -> list[dist.Work]:
        """Start sending or receiving a message."""
        # bool goes as a type that every transport knows.
        parts = [part.view(torch.uint8) if part.dtype is torch.bool else part for part in tensors]
        peer, tag = self._peers.rank, _TAGS[kind]
        started = [transfer(part, peer, group=group, tag=tag) for part in parts]
        works = [work for work in started if work is not None]
        if self._timeout is None:
            self._outcomes += [
                work.get_future_result()  # type: ignore[attr-defined]  # not in torch's stubs
                for work in works
            ]
        return works


def opposite(kind: Kind) -> Kind:
    """Return the kind of messages that crosses a boundary the other way."""
    return Kind.BACKWARD if kind is Kind.FORWARD else Kind.FORWARD
