"""The messages of a job's ranks to each other between iterations. Enter at `make_collectives`.

No process talks to all others: at a thousand ranks that takes a tenth of a second, and each would
hold a connection to each. The replicas of a stage form a tree of small groups, in which values are
merged on their way up. At its top are the ranks of the planner's pipeline, which exchange the
values of their stages; the result goes down the same ways. So what a rank receives does not grow
with the job, except in `to_planner` of values whose merging keeps all of them.

Everything is merged by one rank in one order, and the result is sent: all ranks have equal bits.

If a part of EnvPipe fails on one rank only, all ranks must know, or they would wait for each other:
each tries its part (`on_every_rank`, `by_planner`), and all of them raise `DegradedError`, which
`phases.run_phases` turns into the framework's own order at the highest clock.

Groups exchange over gloo, with connections of their own: in `torch.distributed.new_group` every
rank of the job must take part in making every group, or ranks that have made equally many groups
before; and each of torch's exchanges of objects is two collectives.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from itertools import chain, count
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from envpipe_megatron.errors import EnvPipeError, first_line

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Bytes of a message that says how long the pickle is, and carries it or its beginning.
FRAME_BYTES = 256
_LENGTH_BYTES = 8

_GATHER_TAG = 0

#: The most ranks of one group of a tree, whose values its leader receives.
FAN_IN = 8
#: How arrays of replicas are merged, element by element.
SUM = partial(np.sum, axis=0)
#: How long to wait for ranks that were together just before.
_COME = timedelta(minutes=3)
#: Longest text of an error: notes go through the sockets of agents.
_MOST_CHARACTERS = 1000
#: gloo may wait five times as long for a rank that cannot be reached.
_CONNECT = timedelta(seconds=20)


class HostGroup:
    """Exchanges of small values between hosts of a few ranks, all of which call each in one order.

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
            # Half the time-out: a rank that could not come is still there to hear of it.
            store.wait(everyone, min(timeout / 2, _COME))
            # The first shows soon whether all can be reached. It lives until the next is connected.
            first = dist.ProcessGroupGloo(PrefixStore("first", store), *place, _CONNECT)
            self._transport, _ = dist.ProcessGroupGloo(store, *place, timeout), first

    @property
    def leads(self) -> bool:
        """True if this rank does."""
        return self._index == self._leader

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks in their order, on the leader; elsewhere nothing."""
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
        """Return the leader's value, on all ranks."""
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
        frame = torch.empty(FRAME_BYTES, dtype=torch.uint8, device="cpu")
        self._transport.recv([frame], source, tag).wait()
        return self._value(frame, source, tag)

    def _value(self, frame: torch.Tensor, source: int, tag: int) -> Any:
        """Return the value that a frame begins, whose rest comes by the same way."""
        rest = _rest_of(frame)
        if rest is not None:
            self._transport.recv([rest], source, tag).wait()
        return _unpacked(frame, rest)


