"""The p2p channel between neighbouring stages, in which sends never stop a stage.

Each pair of neighbours has two links, activations forward and gradients backward. On a link,
messages stay in order, sends are asynchronous, and the receiver keeps exactly one receive posted:
the next is posted when the stage takes the one before. So no transfer is ever enqueued behind an
unmatched one of the same stage and direction, and every valid order finishes even where a transfer
completes only when the peer receives (`envpipe_megatron.core.channel_model` is the model of this,
and its tests the proof). Four posted receives were measured 10 % slower on H200s, because waiting
NCCL kernels take SMs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from envpipe_megatron.core.channel_model import QUEUES_VARIABLE
from envpipe_megatron.core.schedule import Kind, Schedule, Unit
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.runtime.channel.host_group import HostGroup
from envpipe_megatron.runtime.channel.messages import StageSpecs, TensorSpec

#: SUCCESS of torch's WorkResult, which has no name in Python.
_SUCCESS = 0


class ChannelError(EnvPipeError):
    """A neighbour that is gone or silent, messages left over, or transfers that cannot work."""


class P2PChannel:
    """All links of one stage.

    Made by `links.make_channel`.

    Args:
        ranks: the global rank of each stage of this pipeline.
        stage: this rank's stage.
        groups: for each kind and sending stage, the process group that carries that link.
        timeout: time until a silent neighbour is an error; None if the group watches over that
            itself (NCCL, whose `wait` would block the host if it were given a time).
        capacity: limit by which orders that need a deeper channel are refused or lowered.
        hosts: host group of the pipeline's stages in order, for the headers of messages that vary;
            None if none vary.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        stage: int,
        groups: Mapping[tuple[Kind, int], dist.ProcessGroup],
        *,
        timeout: timedelta | None,
        capacity: int | None = None,
        hosts: HostGroup | None = None,
    ) -> None:
        #: The global rank of each stage.
        self.ranks = list(ranks)
        self._stage = stage
        self._groups = groups
        self._timeout = timeout
        #: Messages of one direction that may be under way before a send stops the stage, in the
        #: words of `channel_model`; None if sends never do.
        self.capacity = capacity
        self._hosts = hosts
        self._posted: dict[Kind, _Receive] = {}
        self._sent: deque[_Send] = deque()
        #: How each transfer of the step ends, and the neighbour; kept in place of the transfers,
        #: which would keep their tensors.
        self._outcomes: list[tuple[int, torch.futures.Future[int]]] = []

    def begin_step(self, schedule: Schedule, specs: StageSpecs) -> None:
        """Post the first receive of each direction for one execution of a schedule.

        Where messages vary, each is preceded by a header between the hosts, and its receive is
        posted when its unit comes. A host sends the header when it has handed the unit over and
        waits only for those of its own inputs: every valid order finishes, as with gloo.

        Raises:
            ChannelError: messages that vary, over one hardware queue: a send would stop the stage
                until its neighbour comes to the receive.
        """
        if specs.vary and self.capacity is not None:
            raise ChannelError(
                "Messages of varying shape need several hardware queues",
                remedy=f"Set {QUEUES_VARIABLE}=8.",
            )
        receives = schedule.receives[self._stage]
        backward = schedule.is_backward[self._stage]
        self.expect(
            {
                Kind.FORWARD: int((receives & ~backward).sum()),
                Kind.BACKWARD: int((receives & backward).sum()),
            },
            specs,
            vary=specs.vary,
        )

    def expect(self, messages: dict[Kind, int], specs: StageSpecs, *, vary: bool = False) -> None:
        """Expect this many messages of each kind until `end_step`, with headers if they vary."""
        self._receives: Mapping[Kind, TensorSpec] = specs.receives
        self._vary = vary
        self._outcomes.clear()
        self._expected: dict[Kind, int] = dict(messages)
        if not vary:
            for kind in messages:
                self._post_next(kind)

    def receive(self, unit: Unit) -> list[torch.Tensor]:
        """Wait for a unit's input; on a GPU the stream waits, not the host.

        Raises:
            ChannelError: the neighbour is gone, or silent for longer than the time-out.
        """
        if self._vary:
            self._post_next(unit.kind, self._receive_header(unit))
        posted = self._posted.pop(unit.kind)
        try:
            self._wait(posted.works)
        except RuntimeError as error:
            raise self._lost(f"waiting for the input of {unit}", posted.source, error) from error
        if not self._vary:
            self._post_next(unit.kind)
        for tensor in posted.tensors:
            tensor.requires_grad_(unit.kind is Kind.FORWARD and tensor.is_floating_point())
        return posted.tensors

    def send(self, unit: Unit, tensors: Sequence[torch.Tensor]) -> None:
        """Hand a unit's output to the neighbour; returns at once.

        The tensors are kept until they have left. They are detached first: Megatron frees an output
        by swapping its storage (`.data =`), which would corrupt a pending send of it.
        """
        destination = self._neighbour(unit.kind, +1)
        group = self._groups[unit.kind, self._stage]
        # The transfer reads the storage as it is now; later changes of `.data` do not reach it.
        payload = [tensor.detach().contiguous() for tensor in tensors]
        header: list[tuple[dist.Work, torch.Tensor]] = []
        try:
            works = self._start(dist.isend, destination, group, unit.kind, payload)
            if self._vary:
                assert self._hosts is not None
                spec = TensorSpec.of(payload)
                header = self._hosts.send(spec, destination, _header_tag(unit.kind))
                works += [work for work, _ in header]
        except RuntimeError as error:
            raise self._lost(f"sending the output of {unit}", destination, error) from error
        self._sent.append(_Send(str(unit), destination, works, payload, header))
        while self._sent and all(work.is_completed() for work in self._sent[0].works):
            self._sent.popleft()

    def end_step(self) -> None:
        """Wait until all sends have left, and check that no message was lost or left over.

        On a GPU, the stream has come to the step's end.

        Raises:
            ChannelError: a neighbour is gone, or the schedule did not take all messages.
        """
        self._check_outcomes()
        while self._sent:
            sent = self._sent.popleft()
            try:
                self._wait(sent.works)
            except RuntimeError as error:
                what = f"sending the output of {sent.unit}"
                raise self._lost(what, sent.destination, error) from error
        left = {kind.value: count for kind, count in self._expected.items() if count}
        if left or self._posted:
            raise ChannelError(
                f"Stage {self._stage} ended a step with messages not taken",
                value=left or [kind.value for kind in self._posted],
                remedy="The schedule and the channel disagree; please report this.",
            )

    def _check_outcomes(self) -> None:
        """Go no further with messages that never came.

        NCCL's watchdog ends a transfer whose neighbour is silent for too long, and the stream goes
        on with whatever memory held. The host, which had queued the whole step, would go on into
        the framework's collectives; these would wait for the lost rank, too, and hold up the
        watchdog that is about to end the process.
        """
        for neighbour, outcome in self._outcomes:
            if outcome.done() and outcome.value() != _SUCCESS:
                error = RuntimeError("NCCL gave a transfer up; its watchdog says why")
                raise self._lost("waiting for the end of the step", neighbour, error)

    def _wait(self, works: Sequence[dist.Work]) -> None:
        for work in works:
            if self._timeout is None:
                work.wait()  # the stream waits, not the host
            else:
                work.wait(self._timeout)

    def _receive_header(self, unit: Unit) -> TensorSpec:
        """What a unit's input carries, as its sender says."""
        assert self._hosts is not None
        source = self._neighbour(unit.kind, -1)
        try:
            spec: TensorSpec = self._hosts.receive(source, _header_tag(unit.kind))
        except RuntimeError as error:
            raise self._lost(f"waiting for the header of {unit}", source, error) from error
        return replace(spec, device=self._receives[unit.kind].device)

    def _post_next(self, kind: Kind, spec: TensorSpec | None = None) -> None:
        if not self._expected[kind]:
            return
        self._expected[kind] -= 1
        source = self._neighbour(kind, -1)
        group = self._groups[kind, source]
        tensors = (spec or self._receives[kind]).make()
        try:
            works = self._start(dist.irecv, source, group, kind, tensors)
        except RuntimeError as error:
            raise self._lost("posting a receive", source, error) from error
        self._posted[kind] = _Receive(source, works, tensors)

    def _start(
        self,
        transfer: Callable[..., dist.Work | None],
        neighbour: int,
        group: dist.ProcessGroup,
        kind: Kind,
        tensors: Sequence[torch.Tensor],
    ) -> list[dist.Work]:
        """Start sending or receiving a message."""
        rank = self.ranks[neighbour]
        # Transports cannot send booleans.
        parts = [
            tensor.view(torch.uint8) if tensor.dtype is torch.bool else tensor for tensor in tensors
        ]
        started = [transfer(part, rank, group=group, tag=_tag(kind)) for part in parts]
        works = [work for work in started if work is not None]
        if self._timeout is None:
            self._outcomes += [
                (neighbour, work.get_future_result())  # type: ignore[attr-defined]  # not in stubs
                for work in works
            ]
        return works

    def _neighbour(self, kind: Kind, towards: int) -> int:
        """The stage that a kind goes to (+1) or comes from (-1)."""
        direction = towards if kind is Kind.FORWARD else -towards
        return (self._stage + direction) % len(self.ranks)

    def _lost(self, doing: str, neighbour: int, error: RuntimeError) -> ChannelError:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        return ChannelError(
            f"Stage {self._stage} lost its neighbour, stage {neighbour} "
            f"(rank {self.ranks[neighbour]}), while {doing}: {reason}",
            remedy="Look at that rank's log for the first error; clocks are reset on the way out.",
        )


def _tag(kind: Kind) -> int:
    """Tag of the tensors of a kind, which come in the order in which they were sent."""
    return list(Kind).index(kind)


def _header_tag(kind: Kind) -> int:
    return 1 + _tag(kind)


@dataclass(frozen=True)
class _Receive:
    source: int
    works: list[dist.Work]
    tensors: list[torch.Tensor]


@dataclass(frozen=True)
class _Send:
    """A send under way; the tensors stay alive until it has left."""

    unit: str
    destination: int
    works: list[dist.Work]
    payload: list[torch.Tensor]
    header: list[tuple[dist.Work, torch.Tensor]]
