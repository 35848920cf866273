"""Does an order finish on the channels between stages? Decided before training, without a GPU.

**Stage.** One sequential process. For each unit of its order it (1) takes the unit's input from a
channel, if another stage makes it, (2) computes, (3) sends the output, if another stage needs it.

**Channel.** Messages of one kind (activations, gradients) from one stage to one other. They arrive
in the order they were sent, and units may need them in any other: both sides know the schedule, and
so which message is whose. A stage receives those that were sent before the one it needs, and keeps
them until their units come. Two stages with chunks may be each other's neighbour on both
sides, which makes four channels: each kind each way.

**Received, posted, matched.** A message is *received* when the receiving stage is at a unit that
needs it, or one sent later, and the message is there. A receive is *posted* when the communication
library knows of it, and a send is *matched* when a posted receive exists for it. Transfers are
rendezvous: an unmatched message has not left its sender.

**Capacity.** A stage stops after a send for as long as more than `capacity` messages of that
channel are not received: `None` for asynchronous sends (several hardware queues), `0` where a send
returns when the peer is at the receive, `k` for up to `k` messages on their way. A channel that
keeps one receive posted ahead has always one receive more posted than messages received, so a
single hardware queue, which stops at the first unmatched send, has capacity 1. One-sided transfers
into `k` slots have capacity `k`, since a message may leave when one of the last `k` was received.

**Every order finishes on asynchronous sends.** A stage then waits for one thing only: that the unit
which makes its input has ended. Messages sent before that one are no further wait, for they are
there sooner. Orders whose units wait in circles are refused when they are made (`Schedule`). The
same holds for as many slots as a channel has messages; fewer mostly suffice (`slots_of`).

**One simulation is enough.** Stages are deterministic and wait on channels only. A step that is
possible stays possible until it is made, and two possible steps lead to the same state in either
order, so all interleavings end in one and the same state (Kahn, 'The semantics of a simple language
for parallel programming', IFIP 1974). The tests check this by search.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from envpipe_megatron.core.kinds import Unit
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.errors import EnvPipeError

#: What may carry messages between GPUs: one-sided copies where they can, else receives that are
#: posted when their unit begins; such receives everywhere.
CARRIERS = ("auto", "receives")

#: Says how many hardware queues a process has on a GPU.
QUEUES_VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
_USUAL_QUEUES = 8
_USUAL_SLOTS = 4
#: For orders that do not finish on a channel.
CHANNEL_REMEDY = (
    f"Set {QUEUES_VARIABLE}={_USUAL_QUEUES}, with which sends are asynchronous (capacity None), or "
    "allow a larger capacity."
)


def hardware_capacity(environment: Mapping[str, str]) -> int | None:
    """Return the capacity of a channel over NCCL, by a process' environment variables.

    With one hardware queue an unmatched transfer stops all that is enqueued after it; with fewer
    than CUDA's own number, a link and the units may share one.
    """
    queues = environment.get(QUEUES_VARIABLE, "")
    return 1 if queues.isdecimal() and int(queues) < _USUAL_QUEUES else None


@dataclass(frozen=True)
class StuckStage:
    """A stage that waits forever to send a unit's output to `peer`, or to receive its input."""

    stage: int
    unit: str
    sends: bool
    peer: int
    node: int

    def __str__(self) -> str:
        sends, awaits = f"sends the output of {self.unit} to", f"awaits {self.unit}'s input from"
        return f"stage {self.stage} {sends if self.sends else awaits} stage {self.peer}"


def inputs_of(schedule: Schedule, stage: int) -> list[Unit]:
    """Return the units of a stage whose inputs other stages send, in the order of sending."""
    takers = np.flatnonzero(schedule.receives[stage])
    sources = schedule.cross_dependency.reshape(schedule.num_stages, -1)[stage, takers]
    return [schedule.stages[stage][place] for place in takers[np.argsort(sources)]]


def completes(schedule: Schedule, capacity: int | None) -> bool:
    """Return whether every stage reaches the end of its order; raises as `find_stall`."""
    return not find_stall(schedule, capacity)