def _packed(value: object) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return a frame of a value, and what does not fit into it."""
    text = pickle.dumps(value)
    framed = (len(text).to_bytes(_LENGTH_BYTES) + text).ljust(FRAME_BYTES)
    whole = torch.frombuffer(bytearray(framed), dtype=torch.uint8)
    return whole[:FRAME_BYTES], whole[FRAME_BYTES:] if len(whole) > FRAME_BYTES else None


def _rest_of(frame: torch.Tensor) -> torch.Tensor | None:
    """Return room for what did not fit into a frame; None if all did."""
    more = int.from_bytes(frame[:_LENGTH_BYTES].numpy().tobytes()) + _LENGTH_BYTES - FRAME_BYTES
    return torch.empty(more, dtype=torch.uint8, device="cpu") if more > 0 else None


def _unpacked(frame: torch.Tensor, rest: torch.Tensor | None) -> Any:
    parts = [frame[_LENGTH_BYTES:]] + ([] if rest is None else [rest])
    return pickle.loads(b"".join(part.numpy().tobytes() for part in parts))


class CollectivesError(EnvPipeError):
    """A rank of the job is gone or silent."""


class Collectives:
    """Exchanges between the hosts of all ranks of the job.

    Every method is called by all ranks together, and raises CollectivesError when a rank is gone,
    or silent for the groups' time-out.

    Args:
        stage: this rank's.
        pipeline: the stages of this rank's pipeline, in their order.
        tree: the groups of replicas of this rank's stage that it belongs to, from the leaves up.
        num_replicas: how many pipelines the job has.
        replica: the place of this rank's among them, as the planner gets values of replicas.
    """

    def __init__(
        self,
        stage: int,
        pipeline: HostGroup,
        tree: Sequence[HostGroup],
        num_replicas: int,
        replica: int = 0,
    ) -> None:
        self.pipeline = pipeline
        self.num_replicas, self.replica = num_replicas, replica
        self.stage = stage
        self._tree = list(tree)
        self._at_top = all(group.leads for group in tree)
        self.is_planner = self._at_top and pipeline.leads

    def in_pipeline(self, value: T) -> list[T]:
        """Return the value of each stage of this rank's pipeline."""
        with self.names_the_loss():
            return self.pipeline.broadcast(self.pipeline.gather(value))

    def to_planner(self, value: T, merge: Callable[[Sequence[T]], T]) -> list[T]:
        """Return each stage's values, merged over its replicas, on the planner; elsewhere nothing.

        Args:
            value: this rank's value.
            merge: makes one value of several; also of some that it has made before.
        """
        with self.names_the_loss():
            value = self._up(value, merge)
            return self.pipeline.gather(value) if self._at_top else []

    def over_replicas(self, value: T, merge: Callable[[Sequence[T]], T]) -> T:
        """Return the values of the replicas of this rank's stage, merged; only these call it."""
        with self.names_the_loss():
            return self._down(self._up(value, merge))

    def by_stage(self, value: T, merge: Callable[[Sequence[T]], T]) -> list[T]:
        """Return what `to_planner` does, on every rank."""
        return self.from_planner(self.to_planner(value, merge))

    def on_all(self, holds: bool) -> bool:
        """True if it holds on every rank."""
        return self.from_planner(all(self.to_planner(holds, all)))

    def first(self, value: T | None) -> tuple[int, T] | None:
        """Return the first stage that has a value, and one of its values; None without any."""
        stages = self.by_stage(value, lambda parts: next((p for p in parts if p is not None), None))
        found = ((stage, value) for stage, value in enumerate(stages) if value is not None)
        return next(found, None)

    def all_to_planner(self, value: T) -> list[list[T]]:
        """Return the value of each replica of each stage, on the planner; elsewhere nothing."""
        return self.to_planner([value], lambda parts: list(chain.from_iterable(parts)))

    def from_planner(self, value: T | None) -> T:
        """Return the planner's value, on every rank; what others pass is ignored."""
        with self.names_the_loss():
            if self._at_top:
                value = self.pipeline.broadcast(value)
            return self._down(value)  # type: ignore[return-value]  # the planner passed a T

    def agreed(self, make: Callable[[], T]) -> T:
        """Return what the planner makes, on every rank.

        Raises:
            Exception: as `everywhere`.
        """
        return self.from_planner(self.everywhere(lambda: make() if self.is_planner else None))

    def everywhere(self, make: Callable[[], T]) -> T:
        """Return what this rank makes, after every rank has made its own.

        Raises:
            Exception: this rank's own error.
            CollectivesError: that of another rank, so that none goes on without it.
        """
        made, failure = _tried(make)
        first = self.first(None if failure is None else _text(failure))
        if failure is not None:
            raise failure
        if first is not None:
            stage, text = first
            raise CollectivesError(f"A rank of stage {stage} cannot go on: {text}")
        return made[0]

    def latest(self, time_s: float) -> float:
        """Return the latest of all ranks' times."""
        return self.from_planner(max(self.to_planner(time_s, max), default=None))

    def _up(self, value: T, merge: Callable[[Sequence[T]], T]) -> T:
        """Return the values below this rank in the tree, merged: at the top, of all replicas."""
        for group in self._tree:
            gathered = group.gather(value)
            value = merge(gathered) if gathered else value
        return value

    def _down(self, value: T) -> T:
        """Return the value of the rank at the top of the tree."""
        for group in reversed(self._tree):
            value = group.broadcast(value)
        return value

    @contextmanager
    def names_the_loss(self, lost: str = "another rank of the job") -> Iterator[None]:
        """Turn what torch raises when a rank is gone into CollectivesError."""
        try:
            yield
        except RuntimeError as error:
            raise CollectivesError(
                f"Stage {self.stage} lost {lost}: {first_line(error)}",
                remedy="Look at the other ranks' logs for the first error; clocks are reset on the "
                "way out.",
            ) from error


