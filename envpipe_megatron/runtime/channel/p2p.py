"""The p2p channel between neighbouring stages, in which no order of units can hang.

Activations go forward and gradients backward. A unit takes its own message, in any order that they
were sent: what was sent before it is received first, and kept until its unit comes. Sends are
asynchronous. What carries messages is chosen for each boundary between two stages (`links`):
one-sided copies into the neighbour's memory (`puts`), or sends and receives (`carrier`).
`envpipe_megatron.core.channel_model` is the model of both, and its tests the proof.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import chain

import torch
import torch.distributed as dist

from envpipe_megatron.core.channel_model import inputs_of
from envpipe_megatron.core.kinds import MESSAGES, Kind, Unit
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.runtime.channel.carrier import (
    ChannelError,
    StageSpecs,
    TransferCarrier,
    opposite,
)
from envpipe_megatron.runtime.channel.puts import PutCarrier, PutSide

logger = logging.getLogger(__name__)

#: One stage's side of the boundary to a neighbour: it receives one kind and sends the other.
Carrier = PutCarrier | TransferCarrier

#: How long to wait for the device to come to rest, and for neighbours to close too.
_CLOSE_S = 20.0


class P2PChannel:
    """Both neighbours of one stage.

    Made by `links.make_channel`.

    Args:
        ranks: the global rank of each stage of this pipeline.
        stage: this rank's stage.
        carriers: to the neighbour that each kind comes from; the other kind goes there.
        side: what all one-sided carriers of this rank share, if there are any.
        groups: process groups of NCCL's that were made for this channel.
        capacity: limit by which orders that need a deeper channel are refused or lowered. Where
            there is one, a receive is posted ahead: a unit that waits for the device would wait for
            a sender that has not got there, too.
        about: what carries messages between which stages, and why, for the user.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        stage: int,
        carriers: Mapping[Kind, Carrier],
        *,
        side: PutSide | None = None,
        groups: Sequence[dist.ProcessGroup] = (),
        capacity: int | None = None,
        about: str = "",
    ) -> None:
        #: The global rank of each stage.
        self.ranks = list(ranks)
        self._stage = stage
        self._carriers = dict(carriers)
        self._side = side
        self._groups = list(groups)
        self._pid = os.getpid()
        #: An order, and the units whose inputs come in it.
        self._inputs: tuple[Schedule, list[Unit]] | None = None
        #: By kind, the units whose inputs are not received, as these are sent.
        self._awaited: dict[Kind, deque[Unit]] = {}
        #: By their unit, messages that are received and not taken.
        self._kept: dict[Unit, list[torch.Tensor]] = {}
        #: Messages of one direction that may be under way before a send stops the stage, in the
        #: words of `channel_model`; None if sends never do.
        self.capacity = capacity
        #: Whether a stream may go on after a message that never came: NCCL's watchdog ends a
        #: transfer whose neighbour is silent for too long. Then a host waits for its last input
        #: before it hands over what follows the units.
        self.lets_go = bool(groups)
        self.about = about

    def begin_step(self, schedule: Schedule, specs: StageSpecs) -> None:
        """Prepare for one execution of a schedule.

        Where messages vary, each is preceded by a header between the hosts. A host sends it when it
        has handed the unit over and waits only for those of its own inputs: every valid order
        finishes, as with gloo. Not over one hardware queue, where a send would stop the stage until
        its neighbour comes to the receive: no integration has such messages carried there.
        """
        if self._inputs is None or self._inputs[0] is not schedule:
            self._inputs = schedule, inputs_of(schedule, self._stage)
        self._kept.clear()
        for kind, carrier in self._carriers.items():
            awaited = deque(unit for unit in self._inputs[1] if MESSAGES[unit.kind] is kind)
            self._awaited[kind] = awaited
            carrier.expect(len(awaited), specs, schedule)

    def receive(self, unit: Unit) -> list[torch.Tensor]:
        """Wait for a unit's input; on a GPU the stream waits, not the host.

        Raises:
            ChannelError: the neighbour is gone, or silent for longer than the time-out.
        """
        kind = MESSAGES[unit.kind]
        while unit not in self._kept:
            self._kept[self._awaited[kind].popleft()] = self._carriers[kind].receive(unit)
        tensors = self._kept.pop(unit)
        for tensor in tensors:
            tensor.requires_grad_(unit.kind is Kind.FORWARD and tensor.is_floating_point())
        return tensors

    def send(self, unit: Unit, tensors: Sequence[torch.Tensor]) -> None:
        """Hand a unit's output to the neighbour; returns at once.

        The tensors are kept until they have left. They are detached first: Megatron frees an output
        by swapping its storage (`.data =`), which would corrupt a pending send of it.
        """
        # The transfer reads the storage as it is now; later changes of `.data` do not reach it.
        payload = [tensor.detach().contiguous() for tensor in tensors]
        self._carriers[opposite(MESSAGES[unit.kind])].send(unit, payload)

    def end_step(self) -> None:
        """Check that no message was lost or left over.

        The device may be behind; but where the channel `lets_go`, it has got the last input.

        Raises:
            ChannelError: a neighbour is gone, or the schedule did not take all messages.
        """
        if self._side is not None and (loss := self._side.loss()) is not None:
            raise loss
        for carrier in self._carriers.values():
            carrier.end_step()
        left = [*self._kept, *chain.from_iterable(self._awaited.values())]
        if left:
            raise ChannelError(
                f"Stage {self._stage} ended a step with messages not taken",
                value=dict(Counter(MESSAGES[unit.kind].value for unit in left)),
                remedy="The schedule and the channel disagree; please report this.",
            )

    def make_room(self, schedule: Schedule, specs: StageSpecs) -> bool:
        """Take memory for a schedule's messages; whether this rank and its neighbours had it.

        All stages call it together. Where one has too little, it keeps what it had. Raises
        ChannelError if a neighbour is gone or silent.
        """
        carriers = [] if self._side is None else self._side.carriers
        refused = [carrier.make_room(schedule, specs) for carrier in carriers]
        return not any(refused)

    def close(self) -> None:
        """Give back memory, threads and communicators; safe to call twice.

        All stages call it, after their last step. Where the device does not come to rest, or a
        neighbour does not close, in `_CLOSE_S`, all stays until the process ends; so it does where
        Python ends already, and in a forked child.
        """
        has_any = self._side is not None or self._groups
        if has_any and os.getpid() == self._pid and threading.main_thread().is_alive():
            closing = threading.Thread(target=self._give_back, name="envpipe-close", daemon=True)
            with suppress(RuntimeError):  # threads are used up: all stays
                closing.start()
                closing.join(_CLOSE_S)

    def _give_back(self) -> None:
        side, self._side, self._carriers = self._side, None, {}
        try:
            if side is not None:
                side.close()
            while self._groups:
                dist.destroy_process_group(self._groups.pop())
        except Exception as error:  # of any kind: training goes on with what is left
            logger.warning("Memory of messages stays taken: %s", error)

    def check(self) -> None:
        """Raise ChannelError if a neighbour is lost: the device would never come to its input."""
        if self._side is not None:
            self._side.check()