def find_stall(schedule: Schedule, capacity: int | None) -> list[StuckStage]:
    """Run the order on channels of this capacity; return the stages that never reach its end.

    EnvPipeError: a negative capacity, or forwards combined with backwards.
    """
    if capacity is not None and capacity < 0:
        raise EnvPipeError(
            "The capacity of a channel is a number of messages",
            value=capacity,
            remedy="Give zero or more, or None for asynchronous sends.",
        )
    if (schedule.combined & ~schedule.is_backward).any():
        raise EnvPipeError(
            f"Schedule '{schedule.name}' has combined forwards, which EnvPipe cannot run itself",
            remedy="Plan so for a job whose framework runs its units by itself.",
        )
    num_stages, width = schedule.num_stages, schedule.units_per_stage
    limit = schedule.num_units if capacity is None else capacity
    taken_from, sent_to, needed = _channels(schedule)
    sent, received = Counter[int](), Counter[int]()
    position = [stage * width for stage in range(num_stages)]
    behind_send = [-1] * num_stages  # the channel in whose last send a stage still waits
    runnable = list(range(num_stages))
    while runnable:
        stage = runnable.pop()
        node, end, behind = position[stage], (stage + 1) * width, behind_send[stage]
        while behind < 0 or sent[behind] - received[behind] <= limit:
            behind = -1
            if node == end:
                break
            channel = taken_from[node]
            if channel >= 0:
                if received[channel] < min(sent[channel], needed[node]):
                    received[channel] = min(sent[channel], needed[node])
                    runnable.append(channel // num_stages % num_stages)
                if sent[channel] < needed[node]:
                    break
            behind = sent_to[node]
            if behind >= 0:
                sent[behind] += 1
                runnable.append(behind % num_stages)
            node += 1
        position[stage], behind_send[stage] = node, behind

    stuck = []
    for stage, (node, behind) in enumerate(zip(position, behind_send, strict=True)):
        if behind >= 0:
            node, peer = node - 1, behind % num_stages
        elif node < (stage + 1) * width:
            peer = taken_from[node] // num_stages % num_stages
        else:
            continue
        unit = schedule.unit_at(node).label(schedule.num_chunks)
        stuck.append(StuckStage(stage, unit, behind >= 0, peer, node))
    return stuck


def max_falling_step(capacity: int | None) -> int | None:
    """Return by how much a stage's extra forwards may exceed its successor's on such channels.

    `2 * capacity - 1`; with a capacity of one or more EnvPipe's order finishes if and only if no
    step is larger. Take a stage with `w` warm-up forwards before one with `v`. When the first has
    just sent a forward and the second a backward, `w - v + 1` messages between them are not taken,
    both directions together. They stop for each other when each direction holds `capacity + 1`,
    which takes `w - v = 2 * capacity + 1`, and 1F1B's own `w - v` is 1. No rise that the order
    allows stalls.
    """
    return None if capacity is None else 2 * capacity - 1


def slots_of(schedule: Schedule, most: int) -> int:
    """Return the slots of each channel for one-sided transfers: at most `most`, or all it needs.

    Needed is the least capacity on which the order finishes. With twice as many, and at least four,
    no sender has to wait for a slot in the planned timeline: so it was in all of 1,500 random
    orders of EnvPipe's with backwards of 1 to 2.5 forwards.
    """
    needed = 1
    while not completes(schedule, needed):
        needed += 1
    return max(needed, min(most, max(_USUAL_SLOTS, 2 * needed)))


def _channels(schedule: Schedule) -> tuple[list[int], list[int], list[int]]:
    """Return [num_units] the channels of each node's input and output, or -1, and a count.

    The count is of the channel's messages that must have come for that input. The channel of a
    kind from a stage to another is `(kind * num_stages + stage) * num_stages + other`.
    """
    stages, width = schedule.num_stages, schedule.units_per_stage
    takers = np.flatnonzero(schedule.receives)
    sources = schedule.cross_dependency[takers]
    in_order = np.argsort(sources)  # of sending
    takers, sources = takers[in_order], sources[in_order]
    kinds = schedule.is_backward.ravel()[takers]
    channels = (kinds * stages + sources // width) * stages + takers // width
    taken_from, sent_to = np.full((2, schedule.num_units), -1)
    taken_from[takers] = sent_to[sources] = channels
    needed, count = [0] * schedule.num_units, Counter[int]()
    for taker, channel in zip(takers.tolist(), channels.tolist(), strict=True):
        count[channel] += 1
        needed[taker] = count[channel]
    return taken_from.tolist(), sent_to.tolist(), needed