class DegradedError(EnvPipeError):
    """A part of EnvPipe has failed, on all ranks alike: training goes on without it."""


def in_words(error: Exception) -> str:
    """Return an error's text, for a note; the stack of one that is not EnvPipe's is logged."""
    if not isinstance(error, EnvPipeError):
        logger.error("A fault of EnvPipe's, please report it", exc_info=error)
    return _text(error)[:_MOST_CHARACTERS]


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, EnvPipeError) else f"{type(error).__name__}: {error}"


def _tried(make: Callable[[], T]) -> tuple[list[T], Exception | None]:
    """Return [what `make` returned] and None, or [] and its error: others wait for either."""
    try:
        return [make()], None
    except Exception as error:  # of any kind
        return [], error


def by_planner(collectives: Collectives, make: Callable[[], T]) -> T:
    """Return what the planner makes, on every rank; DegradedError if it fails, for any reason."""
    made, failure = _tried(make) if collectives.is_planner else ([], None)
    made, text = collectives.from_planner((made, None if failure is None else in_words(failure)))
    if text is not None:
        raise DegradedError(text)
    return made[0]


def on_every_rank(collectives: Collectives, make: Callable[[], T]) -> T:
    """Return what this rank makes, once every rank has; DegradedError on all if one fails."""
    made, failure = _tried(make)
    first = collectives.first(None if failure is None else in_words(failure))
    if first is not None:
        stage, text = first
        raise DegradedError(f"Stage {stage}: {text}")
    return made[0]


def of_all_ranks(value: T) -> list[T]:
    """Return the value of each rank of the job, over the framework's default group."""
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def all_pipelines(pipeline: Sequence[int]) -> list[tuple[int, ...]]:
    """Return a job's pipelines: every rank gives its own, over the framework's default group."""
    return sorted(set(of_all_ranks(tuple(pipeline))))


#: How often this process has made collectives: groups of the same ranks have names of their own.
_made = count()


def make_collectives(pipelines: Iterable[Sequence[int]], timeout: timedelta) -> Collectives:
    """Connect this rank to the few others that it exchanges with.

    Every rank of the pipelines calls it, at the same point of the program. The planner is the
    lowest rank.

    Args:
        pipelines: for each replica of the pipeline, the global rank of each stage.
        timeout: after which a silent rank is an error.

    Raises:
        CollectivesError: a rank did not come.
    """
    replicas = sorted(pipelines, key=min)
    rank, number = dist.get_rank(), next(_made)
    replica, pipeline = next((n, own) for n, own in enumerate(replicas) if rank in own)
    stage = list(pipeline).index(rank)
    try:
        tree = []
        for members in tree_groups(replica, len(replicas)):
            ranks = [replicas[member][stage] for member in members]
            name = f"{number}/{stage}/{members}"
            tree.append(HostGroup(ranks, name, timeout, leader=ranks[0]))
        own = HostGroup(pipeline, f"{number}/{replica}", timeout, leader=min(pipeline))
    except RuntimeError as error:
        raise CollectivesError(f"Rank {rank} cannot reach others of the job: {error}") from error
    return Collectives(stage, own, tree, len(replicas), replica)


def tree_groups(member: int, size: int) -> list[range]:
    """Return a member's groups in a tree over `size` members, from the leaves up.

    The first member of each group leads it, and belongs to a group of the next level. No group has
    more than `FAN_IN` members, and groups of all levels are about as large.
    """
    levels = width = 1
    while FAN_IN**levels < size:
        levels += 1
    while width**levels < size:
        width += 1
    groups, step = [], 1
    while step < size and member % step == 0:
        first = member - member % (step * width)
        groups.append(range(first, min(first + step * width, size), step))
        step *= width
    return [group for group in groups if len(group) > 1]
