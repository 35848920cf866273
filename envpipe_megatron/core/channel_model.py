"""Does an order finish on the channels between stages? Decided before training, without a GPU.

**Stage.** One sequential process. For each unit of its order it (1) takes the unit's input from a
channel, if another stage makes it, (2) computes, (3) sends the output, if another stage needs it.

**Channel.** Messages of one kind (activations, gradients) from one stage to one other, in the order
they were sent. Two stages with chunks are each other's neighbour on both sides, which makes four
channels (each kind each way), so whether a hop wraps need not be part of the name.

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

    def __str__(self) -> str:
        sends, awaits = f"sends the output of {self.unit} to", f"awaits {self.unit}'s input from"
        return f"stage {self.stage} {sends if self.sends else awaits} stage {self.peer}"


def check_message_order(schedule: Schedule) -> None:
    """Refuse a schedule where messages are taken in another order than they are sent.

    A channel knows no names of messages: units would get the wrong tensors. Combined units are
    refused too: a framework runs those alone.
    """
    if schedule.combined.any():
        raise EnvPipeError(
            f"Schedule '{schedule.name}' has combined units, which EnvPipe cannot run itself",
            remedy="Plan so for a job whose framework runs its units by itself.",
        )
    if schedule.num_stages == 1:
        return
    width = schedule.units_per_stage
    successor = schedule.cross_successor.reshape(schedule.num_stages, width)
    for stage in range(schedule.num_stages):
        for backward in (False, True):
            sends = (schedule.is_backward[stage] == backward) & (successor[stage] >= 0)
            sender = np.flatnonzero(sends) + stage * width
            receiver = schedule.cross_successor[sender]
            early = np.flatnonzero(np.diff(receiver) < 0)
            if early.size:
                one, two = early[0], early[0] + 1
                raise EnvPipeError(
                    f"Schedule '{schedule.name}' runs {schedule.describe(sender[one])} before "
                    f"{schedule.describe(sender[two])}, but their outputs are needed the other "
                    f"way round: {schedule.describe(receiver[two])} comes before "
                    f"{schedule.describe(receiver[one])}",
                    remedy="Messages arrive in the order they are sent: list the units of "
                    "neighbouring stages in the same order.",
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
    source, target = _channels(schedule)
    sent, taken = [0] * (2 * num_stages), [0] * (2 * num_stages)
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
                runnable.append(channel % num_stages)
            behind = target[node]
            if behind >= 0:
                sent[behind] += 1
                runnable.append((stage + (1 if behind < num_stages else -1)) % num_stages)
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
        stuck.append(StuckStage(stage, unit, behind >= 0, schedule.stage_of(peer)))
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
    num_stages, width = schedule.num_stages, schedule.units_per_stage
    most = 0
    sources = schedule.cross_dependency.reshape(num_stages, width)
    targets = schedule.cross_successor.reshape(num_stages, width)
    for stage, target in enumerate(targets):
        for backward in (False, True):
            sends = (schedule.is_backward[stage] == backward) & (target >= 0)
            if not sends.any():
                continue
            peer = int(target[sends][0]) // width
            heard = np.where(sources[stage] // width == peer, sources[stage] % width, -1)
            known = np.maximum.accumulate(np.where(sources[stage] >= 0, heard, -1))[sends]
            takes = np.zeros(width, dtype=np.int64)
            takes[target[sends] % width] = 1
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


def _channels(schedule: Schedule) -> tuple[list[int], list[int]]:
    """For each node the channel it takes from and the one it sends to, or -1.

    A channel's number is its sending stage for activations, and p more for gradients.
    """
    num_stages, width = schedule.num_stages, schedule.units_per_stage
    if num_stages == 1:
        return [-1] * width, [-1] * width
    first = schedule.is_backward.ravel() * num_stages
    dependency, stages = schedule.cross_dependency, np.repeat(np.arange(num_stages), width)
    source = np.where(dependency >= 0, first + dependency // width, -1)
    target = np.where(schedule.cross_successor >= 0, first + stages, -1)
    return source.tolist(), target.tolist()
