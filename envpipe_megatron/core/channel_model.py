"""Does an order finish on the channels between stages? Decided before training, without a GPU.

**Stage.** One sequential process. For each unit of its order it (1) takes the unit's input from a
channel, if another stage makes it, (2) computes, (3) sends the output, if another stage needs it.

**Channel.** Messages of one kind (activations, gradients) from one stage to one other, in the order
they were sent. Two stages with chunks may be each other's neighbour on both sides, which makes four
channels: each kind each way.

**Taken, posted, matched.** A message is *taken* when the receiving stage stands at the unit that
needs it and the message is there. A receive is *posted* when the communication library knows of it,
and a send is *matched* when a posted receive exists for it. Transfers are rendezvous: an unmatched
message has not left its sender.

**Capacity.** A stage stops behind a send for as long as more than `capacity` messages of that
channel are not taken: `None` for asynchronous sends (several hardware queues), `0` where a send
returns when the peer stands at the receive, `k` for up to `k` messages on their way. A channel that
keeps one receive posted ahead has always one receive more posted than messages taken, so a single
hardware queue, which stops at the first unmatched send, has capacity 1. One-sided transfers into
`k` slots have capacity `k`, since a message may leave when one of the last `k` was taken.

**One simulation is enough.** Stages are deterministic and wait on channels only. A step that is
possible stays possible until it is made, and two possible steps lead to the same state in either
order, so all interleavings end in one and the same state (Kahn, 'The semantics of a simple language
for parallel programming', IFIP 1974). The tests check this by search.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from envpipe_megatron.core.kinds import ScheduleError
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.errors import EnvPipeError

#: What may carry messages between GPUs: one-sided copies where they can, else receives that are
#: posted when their unit begins; such receives everywhere; receives that are posted ahead.
CARRIERS = ("auto", "receives", "posted")

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
    """The capacity of a channel over NCCL, by a process' environment variables.

    With one hardware queue an unmatched transfer stops all that is enqueued after it; with fewer
    than CUDA's own number, a link and the units may share one.
    """
    queues = environment.get(QUEUES_VARIABLE, "")
    return 1 if queues.isdigit() and int(queues) < _USUAL_QUEUES else None


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


def check_message_order(schedule: Schedule) -> None:
    """Refuse a schedule where messages are taken in another order than they are sent.

    A channel knows no names of messages: units would get the wrong tensors. Forwards combined with
    backwards are refused too: a framework runs those alone.
    """
    if schedule.combined.any() and not schedule.split:
        raise EnvPipeError(
            f"Schedule '{schedule.name}' has combined units, which EnvPipe cannot run itself",
            remedy="Plan so for a job whose framework runs its units by itself.",
        )
    channels = _Channels(schedule)
    senders = np.flatnonzero(channels.sent_to >= 0)
    senders = senders[np.argsort(channels.sent_to[senders], kind="stable")]
    receivers = schedule.cross_successor[senders]
    same = np.diff(channels.sent_to[senders]) == 0
    early = np.flatnonzero(same & (np.diff(receivers) < 0))
    if early.size:
        one, two = early[0], early[0] + 1
        raise ScheduleError(
            f"Schedule '{schedule.name}' runs {schedule.describe(senders[one])} before "
            f"{schedule.describe(senders[two])}, but their outputs are needed the other way round: "
            f"{schedule.describe(receivers[two])} comes before {schedule.describe(receivers[one])}",
            remedy="Messages arrive in the order they are sent: list the units of neighbouring "
            "stages in the same order, or plan with --runnable.\n"
            + schedule.marked(*map(int, (*senders[one : two + 1], *receivers[one : two + 1]))),
        )


def completes(schedule: Schedule, capacity: int | None) -> bool:
    """Whether every stage reaches the end of its order on such channels; raises as `find_stall`."""
    return not find_stall(schedule, capacity)


def find_stall(schedule: Schedule, capacity: int | None) -> list[StuckStage]:
    """Run the order on channels of this capacity; the stages that never reach its end.

    EnvPipeError: a negative capacity, or messages taken in another order than sent.
    """
    if capacity is not None and capacity < 0:
        raise EnvPipeError(
            "The capacity of a channel is a number of messages",
            value=capacity,
            remedy="Give zero or more, or None for asynchronous sends.",
        )
    check_message_order(schedule)
    num_stages, width = schedule.num_stages, schedule.units_per_stage
    limit = schedule.num_units if capacity is None else capacity
    channels = _Channels(schedule)
    source, target = channels.taken_from.tolist(), channels.sent_to.tolist()
    senders, receivers = channels.sender.tolist(), channels.receiver.tolist()
    sent, taken = [0] * len(senders), [0] * len(senders)
    position = [stage * width for stage in range(num_stages)]
    behind_send = [-1] * num_stages  # the channel whose last send a stage still stands in
    runnable = list(range(num_stages))
    while runnable:
        stage = runnable.pop()
        node, end, behind = position[stage], (stage + 1) * width, behind_send[stage]
        while behind < 0 or sent[behind] - taken[behind] <= limit:
            behind = -1
            if node == end:
                break
            channel = source[node]
            if channel >= 0:
                if sent[channel] == taken[channel]:
                    break
                taken[channel] += 1
                runnable.append(senders[channel])
            behind = target[node]
            if behind >= 0:
                sent[behind] += 1
                runnable.append(receivers[behind])
            node += 1
        position[stage], behind_send[stage] = node, behind

    stuck = []
    for stage, (node, behind) in enumerate(zip(position, behind_send, strict=True)):
        if behind >= 0:
            node, neighbours = node - 1, schedule.cross_successor
        elif node < (stage + 1) * width:
            neighbours = schedule.cross_dependency
        else:
            continue
        unit, peer = schedule.unit_at(node).label(schedule.num_chunks), int(neighbours[node])
        stuck.append(StuckStage(stage, unit, behind >= 0, schedule.stage_of(peer), node))
    return stuck


def max_falling_step(capacity: int | None) -> int | None:
    """How far a stage's extra forwards may exceed its successor's on channels of this capacity.

    `2 * capacity - 1`; with a capacity of one or more EnvPipe's order finishes if and only if no
    step is larger. Take a stage with `w` warm-up forwards before one with `v`. When the first has
    just sent a forward and the second a backward, `w - v + 1` messages between them are not taken,
    both directions together. They stop for each other when each direction holds `capacity + 1`,
    which takes `w - v = 2 * capacity + 1`, and 1F1B's own `w - v` is 1. No rise that the order
    allows stalls.
    """
    return None if capacity is None else 2 * capacity - 1


def most_under_way(schedule: Schedule) -> int:
    """The most messages of a channel that are sent and not yet taken, whatever units' times are.

    A stage that has taken a message knows that its neighbour ran all units before the one that sent
    it, and took their inputs. A channel with as many slots never lets a sender wait. With chunks
    there may be fewer: what a stage learns of its neighbour by way of the others is left out.
    """
    width = schedule.units_per_stage
    channels = _Channels(schedule)
    most = 0
    for channel, (stage, peer) in enumerate(zip(channels.sender, channels.receiver, strict=True)):
        own = slice(stage * width, (stage + 1) * width)
        sources, sends = schedule.cross_dependency[own], channels.sent_to[own] == channel
        heard = np.where((sources >= 0) & (sources // width == peer), sources % width, -1)
        known = np.maximum.accumulate(heard)[sends]
        takes = np.zeros(width, dtype=np.int64)
        takes[schedule.cross_successor[own][sends] % width] = 1
        taken = np.concatenate(([0], np.cumsum(takes)))[known + 1]
        most = max(most, int((np.arange(1, len(taken) + 1) - taken).max()))
    return most


def slots_of(schedule: Schedule, most: int) -> int:
    """Slots of each channel for one-sided transfers: at most `most`, unless more are needed.

    Needed is the least capacity on which the order finishes. With twice as many, and at least four,
    no sender has to wait for a slot in the planned timeline: so it was in all of 1,500 random
    orders of EnvPipe's with backwards of 1 to 2.5 forwards.
    """
    needed = 1
    while not completes(schedule, needed):
        needed += 1
    return max(needed, min(most, most_under_way(schedule), max(_USUAL_SLOTS, 2 * needed)))


class _Channels:
    """The channels of a schedule, each of one kind of message from one stage to one other.

    `taken_from` and `sent_to`, [num_units], are the channel of each node's input and output, or -1;
    `sender` and `receiver` the stages of each channel.
    """

    def __init__(self, schedule: Schedule) -> None:
        stages, width, sources = (
            schedule.num_stages,
            schedule.units_per_stage,
            schedule.cross_dependency,
        )
        receivers = np.flatnonzero(sources >= 0)
        names = schedule.is_backward.ravel()[receivers] * stages + sources[receivers] // width
        names = names * stages + receivers // width
        channels, own = np.unique(names, return_inverse=True)
        self.taken_from = np.full(schedule.num_units, -1)
        self.sent_to = self.taken_from.copy()
        self.taken_from[receivers] = self.sent_to[sources[receivers]] = own
        self.sender, self.receiver = channels // stages % stages, channels % stages
