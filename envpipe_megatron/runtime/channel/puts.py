"""Carries messages by one-sided copies: no kernel waits for a neighbour, and no receive exists.

The sender's copy engine puts a message into a slot of the receiver's memory, and a flag says so.
The receiver's stream waits for the flag when the unit begins, copies the message out of its slot,
and a second flag gives the slot back. Waiting takes no SM and holds up no other stream.

Every wait is for something that was enqueued before it in the order of the schedule. Where the
host waits for the whole device inside of a unit, or all streams share one hardware queue, a stage
stops for a slot as a stage of `channel_model` does with as many; elsewhere the stream of units does
at the next message of the same kind, one later, so that a payload's memory is used again soon.

What becomes of a message that never comes: see `PutSide`.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from envpipe_megatron.core.channel_model import slots_of
from envpipe_megatron.core.kinds import Unit, unit
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.runtime.channel.carrier import ChannelError, StageSpecs, TensorSpec
from envpipe_megatron.runtime.channel.flag_page import PUT, TAKEN, WANTED, FlagPage

if TYPE_CHECKING:  # it imports this module
    from envpipe_megatron.runtime.channel.cuda_device import CudaDevice, CudaStream

logger = logging.getLogger(__name__)

#: The largest share of a GPU's memory for slots, unless an order needs more to finish.
MEMORY_SHARE = 0.01
#: The alignment of the tensors in a slot, bytes.
_ALIGNMENT = 256
#: How often to check that a neighbour lives.
_LOOKS_EVERY_S = 0.25
#: How long a process that has lost a neighbour has to end by itself.
GRACE_S = 15.0
#: Time for the first messages, which show that puts work; how many go each way, and their size.
_PROBE_S = 20.0
_PROBES = 8
_PROBE_BYTES = 32 * 2**20


class PutSide:
    """Shared by the one-sided carriers of a rank: the device, slots, the watch over losses.

    A neighbour is lost whose process is gone, or from which nothing came for the time-out while
    this rank waited. Then the other neighbours hear of it, so that a pipeline ends at once, and the
    host raises ChannelError. The streams are never let go: so nothing that was enqueued behind the
    message that never came will run, and nothing of it can reach a replica or the weights. The
    process has a short while to end by itself.

    A host that fills the queue of a stalled stream is held in a launch with Python's lock, and
    no thread of Python's looks any more (nor does NCCL's watchdog end the process: it asks for the
    lock). So the device ends a process whose thread has not looked for the time-out and a while.

    Args:
        timeout: time without a sign of a neighbour that one waits for.
        budget_bytes: the most for the slots of one boundary, the same on both sides.
    """

    def __init__(self, device: CudaDevice, timeout: timedelta, budget_bytes: int) -> None:
        self.device = device
        self.timeout_s = timeout.total_seconds()
        self._budget_bytes = budget_bytes
        self.carriers: list[PutCarrier] = []
        self._loss: ChannelError | None = None
        self._looking = threading.Lock()
        self._leaves = False
        self._pid = os.getpid()

    def slots(self, schedule: Schedule, slot_bytes: int) -> int:
        """Return how many slots a boundary has for a schedule, where there is memory."""
        return slots_of(schedule, max(1, self._budget_bytes // max(1, slot_bytes)))

    def watch(self) -> None:
        """Look after the neighbours until this is closed or the process ends."""
        atexit.register(self._leave)
        threading.Thread(target=self._keep_looking, name="envpipe-channel", daemon=True).start()

    def close(self) -> None:
        """Give memory and the thread back, with the neighbours; no message is under way.

        Not where one is lost: streams are never let go then, and the process is about to end.
        """
        with self._looking:
            if self._loss is not None:
                return
            self._leaves = True
            self.device.expect_again(None)
        atexit.unregister(self._leave)
        self.device.bind_thread()
        carriers, self.carriers = self.carriers, []
        for carrier in carriers:
            carrier.close()

    def check(self) -> None:
        """Raise ChannelError if a loss is known."""
        if self._loss is not None:
            raise self._loss

    def loss(self) -> ChannelError | None:
        """Return the loss of a neighbour, if there is one; looks at once."""
        with self._looking:
            if self._loss is None:
                for carrier in self.carriers:
                    found = carrier.page.trouble(time.monotonic(), self.timeout_s)
                    if found is not None:
                        self._lose(*found)
                        break
                for carrier in self.carriers:
                    if any(each.page.waits for each in self.carriers if each is not carrier):
                        carrier.page.say_it_waits()
        return self._loss

    def _keep_looking(self) -> None:
        expected_s = -math.inf
        while self.loss() is None and self.carriers:
            with self._looking:
                # A loss that another thread has found since has set a short time.
                goes_on = self._loss is None and not self._leaves
                if goes_on and time.monotonic() - expected_s > self.timeout_s / 8:
                    expected_s = time.monotonic()
                    self.device.expect_again(self.timeout_s + GRACE_S)
            time.sleep(_LOOKS_EVERY_S)

    def _leave(self) -> None:
        """As Python ends, do not wait for streams that wait where no message may come any more."""
        if os.getpid() != self._pid or self.loss() is not None:  # a forked child has no threads
            return
        with self._looking:
            self._leaves = True
            self.device.expect_again(None)
        if any(carrier.page.waits for carrier in self.carriers):
            self.device.abandon()

    def _lose(self, error: ChannelError, stage: int) -> None:
        for carrier in self.carriers:
            carrier.page.say_lost(stage)
        try:
            self.device.abandon()
        finally:
            self._loss = error
            logger.error("%s", error)


class PutCarrier:
    """One side of a boundary; see the module.

    Args:
        boundary: its number, the same on both sides.
    """

    def __init__(self, page: FlagPage, side: PutSide, boundary: int) -> None:
        self.page = page
        self._peers = page.peers
        self._side = side
        self._boundary = boundary
        side.device.open(page)
        self._stream = side.device.new_stream()
        #: What messages carry, until the next step.
        self._specs = StageSpecs({}, {})
        #: Kept until it has left.
        self._payload: Sequence[torch.Tensor] = ()
        self._put = self._taken = 0
        self._slots = self._slot_bytes = 0
        self._own = self._theirs = torch.empty(0)
        self._sized_for: Schedule | None = None

    def probe(self) -> None:
        """Exchange messages of a slot's size, both ways at once; the other side does it too.

        Raises RuntimeError or MemoryError: one did not come, or not as it was sent.
        """
        page = self.page
        self._resize(1, _PROBE_BYTES)
        numbers = torch.arange(_PROBE_BYTES // 4, dtype=torch.int32, device=self._own.device)
        self._specs = StageSpecs.alike(TensorSpec.of([numbers]))
        give_up_s, as_sent = time.monotonic() + _PROBE_S, True
        for count in range(_PROBES):
            pattern = numbers * (2 * count + 1)
            self.send(unit(self._peers.sends, count), [pattern + (page.side << 16)])
            while not page.others(PUT).has(count + 1):
                if time.monotonic() > give_up_s:
                    raise RuntimeError(f"no message came in {_PROBE_S:.0f} s")
                time.sleep(1e-4)
            (got,) = self.receive(unit(self._peers.receives, count))
            as_sent &= torch.equal(got, pattern + (1 - page.side << 16))
        self.end_step()
        if not as_sent:
            raise RuntimeError("a message came with other contents")
        self._slots = self._slot_bytes = 0  # training's are made in their place

    def close(self) -> None:
        """Give the slots back, if there are any; the other side does it too."""
        if self._own.numel():
            self._side.device.share(self._boundary, self.page.side, 0)

    def expect(self, count: int, specs: StageSpecs, schedule: Schedule) -> None:
        """Expect messages of a schedule until `end_step`.

        Memory is made if there is too little, together with the other side.
        """
        self._specs, known = specs, self._sized_for
        alike = known is not None and schedule.stages == known.stages
        if alike and self._needed_bytes(specs) <= self._slot_bytes:
            return
        refused = self.make_room(schedule, specs)
        if refused is not None:
            raise ChannelError(
                f"Stages {self._peers.stage} and {self._peers.neighbour} have no memory for their "
                f"messages: {refused}",
                remedy="Let fewer microbatches be in flight, or take --envpipe-channel receives.",
            )

    def make_room(self, schedule: Schedule, specs: StageSpecs) -> MemoryError | None:
        """Have as many slots as a schedule likes for its messages, else as few as it needs.

        Both sides call it together. Without memory, both keep what they have, and get the reason.
        """
        slot_bytes, refused = self._needed_bytes(specs), None
        liked, needed = self._side.slots(schedule, slot_bytes), slots_of(schedule, 1)
        for slots in (max(liked, self._slots), needed):
            try:
                self._resize(slots, slot_bytes)
            except MemoryError as error:
                refused = error
            except RuntimeError as error:
                raise self._peers.lost("making memory for messages with it", error) from error
            else:
                self._sized_for = schedule
                return None
        return refused

    def receive(self, unit: Unit) -> list[torch.Tensor]:
        """Return the next message, which a unit waits for; the stream does, not the host."""
        self._side.check()
        tensors = self._specs.receives[self._peers.receives].make()
        slot, self._taken = self._own[self._taken % self._slots], self._taken + 1
        stream = self._side.device.units()
        self._wait(stream, PUT, self._taken)
        for part, place in _placed(tensors, slot):
            stream.copy(part, place)
        stream.write(self.page.own(TAKEN), self._taken)
        return tensors

    def send(self, unit: Unit, payload: list[torch.Tensor]) -> None:
        """Hand over a unit's output; return at once and keep it until it has left."""
        self._side.check()
        sizes, agreed = [part.nbytes for part in payload], self._specs.sends[self._peers.sends]
        if sizes != agreed.tensor_bytes:
            raise ChannelError(
                f"The output of {unit} has another size in bytes than was agreed on, "
                f"{agreed.tensor_bytes}",
                value=sizes,
                remedy="Messages of one kind must be alike; please report this.",
            )
        units = self._side.device.units()
        units.after(self._stream)  # so that the memory of the message before can be used again
        self._payload = payload
        self._stream.after(units)
        slot, self._put = self._theirs[self._put % self._slots], self._put + 1
        if self._put > self._slots:
            self._wait(self._stream, TAKEN, self._put - self._slots)
        for part, place in _placed(payload, slot):
            self._stream.copy(place, part)
        self._stream.write(self.page.own(PUT), self._put)

    def end_step(self) -> None:
        """Let the stream of units wait until the last message has left."""
        self._side.device.units().after(self._stream)
        self._payload = ()

    def _needed_bytes(self, specs: StageSpecs) -> int:
        """Return the bytes of a slot that what comes and what goes fit into."""
        both = specs.receives.get(self._peers.receives), specs.sends.get(self._peers.sends)
        return max(_padded(spec.tensor_bytes) if spec else 0 for spec in both)

    def _wait(self, stream: CudaStream, word: int, value: int) -> None:
        """Let a stream wait for the neighbour, and say so while it waits."""
        if not self.page.others(word).has(value):  # what has come would cost the host time
            stream.write(self.page.own(word + WANTED), value)
            stream.wait(self.page.others(word), value)

    def _resize(self, slots: int, slot_bytes: int) -> None:
        """Have as much memory at least; both sides agree, for they have the same numbers."""
        slot_bytes = max(slot_bytes, self._slot_bytes)
        if slots <= self._slots and slot_bytes == self._slot_bytes:
            return
        device, side = self._side.device, self.page.side
        own, theirs = device.share(self._boundary, side, slots * slot_bytes)
        self._own, self._theirs = own.view(slots, slot_bytes), theirs.view(slots, slot_bytes)
        self._slots, self._slot_bytes = slots, slot_bytes


def _padded(sizes: Sequence[int]) -> int:
    return sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)


def _placed(
    tensors: Sequence[torch.Tensor], slot: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the bytes of each tensor of a message that has any, and their place in a slot."""
    places, offset = [], 0
    for tensor in tensors:
        if tensor.nbytes:
            place = slot[offset : offset + tensor.nbytes]
            places.append((tensor.reshape(-1).view(torch.uint8), place))
        offset += _padded([tensor.nbytes])
    return places
